"""One status board per engine object, shared by the two servicers that are built over it.

A launcher makes the engine's servicer and the health servicer apart; what they have in common is an
object of the engine's: vLLM's `AsyncLLM`, SGLang's request manager.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import STALL
from smg_grpc_servicer.core.settings import Settings

_boards: WeakKeyDictionary[Any, StatusBoard] = WeakKeyDictionary()


def share(engine: Any, board: StatusBoard) -> None:
    """From now on this is the engine's board."""
    _boards[engine] = board


def of(engine: Any) -> StatusBoard:
    """The engine's board; a new one, loading, when it has none yet."""
    board = _boards.get(engine)
    if board is None:
        seconds = Settings(STALL).resolve().get_value(STALL)
        board = _boards[engine] = StatusBoard(stall_seconds=seconds)
    return board
