"""The MLX server as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

import grpc
import pytest

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.mlx.options import mlx_settings
from smg_grpc_servicer.testing.history import check
from tests.support.dial import NOT_SERVING, SERVING, watch
from tests.support.dial import check as health
from tests.support.mlx_client import connected
from tests.support.servers import MLX_SERVICE, Server, serving, started

ROUNDS = 20


@pytest.mark.parametrize("module", ["smg_grpc_servicer.mlx", "smg_grpc_servicer.mlx.server"])
async def test_help_names_every_flag(module: str) -> None:
    """P13: both commands exist; each flag stands there with its default and its variable."""
    async with started("--help", module=module) as command:
        assert await command.exit_code() == 0
        words = " ".join(command.log.split())
    for setting in mlx_settings():
        assert setting.flag is not None
        assert f" {setting.flag}" in words
        assert f"env: {setting.env})" in words
        # The line says default and variable; where it breaks is the terminal's choice.
        assert setting.explain() in words


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "error: --model: not given"),
        (("--model", "/nowhere/at/all"), "error: --model: /nowhere/at/all is not a directory"),
        (("--model", "./tests"), "error: --model: tests has no config.json"),
        (("--model", "demo", "--dtype", "int3"), "error: --dtype: got 'int3'"),
        (("--model", "demo", "--adapter-path", "/nowhere"), "error: --adapter-path:"),
        (("--model",), "error: argument --model: expected one argument; see --help"),
        (
            ("--modell", "demo"),
            "error: unrecognized arguments: --modell demo; did you mean --model?",
        ),
    ],
)
async def test_a_setting_that_cannot_work_exits_2(arguments: tuple[str, ...], line: str) -> None:
    """One line says which flag and why; no traceback."""
    async with started("--port", "0", *arguments) as server:
        assert await server.exit_code() == 2
        errors = [text for text in server.log.splitlines() if text.startswith("error:")]
        assert len(errors) == 1
        assert errors[0].startswith(line)
        assert "Traceback" not in server.log


async def test_a_cut_off_model_exits_2(tmp_path: Path) -> None:
    """A half-downloaded model is a setting that cannot work, told in one line."""
    broken = tmp_path / "broken"
    shutil.copytree(demo.path(), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    async with started("--port", "0", "--model", str(broken)) as server:
        assert await server.exit_code() == 2
        (line,) = [text for text in server.log.splitlines() if text.startswith("error:")]
        assert line.startswith(f"error: --model: {broken} cannot be loaded:")


async def test_a_port_in_use_exits_2() -> None:
    """U5: said before the model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with started("--model", "demo", "--port", str(port)) as server:
            assert await server.exit_code() == 2
            assert f"error: --port: port {port} is in use on 127.0.0.1" in server.log
            assert "mlx-lm" not in server.log


@pytest.mark.parametrize("module", ["smg_grpc_servicer.mlx", "smg_grpc_servicer.mlx.server"])
async def test_grpcs_own_lines_stay_out_of_ours(module: str) -> None:
    """Every line is JSON, the error that ends it too; whoever wants grpc's lines can have them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ("--model", "demo", "--log-format", "json", "--port", str(taken.getsockname()[1]))
        async with started(*flags, module=module) as server:
            assert await server.exit_code() == 2
            *lines, error = map(json.loads, server.log.splitlines())
            assert error["level"] == "error"
            assert error["msg"].startswith("--port: port ")
            assert {line["level"] for line in lines} == {"info"}
        async with started(*flags, module=module, env={"GRPC_VERBOSITY": "error"}) as server:
            assert await server.exit_code() == 2
            assert "Failed to add port to server" in server.log


async def test_life_from_the_first_moment_to_the_last(tmp_path: Path) -> None:
    """G6, B1, P12: NOT_SERVING first, SERVING once warm; SIGTERM turns it, the stream ends well.

    And what an operator reads on the way: JSON log lines, metrics, the served name.
    """
    async with started(
        "--model", "demo", "--port", "0", "--served-model-name", "our-demo", "--log-format", "json",
        "--log-level", "debug", "--metrics-port", "0", "--drain-seconds", "60",
        cwd=tmp_path,
    ) as server:  # fmt: skip
        async with connected(await server.bound()) as client:
            answers = watch(client.channel, MLX_SERVICE)
            assert (await answers.read()).status == NOT_SERVING
            assert await health(client.channel) == SERVING
            early = await client.generate([5], max_tokens=1)
            assert early.code is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await answers.read()).status == SERVING

            info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
            assert info.served_model_name == "our-demo"
            assert info.model_path == "demo"
            assert check(await client.generate([5, 6, 7], max_tokens=11)) == []
            await _metrics_tell(server)

            call, history = await client.begin([5, 6], request_id="last", max_tokens=1900)
            server.signal(signal.SIGTERM)
            assert (await answers.read()).status == NOT_SERVING
            late = await client.generate([5], max_tokens=1)
            assert late.code is grpc.StatusCode.UNAVAILABLE
            assert check(await history.record(call)) == []
            assert len(history.streamed_ids()) == 1900
        assert await server.exit_code() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"ts", "level", "logger", "msg"} <= set.intersection(*map(set, lines))
    assert [line for line in lines if line.get("request_id") == "last"]
    states = [line["msg"] for line in lines if line["msg"].startswith("state: ")]
    assert states == [f"state: {s}" for s in ("warming up", "serving", "draining", "stopped")]


async def _metrics_tell(server: Server) -> None:
    place = (await server.printed(r"metrics on (http://\S+?/metrics)"))[1]

    def scrape() -> str:
        with urlopen(place, timeout=5) as answer:
            body: bytes = answer.read()
        return body.decode()

    text = await asyncio.to_thread(scrape)
    labels = 'engine="mlx",model="our-demo"'
    assert f"smg_servicer_generated_tokens_total{{{labels}}} 11.0" in text
    assert f"smg_servicer_prompt_tokens_total{{{labels}}} 3.0" in text
    assert f'smg_servicer_state{{{labels},state="serving"}} 1.0' in text


async def test_a_second_signal_ends_at_once() -> None:
    """V14: the stream is not waited for any more; the code names the signal."""
    async with (
        serving("--model", "demo", "--drain-seconds", "600") as server,
        connected(server.address) as client,
    ):
        await client.begin([5, 6], max_tokens=2000)
        server.signal(signal.SIGTERM)
        await server.printed("state: draining")
        start = monotonic()
        server.signal(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM
        assert monotonic() - start < 3


async def test_sigterm_while_loading_ends_it() -> None:
    """U1: nobody has to wait for a load that is not wanted any more."""
    async with started("--model", "demo", "--port", "0") as server:
        await server.bound()
        assert await server.stop() == 0


async def test_an_idle_server_sleeps(demo_server: Server) -> None:
    """P2: nothing is polled: an idle server is not woken a thousand times a second."""
    window = 1.0
    before = _wake_ups(demo_server.pid)
    await asyncio.sleep(window)  # what is measured, not a wait for something
    assert _wake_ups(demo_server.pid) - before < 100 * window


def _wake_ups(pid: int) -> int:
    """How often its threads have slept and gone on; Linux only."""
    return sum(
        int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


async def _round(number: int) -> int:
    async with serving("--model", "demo") as server:
        async with connected(server.address) as client:
            requests = [client.request([5, 6, 7], max_tokens=20) for _ in range(4)]
            if number % 2:
                assert [check(h) for h in await client.together(requests)] == [[]] * 4
            else:
                calls = [client.stub.Generate(r) for r in requests]
                await calls[0].read()
        return await server.stop()


@pytest.mark.parametrize("batch", range(ROUNDS // 4))
async def test_a_stop_after_serving_is_never_a_crash(batch: int) -> None:
    """U1: native libraries' threads must not tear the process down on its way out."""
    codes = await asyncio.gather(*(_round(4 * batch + i) for i in range(4)))
    assert codes == [0] * 4
