"""`SglangEngine`: the core's `Engine` over a `RequestManager`.

The seam (what others may build on): the constructor below. Facts and loads are given, not found:

* `model_facts`: a value; `server_facts`: called when asked for; `loads`: awaited;
* `limits`: `limits.Limits`, what requests are held against;
* `tokenizer`: what `SamplingParams.normalize` takes; None under `--skip-tokenizer-init`;
* `processor`: of `media_processor`; None for a text model;
* `encoders`: who encodes media by reference; None unless it is `--language-only`;
* `revision`: of a hub id, for GetTokenizer;
* `check_health()` probes the scheduler (id `HEALTH_CHECK…`): any push counts as alive;
* LoRA: `load_adapter`, `unload_adapter`, `adapters` behind the three RPCs (`lora.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import InvalidArgument
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
from smg_grpc_servicer.sglang import control, media, spans
from smg_grpc_servicer.sglang.embedding import EmbeddingSink
from smg_grpc_servicer.sglang.encoders import Encoders
from smg_grpc_servicer.sglang.limits import Limits
from smg_grpc_servicer.sglang.lora import AdapterTable
from smg_grpc_servicer.sglang.outputs import Flight, Prefix, Relay, Sink
from smg_grpc_servicer.sglang.probe import Probe
from smg_grpc_servicer.sglang.request_manager import RequestManager
from smg_grpc_servicer.sglang.requests import RequestBuilder
from smg_grpc_servicer.sglang.turns import FirstOutput, Turns
from smg_grpc_servicer.sglang.warm_up import Leftover

log = logging.getLogger(__name__)

SHARED_TOKENS = 1024
"""Prompt tokens that a first pass over a shared prompt must save to be worth its round trip."""

_GENERATION = frozenset(
    {
        Feature.CHOICES,
        Feature.CONSTRAINT,
        Feature.PROMPT_LOGPROBS,
        Feature.TOKEN_LOGPROBS,
        Feature.HIDDEN_STATES,
        Feature.INPUT_EMBEDS,
        Feature.MEDIA,
        Feature.KV_TRANSFER,
        Feature.LOGIT_PROCESSOR,
        Feature.CUSTOM_PARAMS,
        Feature.TRUNCATION,
    }
)
_WITH_TOKENIZER = frozenset({Feature.STOP_STRINGS, Feature.MIN_TOKENS})
_CONTROL = frozenset({Feature.RANK, Feature.FLUSH_CACHE, Feature.PROFILE, Feature.LOADS})
_EMBEDS = "the model embeds (--is-embedding): send Embed"
_GENERATES = "the model generates, SGLang runs without --is-embedding: send Generate"


class SglangEngine(Engine):
    """Serves requests from SGLang's scheduler processes; all methods on the event loop."""

    name: ClassVar[str] = "SGLang"
    min_output_tokens: ClassVar[int] = 0

    def __init__(
        self,
        manager: RequestManager,
        *,
        model_facts: ModelFacts,
        server_facts: Callable[[], ServerFacts],
        loads: Callable[[], Awaitable[Sequence[Load]]],
        limits: Limits,
        tokenizer: Any = None,
        processor: Any = None,
        encoders: Encoders | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        self._manager = manager
        self._facts = model_facts
        self._server_facts = server_facts
        self._loads = loads
        self._revision = revision
        self._limits = limits
        self._processor = processor
        self._encoders = encoders
        self._builder = RequestBuilder(model_facts, limits, tokenizer)
        self._adapters = AdapterTable(limits, manager.send_communicator_req)
        # Embeddings are only possible without a prefix cache.
        self._turns = None if limits.prefix_cache else Turns()
        self._probe = Probe(
            manager, self._builder, self._turns, generation=model_facts.is_generation
        )
        self._running: dict[str, Flight] = {}
        self._embedding: dict[str, int] = {}
        """Prompt tokens by id."""
        self._leftover: Leftover | None = None
        self.features = _features(model_facts, limits)
        if limits.grid is not None and processor is None:
            # Without positions beside the media the scheduler would end.
            self.features -= {Feature.MEDIA}
        if encoders is not None:
            self.features |= {Feature.MEDIA_REFERENCES}

    async def close(self) -> None:
        """Ours only; the manager is closed by who made it, and the ranks by who started them."""
        for flight in list(self._running.values()):
            flight.stop()
        await self._adapters.close()
        await self._probe.close()
        if self._encoders is not None:
            await asyncio.to_thread(self._encoders.close)

    # Requests.

    def waits_with(self, spec: GenerateSpec) -> bool:
        """For an adapter that has to come back, for encoders, for its turn."""
        return (
            spec.lora_id is not None
            or spec.media is not None
            or spec.references is not None
            or self._turns is not None
        )

    async def submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        if self._leftover is not None:
            self._leftover.somebody_came()
        if not self._facts.is_generation:
            raise InvalidArgument("GenerateRequest", _EMBEDS)
        adapter = None if spec.lora_id is None else await self._adapters.use(spec.lora_id)
        try:
            request = self._builder.generate(spec, None if adapter is None else adapter.name)
            await self._fill_media(spec, request)
            if self._turns is not None:
                await self._turns.wait(embeds=bool(spec.input_embeds))
        except BaseException:
            self._left(spec)
            raise
        if out.ended:
            # Aborted or cut while it waited.
            self._left(spec)
            return
        key = spec.request_id
        stats: list[Any] = []

        def ended() -> None:
            if self._running.get(key) is flight:
                del self._running[key]
            self._left(spec)
            for one in stats:
                spans.end(one)

        flight = Flight(
            out,
            drop=self._drop,
            stop=self._manager.stop,
            on_end=ended,
            prompt_tokens=len(request.input_embeds or request.input_ids),
            drafts_per_step=self._limits.drafts_per_step,
        )
        self._running[key] = flight
        try:
            if self._shares(spec):
                self._send_prefix(spec, request, flight, stats)
            else:
                self._send_choices(spec, request, flight, stats)
        except Exception:
            flight.stop()
            raise

    async def _fill_media(self, spec: GenerateSpec, request: Any) -> None:
        if spec.media is not None:
            request.mm_inputs = await asyncio.to_thread(
                media.build, spec.media, spec.prompt, self._processor
            )
        if spec.references is not None and self._encoders is not None:
            await self._encoders.encoded(spec.references, request)

    def _drop(self, rid: str) -> None:
        self._manager.drop(rid)
        if self._turns is not None:
            self._turns.over(rid)

    def _left(self, spec: GenerateSpec) -> None:
        if spec.lora_id is not None:
            self._adapters.release(spec.lora_id)

    def _shares(self, spec: GenerateSpec) -> bool:
        """Whether a pass over the prompt alone saves the other choices more than it costs.

        Prompt logprobs and input embeddings are computed past the cache, media by reference are
        awaited by each request alone, and the two sides of a disaggregated request must see the
        same requests.
        """
        return (
            spec.sampling.n > 1
            and len(spec.prompt) * (spec.sampling.n - 1) >= SHARED_TOKENS
            and self._limits.prefix_cache
            and self._limits.role == "null"
            and spec.logprobs.prompt is None
            and not spec.input_embeds
            and spec.references is None
        )

    def _send_prefix(
        self, spec: GenerateSpec, request: Any, flight: Flight, stats: list[Any]
    ) -> None:
        rid = self._manager.new_id(spec.request_id, "prefix")

        def then() -> None:
            try:
                self._send_choices(spec, request, flight, stats)
            except Exception as error:
                flight.fail(error)

        sink = Prefix(rid, spec, flight, then)
        self._manager.begin(sink, self._builder.prefix(request, rid))
        flight.began(sink)

    def _send_choices(
        self, spec: GenerateSpec, request: Any, flight: Flight, stats: list[Any]
    ) -> None:
        for index in range(spec.sampling.n):
            rid = self._manager.new_id(spec.request_id, index)
            message = self._builder.choice(request, spec, rid, index)
            if self._limits.traced:
                stats.append(spans.begin(spec, rid, self._limits.role, message.bootstrap_room))
                message.time_stats = stats[-1]
                message.wrap_pickle_fields()
            sink = Relay(rid, index, spec, flight)
            if self._turns is None:
                self._begin(spec, sink, message)
            else:
                self._begin(spec, FirstOutput(rid, sink, self._turns), message)
                self._turns.began(rid, embeds=bool(spec.input_embeds))
            flight.began(sink)

    def _begin(self, spec: GenerateSpec, sink: Sink, message: Any) -> None:
        sent = None
        if spec.references is not None and self._encoders is not None:
            sent = self._encoders.dispatch(spec.references, message, self._manager.forward)
        try:
            self._manager.begin(sink, message)
        finally:
            if sent is not None:
                sent.set()

    def abort(self, request_id: str) -> None:
        flight = self._running.get(request_id)
        if flight is not None:
            flight.stop()

    async def embed(self, spec: EmbedSpec) -> Embedding:
        if self._facts.is_generation:
            raise InvalidArgument("EmbedRequest", _GENERATES)
        rid = self._manager.new_id(spec.request_id)
        sink = EmbeddingSink()
        self._manager.begin(sink, self._builder.embed(spec, rid))
        self._embedding[rid] = len(spec.prompt)
        try:
            return await sink.answer
        finally:
            del self._embedding[rid]
            self._manager.drop(rid)
            if sink.answer.cancelled():
                self._manager.stop(rid)

    # Facts.

    def model_facts(self) -> ModelFacts:
        return self._facts

    def server_facts(self) -> ServerFacts:
        return self._server_facts()

    def tokenizer_revision(self) -> str | None:
        return self._revision

    async def check_health(self) -> None:
        await self._probe.check()

    # Control.

    async def flush_cache(self, timeout: float | None) -> str:
        return await control.flush_cache(self._manager, timeout)

    async def start_profile(self, spec: ProfileSpec) -> str:
        return await control.start_profile(self._manager, spec)

    async def stop_profile(self) -> str:
        return await control.stop_profile(self._manager)

    async def internal_state(self) -> list[dict[str, Any]]:
        """What each rank tells about itself, for operators of this process: not redacted."""
        return await control.internal_state(self._manager)

    async def loads(self) -> Sequence[Load]:
        found = await self._loads()
        return found if self._leftover is None else self._leftover.hide(found)

    def warmed(self) -> None:
        self._leftover = Leftover()

    async def load_adapter(self, adapter: Adapter) -> str:
        self._require_lora()
        return await self._adapters.load(adapter)

    async def unload_adapter(self, name: str, adapter_id: str | None) -> str:
        self._require_lora()
        return await self._adapters.unload(name, adapter_id)

    def adapters(self) -> Sequence[Adapter]:
        self._require_lora()
        return self._adapters.loaded()

    def _require_lora(self) -> None:
        if not self._limits.lora:
            raise self.unsupported(Feature.LORA)

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens of requests that the scheduler has and has said nothing about."""
        flights = sum(flight.unanswered for flight in self._running.values())
        return flights + sum(self._embedding.values())

    def statistics(self) -> dict[str, int]:
        return {
            "running": len(self._running),
            "embedding": len(self._embedding),
            **self._adapters.statistics(),
            **({} if self._turns is None else self._turns.statistics()),
            **self._manager.statistics(),
        }


def _features(facts: ModelFacts, limits: Limits) -> frozenset[Feature]:
    """Both kinds of request, whatever the model is: SGLang has them, and a misdirected one is the
    caller's mistake and told as such.
    """
    features = _CONTROL | _GENERATION | {Feature.EMBED}
    if limits.tokenizer:
        features |= _WITH_TOKENIZER
    return features | {Feature.LORA} if limits.lora and facts.is_generation else features
