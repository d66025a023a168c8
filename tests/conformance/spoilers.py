"""Ways to spoil the messages of an MLX stream, one promise each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

Spoil = Callable[[pb.GenerateResponse, list[int]], Iterator[pb.GenerateResponse]]
"""What goes out instead of a message; the list keeps state for one stream."""


def _of(message: pb.GenerateResponse) -> Any:
    return message.chunk if message.HasField("chunk") else message.complete


def as_it_is(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message


def empty_chunk(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("chunk"):
        counted = pb.GenerateStreamChunk(completion_tokens=message.chunk.completion_tokens)
        yield pb.GenerateResponse(chunk=counted)


def cumulative(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        memory += message.chunk.token_ids
        message.chunk.ClearField("token_ids")
        message.chunk.token_ids.extend(memory)
    yield message


def repeats_ids(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("chunk") and not memory:
        memory.append(1)
        yield message


def drops_a_chunk(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    memory.append(1)
    if message.HasField("complete") or len(memory) % 30 != 20:
        yield message


def no_complete(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        yield message


def ends_twice(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("complete"):
        yield message


def counts_per_chunk(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        message.chunk.completion_tokens = len(message.chunk.token_ids)
    yield message


def counts_the_prompt(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    part = _of(message)
    part.prompt_tokens += part.completion_tokens
    yield message


def unsorted_rows(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    for row in _of(message).output_logprobs.top_logprobs:
        values, ids = list(row.values)[::-1], list(row.token_ids)[::-1]
        row.values[:], row.token_ids[:] = values, ids
    yield message


def logprobs_of_the_last(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    """E6: the fault of a servicer in the wild."""
    if message.HasField("complete"):
        rows = message.complete.output_logprobs
        for field in (rows.token_logprobs, rows.token_ids, rows.top_logprobs):
            del field[:-1]
    yield message


def logprobs_again(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    if message.HasField("complete"):
        message.complete.output_logprobs.token_logprobs.append(-1.0)
    yield message


def positive_logprobs(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    for row in _of(message).output_logprobs.top_logprobs:
        row.values[:] = [1.0, *row.values[1:]]
    yield message


def eos_reason(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.complete.finish_reason == "stop":
        message.complete.finish_reason = "eos"
    yield message


def no_match(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.HasField("complete"):
        message.complete.ClearField("matched_stop_token_id")
    yield message


def large_messages(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    """What a limit-less servicer sends when its engine is quick."""
    if message.HasField("chunk") and message.chunk.output_logprobs.top_logprobs and not memory:
        memory.append(1)
        message.chunk.output_logprobs.top_logprobs[0].values.extend([-9.0] * 1_100_000)
    yield message
