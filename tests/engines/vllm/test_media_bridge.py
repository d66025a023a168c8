"""The media bridge under a real binding: what it calls, and what of the answer reaches the engine.

The processor is a stub, and so is the engine core; the thread, the calls and the wire are not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.core.errors import InvalidArgument, Unavailable
from smg_grpc_servicer.rust.binding import load_binding
from smg_grpc_servicer.vllm.rust_media import MediaBridge, MediaJob, MediaResult
from tests.support.servers import ROOT, Process
from tests.support.wait import until

URL = "data:image/png;base64,AAAA"


class StubProcessor:
    name = "inprocess"

    def __init__(self) -> None:
        self.jobs: list[MediaJob] = []
        self.error: Exception | None = None
        self.pixels: Any = np.arange(6, dtype=np.float32)

    async def schemes(self) -> tuple[str, ...]:
        return ("data", "https")

    async def process(self, job: MediaJob) -> MediaResult:
        self.jobs.append(job)
        if self.error is not None:
            raise self.error
        return MediaResult([*job.prompt_ids, 7, 7], b"\x90", [self.pixels], "salt")


@asynccontextmanager
async def served(folder: Path, processor: StubProcessor) -> AsyncIterator[tuple[Any, MediaBridge]]:
    """A Rust server that has the bridge, over a stub core."""
    bridge = MediaBridge(processor, source="flag", max_inflight=2)
    handshake = f"ipc://{folder}/hs"
    server = load_binding("VllmGrpcServer").start(
        {
            "bind_address": "127.0.0.1:0",
            "ipc_base_url": f"ipc://{folder}/s",
            "handshake_address": handshake,
            "model_path": "m",
            "max_context_length": 4096,
            "vocab_size": 32000,
            "supports_vision": True,
            "media_processor": bridge,
        }
    )
    path = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    core = Process(
        [sys.executable, "-m", "tests.support.stub_core", "--handshake", handshake], path
    )
    try:
        await until(lambda: server.engine_ready, 20)
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel), bridge
    finally:
        await bridge.close()
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(core.end)


def request(name: str = "r") -> Any:
    made = vllm_engine_pb2.GenerateRequest(
        request_id=name,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6], original_text="a picture"),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3),
    )
    made.media_refs.items.add(url=URL, modality=common_pb2.IMAGE)
    return made


async def ask(stub: Any, made: Any) -> list[Any]:
    return [answer async for answer in stub.Generate(made, timeout=20)]


async def test_media_are_processed_here_and_the_answer_goes_to_the_engine(tmp_path: Path) -> None:
    processor = StubProcessor()
    async with served(tmp_path, processor) as (stub, bridge):
        info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=10)
        assert (info.mm_processor, info.mm_processor_source) == ("inprocess", "flag")
        assert info.mm_media_ref_schemes == "data,https"
        (answer,) = await ask(stub, request())
        assert len(answer.complete.output_ids) == 3
        (job,) = processor.jobs
        assert job.request_id == "r"
        assert list(job.prompt_ids) == [5, 6]
        assert job.prompt_text == "a picture"
        assert [tuple(item) for item in job.items] == [("image", URL)]
        assert not job.want_identity
        assert set(bridge.statistics().values()) == {0}


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InvalidArgument("media_refs", "no picture"), grpc.StatusCode.INVALID_ARGUMENT,
         "media_refs: no picture"),
        (Unavailable("sidecar_timeout: r"), grpc.StatusCode.UNAVAILABLE, "sidecar_timeout: r"),
        (ValueError("shapes"), grpc.StatusCode.INTERNAL, "ValueError: shapes"),
    ],
)  # fmt: skip
async def test_a_failure_has_its_status(
    tmp_path: Path, error: Exception, status: grpc.StatusCode, words: str
) -> None:
    processor = StubProcessor()
    processor.error = error
    async with served(tmp_path, processor) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(stub, request())
        assert refused.value.code() is status
        assert words in (refused.value.details() or "")
