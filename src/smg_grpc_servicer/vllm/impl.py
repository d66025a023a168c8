"""Which servicer answers: `python`, or `rust` with the wheel `smg`.

The flag wins over the variable, the variable over `python`. A decision of the flag is written into
the variable, which is what other processes and the Python servicer's constructor look at.
Standard library only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, MutableMapping

from smg_grpc_servicer.core.errors import ConfigError

FLAG = "--servicer-impl"
VARIABLE = "SMG_VLLM_SERVICER_IMPL"
PYTHON = "python"
RUST = "rust"
CHOICES = (PYTHON, RUST)

_NAMES = ("smg_servicer_impl", "servicer_impl")
"""Where a namespace has the flag: ours, or a launcher's that came to have one itself."""


def resolve_servicer_impl(
    args: argparse.Namespace | None = None, environ: MutableMapping[str, str] | None = None
) -> str:
    """`python` or `rust`.

    :raises ConfigError: another word.
    """
    env = os.environ if environ is None else environ
    given = flag_of(args)
    if given is None:
        return _choice(VARIABLE, env.get(VARIABLE, "")) or PYTHON
    chosen = _choice(FLAG, given) or PYTHON
    env[VARIABLE] = chosen
    return chosen


def flag_of(args: argparse.Namespace | None) -> str | None:
    """What was given on the command line."""
    given = {} if args is None else vars(args)
    return next((str(given[name]) for name in _NAMES if given.get(name) is not None), None)


def require_python(environ: Mapping[str, str] | None = None) -> None:
    """What the Python servicer asks before it is built.

    :raises RuntimeError: this process was to serve from Rust.
    """
    env = os.environ if environ is None else environ
    if env.get(VARIABLE, "").strip().lower() == RUST:
        raise RuntimeError(
            f"{VARIABLE}=rust, but the Python servicer is being built: this launcher never asked "
            "which one to run. Start it as `vllm serve M --grpc` or `python -m` of vLLM's gRPC "
            f"launcher, or set {VARIABLE}=python"
        )


def _choice(where: str, text: str) -> str | None:
    word = text.strip().lower()
    if word and word not in CHOICES:
        raise ConfigError(f"{where}: got {text!r}; allowed: one of {', '.join(CHOICES)}")
    return word or None
