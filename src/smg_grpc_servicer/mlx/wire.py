"""`mlx.grpc.engine.MlxEngine`: proto to core and back.

The proto's plain scalars cannot tell "unset" from zero; zero means off there, as the gateway
sends it. Source: `mlx_engine.proto` of smg-grpc-proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import Delta, Finish, GenerateSpec, LogprobSpec, Sampling
from smg_grpc_servicer.core.wire import Choice, Wire
from smg_grpc_servicer.core.wire_parts import fill_end, fill_output, given, scalars


class MlxWire(Wire):
    """See the module."""

    service: ClassVar[str] = "mlx.grpc.engine.MlxEngine"
    proto: ClassVar[Any] = pb
    paths: ClassVar[Mapping[str, str]] = {
        "prompt": "tokenized.input_ids",
        "text": "text",
        "rank": "data_parallel_rank",
    }

    def generate_spec(self, request: pb.GenerateRequest) -> GenerateSpec:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgument("input", "one of tokenized and text is required")
        sent = request.sampling_params
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            text=request.text if kind == "text" else None,
            sampling=Sampling(
                **scalars(sent),
                max_tokens=given(sent, "max_tokens"),
                stop_token_ids=tuple(sent.stop_token_ids),
                ignore_eos=sent.ignore_eos,
                seed=given(sent, "seed"),
                logit_bias=dict(sent.logit_bias),
            ),
            # Zero asks for none here: what the published package does, and all the gateway sends.
            logprobs=LogprobSpec(output=sent.logprobs or None),
            stream=request.stream,
        )

    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> pb.GenerateResponse:
        response, _ = choice.message(pb.GenerateResponse, delta)
        if delta.logprobs is not None:
            fill_output(response.chunk.output_logprobs, delta.token_ids, delta.logprobs)
        return response

    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        complete = response.complete
        fill_end(complete, choice, finish)
        if isinstance(finish.matched, int):
            complete.matched_stop_token_id = finish.matched
        if choice.logprobs is not None:
            fill_output(complete.output_logprobs, choice.token_ids, choice.logprobs)
        return response
