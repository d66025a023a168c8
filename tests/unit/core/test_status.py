"""What a client reads when its call ends badly."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any, cast
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core import status
from smg_grpc_servicer.core.errors import InvalidArgument, NotFound
from smg_grpc_servicer.core.redaction import MASK

PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def travelling(text: str) -> int:
    """Bytes in the header `grpc-message`, by the protocol's rule."""
    return len(quote(text.encode(), safe=PRINTABLE))


@given(st.text(max_size=40), st.integers(1, 400))
def test_details_fit_into_a_header(text: str, times: int) -> None:
    """Whatever a caller wrote, the status gets through: too long a header hides it.

    Everything but printable ASCII takes three bytes a byte; a lone surrogate has no bytes at all.
    """
    words = status.details(NotFound(text * times))
    assert travelling(words) <= status.MAX_DETAILS_BYTES


@pytest.mark.parametrize("letter", ["z", "%", "\n", "\u4e2d", "\U0001f600", "\udcff"])
def test_details_are_cut_no_more_than_needed(letter: str) -> None:
    words = status.details(NotFound(letter * 5000))
    assert status.MAX_DETAILS_BYTES - 12 < travelling(words) <= status.MAX_DETAILS_BYTES
    assert status.details(NotFound(f"id: got {letter!r}")) == f"id: got {letter!r}"


def test_a_huge_text_costs_no_more_than_a_long_one() -> None:
    """A field of 20 MB in an error must not hold up the loop: it is cut before it is looked at."""
    error = InvalidArgument("request_id", "key=" + "token=abc " * (2 << 20))
    start = perf_counter()
    status.details(error)
    assert perf_counter() - start < 0.2


@pytest.mark.parametrize("before", range(status.MAX_TEXT - 40, status.MAX_TEXT + 1, 5))
def test_a_credential_at_the_cut_does_not_show(before: int) -> None:
    """What masking leaves may be short enough to show where the text was cut."""
    filling = "password=" + "x" * (before - 10)
    words = status.details(NotFound(f"{filling} https://user:hunter2@host/{'y' * 100}"))
    assert "hunter" not in words
    assert "user:" not in words
    assert words.startswith(f"password={MASK}")


def test_no_object_address_leaves() -> None:
    words = status.details(RuntimeError(f"no answer from {object()!r}"))
    assert words == "RuntimeError: no answer from <object object>"


@pytest.mark.parametrize("error", [NotFound("gone"), RuntimeError("broke")])
async def test_details_are_made_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line and the status share them, also when nobody reads the log."""
    caplog.set_level(logging.DEBUG)
    made: list[Exception] = []
    details = status.details

    def counting(error: Exception) -> str:
        made.append(error)
        return details(error)

    class Context:
        async def abort(self, code: grpc.StatusCode, words: str, _: Any) -> None:
            raise grpc.aio.AbortError(words)

    monkeypatch.setattr(status, "details", counting)
    with pytest.raises(grpc.aio.AbortError):
        await status.refuse(cast(Any, Context()), error)
    assert made == [error]
    assert details(error) in caplog.text
