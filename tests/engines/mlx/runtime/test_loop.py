"""Life of the generation thread: one thread, woken not polling, bounded, cancellable."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from smg_grpc_servicer.core.errors import AlreadyExists, Exhausted, InvalidArgument, Unavailable
from smg_grpc_servicer.core.types import Sampling
from smg_grpc_servicer.mlx.model import arrays
from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime.inbox import Inbox
from smg_grpc_servicer.mlx.runtime.job import Job
from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop
from tests.support.mlx_loop import GREEDY, Sink, generate, running


class Gate:
    """A model whose calls wait until the test lets them pass; it notes who called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.threads: set[int] = set()

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.open.wait(30)
        return self.model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def close(self) -> None:
        self.entered.clear()
        self.open.clear()


def test_one_thread_does_everything(tiny: Any) -> None:
    """Built on one thread and run on another, mlx streams fail (E2)."""
    model = Gate(tiny.model)
    with running(model) as (loop, sink):
        threads = [
            threading.Thread(target=loop.submit, args=(Job(str(i), [5 + i], 9, GREEDY),))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        sink.ended(*(str(i) for i in range(8)))
        for thread in threads:
            thread.join()
    assert model.threads == sink.threads == {loop._thread.ident}
    assert threading.get_ident() not in model.threads


def test_lazy_private_arrays_are_evaluated_by_the_loader(tiny: Any) -> None:
    """An array built lazily on the loading thread and hidden from `parameters()` (E4)."""
    import mlx.nn as nn

    class Model(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.model
            self._hidden = {"tables": [mx.arange(512) * 0.0]}

        def __call__(self, tokens: Any, cache: Any) -> Any:
            return self.inner(tokens, cache=cache) + self._hidden["tables"][0]

        @property
        def layers(self) -> Any:
            return self.inner.layers

    model = Model()
    found = list(arrays(model))
    assert any(a is model._hidden["tables"][0] for a in found)
    mx.eval(found)
    with running(model) as (loop, sink):
        loop.submit(Job("a", [5, 6], 4, GREEDY))
        sink.ended("a")
        assert sink.last["a"].error is None


def test_an_idle_thread_sleeps(tiny: Any) -> None:
    """No polling (the peer's loop woke a thousand times a second): no turn without work."""
    with running(tiny.model) as (loop, sink):
        loop.submit(Job("a", [5, 6], 4, GREEDY))
        sink.ended("a")
        inbox = loop._inbox
        with inbox._condition:
            # The last turn ends after the last delivery; then the thread waits.
            assert inbox._condition.wait_for(lambda: not inbox._fresh, 5)
        waiting = threading.Event()
        real = inbox._condition.wait

        def wait(timeout: float | None = None) -> bool:
            assert timeout is None
            waiting.set()
            return real(timeout)

        inbox._condition.wait = wait  # type: ignore[method-assign]
        loop.cancel("nobody")
        loop.submit(Job("b", [5, 6], 1, GREEDY))
        sink.ended("b")
        assert waiting.wait(5)
        turns = loop.counters()["turns_total"]
        # A full prompt, one step, the read of it: nothing in between.
        assert not threading.Event().wait(0.2)
        assert loop.counters()["turns_total"] == turns


def test_one_delivery_per_step(tiny: Any) -> None:
    with running(tiny.model) as (loop, sink):
        for i in range(8):
            loop.submit(Job(str(i), [5 + i], 40, GREEDY))
        sink.ended(*(str(i) for i in range(8)))
    assert len(sink.calls) <= 40 + 8
    assert max(sink.calls) == 8


def test_the_queue_is_bounded(tiny: Any) -> None:
    model = Gate(tiny.model)
    with running(model, max_queued=4, completion_batch_size=1) as (loop, sink):
        model.close()
        loop.submit(Job("running", [5], 3, GREEDY))
        assert model.entered.wait(30)
        for i in range(4):
            loop.submit(Job(str(i), [5], 3, GREEDY))
        with pytest.raises(Exhausted, match="max-queued-requests"):
            loop.submit(Job("much", [5], 3, GREEDY))
        assert loop.in_flight == 5
        model.open.set()
        sink.ended("running", "0", "1", "2", "3")
    assert "much" not in sink.ids


def test_refusals(tiny: Any) -> None:
    model = Gate(tiny.model)
    with running(model) as (loop, sink):
        with pytest.raises(InvalidArgument, match="no tokens"):
            loop.submit(Job("empty", [], 3, GREEDY))
        with pytest.raises(InvalidArgument, match="max_tokens"):
            loop.submit(Job("none", [5], 0, GREEDY))
        model.close()
        loop.submit(Job("twin", [5], 3, GREEDY))
        with pytest.raises(AlreadyExists, match="twin"):
            loop.submit(Job("twin", [6], 3, GREEDY))
        model.open.set()
        sink.ended("twin")
        loop.submit(Job("again", [5], 3, GREEDY))
        sink.ended("again")
        assert sink.ids["again"] == sink.ids["twin"]


def test_cancel_at_every_stage(tiny: Any) -> None:
    """Waiting, in the middle of a long prompt, generating, ended: never lost, told once (T5)."""
    model = Gate(tiny.model)
    with running(model, prefill_budget=16, idle_prefill_budget=16) as (loop, sink):
        model.close()
        loop.submit(Job("first", [5], 3, GREEDY))
        assert model.entered.wait(30)
        loop.submit(Job("waiting", [5], 3, GREEDY))
        loop.cancel("waiting")
        loop.cancel("waiting")
        model.open.set()
        sink.ended("first", "waiting")
        loop.cancel("first")
        model.close()
        loop.submit(Job("long", [3 + i % 400 for i in range(500)], 3, GREEDY))
        assert model.entered.wait(30)
        loop.cancel("long")
        model.open.set()
        sink.ended("long")
        loop.submit(Job("generating", [5], 900, GREEDY))
        sink.tokens("generating", 5)
        loop.cancel("generating")
        sink.ended("generating")
    for uid in ("waiting", "long", "generating"):
        finish = sink.last[uid].finish
        assert finish is not None
        assert finish.reason == "abort"
    assert sink.ids["waiting"] == sink.ids["long"] == []
    assert 5 <= len(sink.ids["generating"]) < 900


def test_five_hundred_cancels_at_random_moments(tiny: Any) -> None:
    """Whatever is cancelled when, the survivors' tokens are the undisturbed ones."""
    chooser = random.Random(5)
    survivor = [7, 8, 9]
    with running(tiny.model, prefill_budget=16, completion_batch_size=8) as (loop, sink):
        loop.submit(Job("undisturbed", survivor, 60, GREEDY))
        sink.ended("undisturbed")
        for i in range(500):
            uid = f"victim-{i}"
            size = chooser.choice([1, 3, 10, 60])
            prompt = [chooser.randrange(3, 500) for _ in range(size)]
            loop.submit(Job(uid, prompt, 30, Sampling(seed=i, frequency_penalty=0.1)))
            if i % 50 == 0:
                loop.submit(Job(f"survivor-{i}", survivor, 60, GREEDY))
            moment = chooser.randrange(4)
            if moment:
                goal = len(sink.calls) + moment - 1
                sink.until(partial(lambda n: len(sink.calls) >= n, goal))
            loop.cancel(uid)
        uids = [f"victim-{i}" for i in range(500)]
        sink.ended(*uids, *(f"survivor-{i}" for i in range(0, 500, 50)))
    for i in range(0, 500, 50):
        assert sink.ids[f"survivor-{i}"] == sink.ids["undisturbed"]
    reasons = {e.finish.reason for u in uids if (e := sink.last[u]).finish is not None}
    assert "abort" in reasons
    assert all(sink.last[u].error is None for u in uids)


def test_stop_ends_what_runs(tiny: Any) -> None:
    sink, deaths = Sink(), list[str]()
    loop = GenerationLoop(tiny.model, deliver=sink, on_death=deaths.append)
    loop.start()
    assert loop.wait_ready(30)
    loop.submit(Job("open", [5], 900, GREEDY))
    sink.tokens("open", 2)
    assert loop.stop(30)
    assert isinstance(sink.last["open"].error, Unavailable)
    assert not loop.alive
    assert deaths == []
    with pytest.raises(Unavailable, match="shutting down"):
        loop.submit(Job("late", [5], 1, GREEDY))
    loop.cancel("late")
    assert loop.stop(0)
    assert set(loop.statistics().values()) == {0}


def test_progress_is_a_moment_on_the_monotonic_clock(tiny: Any) -> None:
    with running(tiny.model) as (loop, sink):
        before = loop.last_progress
        loop.submit(Job("a", [5], 2, GREEDY))
        sink.ended("a")
        assert loop.last_progress > before


def test_an_inbox_forgets_what_it_was_told_has_ended() -> None:
    inbox = Inbox(places=1, max_queued=1)
    inbox.submit(Job("a", [1], 1))
    inbox.cancel("a")
    inbox.cancel("stranger")
    fresh, cancelled, stopping = inbox.take(wait=True)
    assert [r.uid for r in fresh] == [r.uid for r in cancelled] == ["a"]
    assert not stopping
    assert inbox.take(wait=False) == ([], [], False)
    inbox.finish(["a"])
    assert inbox.statistics() == {"in_flight": 0, "queued": 0, "cancelling": 0}


@pytest.mark.parametrize("waits", [True, False], ids=["a CPU", "a GPU"])
def test_when_a_step_is_read(
    tiny: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Where the launch of the next step waits for it: before that. Else behind it, so that the
    device is never idle. The answers are the same.
    """
    known: list[int] = []
    with running(tiny.model) as (loop, sink):
        want = generate(loop, sink, prompts[:3], 12, "want")
        worker = loop._worker
        assert worker is not None
        assert worker._launch_waits
        worker._launch_waits = waits
        plain = kv.launch

        def launch(arrays: list[Any]) -> None:
            known.append(len(sink.ids.get("one", ())))
            plain(arrays)

        with monkeypatch.context() as patched:
            patched.setattr(kv, "launch", launch)
            loop.submit(Job("one", prompts[0], 6, GREEDY))
            sink.ended("one")
        assert generate(loop, sink, prompts[:3], 12, "got") == want
    assert known == ([0, 1, 2, 3, 4, 5] if waits else [0, 0, 1, 2, 3, 4])
