"""The vocabulary: what a request is and what an engine answers, in no engine's own terms.

`None` means "the caller left it out" or "nobody knows"; nothing here is invented. Values are
frozen; `Delta` and `LogprobRows` are not, because the mailbox grows them in place (one object
per hand-over, not per token).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from smg_grpc_servicer.core.payloads import HiddenStates, Media, MediaReferences


class Feature(Enum):
    """What a request can need. An engine names what it has; the value is the client's wording."""

    TEXT_INPUT = "text input (send token ids)"
    CHOICES = "more than one choice (n > 1)"
    STOP_STRINGS = "stop strings"
    MIN_TOKENS = "a minimum number of output tokens"
    CONSTRAINT = "structured output (json, regex, grammar, choice, structural tag)"
    PROMPT_LOGPROBS = "prompt logprobs"
    TOKEN_LOGPROBS = "logprobs of chosen token ids"
    HIDDEN_STATES = "hidden states"
    INPUT_EMBEDS = "input embeddings"
    MEDIA = "multimodal input"
    MEDIA_REFERENCES = "references to media (send preprocessed tensors)"
    LORA = "LoRA adapters"
    RANK = "a pinned data-parallel rank"
    KV_TRANSFER = "KV transfer (prefill/decode disaggregation)"
    LOGIT_PROCESSOR = "custom logit processors"
    CUSTOM_PARAMS = "custom parameters"
    TRUNCATION = "prompt truncation"
    EMBED = "embeddings"
    FLUSH_CACHE = "flushing the prefix cache"
    PROFILE = "profiling"
    LOADS = "load reports"
    KV_EVENTS = "KV events"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Structured output: json_schema, json_object, regex, grammar, choice or structural_tag."""

    kind: str
    value: str | tuple[str, ...]
    from_first_token: bool = False
    """It holds from the first generated token, whatever reasoning parser the engine runs."""


FEW = 16
"""Stop token ids; models have a handful."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are picked and when a choice ends."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Off when None; never 0."""
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop: bool = False
    """Keep the matched stop string in the output."""
    n: int = 1
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None

    @property
    def needs(self) -> Iterator[Feature]:
        """What of it not every engine has."""
        if self.n > 1:
            yield Feature.CHOICES
        if self.stop:
            yield Feature.STOP_STRINGS
        if self.min_tokens is not None:
            yield Feature.MIN_TOKENS
        if self.constraint:
            yield Feature.CONSTRAINT

    @property
    def is_small(self) -> bool:
        """Whether what follows from it is worth being remembered: applications repeat theirs."""
        return not (
            self.stop or self.logit_bias or self.constraint or len(self.stop_token_ids) > FEW
        )

    def __hash__(self) -> int:
        """Of what tells most requests apart: this is asked on every one of them."""
        return hash((self.temperature, self.top_p, self.max_tokens, self.seed, self.stop_token_ids))


SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""Of `Sampling`: every proto and every engine has them by these names."""


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """Which log-probabilities come back. Counts: None = none, 0 = the token's own, -1 = all."""

    output: int | None = None
    prompt: int | None = None
    prompt_start: int = 0
    """First prompt position that gets a row."""
    token_ids: tuple[int, ...] = ()

    @property
    def needs(self) -> Iterator[Feature]:
        """What of it not every engine has."""
        if self.prompt is not None:
            yield Feature.PROMPT_LOGPROBS
        if self.token_ids:
            yield Feature.TOKEN_LOGPROBS


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Prefill/decode hand-over: a connector's JSON object, verbatim, or a bootstrap address."""

    params_json: str | None = None
    host: str | None = None
    port: int | None = None
    room: int | None = None


@dataclass(slots=True)
class GenerateSpec:
    """One Generate request in core terms; once checked, the core fills in prompt and trace."""

    request_id: str
    prompt: Sequence[int] = ()
    """Prompt token ids; empty while `text` waits to be tokenized."""
    text: str | None = None
    truncate_prompt: int | None = None
    """Keep at most this many of the prompt's last ids; -1 = as many as leave room for output."""
    sampling: Sampling = Sampling()
    logprobs: LogprobSpec = LogprobSpec()
    stream: bool = False
    rank: int | None = None
    """Data-parallel rank this request is pinned to."""
    lora_id: str | None = None
    kv_transfer: KvTransfer | None = None
    count_reasoning: bool = False
    """The request thinks: its reasoning tokens are to be counted."""
    stream_interval: int | None = None
    """Steps between two outputs of a stream; None leaves it to the engine."""
    input_embeds: Sequence[float] = ()
    """Instead of prompt ids: one row of the model's hidden size per position, end to end."""
    custom_params: Mapping[str, object] | None = None
    """What a custom logit processor reads; whole numbers are int."""
    logit_processor: str | None = None
    """A custom logit processor as the engine serializes it."""
    hidden_states: bool = False
    media: Media | None = None
    references: MediaReferences | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C `traceparent` and `tracestate`."""

    @property
    def needs(self) -> frozenset[Feature]:
        """What an engine must have to serve it."""
        return frozenset(self._needs())

    def _needs(self) -> Iterator[Feature]:
        yield from self.sampling.needs
        yield from self.logprobs.needs
        if self.text is not None:
            yield Feature.TEXT_INPUT
        if self.lora_id is not None:
            yield Feature.LORA
        if self.rank is not None:
            yield Feature.RANK
        if self.kv_transfer:
            yield Feature.KV_TRANSFER
        if self.truncate_prompt is not None:
            yield Feature.TRUNCATION
        if self.input_embeds:
            yield Feature.INPUT_EMBEDS
        if self.custom_params is not None:
            yield Feature.CUSTOM_PARAMS
        if self.logit_processor is not None:
            yield Feature.LOGIT_PROCESSOR
        if self.hidden_states:
            yield Feature.HIDDEN_STATES
        if self.media is not None:
            yield Feature.MEDIA
        if self.references is not None:
            yield Feature.MEDIA_REFERENCES


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities of consecutive output tokens; all lists have one entry per token.

    `values[i]` is the token's own; `top_ids[i]`, `top_values[i]` the k best, best first;
    `chosen[i]` those of `LogprobSpec.token_ids`, in that order (empty when none were asked for).
    """

    values: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_values: list[list[float]] = field(default_factory=list)
    chosen: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, other: LogprobRows) -> None:
        self.values += other.values
        self.top_ids += other.top_ids
        self.top_values += other.top_values
        self.chosen += other.chosen

    def slice(self, start: int, end: int) -> LogprobRows:
        return LogprobRows(
            self.values[start:end],
            self.top_ids[start:end],
            self.top_values[start:end],
            self.chosen[start:end],
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens; a first token has no value (None)."""

    token_ids: Sequence[int]
    values: Sequence[float | None]
    top_ids: Sequence[Sequence[int]] = ()
    top_values: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended: `stop`, `length` or `abort`, and what only its end can tell."""

    reason: str
    matched: int | str | None = None
    """The stop token id or stop string that the caller asked for and that matched."""
    spec_accepted_tokens: int | None = None
    spec_draft_tokens: int | None = None
    kv_transfer: KvTransfer | None = None
    hidden_states: HiddenStates | None = None


@dataclass(slots=True)
class Delta:
    """What an engine produced for one choice since it last told: new ids, perhaps the end."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    finish: Finish | None = None
    prompt_tokens: int | None = None
    """Counts are cumulative and None when unchanged; the prompt's as the engine saw it."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: str | None = None


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """One Embed request."""

    request_id: str
    prompt: Sequence[int]
    rank: int | None = None
    token_type_ids: Sequence[int] = ()
    """One per prompt token, for models with segments; empty when there are none."""
    needs: frozenset[Feature] = frozenset()
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embedding:
    """A pooled vector (float32) and the prompt tokens behind it."""

    values: Sequence[float]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """Options of StartProfile; unset means the engine's default."""

    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: tuple[str, ...] = ()
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model is. Token ids and sizes are None when the model does not say."""

    model_path: str
    served_model_name: str
    tokenizer_path: str | None = None
    is_generation: bool = True
    supports_vision: bool = False
    max_context_length: int | None = None
    max_prompt_tokens: int | None = None
    vocab_size: int | None = None
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    preferred_sampling: Mapping[str, object] = field(default_factory=dict)
    """The operator's own defaults; those the gateway applies are in `default_sampling` too."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Names of a classifier's outputs."""
    weight_version: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class PairingFacts:
    """What a prefill and a decode must agree on, and where a constraint starts; vLLM tells it."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_engine_id: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    """The one asked for; None when the engine picks it itself."""
    model_dtype: str | None = None
    pairing_protocol: str | None = None
    """Set by the operator; two that both have one pair only when they are equal."""
    encoder_dtype: str | None = None
    shm_namespace_id: str | None = None
    reasoning_parser: str | None = None
    constraint_start: str | None = None
    """`after_reasoning` or `first_token`."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server is. `server_args` and `scheduler_info` go out redacted."""

    server_type: str
    """As the published package names it, for example `mlx-grpc`."""
    version: str | None = None
    """The engine's."""
    data_parallel_size: int | None = None
    max_running_requests: int | None = None
    block_size: int | None = None
    is_paused: bool = False
    server_args: Mapping[str, object] = field(default_factory=dict)
    scheduler_info: Mapping[str, object] = field(default_factory=dict)
    pairing: PairingFacts | None = None
