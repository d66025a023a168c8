"""`VllmEngine`: the core's `Engine` over an `AsyncLLM` that somebody else built.

`AsyncLLM.add_request` gives a collector into which vLLM's output loop puts a request's outputs.
Its `put` is replaced by the relay's, so that an output goes straight into the mailbox: no task per
request and no second wake-up per token. An `AsyncLLM` that is not of that make (a wrapper, a
remote client) is read through `generate`, by one task per request.
Importing this module imports no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from itertools import count
from typing import Any, ClassVar

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import EngineDead, FailedPrecondition, Unsupported
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.texts import TextQueue
from smg_grpc_servicer.core.types import (
    Embedding,
    EmbedSpec,
    Feature,
    GenerateSpec,
    ModelFacts,
    ProfileSpec,
    ServerFacts,
)
from smg_grpc_servicer.vllm import control, embedding, failures, handover
from smg_grpc_servicer.vllm.facts import installed_version, kv_capacity, model_facts
from smg_grpc_servicer.vllm.loads import LoadTable
from smg_grpc_servicer.vllm.outputs import Relay
from smg_grpc_servicer.vllm.pairing import pairing_facts
from smg_grpc_servicer.vllm.probe import positive
from smg_grpc_servicer.vllm.requests import RequestBuilder, tokens_prompt
from smg_grpc_servicer.vllm.stats import StatsListener

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""How long the engine may take to say whether it is paused; after that the last answer stands."""

_EXACT_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""vLLM's switch for connectors that read meaning in an id; then ours goes through unchanged."""

_GENERATION = frozenset(
    {
        Feature.TEXT_INPUT,
        Feature.CHOICES,
        Feature.STOP_STRINGS,
        Feature.MIN_TOKENS,
        Feature.CONSTRAINT,
        Feature.PROMPT_LOGPROBS,
        Feature.RANK,
        Feature.KV_TRANSFER,
        Feature.TRUNCATION,
    }
)
_NO_GENERATION = "generating text with a model that is served for pooling (--runner pooling)"
_BOTH = frozenset({Feature.FLUSH_CACHE, Feature.PROFILE, Feature.LOADS})


class _Running:
    """One request at the engine: what it is called there and who reads it."""

    __slots__ = ("engine_id", "internal_id", "pump", "relay")

    def __init__(self, engine_id: str, relay: Relay) -> None:
        self.engine_id = engine_id
        self.internal_id: str | None = None
        self.pump: asyncio.Task[None] | None = None
        self.relay = relay


class VllmEngine(Engine):
    """Serves requests from one `AsyncLLM`; all methods on its event loop."""

    name: ClassVar[str] = "vLLM"

    def __init__(self, async_llm: Any) -> None:
        super().__init__()
        self._llm = async_llm
        config = async_llm.vllm_config
        self._facts = model_facts(config, media=False)
        self.features = _BOTH | (_GENERATION if self._facts.is_generation else {Feature.EMBED})
        self.requests = RequestBuilder(async_llm)
        self._max_running = positive(config, "scheduler_config.max_num_seqs")
        self._loads = LoadTable(
            self.requests.limits.ranks,
            max_running=self._max_running,
            max_tokens=kv_capacity(config),
        )
        self.stats = StatsListener()
        self.stats.attach(async_llm)
        self._paused = False
        self._server = self._server_facts()
        self._direct = hasattr(async_llm, "add_request")
        self._running: dict[str, _Running] = {}
        self._serial = count(1)
        self._exact_ids = os.environ.get(_EXACT_IDS, "0") not in ("", "0")
        self._calls: set[asyncio.Task[None]] = set()
        self._texts = TextQueue("vllm-tokenize")

    async def close(self) -> None:
        """Ours only; who built the `AsyncLLM` shuts it down."""
        self._drop_all()
        if self._calls:
            await asyncio.wait(self._calls, timeout=1.0)
        self._texts.close()

    def died(self, reason: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Every stream ends; a request that vLLM says nothing more about is forgotten."""
        super().died(reason, loop)
        self._drop_all()

    def _drop_all(self) -> None:
        for running in list(self._running.values()):
            running.relay.close()
            if running.pump is not None:
                running.pump.cancel()

    # Requests.

    def waits_with(self, spec: GenerateSpec) -> bool:
        """For a grammar, which vLLM compiles before it takes the request."""
        return spec.sampling.constraint is not None

    async def submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        try:
            await self._submit(spec, out)
        except Exception as error:
            known = failures.located(failures.translate(error), spec)
            if known is error:
                raise
            raise known from error
        handover.taken()

    async def _submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        if not self._facts.is_generation:
            raise Unsupported(self.name, _NO_GENERATION)
        params = self.requests.sampling_params(spec)
        prompt = self.requests.prompt(spec)
        options = self.requests.options(spec)
        key = spec.request_id
        running = _Running(
            self._engine_id(key),
            Relay(
                spec,
                out,
                self._loads.submitted(len(spec.prompt), spec.rank),
                lambda: self._forget(key, running),
            ),
        )
        self._running[key] = running
        try:
            if self._direct:
                await self._add(running, prompt, params, options)
            else:
                self._pump(running, prompt, params, options)
        except Exception:
            running.relay.close()
            self._withdraw(running)
            raise

    def _withdraw(self, running: _Running) -> None:
        """vLLM notes a request down before it sends it on, and when that fails the note stays: it
        counts for vLLM's own bounds for ever.
        """
        noted = getattr(getattr(self._llm, "output_processor", None), "external_req_ids", None)
        if noted and running.engine_id in noted:
            self._call(self._llm.abort(running.engine_id))

    async def _add(
        self, running: _Running, prompt: Any, params: Any, options: dict[str, Any]
    ) -> None:
        collector = await self._llm.add_request(running.engine_id, prompt, params, **options)
        running.internal_id = collector.request_id
        relay = running.relay
        collector.put = relay.put
        # What came while vLLM was still handing the request over.
        early, collector.output = collector.output, None
        if early is not None:
            relay.put(early)
        self._settle(running, params.n)

    def _pump(self, running: _Running, prompt: Any, params: Any, options: dict[str, Any]) -> None:
        outputs = self._llm.generate(prompt, params, running.engine_id, **options)

        async def read() -> None:
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        running.relay.put(output)
            except Exception as error:
                running.relay.fail(error)

        running.pump = asyncio.ensure_future(read())

    def _settle(self, running: _Running, choices: int) -> None:
        """With several ranks, the one that vLLM's own balancing chose."""
        if len(self.requests.limits.ranks) < 2 or running.relay.closed:
            return
        routed = getattr(self._llm.engine_core, "reqs_in_flight", None)
        if not isinstance(routed, dict) or running.internal_id is None:
            return
        child = running.internal_id if choices == 1 else f"0_{running.internal_id}"
        engine = routed.get(child)
        if isinstance(engine, bytes):
            running.relay.counts.settle(int.from_bytes(engine, "little"))

    def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        running.relay.close()
        if running.pump is not None:
            # Its generator aborts the request on the way out.
            running.pump.cancel()
        elif running.internal_id is not None:
            self._call(self._llm.abort(running.internal_id, internal=True))
        else:
            # Cut off inside add_request: vLLM may already have it under our id for it.
            self._call(self._llm.abort(running.engine_id))

    def rejected(self, refused: handover.Handover) -> None:
        """Tell the KV connector that a decode request will not come for its blocks."""
        notify = getattr(self._llm, "notify_kv_transfer_request_rejected", None)
        if notify is None or not self.requests.limits.has_kv_connector or self._llm.errored:
            return
        ranks, rank = self.requests.limits.ranks, refused.rank
        local = ranks.index(rank) if rank is not None and rank in ranks else None
        self._call(
            notify(self._engine_id(refused.request_id), refused.params, data_parallel_rank=local)
        )

    async def tokenize(self, text: str) -> Sequence[int]:
        tokenizer = await self._tokenizer()
        return await self._texts.tokenize(partial(_encode, tokenizer, text))

    async def max_text_length(self) -> int | None:
        longest = getattr(await self._tokenizer(), "max_chars_per_token", None)
        context = self._facts.max_context_length
        return context * longest if context and isinstance(longest, int) and longest > 0 else None

    async def _tokenizer(self) -> Any:
        tokenizer = self._llm.get_tokenizer()
        if isawaitable(tokenizer):
            tokenizer = await tokenizer
        if tokenizer is None:
            raise FailedPrecondition("the engine runs without a tokenizer: send token ids")
        return tokenizer

    async def embed(self, spec: EmbedSpec) -> Embedding:
        limits = self.requests.limits
        counts = self._loads.submitted(len(spec.prompt), spec.rank)
        try:
            return await embedding.embed(
                self._llm,
                tokens_prompt(spec.prompt, rendered=not limits.encoder_decoder),
                self._engine_id(spec.request_id),
                trace=spec.trace if limits.traced else None,
            )
        finally:
            counts.left()

    def _engine_id(self, request_id: str) -> str:
        return request_id if self._exact_ids else f"{request_id}-{next(self._serial)}"

    def _forget(self, key: str, running: _Running) -> None:
        if self._running.get(key) is running:
            del self._running[key]

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        """Run it whatever becomes of the request that caused it."""

        async def run() -> None:
            try:
                await call
            except Exception as error:
                # A dead engine has nothing left to abort.
                level = logging.DEBUG if self._llm.errored else logging.WARNING
                log.log(level, "the engine did not take a notice: %s", error)

        task = asyncio.ensure_future(run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    # Facts.

    def model_facts(self) -> ModelFacts:
        return self._facts

    def server_facts(self) -> ServerFacts:
        if self._server.is_paused != self._paused:
            self._server = replace(self._server, is_paused=self._paused)
        return self._server

    def _server_facts(self) -> ServerFacts:
        config = self._llm.vllm_config
        return ServerFacts(
            server_type="vllm-grpc",
            version=installed_version(),
            data_parallel_size=config.parallel_config.data_parallel_size,
            max_running_requests=self._max_running,
            block_size=positive(config, "cache_config.block_size"),
            pairing=pairing_facts(config),
        )

    async def look_at_pause(self) -> None:
        """Ask the engine whether it is paused, for the next `server_facts`."""
        ask = getattr(self._llm, "is_paused", None)
        if ask is None or self._llm.errored:
            return
        try:
            self._paused = bool(await asyncio.wait_for(ask(), PAUSE_SECONDS))
        except asyncio.TimeoutError:
            log.debug("the engine did not say in time whether it is paused")
        except Exception as error:
            log.debug("whether the engine is paused: %s", error)

    async def check_health(self) -> None:
        if self._llm.errored:
            raise EngineDead(failures.DEAD)
        await self._llm.check_health()

    def translate(self, error: Exception) -> Exception:
        return failures.translate(error)

    # Control.

    def warmed(self) -> None:
        self._loads.start_over()
        if self._llm.errored:
            # Whoever watches it may be a moment late, and nobody is to take it for ready.
            self.died(failures.DEAD)

    async def flush_cache(self, timeout: float | None) -> str:
        return await control.flush_cache(self._llm, self.requests.limits.ranks, timeout)

    async def start_profile(self, spec: ProfileSpec) -> str:
        return await control.start_profile(self._llm, spec)

    async def stop_profile(self) -> str:
        return await control.stop_profile(self._llm)

    async def loads(self) -> Sequence[Load]:
        self.stats.attach(self._llm)
        return self._loads.loads(self.stats.ranks)

    @property
    def pending_prompt_tokens(self) -> int | None:
        """Of requests without any output yet; None when some belong to a rank unknown."""
        return self._loads.pending_tokens

    def statistics(self) -> dict[str, int]:
        return {
            "running": len(self._running),
            "calls": len(self._calls),
            "texts": self._texts.waiting,
            **self._loads.statistics(),
        }


def _encode(tokenizer: Any, text: str) -> list[int]:
    """As vLLM renders a completion prompt."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True)
    return list(ids)
