"""Embeddings of a real model over gRPC and through the router: those of vLLM's own `LLM.embed`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.client import Client, connected
from tests.support.embedding_model import TEXTS, prompts
from tests.support.real_vllm import VLLM, serving
from tests.support.router import Router, routing
from tests.support.servers import Server

NAME = "embedder"
FLAGS = (
    "--served-model-name", NAME, "--runner", "pooling", "--enforce-eager", "--dtype", "float32",
    "--max-num-seqs", "16",
)  # fmt: skip
_serial = count()


@dataclass(frozen=True)
class Embedder:
    """A running server, the model behind it, and vLLM's own answers."""

    server: Server
    client: Client
    path: Path
    prompts: list[list[int]]
    vectors: list[list[float]]

    @property
    def size(self) -> int:
        hidden: int = json.loads((self.path / "config.json").read_text())["hidden_size"]
        return hidden

    async def embed(self, ids: list[int]) -> Any:
        request = VLLM.pb.EmbedRequest(
            request_id=f"e-{next(_serial)}", tokenized={"input_ids": ids}
        )
        return await self.client.stub.Embed(request)


@pytest.fixture(scope="module")
async def embedder(said: Any, embedding_model: Path, home: Path) -> AsyncIterator[Embedder]:
    async with (
        serving(home, embedding_model, *FLAGS) as server,
        connected(server.address, VLLM) as client,
    ):
        asked = prompts(embedding_model)
        yield Embedder(server, client, embedding_model, asked, said["vectors"])


@pytest.fixture(scope="module")
async def front(embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    async with routing(tmp_path_factory.mktemp("router"), embedder.server.address) as router:
        yield router


async def test_vectors_are_those_of_vllm(embedder: Embedder) -> None:
    """All at once; to 1e-5 in every component, with the right count and dimension."""
    answers = await asyncio.gather(*map(embedder.embed, embedder.prompts))
    for ids, vector, answer in zip(embedder.prompts, embedder.vectors, answers, strict=True):
        assert list(answer.embedding) == pytest.approx(vector, abs=1e-5)
        assert answer.embedding_dim == len(vector) == embedder.size
        assert answer.prompt_tokens == len(ids)


async def test_facts_and_what_it_does_not_do(embedder: Embedder) -> None:
    pb, stub = VLLM.pb, embedder.client.stub
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert not info.is_generation
    assert info.served_model_name == NAME
    refused = await embedder.client.generate(embedder.prompts[0], max_tokens=1)
    assert refused.code is grpc.StatusCode.UNIMPLEMENTED
    assert "vLLM" in refused.details
    vocabulary, context = info.vocab_size, info.max_context_length
    for ids, field in (
        ([], "tokenized.input_ids"),
        ([5, vocabulary], "tokenized.input_ids[1]"),
        ([5] * (context + 1), "tokenized.input_ids"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as bad:
            await embedder.embed(ids)
        assert bad.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (bad.value.details() or "").startswith(f"{field}: ")
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await stub.Embed(pb.EmbedRequest(request_id="nothing"))
    assert (missing.value.details() or "").startswith("tokenized: ")
    assert list((await embedder.embed([5] * context)).embedding)


async def test_through_the_router(embedder: Embedder, front: Router) -> None:
    """One text, one vector, and the count of its tokens."""
    await front.embeds(NAME)
    for text, ids, vector in zip(TEXTS, embedder.prompts[-2:], embedder.vectors[-2:], strict=True):
        answer = await front.post("/v1/embeddings", model=NAME, input=text)
        assert answer.status == 200, answer.text
        (row,) = answer.json["data"]
        assert row["embedding"] == pytest.approx(vector, abs=1e-5)
        assert answer.json["usage"]["prompt_tokens"] == len(ids)
    assert await embedder.client.until_active(0) < 1
