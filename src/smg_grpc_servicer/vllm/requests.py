"""A core request as vLLM's own: `SamplingParams`, a prompt, and what `add_request` takes beside.

Defaults of the model's generation config fill only what the proto can tell to be unset:
temperature, top_p, repetition_penalty and max_tokens. A `top_k` or `min_p` of 0 is off, as sent.
vLLM validates the rest; what it would not survive is refused here. vLLM is imported when the
first request is built.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import (
    Constraint,
    GenerateSpec,
    KvTransfer,
    LogprobSpec,
    Sampling,
)
from smg_grpc_servicer.vllm.facts import sampling_defaults
from smg_grpc_servicer.vllm.probe import probe

_CONSTRAINTS: Mapping[str, str] = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
"""`Constraint.kind` to the field of `StructuredOutputsParams`."""

_MAX_BIAS = 100.0
_COLDEST = 0.01
"""vLLM raises a lower temperature to this one; greedy is nearer to what was asked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a vLLM a request is held against, read once."""

    ranks: tuple[int, ...]
    """Global ids of the data-parallel ranks this process drives, in vLLM's order."""
    has_kv_connector: bool
    encoder_decoder: bool
    traced: bool
    defaults: Mapping[str, Any]
    """The model's sampling defaults, by vLLM's names."""

    @classmethod
    def of(cls, async_llm: Any) -> Limits:
        config = async_llm.vllm_config
        return cls(
            ranks=managed_ranks(async_llm),
            has_kv_connector=has_kv_connector(config),
            encoder_decoder=bool(probe(config, "model_config.is_encoder_decoder")),
            traced=probe(config, "observability_config.otlp_traces_endpoint") is not None,
            defaults=dict(sampling_defaults(config.model_config)),
        )

    def local_rank(self, rank: int | None) -> int | None:
        """A global rank as vLLM counts it. :raises InvalidArgument: not one of ours."""
        if rank is None:
            return None
        if rank not in self.ranks:
            raise InvalidArgument(
                "data_parallel_rank", f"must be {_span(self.ranks)} here, got {rank}"
            )
        return self.ranks.index(rank)


def managed_ranks(async_llm: Any) -> tuple[int, ...]:
    """The engine client's own list; else what the configuration says."""
    managed = probe(async_llm, "engine_core.engine_ranks_managed")
    if isinstance(managed, (list, tuple)) and managed:
        return tuple(managed)
    parallel = async_llm.vllm_config.parallel_config
    start = probe(parallel, "data_parallel_index")
    size = parallel.data_parallel_size
    if probe(parallel, "local_engines_only"):
        size = parallel.data_parallel_size_local
    first = start if isinstance(start, int) else 0
    return tuple(range(first, first + max(size, 1)))


def has_kv_connector(vllm_config: Any) -> bool:
    config = probe(vllm_config, "kv_transfer_config")
    return config is not None and probe(config, "kv_connector") is not None


def kv_params(kv: KvTransfer | None) -> dict[str, Any] | None:
    """The connector's parameters as it reads them; None when there are none."""
    if kv is None:
        return None
    if kv.params_json is not None:
        params: dict[str, Any] = json.loads(kv.params_json)
        return params or None
    return {"remote_host": kv.host, "remote_port": kv.port}


class RequestBuilder:
    """Turns specs into vLLM's calls, for one vLLM."""

    def __init__(self, async_llm: Any) -> None:
        self.limits = Limits.of(async_llm)
        self._accepts = _keywords(async_llm)
        self._params: Callable[..., Any] | None = None
        self._structured: Any = None
        self._kinds: Any = None
        self._flat = False
        # An application asks for the same again and again, and building it is half of what a
        # request costs; vLLM changes its copy in place, so each request gets one.
        self._plain = lru_cache(256)(self._build)

    def sampling_params(self, spec: GenerateSpec) -> Any:
        """:raises InvalidArgument: the engine would not survive it. vLLM raises its own."""
        if spec.kv_transfer is None and spec.sampling.is_small:
            return copy.copy(self._plain(spec.sampling, spec.logprobs, spec.stream))
        return self._build(spec.sampling, spec.logprobs, spec.stream, self._kv(spec.kv_transfer))

    def _build(
        self,
        sampling: Sampling,
        logprobs: LogprobSpec,
        stream: bool,
        kv: dict[str, Any] | None = None,
    ) -> Any:
        if self._params is None:
            self._import()
        assert self._params is not None
        # Only what differs from vLLM's default is named: each one costs on every request.
        given: dict[str, Any] = {
            "detokenize": bool(sampling.stop),
            # Logprobs of an answer that is sent whole are collected here, where they are bounded.
            "output_kind": self._kinds.DELTA
            if stream or logprobs.output is not None
            else self._kinds.FINAL_ONLY,
            "skip_clone": True,  # Nobody else has it, so vLLM need not copy it deeply.
        }
        self._fill_choice(given, sampling)
        _fill_end(given, sampling)
        if sampling.constraint is not None:
            given["structured_outputs"] = self._constraint(sampling.constraint)
        if logprobs.output is not None or logprobs.prompt is not None:
            given["logprobs"], given["prompt_logprobs"] = logprobs.output, logprobs.prompt
            if self._flat:
                given["flat_logprobs"] = True
        if kv is not None:
            given["extra_args"] = {"kv_transfer_params": kv}
        return self._params(**given)

    def _fill_choice(self, given: dict[str, Any], sampling: Sampling) -> None:
        """How a token is chosen; the model's defaults where nothing was sent."""
        default = self.limits.defaults.get
        temperature = _or(sampling.temperature, default("temperature"), 1.0)
        if temperature < _COLDEST and sampling.n == 1:
            temperature = 0.0
        given["temperature"] = temperature
        top_p = _or(sampling.top_p, default("top_p"), None)
        if top_p is not None:
            given["top_p"] = top_p
        penalty = _or(sampling.repetition_penalty, default("repetition_penalty"), None)
        if penalty is not None:
            given["repetition_penalty"] = penalty
        given["max_tokens"] = _or(sampling.max_tokens, default("max_tokens"), None)
        for name in ("top_k", "min_p", "frequency_penalty", "presence_penalty", "seed"):
            value = getattr(sampling, name)
            if value is not None:
                given[name] = value
        if sampling.n > 1:
            given["n"] = sampling.n
        if sampling.logit_bias:
            # As vLLM's own front end: the proto says -100 to 100.
            given["logit_bias"] = {
                token: min(max(bias, -_MAX_BIAS), _MAX_BIAS)
                for token, bias in sampling.logit_bias.items()
            }

    def prompt(self, spec: GenerateSpec) -> dict[str, Any]:
        """Rendered, so that vLLM adds it at once; raw where its rendering has work to do.

        A raw prompt is processed on vLLM's own threads: a grammar is compiled during validation
        and must not hold up the loop.
        """
        raw = spec.sampling.constraint is not None or self.limits.encoder_decoder
        return tokens_prompt(spec.prompt, rendered=not raw)

    def options(self, spec: GenerateSpec) -> dict[str, Any]:
        """Keywords of `add_request` and `generate` beside prompt and parameters."""
        chosen: dict[str, Any] = {}
        rank = self.limits.local_rank(spec.rank)
        if rank is not None:
            chosen["data_parallel_rank"] = rank
        if spec.trace and self.limits.traced:
            chosen["trace_headers"] = dict(spec.trace)
        constraint = spec.sampling.constraint
        if constraint is not None and constraint.from_first_token:
            chosen["reasoning_ended"] = True
        return {name: value for name, value in chosen.items() if name in self._accepts}

    def _constraint(self, constraint: Constraint) -> Any:
        value: Any = constraint.value
        if constraint.kind == "json_object":
            value = True
        elif constraint.kind == "choice":
            value = list(constraint.value)
        return self._structured(**{_CONSTRAINTS[constraint.kind]: value})

    def _kv(self, kv: KvTransfer | None) -> dict[str, Any] | None:
        params = kv_params(kv)
        if params and params.get("do_remote_prefill") and not self.limits.has_kv_connector:
            raise InvalidArgument(
                "kv_transfer_params_json",
                "do_remote_prefill needs a KV connector, and this engine runs without one "
                "(--kv-transfer-config)",
            )
        return params

    def _import(self) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._params = SamplingParams
        self._structured = StructuredOutputsParams
        self._kinds = RequestOutputKind
        self._flat = "flat_logprobs" in inspect.signature(SamplingParams).parameters


def _fill_end(given: dict[str, Any], sampling: Sampling) -> None:
    """When a choice ends."""
    if sampling.min_tokens is not None:
        given["min_tokens"] = sampling.min_tokens
    if sampling.ignore_eos:
        given["ignore_eos"] = True
    if sampling.stop_token_ids:
        given["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        given["stop"] = list(sampling.stop)
        given["include_stop_str_in_output"] = sampling.include_stop
        given["skip_special_tokens"] = sampling.skip_special_tokens
        given["spaces_between_special_tokens"] = sampling.spaces_between_special_tokens


def tokens_prompt(ids: Sequence[int], *, rendered: bool) -> dict[str, Any]:
    """`vllm.inputs.TokensInput` (rendered) or `TokensPrompt`; both are plain dictionaries."""
    prompt: dict[str, Any] = {"prompt_token_ids": ids if isinstance(ids, list) else list(ids)}
    if rendered:
        prompt["type"] = "token"
    return prompt


def _keywords(async_llm: Any) -> frozenset[str]:
    """What both ways of handing a request over take."""
    calls = [getattr(async_llm, name, None) for name in ("add_request", "generate")]
    found = [frozenset(inspect.signature(call).parameters) for call in calls if call is not None]
    return frozenset.intersection(*found) if found else frozenset()


def _or(sent: Any, default: Any, otherwise: Any) -> Any:
    if sent is not None:
        return sent
    return otherwise if default is None else default


def _span(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"between {ranks[0]} and {ranks[-1]}"
    return f"one of {', '.join(map(str, ranks))}"
