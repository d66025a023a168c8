"""Our flags on gRPC launch parsers and on no others. The parsers here are of vLLM's shape."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from smg_grpc_servicer.vllm import launcher_switch, options, plugin

SRC = Path(__file__).resolve().parents[3] / "src"
FLAGS = [setting.flag for setting in options.flags()]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hook asked of the switch."""
    calls: list[str] = []
    monkeypatch.setattr(launcher_switch, "install", lambda: calls.append("install"))
    monkeypatch.setattr(launcher_switch, "install_in_new", lambda: calls.append("install_in_new"))
    return calls


@pytest.fixture
def parsers() -> type[argparse.ArgumentParser]:
    """A class of its own for each test, hooked."""

    class FlexibleArgumentParser(argparse.ArgumentParser):
        def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            return super().parse_known_args(args, namespace)

    plugin.hook(FlexibleArgumentParser)
    return FlexibleArgumentParser


def serve_parser(parsers: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = parsers()
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def test_a_grpc_launch_gets_the_values_and_our_server(
    parsers: type[argparse.ArgumentParser], installed: list[str]
) -> None:
    args = serve_parser(parsers).parse_args(["--grpc", "--drain-seconds", "3", "--no-reflection"])
    assert vars(args) == {
        "grpc": True,
        "port": 8000,
        "smg_drain_seconds": "3",
        "smg_reflection": False,
    }
    assert installed == ["install_in_new"]


def test_the_launchers_own_parser_has_them_without_grpc(
    parsers: type[argparse.ArgumentParser], installed: list[str]
) -> None:
    parser = parsers(description="vLLM gRPC Server")
    assert vars(parser.parse_args(["--stall-seconds", "9"])) == {"smg_stall_seconds": "9"}
    assert installed == ["install"]


def test_other_parsers_are_left_alone(
    parsers: type[argparse.ArgumentParser],
    installed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = parsers(description="vLLM CLI")
    before = parser.format_help()
    assert vars(parser.parse_args([])) == {}
    assert parser.format_help() == before
    with pytest.raises(SystemExit):
        parser.parse_args(["--drain-seconds", "3"])
    assert "unrecognized arguments: --drain-seconds" in capsys.readouterr().err
    assert installed == []


def test_an_http_launch_goes_on_as_it_was(
    parsers: type[argparse.ArgumentParser], installed: list[str]
) -> None:
    assert vars(serve_parser(parsers).parse_args([])) == {"grpc": False, "port": 8000}
    assert installed == []


def test_a_flag_of_ours_without_grpc_is_refused(
    parsers: type[argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    """Q1: a security flag that guards nothing."""
    with pytest.raises(SystemExit) as exit_:
        serve_parser(parsers).parse_args(["--auth-token-file", "f"])
    assert exit_.value.code == 2
    assert "--auth-token-file: works only with --grpc" in capsys.readouterr().err


def test_all_flags_are_in_the_help_once_also_after_two_parses(
    parsers: type[argparse.ArgumentParser],
    installed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = serve_parser(parsers)
    first, again = parser.parse_args(["--grpc"]), parser.parse_args(["--grpc"])
    assert vars(first) == vars(again)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert text.count(f"{plugin.TITLE}:") == 1
    assert [flag for flag in FLAGS if flag is not None and flag not in text] == []


def test_a_flag_that_vllm_has_stays_vllms(
    parsers: type[argparse.ArgumentParser], installed: list[str]
) -> None:
    parser = serve_parser(parsers)
    parser.add_argument("--log-format", default="theirs")
    args = parser.parse_args(["--grpc", "--log-format", "json"])
    assert args.log_format == "json"
    assert "smg_log_format" not in vars(args)


def test_hooking_a_class_twice_changes_nothing(parsers: type[argparse.ArgumentParser]) -> None:
    hooked = parsers.parse_known_args
    plugin.hook(parsers)
    assert parsers.parse_known_args is hooked


def test_a_subcommands_parser_is_reached(
    parsers: type[argparse.ArgumentParser], installed: list[str]
) -> None:
    top = parsers(description="vLLM CLI")
    serve = top.add_subparsers(dest="subparser").add_parser("serve")
    serve.add_argument("--grpc", action="store_true")
    args = top.parse_args(["serve", "--grpc", "--metrics-port", "0"])
    assert args.smg_metrics_port == "0"
    assert installed == ["install_in_new"]


def test_what_our_flags_need_may_be_missing_without_breaking_a_launch(
    parsers: type[argparse.ArgumentParser],
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr("smg_grpc_servicer.vllm.options")
    monkeypatch.setitem(sys.modules, "smg_grpc_servicer.vllm.options", None)
    assert vars(serve_parser(parsers).parse_args([])) == {"grpc": False, "port": 8000}
    assert "no flags of smg-grpc-servicer" in caplog.text


def test_registering_hooks_vllms_class_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, plugin.PARSERS, raising=False)
    plugin.register()  # an engine process that parses nothing
    module = ModuleType(plugin.PARSERS)
    vars(module)["FlexibleArgumentParser"] = type("Flexible", (argparse.ArgumentParser,), {})
    monkeypatch.setitem(sys.modules, plugin.PARSERS, module)
    plugin.register()
    hooked = vars(module)["FlexibleArgumentParser"].parse_known_args
    assert hooked is not argparse.ArgumentParser.parse_known_args
    plugin.register()
    assert vars(module)["FlexibleArgumentParser"].parse_known_args is hooked


def test_registering_brings_nothing_but_the_standard_library_and_no_variables() -> None:
    """It runs in every engine process and every worker."""
    code = (
        f"import sys, os; sys.path.insert(0, {str(SRC)!r}); before = dict(os.environ)\n"
        "from smg_grpc_servicer.vllm.plugin import register; register(); register()\n"
        "assert dict(os.environ) == before\n"
        "names = {n.partition('.')[0] for n in sys.modules}\n"
        "print(*sorted(n for n in names if n not in sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["__main__", "smg_grpc_servicer"]
