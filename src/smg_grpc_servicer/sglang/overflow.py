"""Sampling parameters that overflow SGLang's logits.

Its sampler biases and penalises float32 logits and then divides them by the temperature, which is
1e-6 at least (less is greedy). What overflows there becomes NaN: sampling ends the scheduler over
it, or gives ids that do not exist. 1e30 is the bound SGLang itself has for a logit.
"""

from __future__ import annotations

import struct

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import Sampling


def _single(number: float) -> float:
    """As the proto carries it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


MOST_BIAS = _single(1e30)
LEAST_REPETITION_PENALTY = _single(1e-20)
"""Logits are divided by it; they are far below 1e10."""

SANITIZE = "SGLANG_SANITIZE_NAN_LOGITS"
"""SGLang's switch, off by default, that turns what is not finite into numbers before sampling. A
constraint that allows no token at all leaves nothing finite, and no look at it tells."""


def check(sampling: Sampling) -> None:
    """:raises InvalidArgument: naming the field."""
    for token, bias in sampling.logit_bias.items():
        if abs(bias) > MOST_BIAS:
            raise InvalidArgument(
                f"sampling_params.logit_bias[{token}]",
                f"must be between {-MOST_BIAS:g} and {MOST_BIAS:g}, got {bias:g}",
            )
    penalty = sampling.repetition_penalty
    if penalty is not None and penalty < LEAST_REPETITION_PENALTY:
        raise InvalidArgument(
            "sampling_params.repetition_penalty",
            f"must be at least {LEAST_REPETITION_PENALTY:g}, got {penalty:g}",
        )
