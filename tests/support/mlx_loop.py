"""A `GenerationLoop` under test: collects its events and checks that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from smg_grpc_servicer.core.types import LogprobRows, Sampling
from smg_grpc_servicer.mlx.runtime.job import Event, Job
from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop

GREEDY = Sampling(temperature=0)
PATIENCE = 30.0


class Sink:
    """Takes the loop's deliveries; everything is kept per job."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, LogprobRows] = {}
        self.cached: dict[str, list[int]] = {}
        self.last: dict[str, Event] = {}
        self.order: list[str] = []
        """Uid of each token in the order of arrival."""
        self.calls: list[int] = []
        """Number of events of each delivery."""
        self.threads: set[int] = set()

    def __call__(self, events: list[Event]) -> None:
        with self.changed:
            self.threads.add(threading.get_ident())
            self.calls.append(len(events))
            for event in events:
                assert event.uid not in self.last, f"an event after the last one: {event}"
                self.ids.setdefault(event.uid, []).extend(event.token_ids)
                self.order += [event.uid] * len(event.token_ids)
                if event.logprobs is not None:
                    self.logprobs.setdefault(event.uid, LogprobRows()).extend(event.logprobs)
                if event.cached_tokens is not None:
                    self.cached.setdefault(event.uid, []).append(event.cached_tokens)
                if event.last:
                    self.last[event.uid] = event
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at after each delivery."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), "not in time"

    def ended(self, *uids: str) -> None:
        self.until(lambda: all(uid in self.last for uid in uids))

    def tokens(self, uid: str, count: int) -> None:
        """Wait until a job has that many tokens, or ended."""
        self.until(lambda: len(self.ids.get(uid, ())) >= count or uid in self.last)


@contextmanager
def running(model: Any, **options: Any) -> Iterator[tuple[GenerationLoop, Sink]]:
    """A ready loop; at the end everything in flight must have been given back."""
    sink = Sink()
    loop = GenerationLoop(model, deliver=sink, **options)
    loop.start()
    try:
        assert loop.wait_ready(PATIENCE)
        yield loop, sink
        settled(loop, sink)
    finally:
        assert loop.stop(PATIENCE)
    assert loop.statistics() == dict.fromkeys(loop.statistics(), 0)


def settled(loop: GenerationLoop, sink: Sink) -> None:
    """Wait until nothing is held: told after each turn, so another job's end is waited for."""
    if not loop.alive:
        return
    for _ in range(50):
        uid = f"settle-{len(sink.last)}"
        loop.submit(Job(uid, [1], 1, GREEDY))
        sink.ended(uid)
        held = loop.statistics()
        if loop.in_flight == 0 and held["queued"] == 0 and held["prefilling"] == 0:
            return
    raise AssertionError(f"still held: {loop.statistics()}")


def generate(
    loop: GenerationLoop, sink: Sink, prompts: Sequence[Sequence[int]], tokens: int, tag: str
) -> list[list[int]]:
    """Greedy output of all prompts, submitted together."""
    uids = [f"{tag}-{i}" for i in range(len(prompts))]
    for uid, prompt in zip(uids, prompts, strict=True):
        loop.submit(Job(uid, prompt, tokens, GREEDY))
    sink.ended(*uids)
    return [sink.ids[uid] for uid in uids]
