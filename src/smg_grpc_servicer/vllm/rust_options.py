"""What a launch may ask of the Rust server, and what only the Python one has."""

from __future__ import annotations

import argparse
import logging

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import (
    COALESCE_SECONDS,
    EXIT_ON_DEATH,
    MAX_CHUNK_TOKENS,
    MAX_CONCURRENT_RPCS,
    MAX_MESSAGE_BYTES,
    REFLECTION,
    STALL,
)
from smg_grpc_servicer.vllm.options import PREFIX, Plan

log = logging.getLogger(__name__)

PYTHON_ONLY = (
    STALL,
    EXIT_ON_DEATH,
    MAX_MESSAGE_BYTES,
    MAX_CONCURRENT_RPCS,
    MAX_CHUNK_TOKENS,
    COALESCE_SECONDS,
    REFLECTION,
)
"""The Rust server has its own, fixed behaviour in these."""


def refuse_what_rust_lacks(args: argparse.Namespace, asked: Plan) -> None:
    """:raises ConfigError: security or a flag that would have no effect.

    A variable may have been set for other servers too: that is only told.
    """
    faults = []
    if asked.security:
        faults.append(
            f"--servicer-impl rust: its server has no {' and no '.join(asked.security)}; put a "
            "mesh in front of it, or use --servicer-impl python"
        )
    given = [s.flag for s in PYTHON_ONLY if s.flag and PREFIX + s.name in vars(args)]
    if given:
        faults.append(f"{', '.join(given)}: no effect with --servicer-impl rust")
    if faults:
        raise ConfigError("\n".join(faults))
    sources = asked.values.sources
    set_elsewhere = [s.env for s in PYTHON_ONLY if s.env and sources[s.name] != "default"]
    if set_elsewhere:
        log.warning("%s: no effect with --servicer-impl rust", ", ".join(set_elsewhere))
