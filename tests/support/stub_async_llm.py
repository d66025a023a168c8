"""An `AsyncLLM` without an engine: vLLM's own output objects, made as fast as they are taken.

Its steps bring one token to every running request and go through vLLM's own
`RequestOutputCollector`; `generate` and `add_request` are shaped as vLLM 0.32 has them. Tokens are
a function of the prompt (`expected`). Needs vLLM, but neither a model nor a device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import SchedulerStats

from tests.support.vllm_config import vllm_config

VOCAB = 1000
DEFAULT_TOKENS = 16


@dataclass(slots=True)
class Faults:
    """What goes wrong; change it while it runs."""

    refuse: Exception | None = None
    """`add_request` raises this."""
    refuse_late: Exception | None = None
    """The same, once the request is noted down: it could not be sent to the engine core."""
    fail_after: int | None = None
    """The collector gets `error` once the request has this many tokens."""
    error: Exception = field(default_factory=lambda: RuntimeError("the stub broke"))
    mute: bool = False
    finish: str | None = None
    """How choices end, instead of `length`."""
    stop_reason: int | str | None = None
    drop_sampled: bool = False
    """The sampled token is missing from its own logprobs."""
    logprob: float | None = None
    """The value of every sampled token."""
    kv_transfer_params: Any = None
    hold_add: asyncio.Event | None = None
    """`add_request` waits for this after it has registered the request."""


@dataclass(slots=True)
class _Running:
    external: str
    prompt: list[int]
    params: Any
    collector: RequestOutputCollector
    made: list[int] = field(default_factory=list)
    """Tokens per choice; -1 when it is over."""
    told_prompt: set[int] = field(default_factory=set)


class StubAsyncLLM:
    """See the module. `calls` has what each request was handed over with, `aborts` every abort."""

    def __init__(
        self,
        config: Any = None,
        *,
        tokens_per_step: int = 1,
        step: Callable[[], Any] = lambda: asyncio.sleep(0),
        ranks: Sequence[int] = (0,),
        stats: bool = True,
        cached: int = 0,
    ) -> None:
        self.vllm_config = config or vllm_config()
        self.faults = Faults()
        self.calls: list[SimpleNamespace] = []
        self.aborts: list[tuple[str, bool]] = []
        self.notices: list[tuple[str, dict[str, Any], int | None]] = []
        self.resets: list[bool] = [True]
        """Answers of `reset_prefix_cache`, the last one again and again."""
        self.profiles: list[str] = []
        self.paused = False
        self.dead = False
        self.logger_manager = SimpleNamespace(stat_loggers=[]) if stats else None
        self.output_processor = SimpleNamespace(external_req_ids={})
        self.engine_core = SimpleNamespace(
            engine_ranks_managed=list(ranks),
            core_engines=[rank.to_bytes(2, "little") for rank in ranks],
            reqs_in_flight={},
        )
        self._tokens_per_step = tokens_per_step
        self._step = step
        self._cached = cached
        self._serial = 0
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self.output_handler = asyncio.ensure_future(self._steps())

    @staticmethod
    def expected(prompt: Sequence[int], count: int, index: int = 0, first: int = 0) -> list[int]:
        """Output tokens `first` to `count` of a choice."""
        start = sum(prompt) + 31 * index
        return [3 + (start + 7 * at) % (VOCAB - 3) for at in range(first, count)]

    # AsyncLLM's surface.

    @property
    def errored(self) -> bool:
        return self.dead or self.output_handler.done()

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            encode=lambda text, add_special_tokens: [3 + b for b in text.encode()]
        )

    async def is_paused(self) -> bool:
        return self.paused

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
    ) -> RequestOutputCollector:
        if self.errored:
            raise EngineDeadError
        if self.faults.refuse is not None:
            raise self.faults.refuse
        self.calls.append(
            SimpleNamespace(
                request_id=request_id,
                prompt=prompt,
                params=params,
                trace_headers=trace_headers,
                rank=data_parallel_rank,
                reasoning_ended=reasoning_ended,
            )
        )
        self._serial += 1
        internal = f"{request_id}-{self._serial:08x}"
        collector = RequestOutputCollector(params.output_kind, internal)
        self._running[internal] = _Running(
            request_id, list(prompt["prompt_token_ids"]), params, collector, [0] * params.n
        )
        self.output_processor.external_req_ids[request_id] = [internal]
        if self.faults.refuse_late is not None:
            raise self.faults.refuse_late
        self._work.set()
        if self.faults.hold_add is not None:
            await self.faults.hold_add.wait()
        return collector

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate` does it."""
        q: RequestOutputCollector | None = None
        try:
            q = await self.add_request(
                request_id,
                prompt,
                sampling_params,
                trace_headers=trace_headers,
                data_parallel_rank=data_parallel_rank,
                reasoning_ended=reasoning_ended,
            )
            finished = False
            while not finished:
                out = q.get_nowait() or await q.get()
                finished = out.finished
                yield out
        except (asyncio.CancelledError, GeneratorExit):
            if q is not None:
                await self.abort(q.request_id, internal=True)
            raise
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineGenerateError from error

    async def abort(self, request_id: str | Sequence[str], internal: bool = False) -> None:
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self.aborts.append((one, internal))
            for key, running in list(self._running.items()):
                if one == (key if internal else running.external):
                    del self._running[key]
                    self.output_processor.external_req_ids.pop(running.external, None)

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **_more: Any
    ) -> AsyncGenerator[Any, None]:
        import torch

        ids = list(prompt["prompt_token_ids"])
        data = torch.tensor([float(i) for i in ids])
        yield PoolingRequestOutput(request_id, PoolingOutput(data), ids, 0, True)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        self.profiles.append("start")

    async def stop_profile(self) -> None:
        self.profiles.append("stop")

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.notices.append((request_id, kv_transfer_params, data_parallel_rank))

    def shutdown(self) -> None:
        self.output_handler.cancel()

    # What a test does to it.

    def die(self) -> None:
        """The engine core is gone: as vLLM's output loop tells it, which then ends."""
        self.dead = True
        for running in self._running.values():
            running.collector.put(EngineDeadError())
        self._running.clear()
        self._work.set()

    def forget(self) -> None:
        """Drop every request without a word."""
        self._running.clear()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    # The engine.

    async def _steps(self) -> None:
        while not self.dead:
            if not self._running or self.faults.mute:
                self._work.clear()
                if self.faults.mute or not self._running:
                    await self._work.wait()
            for key, running in list(self._running.items()):
                self._advance(key, running)
            self._record()
            await self._step()

    def _record(self) -> None:
        if self.logger_manager is not None:
            stats = SchedulerStats(num_running_reqs=len(self._running), kv_cache_usage=0.25)
            for logger in self.logger_manager.stat_loggers:
                logger.record(stats, None, mm_cache_stats=None, engine_idx=0)

    def _advance(self, key: str, running: _Running) -> None:
        faults = self.faults
        if faults.fail_after is not None and max(running.made) >= faults.fail_after:
            del self._running[key]
            running.collector.put(faults.error)
            return
        parts = [part for index in range(len(running.made)) if (part := self._part(running, index))]
        over = all(made < 0 for made in running.made)
        if over:
            del self._running[key]
        final_only = running.params.output_kind is RequestOutputKind.FINAL_ONLY
        if parts and (over or not final_only):
            if final_only:
                parts = [self._whole(running, part) for part in parts]
            running.collector.put(self._output(running, parts, over))

    def _part(self, running: _Running, index: int) -> CompletionOutput | None:
        made = running.made[index]
        if made < 0:
            return None
        limit = running.params.max_tokens or DEFAULT_TOKENS
        count = min(self._tokens_per_step, limit - made)
        over = made + count >= limit
        running.made[index] = -1 if over else made + count
        ids = self.expected(running.prompt, made + count, index, made)
        return CompletionOutput(
            index=index,
            text="",
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=self._logprobs(running.params, ids),
            finish_reason=(self.faults.finish or "length") if over else None,
            stop_reason=self.faults.stop_reason if over else None,
        )

    def _whole(self, running: _Running, part: CompletionOutput) -> CompletionOutput:
        count = running.params.max_tokens or DEFAULT_TOKENS
        part.token_ids = self.expected(running.prompt, count, part.index)
        part.logprobs = self._logprobs(running.params, part.token_ids)
        return part

    def _output(
        self, running: _Running, parts: list[CompletionOutput], over: bool
    ) -> RequestOutput:
        prompt_logprobs = None
        if running.params.prompt_logprobs is not None and not running.told_prompt:
            running.told_prompt.add(0)
            rest = self._logprobs(running.params, running.prompt[1:], prompt=True)
            prompt_logprobs = _with_none(rest)
        return RequestOutput(
            request_id=running.external,
            prompt=None,
            prompt_token_ids=running.prompt,
            prompt_logprobs=prompt_logprobs,
            outputs=parts,
            finished=over,
            num_cached_tokens=self._cached,
            kv_transfer_params=self.faults.kv_transfer_params if over else None,
        )

    def _logprobs(self, params: Any, ids: Sequence[int], *, prompt: bool = False) -> Any:
        """As vLLM lists them: the token itself, then ranks 1 to k."""
        count = params.prompt_logprobs if prompt else params.logprobs
        if count is None:
            return None
        rows: Any = FlatLogprobs() if params.flat_logprobs else []
        size = VOCAB if count < 0 else count
        for at, token in enumerate(ids):
            # Every other token is itself among the best.
            best = [(token if i == 0 and at % 2 else (token + 1 + i) % VOCAB) for i in range(size)]
            values = [-0.5 - 0.25 * i for i in range(size)]
            own = values[0] if best and best[0] == token else -20.0
            if self.faults.logprob is not None:
                own = self.faults.logprob
            first = [] if self.faults.drop_sampled else [(token, own, 500)]
            entries = first + list(zip(best, values, range(1, size + 1), strict=True))
            if params.flat_logprobs:
                rows.append_fast(
                    *([e[i] for e in entries] for i in range(3)), [None] * len(entries)
                )
            else:
                rows.append({i: Logprob(v, r) for i, v, r in entries})
        return rows


def _with_none(rows: Any) -> Any:
    """Prompt logprobs begin with a position that has none."""
    if isinstance(rows, FlatLogprobs):
        whole = FlatLogprobs()
        whole.append(None)
        whole.extend(rows)
        return whole
    return [None, *rows]
