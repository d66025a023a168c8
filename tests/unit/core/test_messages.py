from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.messages import CHUNK_BYTES, MAX_MESSAGE_BYTES, pieces
from smg_grpc_servicer.core.types import Delta, Finish, GenerateSpec, LogprobRows, PromptLogprobs
from smg_grpc_servicer.core.wire import Choice
from smg_grpc_servicer.mlx.wire import MlxWire


def rows(count: int, width: int) -> LogprobRows:
    return LogprobRows(
        [-0.5] * count, [[2**31 + i for i in range(width)]] * count, [[-1.5] * width] * count
    )


def test_a_small_delta_is_itself() -> None:
    delta = Delta(token_ids=[1, 2], finish=Finish("stop"))

    assert list(pieces(delta)) == [delta]


@given(
    count=st.integers(0, 40),
    width=st.integers(0, 3),
    with_rows=st.booleans(),
    max_bytes=st.integers(1, 300),
    max_tokens=st.none() | st.integers(1, 7),
)
def test_pieces_add_up_and_only_the_last_carries_the_end(
    count: int, width: int, with_rows: bool, max_bytes: int, max_tokens: int | None
) -> None:
    delta = Delta(
        token_ids=list(range(count)),
        logprobs=rows(count, width) if with_rows else None,
        finish=Finish("length"),
    )
    whole = copy.deepcopy(delta)

    # A piece is good until the next one.
    parts = [copy.copy(part) for part in pieces(delta, max_bytes=max_bytes, max_tokens=max_tokens)]

    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + [Finish("length")]
    assert all(max_tokens is None or len(part.token_ids) <= max_tokens for part in parts)
    if with_rows:
        joined = LogprobRows()
        for part in parts:
            assert part.logprobs is not None
            assert len(part.logprobs) == len(part.token_ids)
            joined.extend(part.logprobs)
        assert joined == whole.logprobs


def test_large_rows_stay_under_the_gateways_limit() -> None:
    """A 20,000-entry row for each of 60 tokens is 10 MB; no message may pass 4 MiB."""
    delta = Delta(token_ids=list(range(60)), logprobs=rows(60, 20_000))
    choice, spec = Choice(0, 1, stream=True), GenerateSpec("x")

    sizes = [MlxWire().chunk(spec, choice, piece).ByteSize() for piece in pieces(delta)]

    assert len(sizes) > 5
    assert max(sizes) <= CHUNK_BYTES < MAX_MESSAGE_BYTES


def test_prompt_rows_that_do_not_fit_go_ahead_of_the_tokens() -> None:
    prompt = PromptLogprobs(
        list(range(100)), [None, *[-1.0] * 99], [[1, 2]] * 100, [[-1.0, -2.0]] * 100
    )
    delta = Delta(token_ids=[7], prompt_logprobs=prompt, finish=Finish("length"))

    parts = list(pieces(delta, max_bytes=1000))

    told = [p.prompt_logprobs for p in parts if p.prompt_logprobs is not None]
    assert [token for part in told for token in part.token_ids] == list(range(100))
    assert told[0].values[0] is None
    assert parts[-1].token_ids == [7]
    assert parts[-1].finish == Finish("length")
