"""T10: the servicer's lines beside vLLM's, in one form and at one level."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from smg_grpc_servicer.core import logs
from smg_grpc_servicer.vllm import log_lines

log = logging.getLogger("smg_grpc_servicer.test")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    loggers = [logging.getLogger(logs.PACKAGE), logging.getLogger("vllm")]
    before = [(list(each.handlers), each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.handlers = []
    yield
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.level, each.propagate = handlers, level, propagate


@pytest.fixture
def vllms() -> io.StringIO:
    """The stream of vLLM's handler."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("(vllm) %(levelname)s %(message)s"))
    logging.getLogger("vllm").addHandler(handler)
    return stream


def test_our_lines_have_vllms_form_and_stream(vllms: io.StringIO) -> None:
    log_lines.configure("info", None)
    log_lines.configure("info", None)
    log.debug("not shown")
    log.info("shown")
    assert vllms.getvalue() == "(vllm) INFO shown\n"


def test_credentials_are_masked_in_vllms_form_too(vllms: io.StringIO) -> None:
    secret = "hf_" + "A1b2C3d4" * 4
    log_lines.configure("info", None)
    log.info("token %s", secret)
    assert vllms.getvalue().startswith("(vllm) INFO token ")
    assert secret not in vllms.getvalue()


def test_a_form_that_was_asked_for_holds(
    vllms: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log_lines.configure("info", "json")
    log.info("shown")
    assert json.loads(capsys.readouterr().err)["msg"] == "shown"
    assert vllms.getvalue() == ""


def test_without_handlers_of_vllms_ours_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """VLLM_CONFIGURE_LOGGING=0."""
    log_lines.configure("info", None)
    log.info("shown")
    assert capsys.readouterr().err.endswith("INFO smg_grpc_servicer.test: shown\n")


def test_an_operators_own_handler_stays_the_only_one(vllms: io.StringIO) -> None:
    """From a configuration file of vLLM's logging that names our logger."""
    stream = io.StringIO()
    logging.getLogger(logs.PACKAGE).addHandler(logging.StreamHandler(stream))
    log_lines.configure("debug", None)
    log.debug("shown")
    assert (stream.getvalue(), vllms.getvalue()) == ("shown\n", "")
