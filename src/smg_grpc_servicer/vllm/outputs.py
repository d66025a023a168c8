"""vLLM's `RequestOutput` to core deltas, and the end of a request.

A `Relay` stands where vLLM puts a request's outputs (or errors): on the event loop, one call per
output, straight into the mailbox. Nothing is put after the end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from smg_grpc_servicer.core.errors import Internal, InvalidArgument
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.types import Delta, Finish, GenerateSpec, KvTransfer
from smg_grpc_servicer.vllm.failures import translate
from smg_grpc_servicer.vllm.loads import Tracked
from smg_grpc_servicer.vllm.logprobs import output_rows, prompt_rows

log = logging.getLogger(__name__)

FAILED = "the engine failed this request (finish reason `error`): its log has the cause"

_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
"""vLLM's finish reasons; a detected repetition is an end of the engine's choosing."""


class Relay:
    """One request's way from vLLM to its mailbox."""

    __slots__ = ("_mailbox", "_on_end", "_plain", "_spec", "_started", "_stops", "closed", "counts")

    def __init__(
        self,
        spec: GenerateSpec,
        mailbox: Mailbox,
        counts: Tracked,
        on_end: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._mailbox = mailbox
        self.counts = counts
        self._on_end: Callable[[], None] | None = on_end
        self._plain = spec.logprobs.output is None
        self._started: set[int] = set()
        self._stops = frozenset((*spec.sampling.stop_token_ids, *spec.sampling.stop))
        self.closed = False

    def put(self, output: Any) -> None:
        """An output or an exception; what vLLM's own collector takes."""
        if self.closed:
            return
        if isinstance(output, Exception):
            self.fail(output)
            return
        try:
            for part in output.outputs:
                if part.finish_reason is None and self._plain and part.index in self._started:
                    self.counts.generated(len(part.token_ids))
                    self._mailbox.put_ids(part.index, part.token_ids)
                elif part.finish_reason == "error":
                    self.fail(self._failed(part))
                    return
                else:
                    self._mailbox.put(self._delta(output, part))
            if output.finished:
                self.close()
        except Exception as error:
            # It must not reach vLLM's output loop, which would end all requests.
            log.exception("an output of request %s was not understood", self._spec.request_id)
            self.fail(error)

    def _failed(self, part: Any) -> Exception:
        """vLLM tells no cause. In a choice's first output it is nearly always a grammar that allows
        no token; the one that it refused may stand there.
        """
        constraint = self._spec.sampling.constraint
        if constraint is None or part.index in self._started:
            return Internal(FAILED)
        return InvalidArgument(
            f"sampling_params.{constraint.kind}",
            "the engine failed this request before its first token, as it does when a constraint "
            "allows none or takes too long to compile; its log has the cause",
        )

    def fail(self, error: Exception) -> None:
        if not self.closed:
            self._mailbox.fail(translate(error))
            self._end()

    def close(self) -> None:
        """Nobody listens any more."""
        if not self.closed:
            self._end()

    def _end(self) -> None:
        self.closed = True
        self.counts.left()
        # Dropped after use: it leads back here, and a circle would wait for the collector.
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _delta(self, output: Any, part: Any) -> Delta:
        token_ids = list(part.token_ids)
        delta = Delta(part.index, token_ids)
        counts = self.counts
        counts.generated(len(token_ids))
        wanted = self._spec.logprobs
        if wanted.output is not None and token_ids:
            delta.logprobs = output_rows(part.logprobs or (), token_ids, wanted.output)
        if part.index not in self._started:
            self._started.add(part.index)
            delta.prompt_tokens = len(output.prompt_token_ids or self._spec.prompt)
            delta.cached_tokens = output.num_cached_tokens
            counts.answered(output.num_cached_tokens)
            if wanted.prompt is not None and output.prompt_logprobs:
                delta.prompt_logprobs = prompt_rows(
                    output.prompt_logprobs, output.prompt_token_ids, wanted.prompt
                )
        if part.finish_reason is not None:
            delta.finish = self._finish(output, part)
        return delta

    def _finish(self, output: Any, part: Any) -> Finish:
        # The model's own end and vLLM's own words are not the client's, who would be shown them.
        matched = part.stop_reason if part.stop_reason in self._stops else None
        accepted, drafted = _speculation(part)
        return Finish(
            _REASONS.get(part.finish_reason, part.finish_reason),
            matched,
            accepted,
            drafted,
            handed_over(output.kv_transfer_params),
        )


def handed_over(params: object) -> KvTransfer | None:
    """The connector's parameters for the decode side; left out with a warning when no JSON."""
    if not params:
        return None
    try:
        return KvTransfer(params_json=json.dumps(params, allow_nan=False))
    except (TypeError, ValueError) as error:
        log.warning("the engine's KV-transfer parameters were not sent on: %s", error)
        return None


def _speculation(part: Any) -> tuple[int | None, int | None]:
    """Draft tokens accepted and proposed; vLLM counts them from 0.32, when told to."""
    # Absent on older versions, where nothing is known: no probe for every request's end.
    metrics = getattr(part, "spec_decode_metrics", None)
    if metrics is None:
        return None, None
    return sum(j * count for j, count in enumerate(metrics.histogram)), metrics.num_draft_tokens
