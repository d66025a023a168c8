"""The four protos from a client's side: the same request said in each engine's words.

A `Dialect` builds requests and stubs; what a proto cannot say raises `Unsayable`, so that a check
can tell "not in this proto" from "not served".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import grpc

Setter = Callable[[Any, Any], None]


class Unsayable(Exception):
    """The proto has no field for this."""


@dataclass(frozen=True)
class Dialect:
    """One proto as a client speaks it."""

    engine: str
    """Short name: mlx, vllm, sglang or tokenspeed."""
    service: str
    module: str
    """Generated module in `smg_grpc_proto.generated`, without `_pb2`."""
    renames: Mapping[str, str]
    """Sampling field names that differ from vLLM's."""
    logprobs_in_request: bool
    """Logprob options stand beside the sampling parameters instead of among them."""
    prompt_logprobs: bool
    """Answers have room for log-probabilities of the prompt."""
    abort_takes_list: bool
    off_top_k: int
    """What the gateway sends for "top_k off"."""

    @property
    def pb(self) -> Any:
        return import_module(f"smg_grpc_proto.generated.{self.module}_pb2")

    @property
    def lacks(self) -> frozenset[str]:
        """vLLM's sampling names that the proto has no field for."""
        own = self.pb.SamplingParams.DESCRIPTOR.fields_by_name
        vocabulary = DIALECTS["vllm"].pb.SamplingParams.DESCRIPTOR.fields_by_name
        names = {name for name in vocabulary if self.renames.get(name, name) not in own}
        names -= {"logprobs", "prompt_logprobs"}
        return frozenset(names if self.prompt_logprobs else names | {"prompt_logprobs"})

    def stub(self, channel: grpc.aio.Channel) -> Any:
        grpc_module = import_module(f"smg_grpc_proto.generated.{self.module}_pb2_grpc")
        return getattr(grpc_module, self.service.rsplit(".", 1)[1] + "Stub")(channel)

    def registrar(self) -> Callable[[Any, grpc.aio.Server], None]:
        """The generated `add_<Service>Servicer_to_server`."""
        grpc_module = import_module(f"smg_grpc_proto.generated.{self.module}_pb2_grpc")
        name = self.service.rsplit(".", 1)[1]
        registrar: Callable[[Any, grpc.aio.Server], None] = getattr(
            grpc_module, f"add_{name}Servicer_to_server"
        )
        return registrar

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        stream: bool = True,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        text: str | None = None,
        **sampling: Any,
    ) -> Any:
        """A GenerateRequest. Sampling names are vLLM's; temperature is 0 unless given.

        :raises Unsayable: the proto has no such field.
        """
        request = self.pb.GenerateRequest(request_id=request_id, stream=stream)
        if text is not None:
            if "text" not in request.DESCRIPTOR.fields_by_name:
                raise Unsayable(f"{self.service}: text")
            request.text = text
        else:
            request.tokenized.input_ids.extend(prompt)
        params = request.sampling_params
        if self.off_top_k:
            self._set(params, "top_k", self.off_top_k)
        for name, value in {"temperature": 0.0, **self._gateway_defaults(), **sampling}.items():
            if name in self.lacks:
                if name in sampling:
                    raise Unsayable(f"{self.service}: {name}")
                continue
            self._set(params, name, value)
        self._set_logprobs(request, logprobs, prompt_logprobs)
        return request

    def abort(self, request_id: str) -> Any:
        if self.abort_takes_list:
            return self.pb.AbortRequest(request_ids=[request_id])
        return self.pb.AbortRequest(request_id=request_id, reason="a test")

    def path(self, name: str) -> str:
        """Where a sampling field stands in the request, as an error should name it."""
        return f"sampling_params.{self.renames.get(name, name)}"

    def _gateway_defaults(self) -> dict[str, Any]:
        """What the gateway always fills in, so that plain scalars do not read as zero."""
        return {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1}

    def _set(self, params: Any, name: str, value: Any) -> None:
        name = self.renames.get(name, name)
        field = params.DESCRIPTOR.fields_by_name[name]
        target = getattr(params, name)
        if name == "logit_bias":
            text_keys = field.message_type.fields_by_name["key"].type == field.TYPE_STRING
            for key, bias in value.items():
                target[str(key) if text_keys else key] = bias
        elif name == "choice":
            target.choices.extend(value)
        elif isinstance(value, (list, tuple)):
            target.extend(value)
        else:
            setattr(params, name, value)

    def _set_logprobs(self, request: Any, output: int | None, prompt: int | None) -> None:
        if prompt is not None and not self.prompt_logprobs:
            raise Unsayable(f"{self.service}: prompt logprobs")
        if not self.logprobs_in_request:
            params = request.sampling_params
            if output is not None:
                params.logprobs = output
            if prompt is not None:
                params.prompt_logprobs = prompt
        elif output is not None or prompt is not None:
            # One width for both here, and output rows always come along.
            request.return_logprob = True
            request.top_logprobs_num = max(count for count in (output, prompt) if count is not None)
            request.logprob_start_len = -1 if prompt is None else 0


_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "grammar": "ebnf_grammar",
}

DIALECTS: Mapping[str, Dialect] = {
    dialect.engine: dialect
    for dialect in (
        Dialect(
            engine="mlx",
            service="mlx.grpc.engine.MlxEngine",
            module="mlx_engine",
            renames={},
            logprobs_in_request=False,
            prompt_logprobs=False,
            abort_takes_list=True,
            off_top_k=0,
        ),
        Dialect(
            engine="vllm",
            service="vllm.grpc.engine.VllmEngine",
            module="vllm_engine",
            renames={},
            logprobs_in_request=False,
            prompt_logprobs=True,
            abort_takes_list=True,
            off_top_k=0,
        ),
        Dialect(
            engine="sglang",
            service="sglang.grpc.scheduler.SglangScheduler",
            module="sglang_scheduler",
            renames=_SGLANG_NAMES,
            logprobs_in_request=True,
            prompt_logprobs=True,
            abort_takes_list=False,
            off_top_k=-1,
        ),
        Dialect(
            engine="tokenspeed",
            service="tokenspeed.grpc.scheduler.TokenSpeedScheduler",
            module="tokenspeed_scheduler",
            renames={**_SGLANG_NAMES, "seed": "sampling_seed"},
            logprobs_in_request=True,
            prompt_logprobs=False,
            abort_takes_list=False,
            off_top_k=-1,
        ),
    )
}
"""By short name."""
