"""What a planned warm-up leaves behind: warm ranks, and nothing that anybody could see."""

from __future__ import annotations

import re
from typing import Any


def test_all_of_it_was_answered_before_it_was_ready(warm: Any) -> None:
    log = warm.server.log
    first = log.index("warm-up: the first request took")
    done = re.search(r"warm-up: (\d+) answered, 0 failed", log)
    assert done is not None
    assert int(done[1]) > 60
    assert first < done.start() < log.index("state: serving")
    assert "stay in the prefix cache" not in log


def test_it_is_nobodys_load(warm: Any) -> None:
    """A scheduler goes on telling the rates of its last work: of the warm-up, they are hidden."""
    for row in warm.loads.loads:
        assert row.num_total_reqs == 0
        assert row.gen_throughput == row.cache_hit_rate == 0
