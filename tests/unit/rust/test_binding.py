"""A wheel is asked what it takes; wheels here are made up."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust import binding
from smg_grpc_servicer.rust.binding import Binding, RunningServer, load_binding
from smg_grpc_servicer.rust.plan import Keyword


class Older:
    """The members of smg 1.13.0's server."""

    address, engine_ready, running = "127.0.0.1:1", False, True
    last_error: str | None = None

    def __init__(
        self,
        bind_address: str,
        ipc_base_url: str = "",
        handshake_address: str = "",
        model_path: str = "",
        *,
        vocab_size: int = 0,
        error: object = None,
    ) -> None:
        if isinstance(error, Exception):
            raise error
        self.calls: list[tuple[object, ...]] = []

    def note_engine_alive(self) -> None:
        self.calls.append(("alive",))

    def set_serving(self, serving: bool) -> None:
        self.calls.append(("serving", serving))

    def stop(self, timeout_secs: float = 5.0) -> None:
        self.calls.append(("stop", timeout_secs))


class Newer(Older):
    active_requests = 3
    kv_relay_subscribed = False
    metrics_address = "127.0.0.1:2"

    def set_ready(self, ready: bool) -> None:
        self.calls.append(("ready", ready))


def made(server_class: type, name: str = "Server") -> Binding:
    module = ModuleType("smg.servicer")
    vars(module).update(Server=server_class, __file__="/nowhere/smg/servicer.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "smg", ModuleType("smg"))
        patch.setitem(sys.modules, "smg.servicer", module)
        return load_binding(name)


def test_one_warning_names_all_that_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    wanted = {
        "vocab_size": Keyword(7, required=True),
        "mm_item_limits": Keyword({"image": 1}),
        "runs_mooncake": Keyword(False),
        "block_size": Keyword(None),
    }
    with caplog.at_level(logging.WARNING):
        assert made(Older).fit(wanted) == {"vocab_size": 7}
    assert [record.getMessage() for record in caplog.records] == [
        "smg in /nowhere: its Server takes no mm_item_limits, runs_mooncake; left out"
    ]


def test_an_unset_value_is_never_passed(caplog: pytest.LogCaptureFixture) -> None:
    """Not even where the wheel knows it: its own default is an unset one."""
    assert made(Older).fit({"vocab_size": Keyword(None, required=True)}) == {}
    assert not caplog.records


def test_what_is_needed_or_asked_for_is_refused() -> None:
    wanted = {
        "engine_count": Keyword(2, required=True, names="data parallelism"),
        "media_processor": Keyword(object(), required=True),
        "metrics_bind_address": Keyword("127.0.0.1:0", asked="--metrics-port"),
        "mm_item_limits": Keyword({}),
    }
    with pytest.raises(ConfigError) as told:
        made(Older).fit(wanted)
    assert str(told.value) == (
        "smg in /nowhere: its Server has no --metrics-port (metrics_bind_address), no data "
        "parallelism, no media_processor; install a newer wheel of it, leave the setting out, or "
        "use the Python servicer"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("invalid servicer config: x"), "smg in /nowhere: invalid servicer config: x"),
        (TypeError("'str' object"), "smg in /nowhere: 'str' object"),
        (OSError(98, "in use"), "--host, --port: [Errno 98] in use"),
        (RuntimeError("failed to bind a:1: in use"), "--host, --port: failed to bind a:1: in use"),
        (RuntimeError("metrics listener: in use"), "--metrics-port: metrics listener: in use"),
    ],
)
def test_a_constructor_that_refuses(error: Exception, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(Older).start({"bind_address": "a:1", "error": error})
    assert str(caught.value) == told


def test_what_an_older_wheel_lacks() -> None:
    raw = Older("a:1")
    server = running(raw)
    assert server.active_requests is None
    assert server.metrics_address is None
    assert server.relay_connected
    server.set_ready(False)
    assert raw.calls == [("serving", False)]


def test_what_a_newer_wheel_has() -> None:
    raw = Newer("a:1")
    server = running(raw)
    assert (server.active_requests, server.metrics_address) == (3, "127.0.0.1:2")
    assert not server.relay_connected
    server.set_ready(False)
    server.note_engine_alive()
    server.stop(2)
    assert raw.calls == [("ready", False), ("alive",), ("stop", 2)]


def test_description() -> None:
    lines = made(Older).describe()
    assert lines[0] == "smg in /nowhere, Server"
    assert lines[-1] == (
        "  takes bind_address, error, handshake_address, ipc_base_url, model_path, vocab_size"
    )
    told = "have media processed in this process (media_processor)"
    assert f"  cannot {told}" in lines
    told = "tell when KV events are being read (kv_relay_subscribed)"
    assert f"  cannot {told}" in lines
    assert f"  can {told}" in made(Newer).describe()


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, binding.MODULE, None)
    monkeypatch.setitem(sys.modules, "smg", None)
    with pytest.raises(ConfigError, match=r"^the Rust servicer needs the wheel smg \(.*\); pip "):
        load_binding("VllmGrpcServer")


def test_a_wheel_without_the_engine() -> None:
    with pytest.raises(ConfigError, match="it has no Missing; install a newer one"):
        made(Older, "Missing")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise RuntimeError('ABI 9')", "the wheel smg cannot be loaded (RuntimeError: ABI 9); in"),
        ("import ctypes; ctypes.CDLL('/no.so')", "the wheel smg cannot be loaded (OSError: /no.so"),
        ("def (", "the wheel smg cannot be loaded (SyntaxError: "),
        ("Server = 3", "smg in {}: its Server does not say what it takes"),
        ("Server = int", "smg in {}: its Server does not say what it takes"),
        ("class Server: pass", "smg in {}: its Server has no address, no bind_address, no engine"),
    ],
)
def test_whatever_lies_there_is_one_line(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an installation, one for another Python, an empty class: exit code 2, no traceback."""
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").touch()
    (tmp_path / "smg" / "servicer.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("smg", "smg.servicer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        with pytest.raises(ConfigError) as caught:
            load_binding("Server")
    finally:
        for name in ("smg", "smg.servicer"):
            sys.modules.pop(name, None)
    assert str(caught.value).startswith(told.format(tmp_path))


@pytest.mark.parametrize(
    ("level", "rusts"), [("warning", "warn"), ("debug", "debug"), (None, None)]
)
def test_levels_in_rusts_words(
    level: str | None, rusts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes `warning` for the name of a module, and then says nothing, not even errors."""
    given: list[str | None] = []
    module = ModuleType("smg.servicer")
    vars(module).update(init_servicer_tracing=given.append)
    monkeypatch.setitem(sys.modules, "smg", ModuleType("smg"))
    monkeypatch.setitem(sys.modules, "smg.servicer", module)
    binding.init_tracing(level)
    assert given == [rusts]


def running(raw: Any) -> RunningServer:
    return RunningServer(raw, frozenset(dir(raw)))
