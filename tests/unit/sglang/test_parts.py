"""Pure parts of the SGLang wing: media checks, embeddings, hidden states, replies."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from smg_grpc_servicer.core.errors import FailedPrecondition, Internal, InvalidArgument
from smg_grpc_servicer.core.payloads import HiddenStates, Media, Tensor
from smg_grpc_servicer.sglang import media
from smg_grpc_servicer.sglang.communicators import Communicators
from smg_grpc_servicer.sglang.embedding import dense
from smg_grpc_servicer.sglang.outputs import hidden_states
from smg_grpc_servicer.sglang.wire_parts import custom_params

FLOATS = Tensor(b"\0" * 16, (2, 2), "float32")
SHORT = Tensor(b"1", (2,), "uint8")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Media(FLOATS, modality="smell"), "mm_inputs.modalities"),
        (Media(Tensor(b"1", (1,), "float32")), "mm_inputs.pixel_values"),
        (Media(Tensor(b"", (0,), "complex64")), "mm_inputs.pixel_values.dtype"),
        (
            Media(FLOATS, {"g": Tensor(b"1", (2,), "uint8")}),
            "mm_inputs.model_specific_tensors['g']",
        ),
        (Media(FLOATS, placeholders=((8, 3),)), "mm_inputs.mm_placeholders"),
        (Media(FLOATS, placeholders=((0, 3), (2, 3))), "mm_inputs.mm_placeholders"),
        (Media(FLOATS, placeholders=((0, 0),)), "mm_inputs.mm_placeholders"),
    ],
)
def test_media_that_are_not_what_they_say(wrong: Media, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        media.check(wrong, 10)
    assert caught.value.field == field


def test_media_that_fit() -> None:
    media.check(Media(FLOATS, {"g": FLOATS}, ((5, 5), (0, 5))), 10)


@pytest.mark.parametrize(
    ("found", "expected"),
    [(1, [1.0]), ([0.5, 1.0], [0.5, 1.0]), ([[0.5]], [0.5]), ((0.5,), [0.5])],
)
def test_dense_embeddings(found: Any, expected: list[float]) -> None:
    assert dense(found) == expected


@pytest.mark.parametrize(
    ("found", "kind"),
    [({1: 0.5}, FailedPrecondition), ([[1.0], [2.0]], FailedPrecondition), ([], Internal)],
)
def test_embeddings_that_cannot_be_carried(found: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        dense(found)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (None, None),
        ([], None),
        ([0.5, 1.0], HiddenStates(-1, ((0.5, 1.0),))),
        ([[[1.0], [2.0]], [3.0]], HiddenStates(4, [[1.0], [2.0], [3.0]])),
        ([[1.0], [2.0]], HiddenStates(4, [[1.0], [2.0]])),
    ],
)
def test_hidden_states_in_each_of_sglang_s_shapes(chunks: Any, expected: Any) -> None:
    assert hidden_states(chunks, 4) == expected


def test_whole_numbers_of_a_struct_are_integers_again() -> None:
    sent = Struct()
    sent.update({"a": 1, "b": 0.5, "c": [2, True], "d": {"e": -3}, "f": 2.0**60, "g": None})
    got = custom_params(sent)
    assert got == {"a": 1, "b": 0.5, "c": [2, True], "d": {"e": -3}, "f": 2.0**60, "g": None}
    assert [type(got[name]) for name in ("a", "b", "f")] == [int, float, float]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_however_deep(number: float) -> None:
    sent = Struct()
    sent["a"] = {"b": [1, number]}
    with pytest.raises(InvalidArgument, match=r"sampling_params\.custom_params: .* finite"):
        custom_params(sent)


async def test_replies_find_their_call_and_late_ones_nobody() -> None:
    """§11-9: what comes after its call was given up is recognised."""
    sent: list[Any] = []
    calls = Communicators(sent.append, ranks=2)
    with pytest.raises(asyncio.TimeoutError):
        await calls.call(SimpleNamespace(), 0.001)
    waiting = asyncio.ensure_future(calls.call(SimpleNamespace(), 5))
    await asyncio.sleep(0)
    late, now = (SimpleNamespace(http_worker_ipc=one.http_worker_ipc) for one in sent)
    assert calls.reply(late)
    assert calls.reply(now)
    assert not waiting.done()
    assert calls.reply(now)
    assert await waiting == [now, now]
    assert calls.late == 1
    assert calls.statistics() == {"control_calls": 0}
    assert not calls.reply(SimpleNamespace())
    assert not calls.reply(SimpleNamespace(http_worker_ipc="somebody else's"))
