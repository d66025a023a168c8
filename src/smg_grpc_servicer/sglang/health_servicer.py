"""`SGLangHealthServicer(request_manager, scheduler_info)`: `grpc.health.v1` over a request manager.

For those who embed it; a server of ours has its own health service and does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smg_grpc_servicer.core import boards
from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.sglang.wire import SglangWire


class SGLangHealthServicer(HealthServicer):
    """NOT_SERVING until `set_serving`; says what a servicer over the same manager says.

    :param scheduler_info: accepted for those who pass it; readiness does not hang on it.
    :param board: whose state it tells; else the manager's own.
    """

    def __init__(
        self,
        request_manager: Any,
        scheduler_info: Mapping[str, Any] | None = None,
        *,
        board: StatusBoard | None = None,
    ) -> None:
        self._shared = board or boards.of(request_manager)
        super().__init__(self._shared, [SglangWire.service])

    def set_serving(self) -> None:
        """Ready; requests are taken."""
        self._shared.serving()

    def set_not_serving(self) -> None:
        """Readiness goes down for good and new requests are refused; what runs goes on."""
        self._shared.draining()
