"""An engine without a model: deterministic tokens, and a knob for every way an engine can fail.

Like a real one it works in steps: each step brings some tokens to every running choice. Output is
a function of the prompt, so a test knows it beforehand (`expected`); a seed of a request that is
not greedy shifts it, a bias of 50 or more on a token takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import EngineDead, NotFound
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.types import (
    Delta,
    Embedding,
    EmbedSpec,
    Feature,
    Finish,
    GenerateSpec,
    LogprobRows,
    ModelFacts,
    ProfileSpec,
    PromptLogprobs,
    Sampling,
    ServerFacts,
)

VOCAB = 1000
CONTEXT = 4096
EOS = 2
DEFAULT_MAX_TOKENS = 16
HEAVY_BIAS = 50.0
"""From here on a logit bias decides alone."""

_STEP = 7
_CYCLE = VOCAB - 3
_INVERSE = pow(_STEP, -1, _CYCLE)
_IDS = [3 + (_STEP * at) % _CYCLE for at in range(_CYCLE)] * 2
"""One cycle of output ids, twice: an answer is a stretch of it that begins where its seed says."""


def _answer(seed: int, start: int, end: int) -> list[int]:
    """Output ids `start` to `end` of an answer."""
    at = (seed * _INVERSE + start) % _CYCLE
    ids = _IDS[at : at + end - start]
    while (missing := end - start - len(ids)) > 0:
        again = (at + len(ids)) % _CYCLE
        ids += _IDS[again : again + missing]
    return ids


@dataclass(slots=True)
class Faults:
    """What goes wrong; change it while the engine runs."""

    refuse: Exception | None = None
    """`submit` raises this."""
    submit_delay: float = 0.0
    fail_after: int | None = None
    """Each request fails with `error` once it has produced this many tokens (0: before any)."""
    error: Exception = field(default_factory=lambda: RuntimeError("the fake engine broke"))
    mute: bool = False
    """Accepts requests and never answers."""
    ignore_abort: bool = False
    abort_on_its_own_after: int | None = None
    """Each choice ends with reason `abort` after this many tokens."""


@dataclass(slots=True)
class _Running:
    spec: GenerateSpec
    out: Mailbox
    made: list[int]
    """Tokens made so far, per choice; -1 when the choice is over."""


NOT_FAKED = frozenset(
    {
        Feature.KV_EVENTS,
        Feature.MEDIA,
        Feature.HIDDEN_STATES,
        Feature.INPUT_EMBEDS,
        Feature.LOGIT_PROCESSOR,
        Feature.CUSTOM_PARAMS,
    }
)


class FakeEngine(Engine):
    """See the module. `aborts` records every abort it was told."""

    name: ClassVar[str] = "the fake engine"

    def __init__(
        self,
        *,
        tokens_per_step: int | Callable[[], int] = 1,
        step_seconds: float = 0.0,
        features: frozenset[Feature] = frozenset(Feature) - NOT_FAKED,
        faults: Faults | None = None,
        load_seconds: float = 0.0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.faults = faults or Faults()
        self.aborts: list[str] = []
        self.submitted: list[GenerateSpec] = []
        self.flushes = 0
        self.profiles: list[str] = []
        self._tokens_per_step = tokens_per_step
        self._step_seconds = step_seconds
        self._load_seconds = load_seconds
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._dead: str | None = None
        self.facts = ModelFacts(
            model_path="fake/model",
            served_model_name="fake",
            tokenizer_path=tokenizer,
            max_context_length=CONTEXT,
            vocab_size=VOCAB,
            model_type="fake",
            architectures=("FakeForCausalLM",),
            eos_token_ids=(EOS,),
            pad_token_id=0,
            bos_token_id=1,
        )

    @staticmethod
    def expected(prompt: Sequence[int], count: int, index: int = 0) -> list[int]:
        """The ids of a choice: they depend on the prompt and the choice, and never contain EOS."""
        return _answer(sum(prompt) + 31 * index, 0, count)

    # Life.

    async def start(self) -> None:
        await asyncio.sleep(self._load_seconds)
        self._stepper = asyncio.ensure_future(self._steps())

    async def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
            self._stepper = None

    def die(self, reason: str = "killed") -> None:
        """The engine is gone: every later submit and check says so."""
        self._dead = reason
        self._running.clear()
        self.on_death(reason)

    # Requests.

    async def submit(self, spec: GenerateSpec, out: Mailbox) -> None:
        if self.faults.submit_delay:
            await asyncio.sleep(self.faults.submit_delay)
        if self._dead is not None:
            raise EngineDead(f"the engine is gone: {self._dead}")
        if self.faults.refuse is not None:
            raise self.faults.refuse
        self.submitted.append(spec)
        self._running[spec.request_id] = _Running(spec, out, [0] * spec.sampling.n)
        self._work.set()

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if not self.faults.ignore_abort:
            self._running.pop(request_id, None)

    async def tokenize(self, text: str) -> Sequence[int]:
        return [3 + byte for byte in text.encode()]

    async def embed(self, spec: EmbedSpec) -> Embedding:
        if self._dead is not None:
            raise EngineDead(f"the engine is gone: {self._dead}")
        await asyncio.sleep(self.faults.submit_delay)
        return Embedding([float(token) for token in spec.prompt], len(spec.prompt))

    # Facts and control.

    def model_facts(self) -> ModelFacts:
        return self.facts

    def server_facts(self) -> ServerFacts:
        return ServerFacts(server_type="fake-grpc", version="0", data_parallel_size=1)

    async def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine is gone: {self._dead}")

    async def flush_cache(self, timeout: float | None) -> str:
        self.flushes += 1
        return "flushed"

    async def start_profile(self, spec: ProfileSpec) -> str:
        self.profiles.append("start")
        return "profiling"

    async def stop_profile(self) -> str:
        if not self.profiles or self.profiles[-1] != "start":
            raise NotFound("no profile is running")
        self.profiles.append("stop")
        return "stopped"

    async def loads(self) -> Sequence[Load]:
        return [Load(rank=0, running_requests=len(self._running), waiting_requests=0)]

    def statistics(self) -> dict[str, int]:
        return {"running": len(self._running)}

    # Steps.

    async def _steps(self) -> None:
        while True:
            if not self._running or self.faults.mute:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self._step_seconds)
            for request_id, running in list(self._running.items()):
                self._step(running)
                if all(made < 0 for made in running.made):
                    self._running.pop(request_id, None)

    def _step(self, running: _Running) -> None:
        spec, out, faults = running.spec, running.out, self.faults
        per_step = self._tokens_per_step
        for index, made in enumerate(running.made):
            if made < 0:
                continue
            if faults.fail_after is not None and made >= faults.fail_after:
                running.made = [-1] * len(running.made)
                out.fail(faults.error)
                return
            count = per_step if isinstance(per_step, int) else per_step()
            running.made[index] = self._grow(spec, out, index, made, count)

    def _grow(self, spec: GenerateSpec, out: Mailbox, index: int, made: int, count: int) -> int:
        faults = self.faults
        limit = min(spec.sampling.max_tokens or DEFAULT_MAX_TOKENS, CONTEXT - len(spec.prompt))
        end = min(limit, made + count)
        if faults.fail_after is not None:
            end = min(end, faults.fail_after)
        if faults.abort_on_its_own_after is not None:
            end = min(end, faults.abort_on_its_own_after)
        ids = self._ids(spec, index, made, end)
        finish = self._finish(spec.sampling, ids, end, limit)
        delta = Delta(index=index, token_ids=ids, finish=finish)
        if made == 0:
            delta.prompt_tokens, delta.cached_tokens = len(spec.prompt), 0
            if spec.logprobs.prompt is not None:
                delta.prompt_logprobs = _prompt_rows(spec)
        if spec.logprobs.output is not None:
            delta.logprobs = _rows(ids, spec.logprobs.output)
            if wanted := spec.logprobs.token_ids:
                delta.logprobs.chosen = [[-0.25 * token for token in wanted] for _ in ids]
        if ids or finish is not None:
            out.put(delta)
        return -1 if finish is not None else end

    def _ids(self, spec: GenerateSpec, index: int, made: int, end: int) -> list[int]:
        sampling = spec.sampling
        for token, bias in sampling.logit_bias.items():
            if bias >= HEAVY_BIAS:
                return [token] * (end - made)
        base = sum(spec.prompt) + 31 * index
        if sampling.seed is not None and sampling.temperature != 0:
            base += 131 * (sampling.seed + 1)
        return _answer(base, made, end)

    def _finish(self, sampling: Sampling, ids: list[int], end: int, limit: int) -> Finish | None:
        """Whether this is the end; cuts `ids` behind a token that stops."""
        stops = sampling.stop_token_ids
        for at, token in enumerate(ids):
            if stops and token in stops:
                del ids[at + 1 :]
                return Finish("stop", matched=token)
            if token == EOS and not sampling.ignore_eos:
                del ids[at + 1 :]
                return Finish("stop")
        if (
            self.faults.abort_on_its_own_after is not None
            and end >= self.faults.abort_on_its_own_after
        ):
            return Finish("abort")
        return Finish("length") if end >= limit else None


def _rows(ids: Sequence[int], top: int) -> LogprobRows:
    """Row i: the token itself at -0.5, then its neighbours in the vocabulary at -1.5, -2.5, …"""
    width = VOCAB if top < 0 else top
    return LogprobRows(
        values=[-0.5] * len(ids),
        top_ids=[[(token + at) % VOCAB for at in range(width)] for token in ids],
        top_values=[[-0.5 - at for at in range(width)] for _ in ids],
    )


def _prompt_rows(spec: GenerateSpec) -> PromptLogprobs:
    start = spec.logprobs.prompt_start
    ids = list(spec.prompt[start:])
    rows = _rows(ids, spec.logprobs.prompt or 0)
    values: list[float | None] = [*rows.values]
    if start == 0 and ids:
        values[0], rows.top_ids[0], rows.top_values[0] = None, [], []
    return PromptLogprobs(ids, values, rows.top_ids, rows.top_values)
