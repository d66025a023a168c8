"""Brings SGLang's ranks up beside the event loop, and takes them down again.

Order at the start: ranks and sockets, the servicer, SGLang's sidecar hook, the warm-up. Order at
the end: the servicer, the ranks (asked while their socket is still open), the sockets.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.core.types import EmbedSpec, GenerateSpec, KvTransfer, Sampling
from smg_grpc_servicer.sglang.adapter import SglangEngine
from smg_grpc_servicer.sglang.facts import num_ranks
from smg_grpc_servicer.sglang.parts import Front, Parts
from smg_grpc_servicer.sglang.processes import Ranks, RanksFailed
from smg_grpc_servicer.sglang.request_manager import RequestManager
from smg_grpc_servicer.sglang.warm_up import planned
from smg_grpc_servicer.warmup import inside
from smg_grpc_servicer.warmup.setting import WarmUpBudget

log = logging.getLogger(__name__)

WARM_UP_SECONDS = 600.0
STAND_IN_HOST = "2.2.2.2"
"""SGLang's own: the other side of a disaggregated pair is not asked for such requests."""

Hook = Callable[[Any, Any, Any], Awaitable[object]]


class Served(Protocol):
    """What a servicer is to its engine's life."""

    engine: SglangEngine
    table: RequestTable

    def lost(self, reason: str) -> None: ...

    async def close(self) -> None: ...


Serve = Callable[[RequestManager, Parts, Mapping[str, Any]], Served]


class EngineLife:
    """The steps of a `core.server.Life`. `serve` makes the servicer of ranks that are ready."""

    def __init__(
        self,
        server_args: Any,
        serve: Serve,
        *,
        hook: Hook | None,
        skip_warm_up: bool,
        warm_up: WarmUpBudget,
    ) -> None:
        self._server_args = server_args
        self._serve = serve
        self._hook = hook
        self._skip_warm_up = skip_warm_up
        self._warm_up = warm_up
        self._ranks = Ranks(server_args, Front.of, self._lost)
        self._manager: RequestManager | None = None
        self._served: Served | None = None
        self._dead: str | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        # A rank that fails tells its parent so.
        loop.add_signal_handler(
            signal.SIGQUIT, self._ranks.failed, "a scheduler process reported a failure (SIGQUIT)"
        )
        began = monotonic()
        launched = await self._ranks.start()
        front: Front = launched.front
        parts, ready = front.parts, launched.infos[0]
        ranks = num_ranks(parts.config)
        manager = RequestManager(front.sockets, num_ranks=ranks, on_dead=self._lost)
        self._manager = manager
        await manager.start()
        self._served = self._serve(manager, parts, ready)
        if self._dead is not None:
            raise RanksFailed(self._dead)
        await self._served.engine.start()
        log.info("SGLang's ranks are ready after %.1f s", monotonic() - began)
        if self._hook is not None:
            await self._hook(manager, self._server_args, ready)

    async def warm_up(self) -> None:
        """One small request, then whatever is planned.

        :raises RanksFailed: the ranks cannot answer the first one.
        """
        assert self._served is not None
        engine, config, budget = self._served.engine, self._config(), self._warm_up
        if not self._skip_warm_up:
            await self._first_request(engine, config.disaggregation_mode)
        elif budget.level == "auto":
            return
        await planned(engine, config, budget)

    async def _first_request(self, engine: SglangEngine, role: str) -> None:
        began = monotonic()
        try:
            await asyncio.wait_for(_probe(engine, role), WARM_UP_SECONDS)
        except asyncio.TimeoutError:
            raise RanksFailed(f"warm-up: no answer in {WARM_UP_SECONDS:g} s") from None
        except Exception as error:
            raise RanksFailed(f"warm-up: {error}") from error
        log.info("warm-up: the first request took %.1f s", monotonic() - began)

    def cut(self, error: Exception) -> None:
        if self._served is not None:
            self._served.table.cut_all(error)

    async def close(self) -> None:
        try:
            if self._served is not None:
                await self._served.close()
        finally:
            await self._end()

    async def _end(self) -> None:
        """The ranks, whatever became of the rest."""
        listening = self._manager is not None and self._dead is None
        await self._ranks.close(self._ask if listening else None)
        if self._manager is not None:
            await self._manager.close("the server has stopped")
        elif self._ranks.front is not None:
            await self._ranks.front.close()

    def kill(self) -> None:
        self._ranks.kill()

    def _ask(self) -> None:
        """Tell the ranks to release what they hold and end; followers on other nodes with them."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if self._manager is not None:
            self._manager.send(ShutdownReq())

    def _lost(self, reason: str) -> None:
        """On the loop; once at most is news."""
        self._dead = self._dead or reason
        if self._manager is not None:
            self._manager.dead(reason)
        if self._served is not None:
            self._served.lost(reason)

    def _config(self) -> Any:
        from sglang.srt.arg_groups.model_override_base import resolving_view

        return resolving_view(self._server_args)


async def _probe(engine: SglangEngine, role: str) -> None:
    """One small request through the same path as everybody's."""
    facts = engine.model_facts()
    ids = _ids(facts.vocab_size, facts.max_prompt_tokens)
    if not facts.is_generation:
        await engine.embed(EmbedSpec("smg-warmup-0", ids))
        return
    transfer = None if role == "null" else KvTransfer(host=STAND_IN_HOST, room=0)
    spec = GenerateSpec(
        "smg-warmup-0",
        ids,
        sampling=Sampling(temperature=0.0, max_tokens=8, ignore_eos=True),
        kv_transfer=transfer,
    )
    await inside.answered(engine, spec)


def _ids(vocab: int | None, longest: int | None) -> Sequence[int]:
    """A few ids that every model has; not the first ones, which are often special."""
    count = min(7, max(1, (longest or 8) - 9))
    return [(11 + at) % (vocab or 32) for at in range(count)]
