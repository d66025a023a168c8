"""Media that would end the scheduler, fill the memory or read what is not the caller's."""

from __future__ import annotations

import struct
import time
from typing import Any

import grpc
import pytest
import torch

from smg_grpc_servicer.core.payloads import Media, Tensor
from smg_grpc_servicer.sglang import media
from smg_grpc_servicer.sglang.encoders import Encoders
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import pixels, request, served_sglang

CODE = grpc.StatusCode
TENSORS = Limits(max_prompt_tokens=100, prefix_cache=False, hidden_size=2, media=True)
REFERENCES = Limits(
    max_prompt_tokens=100, media=True, language_only=True, media_items={"image": 2, "video": 0}
)
HUGE_GRID = {"data": struct.pack("<3q", 1, 2**40, 2**40), "shape": [1, 3], "dtype": "int64"}
MANY = [2**32 - 1] * 100_000


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"mm_inputs": pixels(pixel_values={"data": b"", "shape": MANY, "dtype": "uint8"})},
            "mm_inputs.pixel_values.shape",
        ),
        (
            {"mm_inputs": pixels(model_specific_tensors={"video_grid_thw": HUGE_GRID})},
            "mm_inputs.model_specific_tensors",
        ),
        ({"mm_inputs": pixels(), "input_embeds": [0.5, 1.0]}, "mm_inputs"),
    ],
)
async def test_tensors_are_refused_before_they_cost_anything(fields: Any, field: str) -> None:
    """The product of a shape's numbers alone would hold up everybody for a minute."""
    async with served_sglang(limits=TENSORS) as server:
        began = time.monotonic()
        history = await server.generate(request(**fields))
        assert time.monotonic() - began < 2
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith(field)
        assert server.scheduler.received == []
        await server.idle()


def test_numbers_that_sglang_s_unpickler_ends_over_are_sent_wider() -> None:
    """With SGLANG_USE_PICKLE_IPC a tensor of torch's uint32 ends the scheduler that reads it."""
    sent = Tensor(struct.pack("<2I", 7, 2**32 - 1), (2,), "uint32")
    item = media.build(Media(sent, {"sizes": sent}, ((0, 1),)), (5,), None).mm_items[0]
    for made in (item.feature, item.model_specific_data["sizes"]):
        assert made.dtype is torch.int64
        assert made.tolist() == [7, 2**32 - 1]


SECRET = "/etc/secret"


@pytest.mark.parametrize(
    ("references", "field"),
    [
        ({"image_urls": [f"file://{SECRET}"]}, "mm_inputs.image_urls[0]"),
        ({"image_urls": ["http://a/1.png", SECRET]}, "mm_inputs.image_urls[1]"),
        ({"audio_urls": [""]}, "mm_inputs.audio_urls[0]"),
        ({"image_urls": ["http://a/1.png"] * 3}, "mm_inputs.image_urls"),
        ({"video_urls": ["http://a/1.mp4"]}, "mm_inputs.video_urls"),
    ],
)
async def test_references_that_an_encoder_must_not_follow(references: Any, field: str) -> None:
    """SGLang's encoders open files of their machine, and its limits are checked in its front end.

    What the caller wrote is not told back.
    """
    encoders = Encoders(None, "zmq_to_scheduler", None)
    async with served_sglang(limits=REFERENCES, encoders=encoders) as server:
        history = await server.generate(request(mm_inputs=references))
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith(f"{field}: ")
        assert SECRET not in history.details
        assert server.scheduler.received == []
