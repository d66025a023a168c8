"""Our flags on SGLang's own parser, put there by its own plugin loader."""

from __future__ import annotations

import argparse
import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.server_args as sglang_args
from sglang.srt import plugins
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from smg_grpc_servicer.sglang import options, plugin

GRPC = ["--model-path", "m", "--smg-grpc-mode"]


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that SGLang's commands have just started; it stays loaded."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    policy = asyncio.get_event_loop_policy()
    plugins.load_plugins()
    yield
    asyncio.set_event_loop_policy(policy)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    sglang_args.ServerArgs.add_cli_args(made)
    return made


def parse(*argv: str) -> Any:
    """As `prepare_server_args`, without its logging."""
    return sglang_args.ServerArgs.from_cli_args(parser().parse_args(argv))


def test_what_was_given_rides_on_the_record() -> None:
    record = parse(*GRPC, "--drain-seconds", "3", "--no-reflection", "--metrics-port", "9100")
    assert plugin.given(record) == {
        "drain_seconds": "3",
        "reflection": False,
        "metrics_port": "9100",
    }
    assert plugin.given(pickle.loads(pickle.dumps(record))) == plugin.given(record)
    server = options.plan(record, {}, plugin.given(record)).server
    assert (server.drain_seconds, server.reflection, server.metrics_port) == (3.0, False, 9100)


def test_the_flag_wins_over_the_variable() -> None:
    record = parse(*GRPC, "--drain-seconds", "3")
    environ = {"SMG_SERVICER_DRAIN_SECONDS": "9", "SMG_SERVICER_STALL_SECONDS": "7"}
    values = options.plan(record, environ, plugin.given(record)).values
    assert (values["drain_seconds"], values["stall_seconds"]) == (3.0, 7.0)


def test_every_flag_of_ours_is_there_once_and_none_of_sglang_s_is_taken() -> None:
    """Loading twice adds nothing; a launch without them has none."""
    plugins.load_plugins()
    text = parser().format_help()
    ours = {str(setting.flag) for setting in options.flags()}
    group = text[text.index(plugin.TITLE) :]
    assert {flag for flag in ours if flag in group} == ours
    assert "SMG_SERVICER_DRAIN_SECONDS" in group
    bare = parse(*GRPC)
    assert plugin.given(bare) == {}
    server = options.plan(bare, {}, {}).server
    assert (server.host, server.port) == ("127.0.0.1", 30000)  # as the README has it


def test_a_configuration_file_may_have_them(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text("model-path: m\nsmg-grpc-mode: true\ndrain-seconds: 4\n")
    argv = ConfigArgumentMerger(parser()).merge_config_with_args(["--config", str(path)])
    assert plugin.given(parse(*argv)) == {"drain_seconds": "4"}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--model-path", "m"], "works only with --smg-grpc-mode"),
        ([*GRPC, "--encoder-only"], "has no effect with --encoder-only"),
    ],
)
def test_on_a_launch_that_is_not_ours_they_are_refused(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody shall think that a token file guards SGLang's own server."""
    with pytest.raises(SystemExit) as ended:
        parse(*argv, "--auth-token-file", "/f", "--stall-seconds", "1")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: --auth-token-file, --stall-seconds: {why}\n"
    assert plugin.given(parse(*argv)) == {}


@pytest.mark.parametrize(
    ("argv", "variable", "made"),
    [
        (["--smg-grpc-mode"], "", "uvloop"),
        (["--grpc-mode"], "", "uvloop"),
        (["--smg-grpc-mode"], "asyncio", "asyncio"),
        (["--smg-grpc-mode", "--encoder-only"], "", "asyncio"),
        ([], "", "asyncio"),
    ],
)
def test_a_launch_of_ours_runs_on_uvloop(
    argv: list[str], variable: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.LOOP_VARIABLE, variable)
    asyncio.set_event_loop_policy(None)
    parse("--model-path", "m", *argv)
    loop = asyncio.new_event_loop()
    loop.close()
    assert type(loop).__module__.partition(".")[0] == made


def test_sglang_serve_loads_plugins_before_it_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang import launch_server
    from sglang.cli import serve

    served: list[Any] = []
    monkeypatch.setattr(launch_server, "run_server", served.append)
    monkeypatch.setattr(serve, "kill_process_tree", lambda *_, **__: None)
    monkeypatch.setattr(sglang_args.logging, "basicConfig", lambda **_: None)
    (tmp_path / "config.json").write_text("{}")
    serve.serve(None, [str(tmp_path), "--smg-grpc-mode", "--drain-seconds", "5"])
    (record,) = served
    assert plugin.given(record) == {"drain_seconds": "5"}
