"""A core request as SGLang's own: `SamplingParams` and the tokenized inputs of its scheduler.

What the scheduler would not survive is refused here, by the field's name; the rest is checked by
SGLang's own `normalize` and `verify`, as its front end does before it sends. Fields that the
installed release does not have are left out when they say nothing new. SGLang is imported when the
builder is made.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from smg_grpc_servicer.core.errors import FailedPrecondition, InvalidArgument
from smg_grpc_servicer.core.types import (
    SCALARS,
    Constraint,
    EmbedSpec,
    GenerateSpec,
    KvTransfer,
    ModelFacts,
    Sampling,
)
from smg_grpc_servicer.sglang import media, media_grid, overflow
from smg_grpc_servicer.sglang.limits import Limits

_CONSTRAINTS: Mapping[str, str] = {
    "json_schema": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""`Constraint.kind` to the field of `SamplingParams`."""
_PROMPT = "tokenized.input_ids"
_NAMED_FIRST = re.compile(
    r"(temperature|top_p|top_k|min_p|(?:presence|frequency|repetition)_penalty|(?:min|max)_new_tokens"
    r"|logit_bias|sampling_seed|stop)\b"
)
"""Sampling parameters that SGLang's messages begin with."""
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's stand-in for a peer, for requests that nobody will fetch."""


class RequestBuilder:
    """Turns specs into the scheduler's messages, for one SGLang."""

    def __init__(self, facts: ModelFacts, limits: Limits, tokenizer: Any) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._facts = facts
        self._limits = limits
        self._tokenizer = tokenizer
        self._io = io_struct
        self._params = SamplingParams
        self._processors = CustomLogitProcessor
        self._generate_fields = frozenset(io_struct.TokenizedGenerateReqInput.__struct_fields__)
        self._pickled = bool(envs.SGLANG_USE_PICKLE_IPC.get())
        # Without a vocabulary size nothing of it can be outside.
        self._vocab_size = facts.vocab_size or 2**31

    # Generate.

    def generate(self, spec: GenerateSpec, lora_name: str | None = None) -> Any:
        """All choices' request, without an id. :raises InvalidArgument: naming the field."""
        self._check_length(len(spec.prompt))
        wanted = spec.logprobs
        if (wanted.output or 0) > self._vocab_size:
            raise InvalidArgument(
                "top_logprobs_num",
                f"must be at most the vocabulary's {self._vocab_size}, got {wanted.output}",
            )
        more: dict[str, Any] = {}
        if wanted.output is not None and wanted.prompt is not None:
            more["logprob_start_len"] = wanted.prompt_start
        if spec.input_embeds:
            more["input_embeds"] = self._embeds(spec)
        if spec.hidden_states:
            more["return_hidden_states"] = self._hidden_states()
        if spec.lora_id is not None:
            more["lora_id"] = spec.lora_id
            if "lora_name" in self._generate_fields:
                more["lora_name"] = lora_name
        if spec.logit_processor is not None:
            more["custom_logit_processor"] = self._processor(spec.logit_processor)
        if spec.count_reasoning:
            more["require_reasoning"] = True
        more |= self._bootstrap(spec.kv_transfer)
        rank = self._rank(spec.rank, more.get("bootstrap_room"))
        if rank is not None:
            more["routed_dp_rank"] = rank
        if spec.media is not None or spec.references is not None:
            self._check_media(spec)
        filled: dict[str, Any] = {
            "input_text": "",
            "input_ids": array("q", spec.prompt),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": self.sampling_params(spec),
            "return_logprob": wanted.output is not None,
            "logprob_start_len": -1,
            "top_logprobs_num": wanted.output or 0,
            "token_ids_logprob": list(wanted.token_ids) or None,
            "stream": spec.stream,
        }
        return self._io.TokenizedGenerateReqInput(**(filled | more))

    def sampling_params(self, spec: GenerateSpec) -> Any:
        sampling = spec.sampling
        overflow.check(sampling)
        # Only what differs from SGLang's default is named: each one costs on every request.
        given: dict[str, Any] = {"max_new_tokens": sampling.max_tokens}
        for name in SCALARS:
            value = getattr(sampling, name)
            if value is not None:
                given[name] = value
        self._fill_end(given, sampling)
        if spec.stream_interval is not None:
            given["stream_interval"] = spec.stream_interval
        if sampling.seed is not None:
            given["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if spec.custom_params is not None:
            given["custom_params"] = self._custom(spec.custom_params)
        if sampling.constraint is not None:
            given |= _constrained(sampling.constraint)
        try:
            params = self._params(**given)
            params.normalize(self._tokenizer)
            params.verify(self._vocab_size)
        except ValueError as error:
            raise _named(error, sampling) from error
        return params

    def _fill_end(self, given: dict[str, Any], sampling: Sampling) -> None:
        """When a choice ends, and what SGLang's matching of stop strings looks at."""
        if sampling.min_tokens is not None:
            given["min_new_tokens"] = sampling.min_tokens
        if sampling.stop:
            given["stop"] = list(sampling.stop)
            given["skip_special_tokens"] = sampling.skip_special_tokens
            given["spaces_between_special_tokens"] = sampling.spaces_between_special_tokens
        if sampling.stop_token_ids:
            given["stop_token_ids"] = set(sampling.stop_token_ids)
        if sampling.ignore_eos:
            given["ignore_eos"] = True
        if sampling.include_stop:
            given["no_stop_trim"] = True

    def choice(self, request: Any, spec: GenerateSpec, rid: str, index: int) -> Any:
        """The same request for one choice; the object may be the one that was given."""
        request.rid = rid
        if index:
            if spec.sampling.seed is not None:
                # It is on its way in another message already, encoded.
                request.sampling_params.sampling_seed = spec.sampling.seed + index
            if request.bootstrap_room is not None:
                # As SGLang's front end numbers them, on both legs.
                request.bootstrap_room += 1
        return request

    def prefix(self, request: Any, rid: str) -> Any:
        """A pass over the prompt alone, so that all choices find it cached."""
        from msgspec.structs import replace

        params = replace(request.sampling_params, max_new_tokens=0, min_new_tokens=0)
        return replace(
            request,
            rid=rid,
            sampling_params=params,
            stream=False,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_hidden_states=False,
        )

    # Embed.

    def embed(self, spec: EmbedSpec, rid: str) -> Any:
        self._check_length(len(spec.prompt))
        if spec.token_type_ids and len(spec.token_type_ids) != len(spec.prompt):
            raise InvalidArgument(
                "token_type_ids",
                f"must have one entry per prompt token ({len(spec.prompt)}), "
                f"got {len(spec.token_type_ids)}",
            )
        params = self._params(max_new_tokens=0)
        params.normalize(self._tokenizer)
        rank = self._rank(spec.rank, None)
        return self._io.TokenizedEmbeddingReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", spec.prompt),
            mm_inputs=None,
            token_type_ids=list(spec.token_type_ids) or None,
            sampling_params=params,
            **({} if rank is None else {"routed_dp_rank": rank}),
        )

    # Health.

    def probe(self, rid: str, *, generation: bool) -> Any:
        """The smallest request there is."""
        if not generation:
            return self.embed(EmbedSpec(rid, (0,)), rid)
        spec = GenerateSpec(rid, (0,), sampling=Sampling(temperature=0.0, max_tokens=1))
        if self._limits.role == "null":
            request = self.generate(spec)
        else:
            kv = KvTransfer(host=FAKE_BOOTSTRAP_HOST, room=0)
            request = self.generate(GenerateSpec(rid, (0,), sampling=spec.sampling, kv_transfer=kv))
        request.rid = rid
        return request

    # Parts.

    def _check_length(self, count: int) -> None:
        most = self._limits.max_prompt_tokens
        if most is not None and count >= most and not self._limits.truncates:
            raise InvalidArgument(
                _PROMPT, f"the prompt has {count} tokens and the engine takes fewer than {most}"
            )

    def _check_media(self, spec: GenerateSpec) -> None:
        limits, sent = self._limits, spec.media
        if spec.input_embeds:
            raise InvalidArgument("mm_inputs", "cannot stand in a prompt of input_embeds")
        if spec.references is not None:
            media.check_references(spec.references, limits.media_items)
        if sent is None:
            return
        if not limits.media:
            raise InvalidArgument("mm_inputs", "the model takes text only")
        if limits.language_only:
            raise InvalidArgument(
                "mm_inputs.pixel_values",
                "this server has the language model alone (--language-only): send references",
            )
        media.check(sent, len(spec.prompt))
        if limits.grid is None:
            media_grid.check_sizes(sent)
        else:
            limits.grid.check(sent, spec.prompt, limits.media_items)

    def _embeds(self, spec: GenerateSpec) -> list[list[float]]:
        width, flat = self._limits.hidden_size, spec.input_embeds
        if self._limits.prefix_cache:
            raise InvalidArgument(
                "input_embeds", "the server must be started with --disable-radix-cache to take them"
            )
        if self._facts.dtype is not None and not self._facts.dtype.endswith("bfloat16"):
            # SGLang makes bfloat16 of them whatever the model is, and its first layer raises.
            raise InvalidArgument(
                "input_embeds",
                f"the model must be bfloat16 to take them, it is {self._facts.dtype}",
            )
        if width is None or len(flat) % width:
            raise InvalidArgument(
                "input_embeds",
                f"must be whole rows of the model's hidden size ({width}), got {len(flat)} numbers",
            )
        count, limit = len(flat) // width, self._facts.max_context_length
        self._check_length(count)
        if limit is not None and count > limit:
            raise InvalidArgument(
                "input_embeds", f"{count} rows are more than the context length of {limit}"
            )
        # Last, because it takes a look at each of what may be millions.
        if not all(map(math.isfinite, flat)):
            raise InvalidArgument("input_embeds", "must be finite numbers")
        return [list(flat[at : at + width]) for at in range(0, len(flat), width)]

    def _hidden_states(self) -> bool | str:
        mode = self._limits.hidden_states
        if mode == "off":
            raise InvalidArgument(
                "return_hidden_states",
                "the server is not configured to return hidden states "
                "(--return-hidden-states-mode full)",
            )
        return True if mode == "full" else "last"

    def _processor(self, text: str) -> str:
        if not self._limits.logit_processors:
            raise InvalidArgument(
                "custom_logit_processor",
                "the server must be started with --enable-custom-logit-processor to take one",
            )
        try:
            # It runs code of the caller's, which the operator allowed; the scheduler would end
            # over one that cannot be read.
            processor = self._processors.from_str(text)
        except Exception as error:
            raise InvalidArgument(
                "custom_logit_processor",
                "must be what CustomLogitProcessor.to_str() gives and readable here: "
                f"{type(error).__name__}: {error}",
            ) from None
        if not isinstance(processor, self._processors):
            raise InvalidArgument(
                "custom_logit_processor",
                f"must be a CustomLogitProcessor, got {type(processor).__name__}",
            )
        return text

    def _custom(self, params: Mapping[str, object]) -> dict[str, object]:
        """As they are; in msgpack mode only what its decoder in the scheduler can read."""
        if not self._pickled:
            for name, value in params.items():
                parts: Sequence[object] = (value,)
                if isinstance(value, (list, dict)):
                    parts = list(value.values()) if isinstance(value, dict) else value
                if any(isinstance(part, (list, dict)) for part in parts):
                    raise InvalidArgument(
                        f"sampling_params.custom_params[{name!r}]", "must not be nested so deeply"
                    )
        return dict(params)

    def _bootstrap(self, kv: KvTransfer | None) -> dict[str, Any]:
        field, role = "disaggregated_params", self._limits.role
        if role == "null":
            if kv is not None:
                raise InvalidArgument(field, "this server runs without --disaggregation-mode")
            return {}
        if kv is None or kv.room is None:
            raise InvalidArgument(field, f"is required by a {role} server")
        if kv.host is None:
            raise InvalidArgument(f"{field}.bootstrap_host", "must not be empty")
        return {
            "bootstrap_host": kv.host,
            "bootstrap_port": kv.port,
            "bootstrap_room": kv.room,
        }

    def _rank(self, rank: int | None, room: int | None) -> int | None:
        ranks = self._limits.ranks
        if rank is not None and not 0 <= rank < ranks:
            allowed = "0" if ranks == 1 else f"between 0 and {ranks - 1}"
            raise InvalidArgument("data_parallel_rank", f"must be {allowed}, got {rank}")
        if self._limits.role == "prefill" and room is not None and ranks > 1:
            # Where the decode side will look for it.
            return room % ranks
        return rank


def _constrained(constraint: Constraint) -> dict[str, Any]:
    name = _CONSTRAINTS.get(constraint.kind)
    if name is None:
        raise FailedPrecondition(f"SGLang has no constraint of the kind {constraint.kind}")
    value = '{"type": "object"}' if constraint.kind == "json_object" else constraint.value
    return {name: value}


def _named(error: ValueError, sampling: Sampling) -> InvalidArgument:
    words = str(error)
    begins = _NAMED_FIRST.match(words)
    if begins is not None:
        return InvalidArgument(f"sampling_params.{begins[1]}", words)
    if "stop string" in words:
        return InvalidArgument("sampling_params.stop", words)
    if "reasoning" in words:
        return InvalidArgument("sampling_params.custom_params", words)
    return InvalidArgument("sampling_params", words)
