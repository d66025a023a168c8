"""`SGLangHealthServicer` as those use it who embed it."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from smg_grpc_servicer.core import boards
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.sglang.health_servicer import SGLangHealthServicer
from smg_grpc_servicer.sglang.wire import SglangWire

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Manager:
    """Can be a key of a weak dictionary, and that is all that is asked of it."""


def test_not_serving_until_it_is_told() -> None:
    health = SGLangHealthServicer(Manager(), {"max_req_input_len": 7})
    assert health.status("") == SERVING  # alive
    assert health.status(SglangWire.service) == NOT_SERVING
    health.set_serving()
    assert health.status(SglangWire.service) == SERVING
    health.set_not_serving()
    assert health.status(SglangWire.service) == NOT_SERVING
    health.set_serving()
    assert health.status(SglangWire.service) == NOT_SERVING  # a drain is not undone


def test_servicers_over_one_manager_share_their_state() -> None:
    manager, board = Manager(), StatusBoard()
    boards.share(manager, board)
    health = SGLangHealthServicer(manager)
    board.serving()
    assert health.status(SglangWire.service) == SERVING
    assert boards.of(Manager()) is not board
