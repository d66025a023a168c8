"""A SGLang that is too old, too new, or not as we know it."""

from __future__ import annotations

import logging

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.sglang import releases, server
from smg_grpc_servicer.sglang.releases import Needed


def test_what_is_missing_is_told_in_one_line_with_the_range() -> None:
    for needed, missing in (
        (Needed("no.such.module", "x"), "ModuleNotFoundError"),
        (Needed("json", "no_such_name"), "AttributeError"),
        (Needed("json", "dumps", ("obj", "nothing")), "dumps takes no nothing"),
    ):
        with pytest.raises(ConfigError) as refused:
            releases.require((needed,))
        text = str(refused.value)
        assert missing in text
        assert text.endswith("allowed: 0.5.20 to 0.5.23")
        assert "\n" not in text
    releases.require((Needed("json", "dumps", ("obj",)),))


async def test_an_older_sglang_is_refused_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is bound or started; the way out takes no module apart."""
    left_with: list[tuple[str, int]] = []
    monkeypatch.setattr(server, "leave_at_exit", lambda *how: left_with.append(how))
    monkeypatch.setattr(releases, "installed", lambda: "0.5.18")
    monkeypatch.setattr(releases, "NEEDED", (Needed("sglang_that_is_old", "x"),))
    monkeypatch.setattr(releases.require, "__defaults__", (releases.NEEDED,))
    with pytest.raises(SystemExit) as left:
        await server.serve_grpc(object())
    assert left.value.code == 2
    assert left_with == [("sglang", 2)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: SGLang 0.5.18 is not known here")


@pytest.mark.parametrize(
    ("version", "warned"),
    [("0.5.23", False), ("0.5.23.post1", False), ("0.5.24", True), ("0.6", True), (None, False)],
)
def test_a_newer_one_is_served_and_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    warned: bool,
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: version)
    with caplog.at_level(logging.WARNING):
        releases.warn_if_new()
    assert bool(caplog.records) is warned
