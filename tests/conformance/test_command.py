"""The command as a person or a pipeline uses it, against a server in a process of its own."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smg_grpc_servicer.conformance.__main__ import main
from smg_grpc_servicer.conformance.registry import CHECKS
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support.certificates import Authority
from tests.support.child import Child, running


@contextmanager
def serving(engine: str, *flags: str) -> Iterator[Child]:
    """The shipped fake server, ready; a thousand steps a second."""
    flags = ("--engine", engine, "--step-seconds", "0.001", *flags)
    with running(*flags, module="smg_grpc_servicer.testing") as child:
        yield child


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("mlx") as child:
        found = child.address()
        child.wait_for("state: serving")
        yield found


def test_all_passed_is_0_and_the_table_says_so(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([address, "--only", "stream-deltas", "loads", "token-required"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "promise", "sec", "detail"]
    assert [line.split()[0] for line in lines[1:4]] == ["stream-deltas", "loads", "token-required"]
    outcome = lines[0].index("sec") - 8
    assert [line[outcome:].split()[0] for line in lines[1:4]] == ["pass", "n/a", "n/a"]
    assert "no --token-file given" in lines[3]
    assert lines[-1].startswith("1 passed, 0 failed, 2 not applicable in ")


def test_a_failure_is_1_and_is_explained(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary that is said to be smaller than it is: the id past it is served."""
    assert main([address, "--vocab-size", "500", "--only", "invalid-prompt-id"]) == 1

    out = capsys.readouterr().out
    assert "FAIL" in out
    assert re.search(r"ended OK with \d+ messages", out)
    assert "0 passed, 1 failed, 0 not applicable" in out


def test_json_has_everything(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    assert main([f"grpc://{address}", "--only", "ids", "loads", "--json", str(file)]) == 0
    assert "id-duplicate" in capsys.readouterr().out

    document = json.loads(file.read_text())
    assert document["address"] == address
    assert document["engine"] == "mlx"
    assert document["service"] == DIALECTS["mlx"].service
    assert document["failed"] == 0
    assert document["not_applicable"] == 1
    assert document["passed"] == len(document["checks"]) - 1
    assert document["seconds"] >= sum(each["seconds"] for each in document["checks"]) - 0.1
    by_name = {each["name"]: each for each in document["checks"]}
    assert by_name["id-long"]["outcome"] == "passed"
    assert by_name["id-long"]["group"] == "ids"
    assert by_name["id-long"]["promise"] == CHECKS["id-long"].promise
    assert by_name["loads"]["outcome"] == "not_applicable"
    assert by_name["loads"]["detail"] == "the proto has no GetLoads"


def test_json_to_stdout_is_only_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([address, "--only", "id-long", "--json", "-"]) == 0

    captured = capsys.readouterr()
    assert json.loads(captured.out)["passed"] == 1
    assert "id-long" in captured.err


def test_list_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert lines[0].split()[:2] == ["stream-deltas", "life"]


def _closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "ADDRESS: the host:port of the servicer is required"),
        (["no-port"], "ADDRESS: got 'no-port'; allowed: host:port"),
        (["{closed}", "--timeout", "1"], "does not answer"),
        (["{address}", "--engine", "vllm"], "does not serve the vllm service"),
        (["{address}", "--only", "nonsense"], "no check is named 'nonsense'"),
        (["{address}", "--prompt-ids", "5,1000"], "1000 is outside the vocabulary of 1000"),
        (["{address}", "--token-file", "/nowhere"], "--token-file: cannot read '/nowhere'"),
        (["{address}", "--tls-ca", "/nowhere"], "--tls-ca: cannot read '/nowhere'"),
        (
            ["{address}", "--only", "id-long", "--json", "/nowhere/x"],
            "--json: cannot write '/nowhere/x'",
        ),
    ],
)
def test_nothing_to_check_is_2_and_says_why(
    address: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [each.format(address=address, closed=_closed_port()) for each in arguments]
    assert main(filled) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-ids", "5,x"], "got '5,x'; allowed: token ids"),
        (["--prompt-ids", "-1"], "got '-1'; allowed: token ids"),
        (["--timeout", "0"], "got '0'; allowed: a number above 0"),
        (["--vocab-size", "0"], "got '0'; allowed: a whole number above 0"),
        (["--shutdown-pid", "-5"], "got '-5'; allowed: a whole number above 0"),
        (["--engine", "trtllm"], "invalid choice"),
    ],
)
def test_bad_usage_is_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:1", *(f"{arguments[0]}={value}" for value in arguments[1:])])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "words"),
    [(b"# none\n", "holds no token"), ("pässwörd".encode(), "printable ASCII")],
)
def test_a_token_that_nobody_can_send_is_told(
    address: str, tmp_path: Path, token: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_bytes(token)
    assert main([address, "--token-file", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_tls_and_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Q1: with both the suite runs as without; without the token it says what is missing."""
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("localhost")
    tokens = tmp_path / "tokens"
    tokens.write_text("# ours\nsesame\n")
    flags = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    with serving("vllm", *flags, "--auth-token-file", str(tokens)) as child:
        address = child.address().replace("127.0.0.1", "localhost")
        child.wait_for("state: serving")
        trust = [address, "--tls-ca", str(authority.cert)]

        assert main([*trust, "--timeout", "3"]) == 2
        assert "refuses the token; give --token-file" in capsys.readouterr().err
        only = ["token-required", "ids", "cancel", "health-check", "reflection", "tokenizer-zip"]
        assert main([*trust, "--token-file", str(tokens), "--only", *only]) == 0
        out = capsys.readouterr().out
        assert "0 not applicable" in out


@pytest.mark.parametrize("engine", sorted(DIALECTS))
def test_the_shutdown_checks(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B1: they pass on our server and leave it gone, exit code 0."""
    with serving(engine) as child:
        address = child.address()
        child.wait_for("state: serving")
        pid = str(child.process.pid)
        assert main([address, "--only", "shutdown", "--shutdown-pid", pid]) == 0
        assert child.exit_code() == 0
    assert "4 passed, 0 failed, 0 not applicable" in capsys.readouterr().out


def test_a_server_that_drops_its_streams_at_sigterm_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B1 the other way round: a drain of no time cuts the stream."""
    with serving("mlx", "--drain-seconds", "0") as child:
        address = child.address()
        child.wait_for("state: serving")
        pid = str(child.process.pid)
        assert main([address, "--only", "shutdown-drains", "--shutdown-pid", pid]) == 1
        assert child.exit_code() == 0
    assert "ended UNAVAILABLE 'the server is stopping'" in capsys.readouterr().out
