"""The cursor of a subscription that comes before its engine; needs no pyzmq."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.core.errors import OutOfRange


def too_early(request: Any) -> OutOfRange | None:
    """A cursor that is not zero can only be of an engine that is gone.

    Refused now, it is not mistaken for one of the next engine's when that has published as many
    batches; the gateway drops what it knows and begins with zero.
    """
    cursor = int(request.start_sequence_number)
    if not cursor:
        return None
    return OutOfRange(f"start_sequence_number: got {cursor}, of an earlier engine")
