"""Requests that would kill or wedge a headless engine are refused in the engine's own process.

vLLM checks requests in its front end, and `EngineCore` believes them: an id outside the vocabulary,
an empty prompt or one as long as the context ends it, and all streams with it; one that cannot be
decoded ends the thread that reads requests, and nothing is answered any more. The Rust server of
today sends such requests on. Each comes by `EngineCore.preprocess_add_request`, on that thread, and
what it raises ends that request alone (`finish_reason` "error", which the Rust server makes
INTERNAL). Costs a few microseconds a request. Seen on vLLM 0.28 to 0.33.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from smg_grpc_servicer.rust import guard
from smg_grpc_servicer.vllm import log_lines

log = logging.getLogger(__name__)

_stock: list[Callable[..., None]] = []

PROMPT_LOGPROBS_FIELDS = 4
"""Of `LogprobsTensors` that the Rust server reads. vLLM 0.32 has one more, unused there, and what
cannot be read is dropped: nobody is told, and the request hangs."""


class Refused(ValueError):
    """A request that this engine must not run; the message says why."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In the place of a request that could not be decoded: what its error is sent by."""

    request_id: str
    client_index: int
    fault: str


def spread() -> None:
    """Have every engine that this process starts from here on check its requests."""
    from vllm.v1.engine.core import EngineCoreProc

    if not _stock:
        # vLLM starts its engines with this function, in new processes that look it up by name.
        _stock.append(EngineCoreProc.run_engine_core)
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """In the engine's process: vLLM's own, after `install`."""
    from vllm.v1.engine.core import EngineCoreProc

    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        guard.die_with(parent.pid)
    log_lines.configure("info", None)
    install()
    # A forked process has the list; a spawned one has the stock function in its place.
    run: Callable[..., None] = _stock[0] if _stock else EngineCoreProc.run_engine_core
    run(*args, **kwargs)


def install() -> None:
    """Check what engines of this process are given, and that what they give can be read."""
    from vllm.v1.engine import core

    core.MsgpackDecoder = _reading_all(core.MsgpackDecoder, core.EngineCoreRequest)
    core.MsgpackEncoder = _readable(core.MsgpackEncoder, core.EngineCoreOutputs)
    engine = core.EngineCoreProc
    engine.preprocess_add_request = _checking(engine.preprocess_add_request)
    engine._handle_request_preproc_error = _answering(  # noqa: SLF001
        engine._handle_request_preproc_error  # noqa: SLF001
    )
    engine.process_input_sockets = _not_outlived(engine.process_input_sockets)


def _reading_all(decoder: type[Any], request: type[Any]) -> type[Any]:
    """A decoder whose requests that cannot be read come out as `Unreadable`."""

    class Decoder(decoder):  # type: ignore[misc] # vLLM's, whatever it is
        def __init__(self, t: Any = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(t, *args, **kwargs)
            self._of_requests = t is request

        def decode(self, bufs: Any) -> Any:
            try:
                return super().decode(bufs)
            except Exception as error:
                if not self._of_requests:
                    raise
                return unreadable(bufs[0], request, error)

    return Decoder


def _readable(encoder: type[Any], outputs: type[Any]) -> type[Any]:
    """An encoder whose prompt logprobs the Rust server reads."""

    class Encoder(encoder):  # type: ignore[misc] # as above
        def encode_into(self, obj: Any, buf: bytearray) -> Any:
            if isinstance(obj, outputs):
                for output in obj.outputs:
                    if (rows := output.new_prompt_logprobs_tensors) is not None:
                        output.new_prompt_logprobs_tensors = tuple(rows)[:PROMPT_LOGPROBS_FIELDS]
            return super().encode_into(obj, buf)

    return Encoder


def unreadable(frame: Any, request: type[Any], error: Exception) -> Unreadable:
    """Whose request it was that could not be decoded.

    :raises Exception: not even that can be read.
    """
    import msgspec

    # Tensors and numbers of other kinds travel as extension types: they are not looked into.
    values = msgspec.msgpack.decode(frame, ext_hook=lambda code, data: None)
    at = request.__struct_fields__.index("client_index")
    index = values[at] if len(values) > at else 0
    return Unreadable(str(values[0]), index, f"it cannot be read: {error}")


def _checking(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if isinstance(request, Unreadable):
            raise Refused(request.fault)
        try:
            check(request, self.vllm_config)
            if request.mm_features:
                room = self.scheduler.encoder_cache_manager.cache_size
                check_media(request.mm_features, len(request.prompt_token_ids or ()), room)
        except ValueError as error:
            raise Refused(str(error)) from None
        return stock(self, request)

    return preprocess_add_request


def _answering(stock: Callable[..., None]) -> Callable[..., None]:
    """vLLM's answer to a failed request, with one line in the log in place of a traceback."""

    @functools.wraps(stock)
    def handle(self: Any, request: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, Refused):
            stock(self, request)
            return
        log.warning("request %s is refused: %s", request.request_id, error)
        self._send_error_outputs_to_client([request.request_id], request.client_index)

    return handle


def _not_outlived(stock: Callable[..., None]) -> Callable[..., None]:
    """The engine ends with the thread that reads its requests: without it, it only looks alive."""

    @functools.wraps(stock)
    def process_input_sockets(self: Any, *args: Any, **kwargs: Any) -> None:
        import zmq

        try:
            stock(self, *args, **kwargs)
        except zmq.ZMQError:
            raise  # its sockets were closed: it is being shut down
        except Exception:
            log.exception("the engine cannot read requests any more")
            os._exit(1)

    return process_input_sockets


def check(request: Any, vllm_config: Any) -> None:
    """What vLLM's front end would have said.

    :param request: an `EngineCoreRequest`.
    :raises ValueError: a `Refused`, or vLLM's own.
    """
    model = vllm_config.model_config
    if request.prompt_embeds is None:
        _check_prompt(request.prompt_token_ids, model)
    if request.mm_features and not model.is_multimodal_model:
        raise Refused("media for a model that takes none")
    params = request.sampling_params
    if params is None:
        if request.pooling_params is None:
            raise Refused("neither sampling nor pooling parameters")
        if model.runner_type == "generate":
            raise Refused("an embedding from a model that is served for text")
        request.pooling_params.verify(model)
        return
    if model.runner_type != "generate":
        raise Refused("text from a model that is served for pooling")
    _check_sampling(params, model, vllm_config)


def check_media(features: Iterable[Any], length: int, room: int) -> None:
    """Where media stand in a prompt of `length` tokens, for an encoder cache of `room`.

    What does not fit into the cache is never scheduled, and nothing that came after it.

    :raises Refused: the engine would end, or wait for ever.
    """
    for feature in features:
        place = feature.mm_position
        end = place.offset + place.length
        if place.offset < 0 or place.length < 1 or end > length:
            raise Refused(
                f"media at {place.offset} to {end}; allowed: inside the prompt of {length} tokens"
            )
        if place.is_embed is not None and tuple(place.is_embed.shape) != (place.length,):
            raise Refused(
                f"media whose mask is of {list(place.is_embed.shape)}; allowed: [{place.length}]"
            )
        embeds = place.get_num_embeds()
        if embeds > room:
            raise Refused(f"media of {embeds} tokens; allowed: at most {room}")


def _check_prompt(ids: Any, model: Any) -> None:
    if not ids:
        raise Refused("the prompt is empty")
    length = len(ids)
    room = model.max_model_len if model.runner_type != "generate" else model.max_model_len - 1
    if length > room:
        raise Refused(f"a prompt of {length} tokens; allowed: at most {room}")
    _check_ids("prompt", ids, model)


def _check_sampling(params: Any, model: Any, vllm_config: Any) -> None:
    # Constraints are checked where their grammar is compiled, which ends the request alone.
    params.verify(model, vllm_config.speculative_config, None, None)
    _check_ids("stop_token_ids", params.all_stop_token_ids, model)
    bias = params.logit_bias or {}
    _check_ids("logit_bias", bias, model)
    if not all(map(math.isfinite, bias.values())):
        raise Refused("logit_bias: a value that is no number")
    given = (params.extra_args or {}).get("kv_transfer_params")
    if given and vllm_config.kv_transfer_config is None and given.get("do_remote_prefill"):
        raise Refused("a prefill from elsewhere, but this engine has no KV connector")


def _check_ids(name: str, ids: Iterable[int], model: Any) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    size = model.get_vocab_size()
    if low < 0 or high >= size:
        raise Refused(f"{name}: id {low if low < 0 else high}; allowed: 0 to {size - 1}")
