"""Doubles and checkers for people who test against these servicers."""

from smg_grpc_servicer.testing.fake_engine import FakeEngine, Faults
from smg_grpc_servicer.testing.history import History, check

__all__ = ["FakeEngine", "Faults", "History", "check"]
