"""What a planned warm-up leaves behind: a warm engine, and nothing that anybody could see."""

from __future__ import annotations

import re
from typing import Any

from tests.support.client import Client
from tests.support.real_vllm import SEQUENCES
from tests.support.vllm_cases import prompt


def test_all_of_it_was_answered_before_it_was_ready(warm: Any) -> None:
    log = warm.server.log
    done = re.search(r"warm-up: (\d+) answered, 0 failed", log)
    assert done is not None
    assert int(done[1]) > 2 * SEQUENCES
    assert log.index("state: warming up") < done.start() < log.index("state: serving")
    assert "stay in the prefix cache" not in log


def test_it_is_nobodys_load(warm: Any) -> None:
    """The router balances by these: no throughput, no hits, nothing in use."""
    (row,) = warm.loads.loads
    assert row.num_total_reqs == row.num_used_tokens == 0
    assert row.gen_throughput == row.cache_hit_rate == 0


async def test_its_ids_are_anybodys_afterwards(client: Client) -> None:
    ids = await client.ids(prompt(5, 90), request_id="smg-warmup-0", max_tokens=3)
    assert len(ids) == 3
