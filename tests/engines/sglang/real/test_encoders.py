"""Encoder, language model: SGLang's own encoder server sees what a request only refers to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.testing.history import check
from tests.support.client import Client, connected
from tests.support.real_sglang import CPU, NAME, SGLANG, environment, serving
from tests.support.servers import Process
from tests.support.sglang_media_oracle import TOKENS

WAYS = {
    "http": ("--encoder-transfer-backend", "zmq_to_scheduler"),
    "grpc": ("--encoder-transfer-backend", "zmq_to_tokenizer"),
}
"""By how the encoder is reached: where what it made of an image comes to."""


@dataclass
class Split:
    """A language model and the encoder it sends its media to."""

    client: Client
    encoder: Process
    images: list[Any]

    def refer(self, image: Any, url: str | None = None, **sampling: Any) -> Any:
        """One token stands for the image, whose size nobody here knows."""
        offset, length = image["place"]
        ids = image["ids"][: offset + 1] + image["ids"][offset + length :]
        made = self.client.request(ids, **{"max_tokens": TOKENS, **sampling})
        made.mm_inputs.image_urls.append(url or f"data:image/png;base64,{image['png']}")
        return made

    async def answered(self) -> None:
        """A request without media has its answer."""
        assert len(await self.client.ids([5, 6, 7], max_tokens=2)) == 2


@asynccontextmanager
async def _split(
    way: str, seeing: tuple[Path, list[Any]], env: dict[str, str]
) -> AsyncIterator[Split]:
    model, images = seeing
    port, registry = auto.free_ports(1), auto.free_ports(1)
    encoder = Process(
        [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model),
            "--encoder-only", *(("--smg-grpc-mode",) if way == "grpc" else ()),
            "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32",
            *WAYS[way],
        ],
        environment() | env,
    )  # fmt: skip
    flags = (
        *CPU, "--grammar-backend", "none", "--served-model-name", NAME, "--language-only",
        "--encoder-urls", f"{way}://127.0.0.1:{port}",
        "--encoder-bootstrap-port", str(registry), *WAYS[way],
    )  # fmt: skip
    mode = {"SGLANG_ENCODER_MM_RECEIVER_MODE": way}
    try:
        async with (
            serving(model, *flags, env=env | mode) as server,
            connected(server.address, SGLANG) as client,
        ):
            yield Split(client, encoder, images)
    finally:
        await asyncio.to_thread(encoder.end)


@pytest.mark.parametrize("way", WAYS)
async def test_an_image_by_reference_is_answered_as_offline(
    way: str, seeing: tuple[Path, list[Any]], media_env: dict[str, str]
) -> None:
    async with _split(way, seeing, media_env) as split:
        client, images = split.client, split.images
        for image in images:
            history = await client.send(split.refer(image))
            assert check(history) == []
            assert list(history.complete().output_ids) == image["answer"]
            assert history.complete().prompt_tokens == len(image["ids"])
        history = await client.send(split.refer(images[0], n=2, stream=False))
        assert check(history, choices=2) == []
        for index in (0, 1):
            assert list(history.complete(index).output_ids) == images[0]["answer"]

        tensors = client.request([5, 6], max_tokens=1)
        tensors.mm_inputs.pixel_values.shape.append(0)
        tensors.mm_inputs.pixel_values.dtype = "float32"
        refused = await client.send(tensors)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "--language-only" in refused.details

        unreadable = await client.send(split.refer(images[0], "data:image/png;base64,AAAA"))
        assert unreadable.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
        await split.answered()

        await asyncio.to_thread(split.encoder.end)
        gone = await client.send(split.refer(images[1]))
        assert gone.code is grpc.StatusCode.UNAVAILABLE, gone.details
        await split.answered()
        assert await client.until_active(0) < 5
