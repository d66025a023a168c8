"""The LoRA adapters that are loaded, who uses them, and the scheduler calls that change that.

SGLang's scheduler ends with an assertion when a request names an adapter it does not have, or an
id is loaded twice, and it keeps no list: this table is the list. An adapter that is being unloaded
takes no new requests; the scheduler hears of it when the last one has left.

With `--max-loaded-loras` the adapter that was used longest ago makes way for a new one, as SGLang's
HTTP server has it, unless it is pinned; a request that names it has it loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from smg_grpc_servicer.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.sglang.limits import Limits

log = logging.getLogger(__name__)

Call = Callable[[Any, str, float], Awaitable[list[Any]]]

SECONDS = 600.0
"""How long loading one may take."""
_COMMUNICATOR = "update_lora_adapter_communicator"


class AdapterTable:
    """See the module. Changes are made one after another, and to their end whoever waits."""

    def __init__(self, limits: Limits, call: Call) -> None:
        self._limits = limits
        self._call = call
        self._loaded = {adapter.id: adapter for adapter in limits.startup_adapters}
        """By id; the one that was used last is last."""
        self._evicted: dict[str, Adapter] = {}
        """Had to make way for others, and will be back when a request names them."""
        self._users: dict[str, int] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._half_done: dict[str, Adapter] = {}
        """Some rank may have it and some not; it has to be unloaded before it is tried again."""
        self._changing = asyncio.Lock()
        self._work: set[asyncio.Task[str]] = set()

    # Requests.

    async def use(self, adapter_id: str) -> Adapter:
        """One more request names it.

        :raises InvalidArgument: there is none of that id.
        :raises FailedPrecondition: it had to make way, and the scheduler does not take it back.
        """
        while adapter_id in self._evicted:
            refusal = await self._finish(self._reload(self._evicted[adapter_id]))
            if refusal:
                raise FailedPrecondition(
                    f"the adapter {adapter_id!r} could not be loaded again: {refusal}"
                )
        adapter = self._loaded.pop(adapter_id, None)
        if adapter is None:
            raise InvalidArgument("lora_id", f"no adapter is loaded as {adapter_id!r}")
        self._loaded[adapter_id] = adapter
        if adapter_id in self._leaving:
            raise InvalidArgument("lora_id", f"the adapter {adapter_id!r} is being unloaded")
        self._users[adapter_id] = self._users.get(adapter_id, 0) + 1
        return adapter

    def release(self, adapter_id: str) -> None:
        left = self._users[adapter_id] - 1
        if left:
            self._users[adapter_id] = left
            return
        del self._users[adapter_id]
        leaving = self._leaving.get(adapter_id)
        if leaving is not None:
            leaving.set()

    # Changes.

    def loaded(self) -> Sequence[Adapter]:
        return tuple(self._loaded.values())

    async def load(self, adapter: Adapter) -> str:
        """What the scheduler has against it; "" when it is loaded."""
        for field, value in (("lora_name", adapter.name), ("lora_path", adapter.path)):
            if not value:
                raise InvalidArgument(field, "must not be empty")
        if not adapter.id:
            raise InvalidArgument("lora_id", "must not be empty")
        self._require_dynamic()
        return await self._finish(self._load(adapter))

    async def unload(self, name: str, adapter_id: str | None) -> str:
        if not name:
            raise InvalidArgument("lora_name", "must not be empty")
        self._require_dynamic()
        return await self._finish(self._unload(name, adapter_id))

    def _require_dynamic(self) -> None:
        if self._limits.ranks > 1:
            raise FailedPrecondition(
                "SGLang loads adapters at run time only without data parallelism (--dp-size 1)"
            )

    async def _finish(self, work: Any) -> str:
        """A caller that leaves must not leave the table and the scheduler of two minds."""
        task: asyncio.Task[str] = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("the server stops, its adapters do not change any more") from None
            raise

    def _done(self, task: asyncio.Task[str]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; nobody may

    async def _load(self, adapter: Adapter) -> str:
        async with self._changing:
            for known in (*self._loaded.values(), *self._half_done.values()):
                if known.id == adapter.id:
                    raise InvalidArgument("lora_id", f"{adapter.id!r} is loaded already")
                if known.name == adapter.name:
                    raise InvalidArgument("lora_name", f"{adapter.name!r} is loaded already")
            return await self._add(adapter)

    async def _reload(self, adapter: Adapter) -> str:
        async with self._changing:
            if adapter.id not in self._evicted:
                return ""  # somebody else has seen to it
            if adapter.id in self._half_done:
                return "it was not unloaded everywhere: unload it first"
            return await self._add(adapter)

    async def _add(self, adapter: Adapter) -> str:
        most = self._limits.max_adapters
        full = most is not None and len(self._loaded) >= most
        if full and all(other.pinned for other in self._loaded.values()):
            # SGLang's own server would load it, drop it again and call that a success.
            raise FailedPrecondition(
                f"{most} adapters are loaded, as many as --max-loaded-loras allows, and all are "
                "pinned: unload one first"
            )
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        self._half_done[adapter.id] = adapter
        refusal, present = await self._ask(
            LoadLoRAAdapterReqInput(
                lora_name=adapter.name,
                lora_path=adapter.path,
                pinned=adapter.pinned,
                lora_id=adapter.id,
            ),
            adapter.name,
        )
        if not refusal or not present:
            del self._half_done[adapter.id]
        if refusal:
            return refusal
        for known in list(self._evicted.values()):
            if known.id == adapter.id or known.name == adapter.name:
                del self._evicted[known.id]
        oldest = next((other for other in self._loaded.values() if not other.pinned), None)
        self._loaded[adapter.id] = adapter
        if full and oldest is not None:
            await self._evict(oldest)
        return ""

    async def _evict(self, adapter: Adapter) -> None:
        log.info("the adapter %r makes way for another", adapter.name)
        del self._loaded[adapter.id]
        self._evicted[adapter.id] = self._half_done[adapter.id] = adapter
        refusal = await self._remove(adapter)
        if refusal:
            log.warning("the adapter %r was not unloaded: %s", adapter.name, refusal)
        else:
            del self._half_done[adapter.id]

    async def _unload(self, name: str, adapter_id: str | None) -> str:
        async with self._changing:
            adapter = self._named(name, adapter_id)
            refusal = ""
            if adapter.id in self._loaded or adapter.id in self._half_done:
                refusal = await self._remove(adapter)
            if not refusal:
                for table in (self._loaded, self._half_done, self._evicted):
                    table.pop(adapter.id, None)
            return refusal

    async def _remove(self, adapter: Adapter) -> str:
        """From the scheduler, once nobody uses it."""
        left = asyncio.Event()
        self._leaving[adapter.id] = left
        try:
            if adapter.id in self._users:
                await left.wait()
            from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

            refusal, _ = await self._ask(
                UnloadLoRAAdapterReqInput(lora_name=adapter.name, lora_id=adapter.id), adapter.name
            )
            return refusal
        finally:
            del self._leaving[adapter.id]

    def _named(self, name: str, adapter_id: str | None) -> Adapter:
        known = (*self._loaded.values(), *self._half_done.values(), *self._evicted.values())
        for adapter in known:
            if adapter.name == name:
                if adapter_id and adapter_id != adapter.id:
                    raise InvalidArgument(
                        "lora_id", f"{name!r} is loaded as {adapter.id!r}, not as {adapter_id!r}"
                    )
                return adapter
        raise InvalidArgument("lora_name", f"no adapter is loaded under {name!r}")

    async def _ask(self, request: Any, name: str) -> tuple[str, bool]:
        """All ranks' refusals in one text, and whether some rank may have the adapter."""
        try:
            replies = await self._call(request, _COMMUNICATOR, SECONDS)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"the scheduler did not answer in {SECONDS:g} s") from None
        words = [
            (reply.error_message or "").strip() or "the scheduler refused without a reason"
            for reply in replies
            if not reply.success
        ]
        present = any(reply.success or name in (reply.loaded_adapters or {}) for reply in replies)
        return " | ".join(dict.fromkeys(words)), present

    async def close(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        return {"adapter_users": sum(self._users.values()), "adapter_changes": len(self._work)}
