"""How a process of ours ends, and what is told on standard error when it cannot start."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys

import pytest

from smg_grpc_servicer.core.command import command
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.logs import PACKAGE, configure
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.process import print_config_error
from smg_grpc_servicer.core.quiet import quiet_interrupt
from smg_grpc_servicer.core.settings import Settings, Values

URL = "https://user:hunter2pass@host/x"


def test_faults_are_told_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_config_error(ConfigError("--port: got 'x'\n--tls-key: got '/a/key.pem', not a key"))
    assert capsys.readouterr().err == (
        "error: --port: got 'x'\nerror: --tls-key: got '/a/key.pem', not a key\n"
    )


def test_a_log_for_machines_gets_them_as_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a process is the line that a collector must not lose."""
    logger = logging.getLogger(PACKAGE)
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # put back afterwards
    logger.handlers = []
    read = io.StringIO()
    configure(style="json", stream=read)
    print_config_error(ConfigError("--port: got 'x'\n--tls-key: not a key"))
    lines = [json.loads(line) for line in read.getvalue().splitlines()]
    assert [(line["level"], line["msg"]) for line in lines] == [
        ("error", "--port: got 'x'"),
        ("error", "--tls-key: not a key"),
    ]


def test_an_interrupt_during_imports_leaves_no_traceback() -> None:
    program = (
        "import os, signal\n"
        "from smg_grpc_servicer.core.quiet import quiet_interrupt\n"
        "with quiet_interrupt():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_python_hears_interrupts_again_after_its_imports() -> None:
    before = signal.getsignal(signal.SIGINT)
    with quiet_interrupt():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_a_password_in_a_setting_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """Start-up errors go to the same log collectors as log lines, and are masked like them."""
    print_config_error(ConfigError(f"--model: {URL} is not a directory"))
    assert (
        capsys.readouterr().err == "error: --model: https://[redacted]@host/x is not a directory\n"
    )


def test_a_password_in_an_unknown_argument_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(values: Values, options: ServerOptions) -> int:
        raise AssertionError

    with pytest.raises(SystemExit, match="2"):
        command("x", "", Settings(), serve, argv=["--modell", URL])
    told = capsys.readouterr().err
    assert told.startswith("error: unrecognized arguments: --modell https://")
    assert "hunter2pass" not in told


@pytest.mark.parametrize("state", ["absent", "closed", "full"])
def test_nobody_to_tell_is_no_second_fault(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    stream = None if state == "absent" else Full()
    if state == "closed":
        assert stream is not None
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    print_config_error(ConfigError("--port: got 'x'"))
    assert sys.stderr is None


class Full(io.StringIO):
    def flush(self) -> None:
        if not self.closed:
            raise OSError(28, "No space left on device")


LEAVING = """
import sys
from smg_grpc_servicer.core.process import leave_at_exit

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
sys.argv = ["/usr/bin/{command}"]
leave_at_exit("vllm", {code})
print("last words")
{end}
"""


@pytest.mark.parametrize(
    ("command", "code", "end", "wanted"),
    [
        ("vllm", 3, "", (3, ["last words"])),
        ("vllm", 0, "raise OSError", (1, ["last words"])),
        ("mine", 3, "", (0, ["last words", "taken apart"])),
    ],
    ids=["its own", "its own, with a fault", "somebody's"],
)
def test_a_closing_interpreter_is_left(
    command: str, code: int, end: str, wanted: tuple[int, list[str]]
) -> None:
    """In the engine's own command; a program that merely calls us ends as it likes."""
    script = LEAVING.format(command=command, code=code, end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout.split("\n")[:-1]) == wanted, done.stderr
