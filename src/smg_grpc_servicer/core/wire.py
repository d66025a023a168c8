"""The port between the RPC bodies and one engine's proto; a wing's `wire.py` implements it.

A wire knows protobuf and the vocabulary, never an engine, so that any wire can be served over any
engine. Which request field became what is told by its tables; a test walks the descriptors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Delta,
    Embedding,
    EmbedSpec,
    Finish,
    GenerateSpec,
    LogprobRows,
    ModelFacts,
    ProfileSpec,
    PromptLogprobs,
    ServerFacts,
)
from smg_grpc_servicer.core.wire_facts import filled, model_info

Message = Any
"""A protobuf message; the generated classes have no common typed base."""
M = TypeVar("M")


@dataclass(slots=True)
class Choice:
    """What one choice of a request has produced so far."""

    index: int
    prompt_tokens: int
    stream: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    """All rows of an answer sent whole; a stream's rows travel in its chunks only."""
    prompt_logprobs: PromptLogprobs | None = None
    chosen: list[list[float]] = field(default_factory=list)
    """Of a stream: all rows of chosen token ids, which SGLang's proto repeats at the end."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    weight_version: str | None = None
    _chunk: Message | None = None
    _counts_new: bool = False

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def message(self, make: Callable[[], M], delta: Delta) -> tuple[M, bool]:
        """This delta's response with all that every proto has, and whether to fill in more.

        It is the same message again while there are only ids: it is serialised before its write
        first waits, so it is free by then, and a new one costs more than all that is set in it.
        Rows would leave their memory behind.
        """
        response: Any
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            response, new = make(), True
        elif self._chunk is None:
            response, new = make(), True
            self._chunk = response
        else:
            response, new = self._chunk, self._counts_new
            self._counts_new = False
        chunk = response.chunk
        chunk.token_ids[:] = delta.token_ids
        chunk.completion_tokens = len(self.token_ids)
        if new:
            chunk.prompt_tokens = self.prompt_tokens
            chunk.cached_tokens = self.cached_tokens
            chunk.index = self.index
        return response, new

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
            self._counts_new = True
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
            self._counts_new = True
        if delta.reasoning_tokens is not None:
            self.reasoning_tokens = delta.reasoning_tokens
            self._counts_new = True
        if delta.weight_version is not None:
            self.weight_version = delta.weight_version
            self._counts_new = True
        if not self.stream:
            self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
            if delta.logprobs is not None:
                if self.logprobs is None:
                    self.logprobs = delta.logprobs
                else:
                    self.logprobs.extend(delta.logprobs)
        elif delta.logprobs is not None and delta.logprobs.chosen:
            self.chosen += delta.logprobs.chosen


@dataclass(frozen=True, slots=True)
class LiveFacts:
    """What changes while a server runs."""

    active_requests: int
    uptime_seconds: float
    started_at: float
    """Seconds since the epoch."""
    last_receive_at: float | None = None


class Wire(ABC):
    """One proto service, both ways."""

    proto: ClassVar[Any]
    """The generated module with its messages."""
    service: ClassVar[str]
    """Full name, for example `mlx.grpc.engine.MlxEngine`; also its readiness name in health."""
    paths: ClassVar[Mapping[str, str]] = {}
    """Core name to the field's path in the request, unless that is `sampling_params.<name>`."""

    def path(self, name: str) -> str:
        """How the caller calls what core calls `name`."""
        return self.paths.get(name, f"sampling_params.{name}")

    # Generate.

    @abstractmethod
    def generate_spec(self, request: Message) -> GenerateSpec:
        """:raises InvalidArgument: naming the field."""

    @abstractmethod
    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> Message:
        """New tokens of a stream; `choice` already counts them.

        Good until the choice's next chunk, see `Choice.message`.
        """

    @abstractmethod
    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> Message:
        """The end of a choice, with its logprobs when it was not streamed."""

    # What the protos have alike; a wing overrides where its own differs.

    def abort_ids(self, request: Message) -> Sequence[str]:
        return list(request.request_ids)

    def abort_response(self, found: Sequence[str]) -> Message:
        return self.proto.AbortResponse()

    def health_response(self, healthy: bool, message: str) -> Message:
        return self.proto.HealthCheckResponse(healthy=healthy, message=message)

    def model_info(self, facts: ModelFacts) -> Message:
        return model_info(self.proto.GetModelInfoResponse, facts)

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> Message:
        started = Timestamp()
        started.FromNanoseconds(int(live.started_at * 1e9))
        return filled(
            self.proto.GetServerInfoResponse,
            server_type=facts.server_type,
            active_requests=live.active_requests,
            is_paused=facts.is_paused,
            last_receive_timestamp=live.last_receive_at,
            uptime_seconds=live.uptime_seconds,
            start_time=started,
        )

    # What not every proto has.

    def embed_spec(self, request: Message) -> EmbedSpec:
        raise NotImplementedError(f"{self.service} has no Embed")

    def embed_response(self, embedding: Embedding) -> Message:
        return self.proto.EmbedResponse(
            embedding=embedding.values,
            prompt_tokens=embedding.prompt_tokens,
            embedding_dim=len(embedding.values),
        )

    def loads_response(self, request: Message, loads: Sequence[Load], version: str) -> Message:
        raise NotImplementedError(f"{self.service} has no GetLoads")

    # Shared by the protos' common messages.

    def flush_timeout(self, request: Message) -> float | None:
        """Seconds to wait for the engine to be idle; None when the caller sets no bound."""
        if not 0 <= request.timeout_s < math.inf:
            raise InvalidArgument(
                "timeout_s", f"must be a finite number and not negative, got {request.timeout_s:g}"
            )
        return float(request.timeout_s) or None

    def profile_spec(self, request: Message) -> ProfileSpec:
        def optional(name: str) -> Any:
            return getattr(request, name) if request.HasField(name) else None

        return ProfileSpec(
            output_dir=optional("output_dir"),
            start_step=optional("start_step"),
            num_steps=optional("num_steps"),
            activities=tuple(request.activities),
            profile_by_stage=request.profile_by_stage,
            with_stack=optional("with_stack"),
            record_shapes=optional("record_shapes"),
        )
