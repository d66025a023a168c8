"""A vision model behind the newer wheel, whose own pipeline processes media; what else it can do.

One start. The suite of `test_conformance.py` and the guards are for the older wheel.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import History, check
from tests.support.child import ROOT
from tests.support.client import Client, connected
from tests.support.dial import NOT_SERVING, SERVING, watch
from tests.support.real_vllm import NAME, SEQUENCES, VLLM, environment, run_module, serving
from tests.support.rust_served import NEWER, packages_of
from tests.support.servers import Server
from tests.support.tiny_vl import LARGEST, MERGE, PATCH
from tests.support.vllm_cases import prompt

TORCHVISION = "SMG_TORCHVISION"
"""The Python of a venv that has torchvision."""
FLAGS = (
    "--max-model-len", "1024", "--max-num-seqs", str(SEQUENCES), "--enforce-eager",
    "--dtype", "float32", "--servicer-impl", "rust", "--drain-seconds", "30",
    "--mm-processor", "smg", "--mm-max-inflight", "3",
    "--allowed-media-domains", "example.com", "--limit-mm-per-prompt", '{"image": 2}',
)  # fmt: skip
SIDE = PATCH * MERGE
"""Pixels of a token's side."""


@dataclass(frozen=True)
class Seeing:
    """The server, a connection, and what asks it about images."""

    server: Server
    client: Client
    words: Any

    def ids(self, images: int = 1) -> list[int]:
        one = "<|vision_start|><|image_pad|><|vision_end|>"
        ids: list[int] = self.words.encode(f"hello {images * one} what color").ids
        return ids

    async def ask(self, *urls: str) -> History:
        request = self.client.request(self.ids(len(urls)), max_tokens=4, temperature=0.0)
        for url in urls:
            request.media_refs.items.add(url=url, modality=common_pb2.IMAGE)
        return await asyncio.wait_for(self.client.send(request), 20)


@pytest.fixture(scope="module")
async def seeing(one_loop: None, home: Path) -> AsyncIterator[Seeing]:
    from tokenizers import Tokenizer

    path = home / "qwen3-vl"
    await run_module(home, "tests.support.tiny_vl", str(path))
    here = str(ROOT / "tests" / "support" / "vllm_media")
    folders = (here, environment(home)["PYTHONPATH"], packages_of(NEWER), packages_of(TORCHVISION))
    env = {"PYTHONPATH": os.pathsep.join(folders), "NO_COLOR": "1"}
    async with (
        serving(home, path, "--served-model-name", NAME, *FLAGS, env=env) as server,
        connected(server.address, VLLM) as client,
    ):
        yield Seeing(server, client, Tokenizer.from_file(str(path / "tokenizer.json")))


RED, BLUE = bytes((255, 0, 0)), bytes((0, 0, 255))


def image(side: int, color: bytes) -> str:
    """A square of one colour as a `data:` reference to a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(side * (b"\0" + side * color))
    file = b"\x89PNG\r\n\x1a\n"
    file += chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def answer(history: History) -> tuple[int, list[int]]:
    """Length of the prompt and the output of a request that went well."""
    assert history.code is grpc.StatusCode.OK, history.details
    complete = history.complete()
    return complete.prompt_tokens, list(complete.output_ids)


def plain(log: str) -> str:
    """Without the colours of Rust's log."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log)


async def test_every_media_option_reaches_the_pipeline(seeing: Seeing) -> None:
    log = plain(seeing.server.log)
    assert "tokenspeed-smg 1.13.0.post20261027 serves vLLM" in log
    (ready,) = (line for line in log.splitlines() if "smg media processor ready" in line)
    assert 'spec="qwen3_vl" pixel_format=RawU8 max_inflight=3' in ready
    assert "image=2 (the engine's --limit-mm-per-prompt)" in ready
    assert 'allowed_media_domains=Some(["example.com"])' in log


async def test_the_gateway_is_told_who_processes_media(seeing: Seeing) -> None:
    client = seeing.client
    model = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    assert model.supports_vision
    server = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    assert (server.mm_processor, server.mm_processor_source) == ("smg", "flag")
    assert server.mm_media_ref_schemes == "http,https,data"
    assert server.mm_item_limits == "image=2,video=999"
    assert server.mm_device_do_normalize


async def test_text_alone_is_served(seeing: Seeing) -> None:
    first = await seeing.client.generate(prompt(5), max_tokens=8)
    check(first)
    assert answer(first)[0] == 5
    assert answer(await seeing.client.generate(prompt(5), max_tokens=8)) == answer(first)


async def test_images_are_seen(seeing: Seeing) -> None:
    """Their tokens are counted, and what they show changes the answer."""
    red, blue = image(3 * SIDE, RED), image(3 * SIDE, BLUE)
    text = len(seeing.ids()) - 1
    length, output = answer(await seeing.ask(red))
    assert length == text + 9
    assert answer(await seeing.ask(red)) == (length, output)
    assert answer(await seeing.ask(blue))[1] != output
    two = await seeing.ask(red, blue)
    assert answer(two)[0] == len(seeing.ids(2)) - 2 + 18


async def test_a_large_image_is_made_smaller(seeing: Seeing) -> None:
    length, _ = answer(await seeing.ask(image(1024, RED)))
    assert length == len(seeing.ids()) - 1 + LARGEST // SIDE**2


BAD = {
    "more than the limit": ([image(SIDE, RED)] * 3, "above this worker's limit of 2"),
    "no image": (["data:image/png;base64,AAAA"], "image decode error"),
    "a local file": (["file:///etc/passwd"], 'unsupported url scheme "file"'),
    "a host that is not allowed": (["http://other.test/x.png"], "'other.test' is not in the allow"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_media_are_refused_before_the_engine(seeing: Seeing, name: str) -> None:
    """No connection is made to a host outside `--allowed-media-domains`."""
    urls, words = BAD[name]
    history = await seeing.ask(*urls)
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in history.details
    assert answer(await seeing.client.generate(prompt(3), max_tokens=2))[0] == 3


async def test_an_abort_ends_a_stream_and_loads_tell_of_it(seeing: Seeing) -> None:
    client = seeing.client
    call, history = await client.begin(prompt(4), request_id="to-abort", max_tokens=900)
    assert await running(client) == [1]
    await client.stub.Abort(client.pb.AbortRequest(request_ids=["to-abort"]))
    history = await history.record(call)
    assert history.complete().finish_reason == "abort"
    end = asyncio.get_running_loop().time() + 5
    while await running(client) != [0]:
        assert asyncio.get_running_loop().time() < end


async def running(client: Client) -> Sequence[int]:
    loads = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    return [load.num_running_reqs for load in loads]


async def test_a_profiler_that_is_not_there_is_the_engines_to_refuse(seeing: Seeing) -> None:
    """The older wheel has no such call."""
    with pytest.raises(grpc.aio.AioRpcError, match="Call to profile method failed") as refused:
        await seeing.client.stub.StartProfile(common_pb2.StartProfileRequest())
    assert refused.value.code() is grpc.StatusCode.INTERNAL


async def test_a_drain_refuses_what_is_new_and_ends_with_the_last_request(seeing: Seeing) -> None:
    """Also while clients stay connected; the older wheel serves on, and waits for them to leave."""
    client = seeing.client
    answers = watch(client.channel, VLLM.service)
    assert (await answers.read()).status == SERVING
    call, history = await client.begin(prompt(4), max_tokens=400)
    seeing.server.signal(SIGTERM)
    assert (await answers.read()).status == NOT_SERVING
    late = await client.generate(prompt(3), max_tokens=1)
    # "servicer is draining", or a connection refused where the goodbye came first.
    assert late.code is grpc.StatusCode.UNAVAILABLE
    history = await history.record(call)
    assert len(answer(history)[1]) == 400
    assert await seeing.server.exit_code(20) == 0, seeing.server.log
    assert "the drain is over" not in seeing.server.log
