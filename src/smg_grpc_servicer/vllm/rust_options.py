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
from smg_grpc_servicer.rust.binding import Binding
from smg_grpc_servicer.vllm.media_options import SMG, TURBOJPEG, MediaOptions
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


_PIPELINE_HEEDS_TURBOJPEG = "mm_encoder_budget"
"""Wheels that take this keyword do; nothing else tells them, as unknown settings are ignored."""


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


def refuse_what_the_wheel_lacks(media: MediaOptions, binding: Binding) -> None:
    """:raises ConfigError: a setting of its media pipeline that this wheel would not heed."""
    required = media.processor == SMG and media.turbojpeg != TURBOJPEG.default
    if required and _PIPELINE_HEEDS_TURBOJPEG not in binding.keywords:
        raise ConfigError(
            f"{TURBOJPEG.flag}: got {media.turbojpeg!r}, which {binding.wheel} does not heed; "
            f"allowed: {TURBOJPEG.default}, or a newer wheel"
        )
