"""The settings of the MLX server."""

from __future__ import annotations

from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.mlx.options import MlxOptions, mlx_settings


def values(**given: str) -> Any:
    return mlx_settings().resolve({"model": "demo"} | given, {})


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1MiB", 2**20)])
def test_a_prefix_cache_of_nothing_is_none(text: str, size: int) -> None:
    """`--prompt-cache-bytes 0` turns it off, as its help says."""
    assert MlxOptions.from_values(values(prompt_cache_bytes=text)).prompt_cache_bytes == size
    with pytest.raises(ConfigError, match="--prompt-cache-bytes: got '-1'"):
        values(prompt_cache_bytes="-1")


def test_a_message_is_bounded_by_what_a_prompt_can_be() -> None:
    """Ids and text only: nobody may make the server hold half a gigabyte for one call."""
    assert ServerOptions.from_values(values()).max_receive_bytes == 32 * 2**20
    assert ServerOptions.from_values(values(max_message_bytes="1GiB")).max_receive_bytes == 2**30
