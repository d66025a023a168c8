"""One status board per engine, shared by the two servicers that a launcher builds over it.

vLLM's launchers build `VllmEngineServicer(async_llm, …)` and `VllmHealthServicer(async_llm)` apart;
what they have in common is the engine object.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import STALL
from smg_grpc_servicer.core.settings import Settings

_boards: WeakKeyDictionary[Any, StatusBoard] = WeakKeyDictionary()


def share(async_llm: Any, board: StatusBoard) -> None:
    """From now on this is the engine's board."""
    _boards[async_llm] = board


def of(async_llm: Any) -> StatusBoard:
    """The engine's board; a new one, loading, when it has none yet."""
    board = _boards.get(async_llm)
    if board is None:
        seconds = Settings(STALL).resolve().get_value(STALL)
        board = _boards[async_llm] = StatusBoard(stall_seconds=seconds)
    return board
