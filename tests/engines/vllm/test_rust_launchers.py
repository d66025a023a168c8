"""`--servicer-impl rust` through the launchers of vLLM 0.28 to 0.33: their own files, a real wheel.

vLLM around them is a stub and the engine core is `stub_core`, so this is about the way from a
command line to the Rust server over a headless engine, and about what is refused on it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.engines.vllm.test_launchers import ENDS, WAYS, generate
from tests.support.dial import SERVING, check
from tests.support.processes import descendants, exists
from tests.support.router import free_ports
from tests.support.rust_served import files
from tests.support.vllm_wheels import RELEASES
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.engines.vllm.conftest import Start

# The first run downloads a wheel of up to 340 MB for each release.
pytestmark = pytest.mark.timeout(300)

SERVICE = "vllm.grpc.engine.VllmEngine"


@pytest.fixture(autouse=True)
def private(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A socket folder of the test's own, in the environment that `start` has cleaned."""
    # Not in `tmp_path`, whose names are too long for sockets.
    parent = Path(tempfile.mkdtemp(prefix="smg-"))
    monkeypatch.setenv("SMG_ZMQ_SOCKET_DIR", str(parent / "s"))
    yield parent / "s"
    shutil.rmtree(parent)


async def served(address: str) -> tuple[str, str]:
    """One request is answered from Rust; the server's type and the model's name."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert await check(channel, SERVICE) == SERVING
        answers = await generate(stub)
        assert list(answers[-1].complete.output_ids) == [1000, 1001, 1002]  # the stub core's
        server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=5)
        model = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=5)
        return server.server_type, model.served_model_name


async def launched(start: Start, release: str, *arguments: str) -> list[str]:
    """Every form of that release, all at the same time; each serves and ends. What they said."""
    forms = [form for each, form in WAYS if each == release]
    with ExitStack() as stack:
        children = [
            stack.enter_context(start(release, form, "--port", "0", *arguments)) for form in forms
        ]
        for child in children:
            address = await asyncio.to_thread(child.address)
            await asyncio.to_thread(child.wait_for, "serving on grpc", 40)
            assert await served(address) == ("vllm-grpc", "tiny")
        for child in children:
            child.signal(signal.SIGTERM)
        for form, child in zip(forms, children, strict=True):
            assert child.exit_code() == 0, (form, child.output)
        return [child.output for child in children]


@pytest.mark.parametrize("release", RELEASES)
async def test_every_way_into_the_launcher_leads_to_rust(
    start: Start, release: str, private: Path
) -> None:
    """By the flag; SIGTERM ends server and engine with 0 and leaves no file."""
    for output in await launched(start, release, "--servicer-impl", "rust"):
        assert "warm-up: 1 answered, 0 failed" in output
    assert files(private) == []


@pytest.mark.parametrize("release", ENDS)
async def test_the_variable_alone_leads_there_too(
    start: Start, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where our plugin is left out: the launcher imports our servicer, which is enough."""
    monkeypatch.setenv("SMG_VLLM_SERVICER_IMPL", " RUST ")
    monkeypatch.setenv("SMG_VLLM_SERVICER_WARMUP", "off")
    monkeypatch.setenv("VLLM_PLUGINS", "another-one")
    for output in await launched(start, release):
        assert "warm-up" not in output


async def test_a_port_may_be_chosen_for_the_handshake(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it is a socket file that nobody else can open. Of two flags the last one holds."""
    (port,) = free_ports(1)
    monkeypatch.setenv("SMG_VLLM_SERVICER_HANDSHAKE_PORT", str(port))
    twice = ("--servicer-impl", "python", "--servicer-impl", "rust")
    with start("0.32.0", "serve", "--port", "0", *twice) as child:
        address = child.address()
        child.wait_for("serving on grpc")
        assert (await served(address))[0] == "vllm-grpc"
    assert f"head node address tcp://127.0.0.1:{port}" in child.output


async def test_the_flag_wins_over_the_variable(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMG_VLLM_SERVICER_IMPL", "rust")
    with start("0.32.0", "serve", "--port", "0", "--servicer-impl", "python") as child:
        child.address()
        child.wait_for("state: serving")
        child.signal(signal.SIGTERM)
        assert child.exit_code() == 0, child.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--die-at registered --code 7", "exit code 7"),
        ("--die-at registered --how kill", "SIGKILL"),
        ("--die-at hello --code 3", "exit code 3"),
    ],
)
def test_an_engine_that_dies_ends_it_with_1_and_its_own_reason(
    start: Start, flags: str, said: str, monkeypatch: pytest.MonkeyPatch, private: Path
) -> None:
    """Through vLLM's headless process, which itself would have ended with 0."""
    monkeypatch.setenv("STUB_CORE", flags)
    monkeypatch.setenv("SMG_VLLM_SERVICER_WARMUP", "off")
    with start("0.32.0", "serve", "--port", "0", "--servicer-impl", "rust") as child:
        assert child.exit_code() == 1, child.output
    (line,) = (line for line in child.lines if line.rstrip().endswith("; stopping"))
    assert "the engine (pid" in line
    assert said in line
    assert files(private) == []


async def test_the_end_of_one_rank_is_told_before_the_others_have_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM first asks the other ranks to end, and waits for them: streams of the dead one hang."""
    monkeypatch.setenv("STUB_CORE", "--stubborn")
    two = ("--data-parallel-size", "2", "--servicer-impl", "rust")
    with start("0.32.0", "serve", "--port", "0", *two) as child:
        address = child.address()
        child.wait_for("serving on grpc")
        assert (await served(address))[0] == "vllm-grpc"
        family = descendants(child.process.pid)
        ranks = [pid for pid in family if b"--multiprocessing-fork" in command(pid)]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert child.exit_code(10) == 1, child.output
        assert not any(map(exists, family))
    assert "EngineCore_DP1 was ended by SIGKILL" in child.output
    assert "was ended by SIGKILL; stopping" in child.output


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_launcher_that_is_killed_takes_the_engine_with_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No orphan holds the accelerator."""
    monkeypatch.setenv("SMG_VLLM_SERVICER_WARMUP", "off")
    with start("0.32.0", "serve", "--port", "0", "--servicer-impl", "rust") as child:
        child.address()
        child.wait_for("serving on grpc")
        family = descendants(child.process.pid)
        assert len(family) >= 2
        child.process.kill()
        child.process.wait()
        await until(lambda: not any(map(exists, family)), 30)


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (["--servicer-impl", "go"], {}, "error: --servicer-impl: got 'go'; allowed: one of"),
        ([], {"SMG_VLLM_SERVICER_IMPL": "go"}, "error: SMG_VLLM_SERVICER_IMPL: got 'go'"),
        (["--servicer-impl", "rust", "--metrics-port", "0"], {}, "--metrics-port"),
        (["--servicer-impl", "rust"], {"SMG_VLLM_SERVICER_DRAIN_SECS": "soon"},
         "error: SMG_VLLM_SERVICER_DRAIN_SECS: got 'soon'"),
        (["--servicer-impl", "rust"], {"SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS": "9"},
         "SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS"),
        ([], {"SMG_VLLM_SERVICER_WARMUP": "hot"}, "error: SMG_VLLM_SERVICER_WARMUP: got 'hot'"),
        (["--servicer-impl", "rust"], {"SMG_VLLM_SERVICER_WARMUP": "fast:0"},
         "error: SMG_VLLM_SERVICER_WARMUP: got 'fast:0'"),
        (["--servicer-impl", "rust"], {"VLLM_API_KEY": "s3cret"},
         "error: --servicer-impl rust: its server has no tokens"),
        (["--servicer-impl", "rust", "--max-chunk-tokens", "5"], {},
         "error: --max-chunk-tokens: no effect with --servicer-impl rust"),
        (["--servicer-impl", "rust", "--mm-processor", "redis"], {},
         "error: --mm-processor: got 'redis', which is not served yet"),
        (["--servicer-impl", "rust", "--mm-processor", "smg"], {},
         "error: --mm-processor: got 'smg', but this model takes no media"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_and_exit_code_2_before_anything_is_bound(
    start: Start,
    arguments: list[str],
    environ: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with start("0.32.0", "serve", "--port", "0", *arguments) as child:
        assert child.exit_code() == 2, child.output
    errors = [each for each in child.lines if each.startswith("error:")]
    assert len(errors) == 1, child.output
    assert line in errors[0]
    assert "Traceback" not in child.output
    assert "listening" not in child.output
    assert "s3cret" not in child.output


def test_a_wheel_that_is_not_there_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").touch()
    rust = ("--servicer-impl", "rust")
    with start("0.32.0", "serve", "--port", "0", *rust, first=tmp_path) as child:
        assert child.exit_code() == 2, child.output
    assert "error: the Rust servicer needs the wheel smg" in child.output
    assert "Traceback" not in child.output


@pytest.mark.parametrize(("form", "given"), [("serve", "flag"), ("launcher", "variable")])
def test_a_launcher_that_cannot_be_switched_is_refused_when_it_is_parsed(
    start: Start, form: str, given: str, monkeypatch: pytest.MonkeyPatch, changed: Path
) -> None:
    """It would serve from Python and say nothing."""
    arguments = ["--servicer-impl", "rust"] if given == "flag" else []
    if given == "variable":
        monkeypatch.setenv("SMG_VLLM_SERVICER_IMPL", "rust")
    with start("0.32.0", form, "--port", "0", *arguments, first=changed) as child:
        assert child.exit_code() == 2, child.output
    asked = "--servicer-impl" if given == "flag" else "SMG_VLLM_SERVICER_IMPL"
    assert f"error: {asked}: the installed vLLM cannot be switched to it" in child.output
    assert "Traceback" not in child.output


def test_without_a_flag_such_a_launcher_runs_as_it_is(start: Start, changed: Path) -> None:
    with start("0.32.0", "launcher", "--port", "0", first=changed) as child:
        assert child.exit_code() == 0, child.output
    assert "another server" in child.output


@pytest.fixture
def changed(tmp_path: Path, trees: Callable[[str], Path]) -> Path:
    """A release whose launcher serves by another name."""
    target = tmp_path / "changed"
    shutil.copytree(trees("0.32.0"), target, ignore=shutil.ignore_patterns("*.dist-info"))
    launcher = target / "vllm" / "entrypoints" / "launchers" / "grpc_server.py"
    text = launcher.read_text()
    text = text.replace("async def serve_grpc(args", "async def serve_other(args")
    launcher.write_text(text.replace("uvloop.run(serve_grpc(args))", "print('another server')"))
    return target
