"""An Embed that ends before the engine has answered: the caller is told how, the engine stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.core.types import Embedding, EmbedSpec
from smg_grpc_servicer.testing.dialects import DIALECTS, Dialect
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from tests.support.serving import Served, served
from tests.support.wait import until

EMBEDS = [dialect for dialect in DIALECTS.values() if hasattr(dialect.pb, "EmbedRequest")]
CODE = grpc.StatusCode


class Thinking(FakeEngine):
    """Never has its embedding; knows how many are still asked for."""

    at_work = 0

    async def embed(self, spec: EmbedSpec) -> Embedding:
        self.at_work += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.at_work -= 1
        raise AssertionError


ENDS: dict[str, tuple[Callable[[Served], object], grpc.StatusCode]] = {
    "abort": (lambda server: server.servicer.abort(["e"]), CODE.ABORTED),
    "stop": (lambda server: server.servicer.table.cut_all(Unavailable("stop")), CODE.UNAVAILABLE),
    "death": (lambda server: server.engine.died("a test"), CODE.UNAVAILABLE),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("dialect", EMBEDS, ids=lambda dialect: dialect.engine)
async def test_an_embed_ends_at_once(dialect: Dialect, how: str) -> None:
    """By Abort, by a stop of this server, by the engine's death; nothing of it goes on."""
    end, code = ENDS[how]
    engine = Thinking()
    async with served(dialect, engine) as server:
        request = dialect.pb.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6]})
        call = server.stub.Embed(request)
        answer = asyncio.ensure_future(_code(call))
        await until(lambda: engine.at_work == 1)
        end(server)
        assert await asyncio.wait_for(answer, 1) is code
        assert engine.at_work == 0


async def _code(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code
