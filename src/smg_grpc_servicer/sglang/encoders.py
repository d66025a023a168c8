"""Encoders of their own (EPD): a language-only server has the media of its requests encoded there.

What SGLang's tokenizer manager does for `--language-only`, by SGLang's own receiver: encoders stand
in `--encoder-urls` or register themselves, each request's references are sent to them, and what
they make of them comes to the scheduler, or for `zmq_to_tokenizer` to this process. The encoder
itself is SGLang's own server (`--encoder-only`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Event
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError, Exhausted, Unavailable
from smg_grpc_servicer.core.payloads import MediaReferences

log = logging.getLogger(__name__)

Encode = Callable[..., Coroutine[Any, Any, Any]]

TO_THIS_PROCESS = "zmq_to_tokenizer"
MOST = 512
"""Choices that are sent to encoders at once: SGLang's receiver has a thread for each, and keeps it
when the client has gone, as long as an encoder says nothing."""


class Encoders:
    """On the event loop.

    :param receiver: SGLang's `MMReceiver…`.
    :param processor: of `media_processor`; needed where embeddings come to this process.
    """

    def __init__(
        self, receiver: Any, backend: str, processor: Any, close: Callable[[], None] = lambda: None
    ) -> None:
        self._receiver = receiver
        self._here = backend == TO_THIS_PROCESS
        self._processor = processor
        self._under_way: set[str] = set()
        """Choices that a thread of the receiver's works on."""
        self.close = close

    @classmethod
    def of(
        cls, server_args: Any, config: Any, model_config: Any, processor: Any
    ) -> Encoders | None:
        """After SGLang's `publish`; None unless the launch is `--language-only`.

        :raises ConfigError: SGLang's receiver cannot work with these encoders.
        """
        if not config.language_only:
            return None
        from sglang.srt.disaggregation.encoder.receiver import (
            EncoderBootstrapServer,
            create_mm_receiver,
        )
        from sglang.srt.environ import envs

        urls = list(config.encoder_urls)
        registry = EncoderBootstrapServer(
            host=config.host, port=config.encoder_bootstrap_port, urls=urls
        )
        receiver = create_mm_receiver(
            server_args,
            dtype=model_config.dtype,
            hf_config=model_config.hf_config,
            # The registry adds to this very list.
            encode_urls=urls,
        )
        backend = config.encoder_transfer_backend
        takes = inspect.signature(receiver.encode).parameters
        if backend != TO_THIS_PROCESS and "time_stats_json" not in takes:
            # 0.5.23: its receiver hands that to every encoder, and this one does not take it.
            raise ConfigError(
                f"--encoder-transfer-backend: got {backend}; allowed with gRPC encoders on this "
                f"SGLang: {TO_THIS_PROCESS}"
            )
        made = cls(receiver, backend, processor, registry.close)
        receiver.encode = made.watched(receiver.encode, envs.SGLANG_ENCODER_RECV_TIMEOUT.get())
        return made

    def watched(self, encode: Encode, seconds: float) -> Encode:
        """`encode`, which ends when nobody waits for the media any more: after 3 minutes, unless
        the operator says otherwise, where its own bound is half an hour.
        """

        async def watched(req_id: str, *args: Any, **named: Any) -> Any:
            try:
                return await asyncio.wait_for(encode(req_id, *args, **named), seconds)
            except asyncio.TimeoutError:
                raise TimeoutError(f"no encoder has answered in {seconds:g} s") from None
            finally:
                self._under_way.discard(req_id)

        return watched

    async def encoded(self, references: MediaReferences, request: Any) -> None:
        """Before any choice is sent: put what was made of the media into the request, where it
        comes to this process.

        :raises Unavailable: no encoder made anything of them.
        """
        if not self._here:
            return
        made = await self._receiver.recv_mm_data(
            request_obj=_asked(references, request),
            mm_processor=self._processor,
            prompt=list(request.input_ids),
            need_wait_for_mm_inputs=True,
        )
        if made is None:
            raise Unavailable("the media could not be encoded: no encoder gave an answer")
        request.mm_inputs = made
        request.input_ids = array("q", made.input_ids)

    def dispatch(
        self, references: MediaReferences, request: Any, forward: Callable[[Any], None]
    ) -> Event | None:
        """For one choice, which has its id: have its media encoded for the scheduler.

        :param forward: sends the scheduler word that this failed; called on the loop.
        :return: to be set once the request has been sent; None when nothing is to be waited for.
        :raises Unavailable: there is no encoder.
        :raises Exhausted: they have too much to do.
        """
        if self._here:
            return None
        loop = asyncio.get_running_loop()

        def failed(error: Any) -> None:
            self._under_way.discard(error.rid)
            log.warning("the media of request %r were not encoded: %s", error.rid, error.error_msg)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(forward, error)

        if len(self._under_way) >= MOST:
            raise Exhausted(f"{MOST} requests wait for the encoders already")
        asked = _asked(references, request)
        self._under_way.add(request.rid)
        sent: Event | None = None
        try:
            sent = self._receiver.send_encode_request(asked, on_dispatch_error=failed)
        finally:
            if sent is None:
                self._under_way.discard(request.rid)
        if sent is None:
            raise Unavailable("the media cannot be encoded: no encoder is there")
        request.need_wait_for_mm_inputs = True
        request.num_items_assigned = asked.num_items_assigned
        request.encoder_urls = asked.encoder_urls
        return sent


def _asked(references: MediaReferences, request: Any) -> Any:
    """What SGLang's receiver reads of an HTTP request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        rid=request.rid,
        input_ids=list(request.input_ids),
        image_data=list(references.images) or None,
        video_data=list(references.videos) or None,
        audio_data=list(references.audios) or None,
    )
