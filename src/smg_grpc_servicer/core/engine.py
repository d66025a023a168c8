"""The port between the RPC bodies and an engine; an adapter implements it, and nothing else.

An adapter accepts requests (`submit`), brings their deltas to the mailboxes on the event loop,
and stops them (`abort`). A feature it does not name is refused before it hears of the request.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from smg_grpc_servicer.core.errors import Unsupported
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.core.types import (
    Embedding,
    EmbedSpec,
    Feature,
    GenerateSpec,
    ModelFacts,
    ProfileSpec,
    ServerFacts,
)

OnDeath = Callable[[str], None]


class Engine(ABC):
    """One engine behind one server. All methods run on the event loop unless they say otherwise."""

    name: ClassVar[str]
    """What clients read in an UNIMPLEMENTED answer, for example `MLX`."""
    features: frozenset[Feature] = frozenset()
    min_output_tokens: ClassVar[int] = 1
    """The smallest `max_tokens` a request may ask for."""

    def __init__(self) -> None:
        self.on_death: OnDeath = lambda reason: None
        """Called once, on the loop, when the engine is gone for good."""

    # Life.

    async def start(self) -> None:
        """Load; returns when requests could run. Raises when they never will."""

    async def warm_up(self) -> None:
        """Run whatever makes the first real request as quick as the second."""

    def warmed(self) -> None:
        """A warm-up from outside is over: what it left in counts and rates is nobody's load."""

    async def close(self) -> None:
        """Stop and free everything; after it no delta arrives."""

    # Requests.

    @abstractmethod
    async def submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        """Accept a validated request; its deltas go to `out` until all its choices finished.

        Returns as soon as the engine has it. When this raises, the engine has nothing of the
        request. When it is cancelled, `abort` follows and must find whatever was begun.
        """

    def waits_with(self, spec: GenerateSpec) -> bool:
        """Whether `submit` may wait for somebody else: it is cancelled then, not waited for, when
        the request is aborted or cut meanwhile. Watching for that costs a request two tasks.
        """
        return False

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Stop a request that was submitted. Returns at once, never raises, may come twice."""

    async def tokenize(self, text: str) -> Sequence[int]:
        """Prompt ids of a text, computed off the loop."""
        raise self.unsupported(Feature.TEXT_INPUT)

    async def max_text_length(self) -> int | None:
        """Characters beyond which no text can fit into the context; None when nobody knows."""
        return None

    async def embed(self, spec: EmbedSpec) -> Embedding:
        raise self.unsupported(Feature.EMBED)

    # Facts.

    @abstractmethod
    def model_facts(self) -> ModelFacts:
        """Cheap: asked for at every request."""

    @abstractmethod
    def server_facts(self) -> ServerFacts: ...

    def tokenizer_path(self) -> str | None:
        """A directory or hub id; None when the engine has no tokenizer."""
        return self.model_facts().tokenizer_path

    def tokenizer_revision(self) -> str | None:
        """Branch, tag or commit of a hub id; None is its main branch."""
        return None

    async def check_health(self) -> None:
        """Raise when the engine cannot serve although nothing was reported yet."""

    def translate(self, error: Exception) -> Exception:
        """An engine's own exception as one of `core.errors`, or unchanged."""
        return error

    def counters(self) -> dict[str, int]:
        """What an operator may want to see beside `statistics`: it need not return to zero.

        Names that end in `_total` only grow.
        """
        return {}

    # Control.

    async def flush_cache(self, timeout: float | None) -> str:
        """Drop the prefix cache; returns a message for the operator."""
        raise self.unsupported(Feature.FLUSH_CACHE)

    async def start_profile(self, spec: ProfileSpec) -> str:
        raise self.unsupported(Feature.PROFILE)

    async def stop_profile(self) -> str:
        raise self.unsupported(Feature.PROFILE)

    async def loads(self) -> Sequence[Load]:
        raise self.unsupported(Feature.LOADS)

    async def load_adapter(self, adapter: Adapter) -> str:
        """Returns why the engine refused it; "" when it is loaded."""
        raise self.unsupported(Feature.LORA)

    async def unload_adapter(self, name: str, adapter_id: str | None) -> str:
        """Returns why the engine refused; "" when it is gone. Waits for requests that use it."""
        raise self.unsupported(Feature.LORA)

    def adapters(self) -> Sequence[Adapter]:
        """Those that are loaded."""
        raise self.unsupported(Feature.LORA)

    # Shared by adapters.

    def unsupported(self, feature: Feature) -> Unsupported:
        return Unsupported(self.name, feature.value)

    def died(self, reason: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Tell the core; from another thread, with the loop."""
        if loop is None:
            self.on_death(reason)
        else:
            loop.call_soon_threadsafe(self.on_death, reason)
