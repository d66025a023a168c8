from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from smg_grpc_servicer.core import logs

log = logging.getLogger("smg_grpc_servicer.test")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger(logs.PACKAGE)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_text_lines() -> None:
    out = io.StringIO()
    logs.configure("info", "text", out)
    log.debug("not shown")
    log.info("shown %d", 1)
    assert out.getvalue().endswith("INFO smg_grpc_servicer.test: shown 1\n")
    assert out.getvalue().count("\n") == 1


def test_json_lines() -> None:
    out = io.StringIO()
    logs.configure("debug", "json", out)
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        log.exception("failed", extra={"request_id": "r1", "ids": (1, 2), "odd": object})
    (text,) = out.getvalue().splitlines()
    line = json.loads(text)
    assert line.pop("exc").endswith("ValueError: one\ntwo")
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "error",
        "logger": "smg_grpc_servicer.test",
        "msg": "failed",
        "request_id": "r1",
        "ids": [1, 2],
        "odd": "<class 'object'>",
    }


@pytest.mark.parametrize("style", ["text", "json"])
def test_credentials_are_masked(style: str) -> None:
    """No credential leaves in a log, in whatever part of a line it stands."""
    out = io.StringIO()
    logs.configure("info", style, out)
    secret = "hf_" + "A1b2C3d4" * 4
    try:
        raise ValueError(secret)
    except ValueError:
        log.exception("loading with %s", secret, extra={"url": f"https://me:{secret}@hub"})
    assert secret not in out.getvalue()
    assert "loading with" in out.getvalue()


def test_twice_is_once_and_others_are_left_alone() -> None:
    """T10: each line appears once, whatever an engine does to the root logger."""
    out = io.StringIO()
    root = logging.getLogger()
    other = logging.StreamHandler(out)
    root.addHandler(other)
    before = list(root.handlers)
    try:
        logs.configure("info", "text", out)
        logs.configure("info", "text", out)
        log.info("only once")
        assert root.handlers == before
    finally:
        root.removeHandler(other)
    assert out.getvalue().count("only once") == 1


FORGED = "id \x1b[2Kone\r\n2026-01-31 12:00:00.000 ERROR root: forged\x00\x85\u2028\u202e end\té"
SHOWN = r"id \x1b[2Kone\r\n2026-01-31 12:00:00.000 ERROR root: forged\x00\x85\u2028\u202e end\té"


@pytest.mark.parametrize("borrowed", [False, True], ids=["ours", "an engine's"])
def test_control_characters_of_a_message_are_escaped(borrowed: bool) -> None:
    """What a client sends (a request id, a name) can neither forge a line nor move a cursor."""
    out = io.StringIO()
    formatter = logging.Formatter("%(levelname)s %(name)s: %(message)s") if borrowed else None
    logs.configure("info", "text", out, formatter)
    log.info("got %s", FORGED)
    assert out.getvalue().endswith(f"INFO smg_grpc_servicer.test: got {SHOWN}\n")
    assert len(out.getvalue().splitlines()) == 1


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    out = io.StringIO()
    logs.configure("info", "text", out)
    try:
        raise ValueError("\x1b[2Kone\rtwo")
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().split("\n")
    assert lines[0].endswith("ERROR smg_grpc_servicer.test: failed")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == [r"ValueError: \x1b[2Kone\rtwo", ""]


def test_a_credential_with_a_break_in_it_is_masked_whole() -> None:
    """Escaping comes after masking, which it must not mislead."""
    out = io.StringIO()
    logs.configure("info", "text", out)
    log.info("password=hunter\x01secretpart")
    log.info("Authorization: Bearer\nabcdefgh12345678")
    assert "secretpart" not in out.getvalue()
    assert "abcdefgh" not in out.getvalue()
