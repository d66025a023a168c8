"""One status board per request manager, shared by the two servicers that are built over it.

`SGLangSchedulerServicer` and `SGLangHealthServicer` are made apart; what they have in common is
the request manager.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import STALL
from smg_grpc_servicer.core.settings import Settings

_boards: WeakKeyDictionary[Any, StatusBoard] = WeakKeyDictionary()


def share(manager: Any, board: StatusBoard) -> None:
    """From now on this is the manager's board."""
    _boards[manager] = board


def of(manager: Any) -> StatusBoard:
    """The manager's board; a new one, loading, when it has none yet."""
    board = _boards.get(manager)
    if board is None:
        seconds = Settings(STALL).resolve().get_value(STALL)
        board = _boards[manager] = StatusBoard(stall_seconds=seconds)
    return board
