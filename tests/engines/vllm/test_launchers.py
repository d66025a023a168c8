"""The launchers of vLLM 0.28 to 0.33, their own files, run through to our server.

Around them `vllm` is a stub: this is about who serves, with which flags, and how it starts and
ends. The files come from the package index; see `tests/support/vllm_wheels.py`.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.support.certificates import Authority
from tests.support.dial import NOT_SERVING, SERVING, check, watch
from tests.support.vllm_wheels import RELEASES

if TYPE_CHECKING:
    from tests.engines.vllm.conftest import Start

# The first run downloads a wheel of up to 340 MB for each release.
pytestmark = pytest.mark.timeout(300)

SERVICE = "vllm.grpc.engine.VllmEngine"
FORMS = ("serve", "launcher", "old-name")
ENDS = ("0.28.0", "0.33.0")
"""The oldest launcher and the newest."""


WAYS = [
    (release, form)
    for release in RELEASES
    for form in FORMS
    if form != "launcher" or release not in ("0.28.0", "0.29.0")  # those have the old name only
]


async def generate(stub: Any, **options: Any) -> list[Any]:
    request = vllm_engine_pb2.GenerateRequest(
        request_id="one",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3),
        stream=True,
    )
    return [answer async for answer in stub.Generate(request, timeout=10, **options)]


@pytest.mark.parametrize(("release", "form"), WAYS)
async def test_every_way_into_the_launcher_leads_to_our_server(
    start: Start, release: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port answers while the engine loads, then it serves, and SIGTERM ends it with 0."""
    fifo = tmp_path / "load"
    os.mkfifo(fifo)
    monkeypatch.setenv("STUB_LOAD", str(fifo))
    with start(release, form, "--port", "0", "--drain-seconds", "7") as child:
        address = child.address()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            changes = watch(channel, SERVICE)
            assert (await changes.read()).status == NOT_SERVING
            assert await check(channel) == SERVING  # alive
            with pytest.raises(grpc.aio.AioRpcError, match="not ready: loading") as refused:
                await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            fifo.write_text("ok")
            assert (await changes.read()).status == SERVING
            answers = await generate(stub)
            assert len(answers[-1].complete.output_ids) == 3
            changes.cancel()
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0, child.output
    assert "'drain_seconds': '7 (flag)'" in child.output
    assert "the stub engine is shut down" in child.output


@pytest.mark.parametrize(("release", "form"), [way for way in WAYS if way[0] in ENDS])
def test_it_is_our_server_too_where_the_plugin_is_left_out(
    start: Start, release: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another-one")
    with start(release, form, "--port", "0") as child:
        child.address()
        child.wait_for("state: serving")
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0, child.output


@pytest.mark.parametrize("release", RELEASES)
async def test_tls_and_api_key_of_vllms_own_flags_hold(
    start: Start, release: str, tmp_path: Path
) -> None:
    """Q1: `--api-key` and TLS together with `--grpc` were accepted and ignored."""
    authority = Authority(tmp_path)
    pair = authority.issue("localhost")
    arguments = ("--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key))
    with start(release, "serve", "--port", "0", "--api-key", "s3cret", *arguments) as child:
        address = child.address()
        child.wait_for("state: serving")
        credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            assert await check(channel, SERVICE) == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(stub)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await generate(stub, metadata=(("authorization", "Bearer s3cret"),))
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)
    assert "s3cret" not in child.output


@pytest.mark.parametrize("form", FORMS)
async def test_the_variable_of_the_api_key_holds_in_every_form(
    start: Start, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with start("0.32.0", form, "--port", "0") as child:
        async with grpc.aio.insecure_channel(child.address()) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(stub)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ssl-certfile", "/nowhere"], "error: --ssl-certfile: got '/nowhere'"),
        (["--ssl-ca-certs", __file__], "error: --ssl-cert-reqs: got 0 with --ssl-ca-certs"),
        (["--uds", "/tmp/x"], "error: --uds: not supported with --grpc"),
        (["--drain-seconds", "soon"], "error: --drain-seconds: got 'soon'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(
    start: Start, arguments: list[str], line: str
) -> None:
    with start("0.32.0", "serve", "--port", "0", *arguments) as child:
        assert child.exit_code() == 2
    assert line in child.output
    assert "Traceback" not in child.output
    assert "listening" not in child.output


@pytest.mark.parametrize("form", FORMS)
def test_a_port_in_use_is_one_line_and_exit_code_2(start: Start, form: str) -> None:
    """U5: two servers on one port without an error."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start("0.32.0", form, "--port", str(port)) as child:
            assert child.exit_code() == 2
    assert f"error: --port: port {port} is in use" in child.output
    assert "Traceback" not in child.output


async def test_ipv6_is_bound_and_its_address_can_be_dialled(start: Start) -> None:
    """Q3: vLLM's launcher joins `::1` and the port without brackets."""
    with start("0.32.0", "serve", "--host", "::1", "--port", "0") as child:
        address = child.address()
        assert address.startswith("[::1]:")
        async with grpc.aio.insecure_channel(address) as channel:
            assert await check(channel) == SERVING


def test_sigterm_while_the_engine_loads_ends_it_at_once_with_0(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "load"
    os.mkfifo(fifo)
    monkeypatch.setenv("STUB_LOAD", str(fifo))
    with start("0.32.0", "serve", "--port", "0") as child:
        child.address()
        child.signal(signal.SIGTERM)
        assert child.exit_code(15) == 0, child.output


@pytest.mark.parametrize("form", ["launcher", "old-name"])
def test_an_interpreter_that_hangs_while_it_closes_is_left_behind(
    start: Start, form: str, tmp_path: Path
) -> None:
    """With some engines a native destructor ended the main thread: exit code 1, 20 s late."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 3600)\n"
    )
    with start("0.32.0", form, "--port", "0", first=tmp_path) as child:
        child.address()
        child.wait_for("state: serving")
        child.signal(signal.SIGTERM)
        assert child.exit_code(10) == 0, child.output
    assert "stopped, exit code 0" in child.output


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_that_does_not_come_up_ends_it_with_1(
    start: Start, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "load"
    said.write_text("no room for the KV cache")
    monkeypatch.setenv("STUB_LOAD", str(said))
    with start("0.32.0", form, "--port", "0") as child:
        assert child.exit_code() == 1
    assert "no room for the KV cache" in child.output


@pytest.mark.parametrize("form", FORMS)
def test_a_launcher_we_do_not_know_is_refused_where_it_would_drop_security(
    start: Start, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_CHANGED", "1")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with start("0.32.0", form, "--port", "0") as child:
        assert child.exit_code() == 2
    assert "its own server has no tokens; allowed: vLLM 0.28 to 0.33" in child.output
    assert "Traceback" not in child.output
    assert "s3cret" not in child.output


def test_a_launcher_we_do_not_know_runs_itself_otherwise(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_CHANGED", "1")
    with start("0.32.0", "serve", "--port", "0") as child:
        child.wait_for("vLLM's own gRPC server runs")
        # It goes on to build the engine in its own way, which the stub does not let it.
        assert child.exit_code() == 1
    assert "unexpected keyword argument 'enable_log_requests'" in child.output


@pytest.mark.parametrize("release", RELEASES)
def test_our_flags_are_in_the_help(start: Start, release: str) -> None:
    with start(release, "serve", "--help=GrpcServer") as child:
        child.wait_for("--drain-seconds")
        assert child.exit_code() == 0
    with start(release, "old-name", "--help=drain-seconds") as child:
        child.wait_for(r"env: SMG_SERVICER_DRAIN_SECONDS")
        assert child.exit_code() == 0


def test_the_releases_are_those_of_the_extra() -> None:
    """`smg-grpc-servicer[vllm]` asks for what is run here."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"vllm>=0.28,<0.34"' in text
    assert {tuple(map(int, r.split(".")))[:2] for r in RELEASES} == {(0, n) for n in range(28, 34)}
