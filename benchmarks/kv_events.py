"""KV events: what a relay costs per event, what a live block takes, how late a batch is.

Events go through decoding, normalisation, the live-block record, the history and two subscribers'
messages (parsed and serialized as gRPC does). CPU seconds are this process's own. With
`--published FOLDER` the published package runs the same batches over the same sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import zmq
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.kv_events.endpoints import Endpoint, Source
from smg_grpc_servicer.kv_events.history import History
from smg_grpc_servicer.kv_events.record import RankRecord
from smg_grpc_servicer.kv_events.relay import Relay
from smg_grpc_servicer.kv_events.snapshot import Snapshot, State
from smg_grpc_servicer.kv_events.stream import Stream
from smg_grpc_servicer.kv_events.subscriber import Place

BLOCK = 16
VOCAB = 128_000

BLOCK_BYTES = 400
RATIO = 3.0
"""Targets: memory per live block, at most; a whole server beside the published one, at least."""


class Traffic:
    """Batches of an engine under load: chains of blocks stored, the oldest removed.

    Half of the tokens are among the vocabulary's first 2,000, as in text.
    """

    def __init__(self, live: int, seed: int = 1) -> None:
        self._random = Random(seed)
        self._live: list[int] = []
        self._limit = live

    def stored(self) -> dict[str, object]:
        draw = self._random
        block = draw.getrandbits(64)
        parent = self._live[-1] if self._live and draw.random() < 0.9 else None
        self._live.append(block)
        return {
            "type": "BlockStored",
            "block_hashes": [block],
            "parent_block_hash": parent,
            "token_ids": [int(VOCAB * draw.random() ** 6) for _ in range(BLOCK)],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def batch(self, stores: int) -> bytes:
        events = [self.stored() for _ in range(stores)]
        over = len(self._live) - self._limit
        if over > 0:
            gone, self._live = self._live[:over], self._live[over:]
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        return msgspec.msgpack.encode([time.time(), events, 0])


async def throughput(batches: list[bytes], subscribers: int = 2) -> float:
    """Events per CPU second."""
    history = History(len(batches), 1 << 30)
    record = RankRecord(0, history, can_replay=False)
    started = time.process_time()
    for sequence, payload in enumerate(batches):
        record.live(sequence, payload)
    written = 0

    async def write(message: common_pb2.KvEventBatch) -> None:
        nonlocal written
        written += len(message.SerializeToString())

    histories = SimpleNamespace(histories={0: history})

    for _ in range(subscribers):
        stream = Stream(histories, write, {0: Place()}, None, early_loads=False)  # type: ignore[arg-type]
        while (await stream._turn(lambda: None))[0]:
            pass
    return record.normalizer.inputs / (time.process_time() - started)


def memory(blocks: int) -> tuple[float, float]:
    """Bytes of this process per live block, and seconds until its snapshot is made."""
    record = RankRecord(0, History(1, 1), can_replay=False)
    traffic = Traffic(blocks)
    before = _resident()
    for sequence in range(blocks // 100):
        record.live(sequence, traffic.batch(100))
    traffic._live.clear()
    per_block = (_resident() - before) / record.blocks.live
    last = record.history.last
    assert last is not None
    started = time.perf_counter()
    state = State(0, 0, last, 0, record.blocks.capture())
    sum(1 for _ in Snapshot(state).chunks())
    return per_block, time.perf_counter() - started


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def served(path: str, stores: int, count: int) -> float:
    """Events per CPU second of a whole server with two gRPC subscribers, in its own process.

    :param path: where its `smg_grpc_servicer` is.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    traffic = Traffic(20_000)
    payloads = [traffic.batch(stores) for _ in range(count)]
    script = str(Path(__file__).with_name("kv_events_child.py"))
    child = subprocess.Popen(  # noqa: ASYNC220 - before the clock starts
        [sys.executable, script, f"tcp://*:{port}"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    line = next((line for line in child.stdout if line.startswith("PORT ")), None)
    if line is None:
        raise SystemExit(f"the package at {path} does not serve here")

    def send(sequence: int) -> None:
        publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payloads[sequence]])

    async def read_to(call: Any, sequence: int) -> None:
        while (await call.read()).sequence_number < sequence:
            pass

    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{line.split()[1]}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            request = common_pb2.SubscribeKvEventsRequest()
            calls = [stub.SubscribeKvEvents(request, timeout=300) for _ in range(2)]
            for call in calls:
                await call.initial_metadata()

            async def drive(start: int, end: int) -> None:
                read = asyncio.gather(*(read_to(call, end - 1) for call in calls))
                for sequence in range(start, end):
                    send(sequence)
                    if not sequence % 20:
                        await asyncio.sleep(0)
                await read

            first = asyncio.gather(*(read_to(call, 0) for call in calls))
            while not first.done():  # until the subscription has arrived
                send(0)
                await asyncio.wait({first}, timeout=0.05)
            await drive(1, count // 3)  # a server warms up once in its life
            before = _cpu_seconds(child.pid)
            await drive(count // 3, count)
            return stores * (count - count // 3) / (_cpu_seconds(child.pid) - before)
    finally:
        child.kill()
        child.wait()
        context.destroy(0)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def lag(rate: int, seconds: float) -> tuple[float, float]:
    """Milliseconds from publishing to the loop, median and p99, at `rate` batches a second."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    relay = Relay([Source(0, Endpoint("tcp", "127.0.0.1", port), False, None)], context=context)
    relay.start()
    traffic = Traffic(10_000)
    payloads = [traffic.batch(2) for _ in range(int(rate * seconds))]
    sent: list[float] = []
    late: list[float] = []
    wake = asyncio.Event()
    relay.listen(wake.set)
    history = relay.histories[0]

    def publish(sequence: int) -> None:
        sent.append(time.perf_counter())
        publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payloads[sequence]])

    while history.last is None:  # until the subscription has arrived
        publisher.send_multipart([b"", (0).to_bytes(8, "big"), payloads[0]])
        await asyncio.sleep(0.01)
    sent.append(0.0)

    async def drive() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for sequence in range(1, len(payloads)):
            delay = start + sequence / rate - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            publish(sequence)

    driver = asyncio.create_task(drive())
    at = history.last or 0
    while at < len(payloads) - 1:
        await wake.wait()
        wake.clear()
        now = time.perf_counter()
        for entry in history.after(at, len(payloads)):
            late.append((now - sent[entry.sequence]) * 1000)
            at = entry.sequence
    await driver
    relay.close()
    publisher.close(0)
    context.term()
    late.sort()
    return late[len(late) // 2], late[int(len(late) * 0.99)]


def main() -> int:
    """Print the rows; 1 when a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="live blocks to hold")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long lag is measured")
    parser.add_argument("--published", metavar="FOLDER", help="the published package")
    parser.add_argument("--rounds", type=int, default=3, help="times both servers are measured")
    args = parser.parse_args()
    traffic = Traffic(20_000)
    batches = [traffic.batch(4) for _ in range(10_000)]
    asyncio.run(throughput(batches[:1000]))  # the memo of varints fills once in a life
    rate = asyncio.run(throughput(batches))
    typical, p99 = asyncio.run(lag(2000, args.seconds))
    per_block, seconds = memory(args.blocks)
    rows: list[tuple[str, str]] = [
        ("events per CPU second, two subscribers", f"{rate:,.0f}"),
        ("relay lag at 2,000 batches/s, median", f"{typical:.2f} ms"),
        ("relay lag at 2,000 batches/s, p99", f"{p99:.2f} ms"),
        (f"memory per live block ({args.blocks:,} blocks of {BLOCK} tokens)", f"{per_block:.0f} B"),
        ("snapshot of them, off the loop", f"{seconds:.1f} s"),
    ]
    root = Path(__file__).resolve().parents[1]
    own = os.pathsep.join((str(root / "src"), str(root)))
    ratios = []
    for stores, count in ((4, 6000), (32, 2000)):
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(asyncio.run(served(own, stores, count)))
            if args.published:
                path = os.pathsep.join((args.published, str(root)))
                theirs.append(asyncio.run(served(path, stores, count)))
        name = f"the same of a whole server, {stores} events a batch"
        rows.append((name, f"{median(ours):,.0f}"))
        if theirs:
            rows.append((f"{name}, published", f"{median(theirs):,.0f}"))
            ratio = median([mine / other for mine, other in zip(ours, theirs, strict=True)])
            rows.append(("ratio of the two, median of rounds", f"{ratio:.1f}"))
            ratios.append(ratio)
    print("| KV events | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")
    return int(per_block > BLOCK_BYTES or min(ratios, default=RATIO) < RATIO)


if __name__ == "__main__":
    sys.exit(main())
