"""A tiny vision model: preprocessed images are answered as SGLang's own Engine answers them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client, connected
from tests.support.real_sglang import CPU, NAME, SGLANG, serving
from tests.support.sglang_media_oracle import TOKENS


@pytest.fixture(scope="module")
async def images(seeing: tuple[Path, list[Any]]) -> list[Any]:
    return seeing[1]


@pytest.fixture(scope="module")
async def client(
    seeing: tuple[Path, list[Any]], media_env: dict[str, str]
) -> AsyncIterator[Client]:
    flags = (*CPU, "--grammar-backend", "none", "--served-model-name", NAME)
    async with (
        serving(seeing[0], *flags, env=media_env) as server,
        connected(server.address, SGLANG) as connection,
    ):
        yield connection


def request(client: Client, image: Any, **sampling: Any) -> Any:
    """As the gateway sends it."""
    made = client.request(image["ids"], **{"max_tokens": TOKENS, **sampling})
    media = made.mm_inputs
    media.pixel_values.data = base64.b64decode(image["pixels"])
    media.pixel_values.shape.extend(image["shape"])
    media.pixel_values.dtype = "float32"
    grid = media.model_specific_tensors["image_grid_thw"]
    cells = [cell for row in image["grid"] for cell in row]
    grid.data = b"".join(cell.to_bytes(8, "little") for cell in cells)
    grid.shape.extend([len(image["grid"]), 3])
    grid.dtype = "int64"
    offset, length = image["place"]
    media.mm_placeholders.add(offset=offset, length=length)
    media.im_token_id = image["token"]
    media.modalities.append("image")
    return made


async def test_an_image_is_answered_as_offline(client: Client, images: list[Any]) -> None:
    """Its positions are right, alone and beside others, the first time and out of the cache."""
    for _ in range(2):
        for image in images:
            history = await client.send(request(client, image))
            assert check(history) == []
            assert list(history.complete().output_ids) == image["answer"]
    histories = await client.together([request(client, image) for image in images])
    told = [list(history.complete().output_ids) for history in histories]
    assert told == [image["answer"] for image in images]


async def test_choices_see_the_image_too(client: Client, images: list[Any]) -> None:
    history = await client.send(request(client, images[0], n=2))
    assert check(history, choices=2) == []
    for index in (0, 1):
        assert list(history.complete(index).output_ids) == images[0]["answer"]


async def test_a_model_that_sees_says_so(client: Client) -> None:
    info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    assert info.supports_vision


def _grid(made: Any, *cells: int) -> None:
    grid = made.mm_inputs.model_specific_tensors["image_grid_thw"]
    grid.data = b"".join(cell.to_bytes(8, "little", signed=True) for cell in cells)
    grid.shape[:] = [len(cells) // 3, 3]


def _pairs(made: Any) -> None:
    _grid(made, 1, 4, 4, 1, 4, 4)
    made.mm_inputs.model_specific_tensors["image_grid_thw"].shape[:] = [3, 2]


def _no_places(made: Any) -> None:
    made.mm_inputs.ClearField("mm_placeholders")


def _short_place(made: Any) -> None:
    made.mm_inputs.mm_placeholders[0].length -= 1


def _long_place(made: Any) -> None:
    made.mm_inputs.mm_placeholders[0].length += 2


def _moved_place(made: Any) -> None:
    made.mm_inputs.mm_placeholders[0].offset += 2


def _no_grid(made: Any) -> None:
    made.mm_inputs.ClearField("model_specific_tensors")


def _narrow(made: Any) -> None:
    made.mm_inputs.pixel_values.shape[:] = [32, 768]


def _flat(made: Any) -> None:
    made.mm_inputs.pixel_values.shape[:] = [16 * 1536]


def _text_only(made: Any) -> None:
    made.tokenized.input_ids[:] = [5] * len(made.tokenized.input_ids)


BAD = {
    "grid too large": lambda made: _grid(made, 1, 8, 8),
    "grid too small": lambda made: _grid(made, 1, 2, 2),
    "grid of nothing": lambda made: _grid(made, 1, 0, 4),
    "grid negative": lambda made: _grid(made, 1, -4, -4),
    "two grids": lambda made: _grid(made, 1, 4, 4, 1, 4, 4),
    "grid of pairs": _pairs,
    "no grid": _no_grid,
    "no places": _no_places,
    "a place too short": _short_place,
    "a place too long": _long_place,
    "a place elsewhere": _moved_place,
    "pixels too narrow": _narrow,
    "pixels without rows": _flat,
    "no token of an image": _text_only,
}


@pytest.mark.parametrize("name", BAD)
async def test_what_does_not_fit_costs_its_sender_alone(
    client: Client, images: list[Any], name: str
) -> None:
    """Much of it would end the scheduler."""
    made = request(client, images[0])
    BAD[name](made)
    history = await client.send(made)
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history.details
    assert history.details.startswith("mm_inputs")
    assert len(await client.ids([5, 6, 7], max_tokens=2)) == 2
