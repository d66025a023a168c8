"""`MlxEngine`: the core's `Engine` over the generation runtime.

The event loop never touches mlx: loading and the runtime live on threads of their own, and each
step's events come over in one hand-over. Importing this module imports no mlx.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import EngineDead, Unavailable
from smg_grpc_servicer.core.facts import (
    architectures,
    bos_token_id,
    model_type,
    pad_token_id,
    read_config,
)
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.progress import progress
from smg_grpc_servicer.core.texts import TextQueue
from smg_grpc_servicer.core.types import (
    Delta,
    Feature,
    Finish,
    GenerateSpec,
    ModelFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.mlx import backend
from smg_grpc_servicer.mlx.options import MlxOptions

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.model import LoadedModel
    from smg_grpc_servicer.mlx.runtime.job import Event, Job
    from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop

log = logging.getLogger(__name__)

DEFAULT_TEMPERATURE = 1.0
"""What an unset temperature means: the published package's, not mlx-lm's 0."""
DEFAULT_MAX_TOKENS = 256
"""When neither the request nor the model bounds the output."""
STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Running:
    request_id: str
    out: Mailbox
    stop_token_ids: tuple[int, ...]


class MlxEngine(Engine):
    """One model on one generation thread."""

    name: ClassVar[str] = "MLX"
    features = frozenset({Feature.TEXT_INPUT})

    def __init__(self, options: MlxOptions) -> None:
        super().__init__()
        self.options = options
        self._loaded: LoadedModel | None = None
        self._facts: ModelFacts | None = None
        self._runtime: GenerationLoop | None = None
        self._backend: backend.Backend | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, _Running] = {}
        self._uids: dict[str, str] = {}
        """Request id to the runtime's own id, so that an id can be used again at once."""
        self._serial = count(1)
        self._held: list[Event] = []
        """Events of steps that were not handed over yet; the generation thread's own."""
        self._next = 0.0
        self._window = 0.0
        """How far apart a stream's messages are now; earlier a step's tokens are of no use."""
        self._texts = TextQueue("mlx-tokenize")
        self._max_text_length: int | None = None

    # Life.

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        # A thread that is gone long before the process ends: mlx leaves a Python object behind on
        # the thread that builds a model, and letting go of it in a closing interpreter aborts.
        loading = ThreadPoolExecutor(1, thread_name_prefix="mlx-load")
        try:
            await self._loop.run_in_executor(loading, self._load)
        finally:
            loading.shutdown(wait=False)

    def _load(self) -> None:
        """On a thread: mlx, the model, the generation thread."""
        options = self.options
        self._backend = backend.prepare(options.backend)
        from smg_grpc_servicer.mlx import model
        from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop

        log.info("%s", self._backend.describe())
        self._loaded = model.load(
            options.model, adapter_path=options.adapter_path, dtype=self._backend.dtype
        )
        self._facts = _facts(options, self._loaded)
        if self._loaded.context_length is not None:
            longest = max(map(len, self._loaded.tokenizer.get_vocab()), default=0)
            self._max_text_length = self._loaded.context_length * longest or None
        self._runtime = GenerationLoop(
            self._loaded.model,
            deliver=self._hand_over,
            on_death=lambda reason: self.died(reason, self._loop),
            prefill_batch_size=options.prefill_batch_size,
            completion_batch_size=options.completion_batch_size,
            prefill_budget=options.prefill_budget,
            prompt_cache_bytes=options.prompt_cache_bytes,
            max_queued=options.max_queued_requests,
        )
        self._runtime.start()
        self._runtime.wait_ready()

    async def warm_up(self) -> None:
        """Each kind of step once: greedy, sampled, filtered, with logprobs."""
        kinds = (
            (Sampling(temperature=0.0), None),
            (Sampling(temperature=1.0, seed=0), 1),
            (Sampling(temperature=0.7, top_p=0.9, top_k=8, min_p=0.01, seed=0), 1),
        )
        with progress("warming up", len(kinds), "request") as advance:
            for at, (sampling, logprobs) in enumerate(kinds):
                out = Mailbox(stream=False)
                spec = GenerateSpec(f"smg-warmup-{at}", [0] * 8, sampling=sampling)
                await self._begin(spec, out, max_tokens=4, logprobs=logprobs)
                await out.wait()
                advance(1)

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None and not await asyncio.to_thread(runtime.stop, STOP_SECONDS):
            log.warning("the generation thread did not end within %g s", STOP_SECONDS)
        self._texts.close()

    # Requests.

    async def submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        facts = self.model_facts()
        sampling = spec.sampling
        room = (facts.max_context_length or 0) - len(spec.prompt)
        limit = sampling.max_tokens
        if facts.max_context_length is not None:
            # More than fits is asked for all the time; the output then ends with `length`.
            limit = room if limit is None else min(limit, room)
        await self._begin(
            spec, out, max_tokens=limit or DEFAULT_MAX_TOKENS, logprobs=spec.logprobs.output
        )

    async def _begin(
        self, spec: GenerateSpec, out: Mailbox, *, max_tokens: int, logprobs: int | None
    ) -> None:
        runtime, facts = self._require(), self.model_facts()
        from smg_grpc_servicer.mlx.runtime.job import Job

        sampling = spec.sampling
        if sampling.temperature is None:
            sampling = replace(sampling, temperature=DEFAULT_TEMPERATURE)
        if facts.vocab_size is not None and (sampling.top_k or 0) >= facts.vocab_size:
            sampling = replace(sampling, top_k=None)
        stops = frozenset(sampling.stop_token_ids)
        job: Job = Job(
            uid=f"{spec.request_id}#{next(self._serial)}",
            prompt=spec.prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stops if sampling.ignore_eos else stops | frozenset(facts.eos_token_ids),
            logprobs=logprobs,
        )
        runtime.submit(job)
        self._running[job.uid] = _Running(spec.request_id, out, sampling.stop_token_ids)
        self._uids[spec.request_id] = job.uid

    def abort(self, request_id: str) -> None:
        uid = self._uids.pop(request_id, None)
        if uid is None:
            return
        self._running.pop(uid, None)
        if self._runtime is not None:
            self._runtime.cancel(uid)

    async def tokenize(self, text: str) -> Sequence[int]:
        loaded = self._loaded
        if loaded is None:
            raise Unavailable("the model is not loaded")
        return await self._texts.tokenize(partial(_encode, loaded.tokenizer, text))

    async def max_text_length(self) -> int | None:
        return self._max_text_length

    def _hand_over(self, events: list[Event]) -> None:
        """On the generation thread, once a step."""
        assert self._loop is not None
        self._held += events
        now = monotonic()
        # A request's first event carries its cached tokens.
        urgent = any(event.last or event.cached_tokens is not None for event in events)
        if now < self._next and not urgent:
            return
        self._next = now + self._window
        held, self._held = self._held, []
        try:
            self._loop.call_soon_threadsafe(self._deliver, held)
        except RuntimeError:
            # The loop is closed: the server has stopped and nobody reads any more.
            log.debug("%d events came after the event loop was closed", len(held))

    def _deliver(self, events: list[Event]) -> None:
        """On the event loop: each event to its request's mailbox."""
        for event in events:
            running = self._running.get(event.uid)
            if running is None:
                continue
            if event.last:
                del self._running[event.uid]
                if self._uids.get(running.request_id) == event.uid:
                    del self._uids[running.request_id]
            self._window = running.out.window
            if event.error is not None:
                running.out.fail(event.error)
                continue
            finish = event.finish
            if finish is not None and finish.matched not in running.stop_token_ids:
                # The gateway shows what matched to its client, who did not ask for the model's end.
                finish = Finish(finish.reason)
            running.out.put(
                Delta(
                    token_ids=event.token_ids,
                    logprobs=event.logprobs,
                    finish=finish,
                    cached_tokens=event.cached_tokens,
                )
            )

    # Facts.

    def model_facts(self) -> ModelFacts:
        if self._facts is None:
            raise Unavailable("the model is not loaded")
        return self._facts

    @property
    def on_cpu(self) -> bool:
        """The model runs on this machine's processors; known once it is loaded."""
        return self._backend is not None and self._backend.device == "cpu"

    def server_facts(self) -> ServerFacts:
        version = None if self._backend is None else self._backend.versions.get("mlx-lm")
        return ServerFacts(
            server_type="mlx-grpc",
            version=version,
            data_parallel_size=1,
            max_running_requests=self.options.completion_batch_size,
        )

    async def check_health(self) -> None:
        self._require()

    def statistics(self) -> dict[str, int]:
        held = {} if self._runtime is None else self._runtime.statistics()
        return {"running": len(self._running), "ids": len(self._uids), **held}

    def counters(self) -> dict[str, int]:
        return {} if self._runtime is None else self._runtime.counters()

    def _require(self) -> GenerationLoop:
        if self._runtime is None:
            raise Unavailable("the engine is not running")
        if not self._runtime.alive:
            raise EngineDead("the generation thread has ended")
        return self._runtime


def _encode(tokenizer: Any, text: str) -> list[int]:
    """As mlx-lm does for a raw prompt: special tokens unless the text brings its own BOS."""
    bos = tokenizer.bos_token
    ids: list[int] = tokenizer.encode(
        text, add_special_tokens=bos is None or not text.startswith(bos)
    )
    return ids


def _facts(options: MlxOptions, loaded: LoadedModel) -> ModelFacts:
    config = loaded.config
    generation = read_config(loaded.directory / "generation_config.json")
    return ModelFacts(
        model_path=options.model,
        served_model_name=options.served_model_name or options.model,
        tokenizer_path=str(loaded.directory),
        max_context_length=loaded.context_length,
        max_prompt_tokens=None if loaded.context_length is None else loaded.context_length - 1,
        vocab_size=loaded.vocab_size,
        model_type=model_type(config),
        architectures=architectures(config),
        eos_token_ids=loaded.eos_token_ids,
        pad_token_id=pad_token_id(config, generation),
        bos_token_id=bos_token_id(config, generation),
        dtype=loaded.dtype,
    )
