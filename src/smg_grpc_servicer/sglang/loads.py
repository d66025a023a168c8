"""What each rank has to do, as SGLang's schedulers publish it in shared memory.

A rank that has not published yet has no row. Reading takes a file lock that a rank holds for
microseconds, and one that is stopped at the wrong moment for as long as it is, so it happens on a
thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import DeadlineExceeded
from smg_grpc_servicer.core.loads import (
    DisaggregationLoad,
    Load,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)

log = logging.getLogger(__name__)

READ_SECONDS = 2.0
GLANCE_SECONDS = 0.05
CALLER = "TokenizerManager"
"""In whose place we read; SGLang gives one socket or file per caller."""


class LoadReader:
    """The loads of all ranks.

    :param snapshots: all ranks' `LoadSnapshot`s, read now.
    """

    def __init__(
        self,
        snapshots: Callable[[], Sequence[Any]],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._snapshots = snapshots
        self._close = close
        self._thread = ThreadPoolExecutor(1, "sglang-loads")
        self._reading: Future[Sequence[Any]] | None = None
        self._began = 0.0
        self.bounds: dict[int, int] = {}
        """Most requests a rank runs at once, by rank, as far as they were published."""
        self.reported: float | None = None
        """When the newest of the reports that were last read was made (`monotonic` seconds)."""

    @classmethod
    def of(cls, port_args: Any) -> LoadReader:
        """Of ranks that were started with these ports. After SGLang's `publish`."""
        from sglang.srt.managers import load_snapshot

        reader = load_snapshot.create_load_snapshot_reader(port_args, caller=CALLER)

        def close() -> None:
            reader.close()
            # Nobody else removes it.
            with suppress(OSError):
                Path(load_snapshot.shm_path_for(port_args.instance_id)).unlink()

        return cls(reader.read_all, close)

    async def read(self) -> list[Load]:
        """:raises DeadlineExceeded: the file is locked for too long."""
        reading = asyncio.wrap_future(self._begin())
        reading.add_done_callback(_ignore)
        try:
            found = await asyncio.wait_for(asyncio.shield(reading), READ_SECONDS)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"the load reports could not be read in {READ_SECONDS:g} s"
            ) from None
        self.reported = _newest(found)
        loads = [load(snapshot) for snapshot in found if snapshot.timestamp]
        for row in loads:
            if row.max_running_requests:
                self.bounds[row.rank] = row.max_running_requests
        return loads

    def last_report(self) -> float | None:
        """When a scheduler last reported (`monotonic` seconds), for the stall rule.

        A long prefill gives no output for minutes, but its scheduler reports after every step. The
        report's own time is told, so it does not matter how late somebody looks.
        """
        try:
            # Of a reading that hangs, only the first to ask waits: the loop stands still meanwhile.
            reading = self._begin()
            found = reading.result(max(0.0, self._began + GLANCE_SECONDS - time.monotonic()))
        except Exception:
            log.debug("the load reports cannot be read", exc_info=True)
            return None
        return _newest(found)

    def _begin(self) -> Future[Sequence[Any]]:
        """The one that is under way, or a new one: behind one that hangs they would pile up."""
        if self._reading is None or self._reading.done():
            self._began = time.monotonic()
            self._reading = self._thread.submit(self._snapshots)
        return self._reading

    def close(self) -> None:
        """Off the loop; a reading that hangs is left behind."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._reading is None or self._reading.done():
            self._close()


def _newest(snapshots: Sequence[Any]) -> float | None:
    newest = max((snapshot.timestamp for snapshot in snapshots), default=0.0)
    return time.monotonic() - max(0.0, time.time() - newest) if newest else None


def load(snapshot: Any) -> Load:
    """A `LoadSnapshot` in core terms; its zeros are counts."""
    return Load(
        rank=snapshot.dp_rank,
        running_requests=snapshot.num_running_reqs,
        waiting_requests=snapshot.num_waiting_reqs,
        waiting_uncached_tokens=snapshot.num_waiting_uncached_tokens,
        used_tokens=snapshot.num_used_tokens,
        max_total_tokens=snapshot.max_total_num_tokens,
        max_running_requests=snapshot.max_running_requests,
        token_usage=snapshot.token_usage,
        gen_throughput=snapshot.gen_throughput,
        cache_hit_rate=snapshot.cache_hit_rate,
        utilization=snapshot.utilization,
        memory=_memory(snapshot.memory),
        queues=_queues(snapshot.queues),
        speculative=_speculative(snapshot.speculative),
        lora=_lora(snapshot.lora),
        disaggregation=_disaggregation(snapshot.disaggregation),
    )


def _memory(found: Any) -> MemoryLoad | None:
    if found is None:
        return None
    return MemoryLoad(found.weight_gb, found.kv_cache_gb, found.graph_gb, found.token_capacity)


def _queues(found: Any) -> QueueLoad | None:
    if found is None:
        return None
    return QueueLoad(found.waiting, found.grammar, found.paused, found.retracted)


def _speculative(found: Any) -> SpeculativeLoad | None:
    return None if found is None else SpeculativeLoad(found.accept_length, found.accept_rate)


def _lora(found: Any) -> LoraLoad | None:
    return (
        None if found is None else LoraLoad(found.slots_used, found.slots_total, found.utilization)
    )


def _disaggregation(found: Any) -> DisaggregationLoad | None:
    if found is None:
        return None
    return DisaggregationLoad(
        mode=found.mode,
        # Renamed in SGLang after the proto was written.
        prefill_prealloc_queue_reqs=found.prefill_bootstrap_queue_reqs,
        prefill_inflight_queue_reqs=found.prefill_inflight_queue_reqs,
        decode_prealloc_queue_reqs=found.decode_prealloc_queue_reqs,
        decode_transfer_queue_reqs=found.decode_transfer_queue_reqs,
        decode_retracted_queue_reqs=found.decode_retracted_queue_reqs,
        kv_transfer_speed_gb_s=found.kv_transfer_speed_gb_s,
        kv_transfer_latency_ms=found.kv_transfer_latency_ms,
    )


def _ignore(future: asyncio.Future[Any]) -> None:
    """Read the outcome, so that a reading nobody waits for any more is not complained about."""
    if not future.cancelled():
        future.exception()
