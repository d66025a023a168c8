"""The promises of a Generate stream, checked on what a client saw.

`History` records the messages and the status of one stream; `check` says which promises were
broken. It reads the four protos' messages alike, because their chunk and complete have the same
fields. Source of the promises: the contract table in DEVELOPMENT.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc

MAX_RECEIVE_BYTES = 4 * 1024 * 1024
"""The gateway's receive limit."""


@dataclass(slots=True)
class History:
    """One stream as its client saw it."""

    stream: bool = True
    messages: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """`monotonic` seconds, one for each message."""
    code: grpc.StatusCode | None = None
    """None while the stream is open."""
    details: str = ""

    async def record(self, call: AsyncIterable[Any]) -> History:
        """Read a call to its end, whatever that is."""
        try:
            async for message in call:
                self.messages.append(message)
                self.times.append(monotonic())
        except grpc.RpcError as error:
            self.code = error.code()
            self.details = error.details() or ""
        else:
            self.code = grpc.StatusCode.OK
        return self

    @property
    def chunks(self) -> list[Any]:
        return [m.chunk for m in self.messages if m.WhichOneof("response") == "chunk"]

    @property
    def completes(self) -> list[Any]:
        return [m.complete for m in self.messages if m.WhichOneof("response") == "complete"]

    def streamed_ids(self, index: int = 0) -> list[int]:
        return [token for c in self.chunks if c.index == index for token in c.token_ids]

    def complete(self, index: int = 0) -> Any:
        """The complete of a choice. :raises LookupError: when it never came."""
        for complete in self.completes:
            if complete.index == index:
                return complete
        raise LookupError(f"choice {index} has no complete; the stream ended {self.code}")


def check(history: History, choices: int = 1, *, logprobs: int | None = None) -> list[str]:
    """Broken promises in plain words; empty when all hold.

    :param choices: how many the request asked for.
    :param logprobs: how many top logprobs it asked for; None for none.
    """
    broken = [
        f"message {at} has {message.ByteSize()} bytes, more than the gateway takes"
        for at, message in enumerate(history.messages)
        if message.ByteSize() > MAX_RECEIVE_BYTES
    ]
    ended: set[int] = set()
    counts: dict[int, int] = {}
    for message in history.messages:
        kind = message.WhichOneof("response")
        if kind is None:
            broken.append("a message with neither chunk nor complete")
            continue
        part = getattr(message, kind)
        if part.index in ended:
            broken.append(f"choice {part.index}: a {kind} after its complete")
        if part.index >= choices:
            broken.append(f"choice {part.index} was not asked for (n={choices})")
        if kind == "chunk":
            broken += _check_chunk(part, counts, logprobs)
        else:
            ended.add(part.index)
            broken += _check_complete(history, part, logprobs)
    if history.code is grpc.StatusCode.OK and ended != set(range(choices)):
        broken.append(f"OK although only choices {sorted(ended)} of {choices} had their complete")
    return broken


def _check_chunk(chunk: Any, counts: dict[int, int], logprobs: int | None) -> list[str]:
    where = f"choice {chunk.index}"
    broken = []
    carries_prompt = "input_logprobs" in chunk.DESCRIPTOR.fields_by_name and chunk.HasField(
        "input_logprobs"
    )
    if not chunk.token_ids and not carries_prompt:
        broken.append(f"{where}: an empty chunk")
    counts[chunk.index] = counts.get(chunk.index, 0) + len(chunk.token_ids)
    if chunk.completion_tokens != counts[chunk.index]:
        broken.append(
            f"{where}: completion_tokens {chunk.completion_tokens} after "
            f"{counts[chunk.index]} streamed ids"
        )
    return broken + _check_rows(where, chunk, list(chunk.token_ids), logprobs)


def _check_complete(history: History, complete: Any, logprobs: int | None) -> list[str]:
    where = f"choice {complete.index}"
    ids = list(complete.output_ids)
    broken = []
    if not complete.finish_reason:
        broken.append(f"{where}: complete without finish_reason")
    if complete.completion_tokens != len(ids):
        broken.append(
            f"{where}: completion_tokens {complete.completion_tokens} for {len(ids)} output ids"
        )
    if not history.stream:
        if history.chunks:
            broken.append(f"{where}: chunks although the request did not ask for a stream")
        return broken + _check_rows(where, complete, ids, logprobs)
    if history.streamed_ids(complete.index) != ids:
        broken.append(f"{where}: the streamed ids are not the complete's output ids")
    if complete.HasField("output_logprobs"):
        broken.append(f"{where}: logprobs again in the complete of a stream")
    return broken


def _check_rows(where: str, part: Any, ids: list[int], logprobs: int | None) -> list[str]:
    rows = part.output_logprobs
    if logprobs is None:
        return [f"{where}: logprobs that were not asked for"] if rows.token_logprobs else []
    broken = []
    if list(rows.token_ids) != ids or len(rows.token_logprobs) != len(ids):
        broken.append(f"{where}: logprobs are not in step with their ids")
    if logprobs > 0:
        if len(rows.top_logprobs) != len(ids):
            broken.append(f"{where}: {len(rows.top_logprobs)} rows for {len(ids)} ids")
        for row in rows.top_logprobs:
            values = list(row.values)
            if len(values) != logprobs or len(row.token_ids) != logprobs:
                broken.append(f"{where}: a row of {len(values)} entries, {logprobs} asked for")
            if values != sorted(values, reverse=True):
                broken.append(f"{where}: a row that is not sorted best first")
    return broken
