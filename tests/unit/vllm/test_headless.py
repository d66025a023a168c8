"""A gRPC command line aimed at this host without a front end, and how its process ends."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.vllm.headless import aimed, ranks_of, require_local


def parsed(**given: Any) -> argparse.Namespace:
    defaults = {
        "model": "m",
        "model_tag": "m",
        "grpc": True,
        "data_parallel_size": 1,
        "data_parallel_rank": None,
        "data_parallel_start_rank": None,
        "data_parallel_size_local": None,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_backend": "mp",
    }
    return argparse.Namespace(**defaults | given)


def test_it_is_the_same_launch_without_a_front_end() -> None:
    args = parsed(
        smg_servicer_impl="rust",
        dispatch_function=print,
        kv_events_config="kept",
        api_server_count=4,
    )
    before = dict(vars(args))
    made = vars(aimed(args))
    assert vars(args) == before
    assert made["headless"]
    assert not made["grpc"]
    assert made["model_tag"] is None
    assert (made["model"], made["kv_events_config"]) == ("m", "kept")
    assert made["api_server_count"] == 0
    assert (made["data_parallel_size"], made["data_parallel_size_local"]) == (1, 1)
    assert made["data_parallel_address"] == "127.0.0.1"
    assert not {"smg_servicer_impl", "dispatch_function"} & set(made)


def test_all_ranks_are_on_this_host() -> None:
    args = parsed(data_parallel_size=3)
    require_local(args)
    assert ranks_of(args) == 3
    assert aimed(args).data_parallel_size_local == 3
    require_local(parsed(data_parallel_size=2, data_parallel_size_local=2))
    # A launcher's own parser may lack some of these.
    assert ranks_of(argparse.Namespace()) == 1
    require_local(argparse.Namespace())


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"data_parallel_rank": 0}, "--data-parallel-rank"),
        ({"data_parallel_start_rank": 0}, "--data-parallel-start-rank"),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, "--data-parallel-size-local"),
        ({"data_parallel_backend": "ray"}, "--data-parallel-backend"),
    ],
)
def test_ranks_elsewhere_are_refused(given: dict[str, Any], flag: str) -> None:
    """Not silently moved here, where there may be no room for them."""
    with pytest.raises(ConfigError, match=f"^{flag}: not supported with --servicer-impl rust"):
        require_local(parsed(**given))
