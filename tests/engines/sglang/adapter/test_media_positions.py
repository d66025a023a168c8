"""Positions of a prompt with media travel beside them, so that the scheduler has them."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import pytest
import torch

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.payloads import Media, Tensor
from smg_grpc_servicer.sglang import media
from smg_grpc_servicer.sglang.limits import Limits
from smg_grpc_servicer.sglang.media_grid import GridRule
from tests.support.sglang_served import pixels, request, served_sglang

IMAGE = Media(Tensor(struct.pack("<4f", 1, 2, 3, 4), (2, 2), "float32"), {}, ((1, 2),), 6)


class Processor:
    """In SGLang's place."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.asked: list[Any] = []

    def compute_mrope_positions(self, ids: list[int], items: list[Any]) -> Any:
        self.asked.append((ids, len(items)))
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_positions_are_those_of_the_prompt_as_it_was_sent() -> None:
    where, delta = torch.zeros(3, 4), torch.tensor([[2]])
    processor = Processor((where, delta))
    made = media.build(IMAGE, (5, 6, 6, 7), processor)
    assert made.mrope_positions is where
    assert made.mrope_position_delta is delta
    assert processor.asked == [([5, 6, 6, 7], 1)]


def test_a_model_with_plain_positions_has_none() -> None:
    assert media.build(IMAGE, (5, 6, 6, 7), Processor((None, None))).mrope_positions is None


def test_media_that_do_not_fit_their_prompt_are_the_caller_s_mistake() -> None:
    with pytest.raises(InvalidArgument, match="do not fit"):
        media.build(IMAGE, (5, 6, 6, 7), Processor(IndexError("no such row")))


async def test_without_the_processor_such_a_model_takes_no_media() -> None:
    """The scheduler would end over a request without positions."""
    limits = Limits(max_prompt_tokens=100, media=True, grid=GridRule(2, None, ()))
    async with served_sglang(limits=limits) as server:
        history = await server.generate(request(mm_inputs=pixels()))
        assert history.code is grpc.StatusCode.UNIMPLEMENTED
        assert "multimodal" in history.details
        assert server.scheduler.received == []
