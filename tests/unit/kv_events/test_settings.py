from __future__ import annotations

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.kv_events.endpoints import Endpoint, Source
from smg_grpc_servicer.kv_events.settings import relay

SOURCE = Source(0, Endpoint("inproc", path="settings"), False, None)


def test_the_variables_reach_every_rank() -> None:
    made = relay(
        [SOURCE],
        {
            "SMG_KV_EVENT_HISTORY_BATCHES": "7",
            "SMG_KV_EVENT_HISTORY_BYTES": "2MiB",
            "SMG_KV_EVENT_HASH_CHECK": "sglang",
        },
    )
    try:
        history = made.histories[0]
        assert (history.limit_batches, history.limit_bytes) == (7, 2 * 1024 * 1024)
        assert made.statistics()["hash_checked_total"] == 0
    finally:
        made.close()


def test_without_a_check_there_are_no_figures_of_one() -> None:
    made = relay([SOURCE], {})
    try:
        assert not [name for name in made.statistics() if name.startswith("hash_")]
    finally:
        made.close()


def test_a_value_that_cannot_work_is_named() -> None:
    with pytest.raises(ConfigError, match="SMG_KV_EVENT_HISTORY_BATCHES"):
        relay([SOURCE], {"SMG_KV_EVENT_HISTORY_BATCHES": "0"})
