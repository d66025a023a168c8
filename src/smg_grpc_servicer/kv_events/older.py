"""Batches that the history no longer has, fetched for one subscriber from its rank's publisher.

Blocking; runs on a worker thread. What is fetched must join the history: its batch at the seam has
to be the very one that stands there, or the answer is of another publisher process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smg_grpc_servicer.kv_events.blocks import Blocks
from smg_grpc_servicer.kv_events.decode import Decoder, Undecodable
from smg_grpc_servicer.kv_events.endpoints import Source
from smg_grpc_servicer.kv_events.history import ENTRY_BYTES, Entry
from smg_grpc_servicer.kv_events.normalize import Normalizer
from smg_grpc_servicer.kv_events.record import RankRecord
from smg_grpc_servicer.kv_events.sockets import ReplaySocket

if TYPE_CHECKING:
    import zmq

SECONDS = 1.5
"""All the time there is: the gateway hangs up when it has seen no headers for 2 s."""


def fetch(
    source: Source,
    record: RankRecord,
    after: int,
    *,
    context: zmq.Context[zmq.Socket[bytes]],
    seconds: float = SECONDS,
) -> list[Entry] | None:
    """The batches from `after` + 1 up to the history's oldest; None when they cannot be had."""
    history = record.history
    before = history.view()
    if source.replay is None or before.first is None:
        return None
    found = _fetch(source, record, after, before.first, context, time.monotonic() + seconds)
    return found if history.view().epoch == before.epoch else None


def _fetch(
    source: Source,
    record: RankRecord,
    after: int,
    seam: int,
    context: zmq.Context[zmq.Socket[bytes]],
    deadline: float,
) -> list[Entry] | None:
    assert source.replay is not None
    decoder, normalizer = Decoder(), _normalizer(record)
    entries: list[Entry] = []
    size, expected = 0, after + 1
    replay = ReplaySocket(context, source.replay, expected)
    try:
        while (left := deadline - time.monotonic()) > 0:
            if not replay.socket.poll(int(left * 1000) + 1):
                break
            batch = replay.receive()
            if batch is None or batch[0] != expected:
                break
            sequence, payload = batch
            if sequence == seam:
                return entries if record.history.digest(seam) == hash(payload) else None
            seen = normalizer.inputs
            data = normalizer.batch(sequence, decoder.decode(payload))
            entries.append(Entry(sequence, data, hash(payload), seen, normalizer.inputs - seen))
            size += len(data) + ENTRY_BYTES
            if size > record.history.limit_bytes:
                break
            expected += 1
    except (Undecodable, ValueError):
        return None
    finally:
        replay.close()
    return None


def _normalizer(record: RankRecord) -> Normalizer:
    """One that knows what the record's knows, and writes into blocks of its own."""
    blocks = Blocks()
    for number, tier in tuple(record.blocks.tiers.items()):
        blocks.tier(number).namespaces = tier.namespaces.copy()
    normalizer = Normalizer(record.rank, blocks)
    normalizer.groups = record.normalizer.groups.copy()
    return normalizer
