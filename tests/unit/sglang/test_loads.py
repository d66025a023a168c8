"""Load reports of the schedulers as rows, and as the stall rule's sign of life."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.errors import DeadlineExceeded, InvalidArgument
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.core.stall import EngineProgress
from smg_grpc_servicer.kv_events.loads import Records, Sample
from smg_grpc_servicer.sglang import loads
from smg_grpc_servicer.sglang.loads import LoadReader
from smg_grpc_servicer.sglang.servicer import sign_of_life
from smg_grpc_servicer.sglang.wire_loads import loads_response


def snapshot(rank: int = 0, **given: Any) -> Any:
    values: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_waiting_uncached_tokens": 40,
        "num_used_tokens": 100,
        "max_total_num_tokens": 400,
        "max_running_requests": 8,
        "token_usage": 0.25,
        "gen_throughput": 50.0,
        "cache_hit_rate": 0.5,
        "utilization": 0.75,
        "memory": SimpleNamespace(weight_gb=1.0, kv_cache_gb=2.0, graph_gb=0.5, token_capacity=400),
        "queues": SimpleNamespace(waiting=1, grammar=2, paused=3, retracted=4, prealloc_ready=5),
        "speculative": None,
        "lora": None,
        "disaggregation": None,
    }
    return SimpleNamespace(**(values | given))


async def test_one_row_per_rank_that_has_reported() -> None:
    reader = LoadReader(lambda: [snapshot(0), snapshot(1, timestamp=0.0), snapshot(2)])
    rows = await reader.read()
    assert [row.rank for row in rows] == [0, 2]
    assert (rows[0].running_requests, rows[0].waiting_requests) == (2, 1)
    assert rows[0].utilization == 0.75
    assert rows[0].active_token_usage is None
    assert reader.bounds == {0: 8, 2: 8}
    reader.close()


def test_sections_by_the_proto_s_names() -> None:
    told = SimpleNamespace(
        mode="prefill",
        prefill_bootstrap_queue_reqs=1,
        prefill_inflight_queue_reqs=2,
        decode_prealloc_queue_reqs=3,
        decode_transfer_queue_reqs=4,
        decode_retracted_queue_reqs=5,
        kv_transfer_speed_gb_s=6.0,
        kv_transfer_latency_ms=7.0,
    )
    row = loads.load(
        snapshot(
            disaggregation=told,
            lora=SimpleNamespace(slots_used=1, slots_total=4, utilization=0.25),
            speculative=SimpleNamespace(accept_length=2.5, accept_rate=0.5),
        )
    )
    (sent,) = loads_response(pb.GetLoadsRequest(), [row], "1").loads
    assert sent.disaggregation.prefill_prealloc_queue_reqs == 1
    assert sent.disaggregation.kv_transfer_latency_ms == 7
    assert sent.speculative.accept_length == 2.5
    assert sent.lora.slots_total == 4
    assert sent.queues.retracted == 4
    assert sent.memory.token_capacity == 400
    batch = common_pb2.KvEventBatch()
    Records(lambda: 1).alone(batch, Sample(row, 0.0), 0.0)
    assert batch.load.disaggregation.mode == "prefill"
    assert batch.load.memory.weight_gb == 1
    assert batch.load.queues.waiting == 1


def test_the_aggregate_and_what_was_asked_for() -> None:
    rows = [loads.load(snapshot(rank, utilization=0.5 + rank / 4)) for rank in range(2)]
    answer = loads_response(pb.GetLoadsRequest(include=["core", "queues"]), rows, "1")
    assert answer.aggregate.total_running_reqs == 4
    assert answer.aggregate.avg_utilization == 0.625
    assert [row.HasField("queues") for row in answer.loads] == [True, True]
    assert not answer.loads[0].HasField("memory")
    with pytest.raises(InvalidArgument, match="include"):
        loads_response(pb.GetLoadsRequest(include=["all", "nothing"]), rows, "1")


class Hanging:
    """A reading that goes on when it is told to."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.readings = 0
        self.reader = LoadReader(self._read)

    def _read(self) -> list[Any]:
        self.readings += 1
        self.free.wait(10)
        return [snapshot()]


async def test_a_locked_file_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank stopped while it writes holds the lock: callers are told, and one reading waits."""
    monkeypatch.setattr(loads, "READ_SECONDS", 0.05)
    hanging = Hanging()
    reader = hanging.reader
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            await reader.read()
    assert reader.last_report() is None
    assert hanging.readings == 1
    hanging.free.set()
    await asyncio.to_thread(reader._thread.submit(lambda: None).result)
    assert len(await reader.read()) == 1
    reader.close()


def test_a_reading_that_hangs_is_glanced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stall rule asks on the loop, again and again: it waits a single time, and queues none."""
    monkeypatch.setattr(loads, "GLANCE_SECONDS", 0.2)
    hanging = Hanging()
    reader = hanging.reader
    began = time.monotonic()
    assert [reader.last_report() for _ in range(20)] == [None] * 20
    assert time.monotonic() - began < 2
    hanging.free.set()
    reader._thread.submit(lambda: None).result()
    assert hanging.readings == 1
    assert reader.last_report() is not None
    reader.close()


def progress(table: RequestTable, pushed: float | None, reader: LoadReader) -> EngineProgress:
    manager = SimpleNamespace(last_receive=pushed)
    return EngineProgress(table, lambda: sign_of_life(manager, reader))


async def test_row_17_a_long_prefill_is_no_stall_and_a_silent_scheduler_is() -> None:
    """No output for a minute; its scheduler reports after every step, or has stopped to."""
    for age, stalled in ((0.0, False), (60.0, True)):
        reader = LoadReader(lambda age=age: [snapshot(timestamp=time.time() - age)])  # type: ignore[misc]
        table = RequestTable()
        ticket = table.admit("r", 1, stream=True)
        ticket.mailbox.owe()
        table._pulse.owed_since = time.monotonic() - 60
        board = StatusBoard(progress(table, time.monotonic() - 60, reader), stall_seconds=30)
        board.serving()
        board.refresh()
        assert board.stalled is stalled
        board.stopped()
        table.release(ticket)
        reader.close()


async def test_row_17_idle_time_is_not_silence() -> None:
    """The first request after an hour finds a scheduler that was never asked meanwhile."""
    hour = 3600.0
    reader = LoadReader(lambda: [snapshot(timestamp=time.time() - hour)])
    table = RequestTable()
    ticket = table.admit("r", 1, stream=True)
    ticket.mailbox.owe()
    board = StatusBoard(progress(table, time.monotonic() - hour, reader), stall_seconds=30)
    board.serving()
    board.refresh()
    assert not board.stalled
    board.stopped()
    table.release(ticket)
    reader.close()
