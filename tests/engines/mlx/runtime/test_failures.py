"""One request's failure is its own: the others lose no token and repeat none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from smg_grpc_servicer.core.errors import EngineDead, Internal, Unavailable
from smg_grpc_servicer.core.types import Sampling
from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime.decode import DecodeBatch
from smg_grpc_servicer.mlx.runtime.job import Job, make_row
from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop
from smg_grpc_servicer.mlx.runtime.prefix_cache import PrefixCache
from tests.support.mlx_loop import GREEDY, Sink, running

POISON = 500
STEADY = Sampling(temperature=0, logit_bias={POISON: -1e9})
"""Never draws the poison by itself."""


class Poisoned:
    """A model that fails, in a way of the test's choosing, when it is fed the poison."""

    def __init__(self, model: Any, *, half_way: bool = False, nan: bool = False) -> None:
        self.model = model
        self.half_way = half_way
        self.nan = nan
        self.calls = 0
        self.failures = 0

    def __call__(self, tokens: Any, cache: Any) -> Any:
        self.calls += 1
        hit = tokens == POISON
        if not mx.any(hit).item():
            return self.model(tokens, cache=cache)
        self.failures += 1
        if self.nan:
            logits = self.model(tokens, cache=cache)
            return mx.where(mx.any(hit, axis=1)[:, None, None], mx.nan, logits)
        if self.half_way:
            # Some layers have taken the step's keys and values, others have not.
            self.model.model.layers[0](mx.zeros((*tokens.shape, 64)), None, cache=cache[0])
        raise RuntimeError("poison")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def undisturbed(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    with running(model) as (loop, sink):
        uids = [str(i) for i in range(len(prompts))]
        for uid, prompt in zip(uids, prompts, strict=True):
            loop.submit(Job(uid, prompt, tokens, STEADY))
        sink.ended(*uids)
        return [sink.ids[uid] for uid in uids]


def test_a_row_that_leaves_before_its_first_step_costs_the_others_nothing(tiny: Any) -> None:
    """C3: one-token prompts have empty caches, which mlx-lm cannot take apart."""
    batch = DecodeBatch(tiny.model, PrefixCache(0))
    stays, goes = (make_row(Job(uid, [5], 3, STEADY), 0) for uid in ("stays", "goes"))
    batch.add([stays, goes], kv.merge([kv.make(tiny.model), kv.make(tiny.model)]))
    goes.done = goes.failed = True

    batch.prune()
    for _ in range(3):
        step = batch.build()
        batch.launch(step)
        step.read()

    assert batch.find_culprits() == []
    assert stays.tokens[1:] == undisturbed(tiny.model, [[5]], 3)[0][:3]


@pytest.mark.parametrize("half_way", [False, True])
def test_a_poisoned_row_in_decode(tiny: Any, prompts: list[list[int]], half_way: bool) -> None:
    """Neighbours of a bad row lost a token and never knew (P3)."""
    want = undisturbed(tiny.model, prompts[2:8], 40)
    model = Poisoned(tiny.model, half_way=half_way)
    with running(model) as (loop, sink):
        uids = [str(i) for i in range(6)]
        for i, uid in enumerate(uids):
            loop.submit(Job(uid, prompts[2 + i], 40, STEADY))
            if i in {2, 4}:
                bad = Sampling(temperature=0, logit_bias={POISON: 1e9})
                loop.submit(Job(f"bad-{i}", prompts[i], 40, bad))
        sink.ended(*uids, "bad-2", "bad-4")
        assert loop.counters()["failed_steps_total"] >= 1
    assert model.failures > 0
    assert [sink.ids[uid] for uid in uids] == want
    for uid in ("bad-2", "bad-4"):
        assert sink.ids[uid] == [POISON]
        error = sink.last[uid].error
        assert isinstance(error, Internal)
        assert "poison" in str(error)


def test_a_poisoned_row_alone(tiny: Any, prompts: list[list[int]]) -> None:
    with running(Poisoned(tiny.model, half_way=True)) as (loop, sink):
        bad = Sampling(temperature=0, logit_bias={POISON: 1e9})
        loop.submit(Job("bad", prompts[3], 40, bad))
        sink.ended("bad")
        assert isinstance(sink.last["bad"].error, Internal)
        loop.submit(Job("good", prompts[3], 5, STEADY))
        sink.ended("good")
    assert len(sink.ids["good"]) == 5


@pytest.mark.parametrize("length", [5, 100])
def test_a_poisoned_prompt(tiny: Any, prompts: list[list[int]], length: int) -> None:
    """In a group of short prompts and in a chunk of a long one."""
    want = undisturbed(tiny.model, prompts[2:8], 20)
    bad = [3 + i for i in range(length)]
    bad[length // 2] = POISON
    with running(Poisoned(tiny.model), prefill_budget=64) as (loop, sink):
        uids = [str(i) for i in range(6)]
        for i, uid in enumerate(uids):
            loop.submit(Job(uid, prompts[2 + i], 20, STEADY))
            if i == 3:
                loop.submit(Job("bad", bad, 20, STEADY))
        sink.ended(*uids, "bad")
    assert isinstance(sink.last["bad"].error, Internal)
    assert sink.ids["bad"] == []
    assert [sink.ids[uid] for uid in uids] == want


def test_a_row_whose_logits_are_not_finite(tiny: Any, prompts: list[list[int]]) -> None:
    want = undisturbed(tiny.model, prompts[2:6], 20)
    with running(Poisoned(tiny.model, nan=True)) as (loop, sink):
        uids = [str(i) for i in range(4)]
        for i, uid in enumerate(uids):
            loop.submit(Job(uid, prompts[2 + i], 20, STEADY))
        loop.submit(Job("bad", [5, 6, POISON], 20, Sampling(seed=1)))
        sink.ended(*uids, "bad")
    assert "not finite" in str(sink.last["bad"].error)
    assert sink.ids["bad"] == []
    assert [sink.ids[uid] for uid in uids] == want


def test_masked_logits_are_fine(tiny: Any) -> None:
    """Some models mask padding ids with minus infinity: that is no fault."""

    class Masking(Poisoned):
        def __call__(self, tokens: Any, cache: Any) -> Any:
            logits = self.model(tokens, cache=cache)
            return mx.where(mx.arange(logits.shape[-1]) < 100, logits, -mx.inf)

    with running(Masking(tiny.model)) as (loop, sink):
        loop.submit(Job("greedy", [5, 6], 20, GREEDY))
        loop.submit(Job("sampled", [5, 6], 20, Sampling(seed=1, top_p=0.9), logprobs=2))
        sink.ended("greedy", "sampled")
    assert max(sink.ids["greedy"] + sink.ids["sampled"]) < 100


def failing(real: Any, *calls: int) -> Any:
    """`real`, which fails at these of its calls (counted from 1)."""
    count = 0

    def function(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            raise MemoryError("no room on the device")
        return real(*args, **options)

    return function


def test_a_step_lost_while_it_ran_costs_its_rows_only(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device lost cannot be run again: its rows end, the next request is served."""
    with running(tiny.model, prompt_cache_bytes=0) as (loop, sink):
        monkeypatch.setattr(kv, "launch", failing(kv.launch, 6))
        for uid in ("a", "b"):
            loop.submit(Job(uid, [5, 6, 7], 40, GREEDY))
        sink.ended("a", "b")
        assert "no room on the device" in str(sink.last["a"].error)
        assert loop.alive
        loop.submit(Job("next", [5, 6, 7], 10, GREEDY))
        sink.ended("next")
        assert len(sink.ids["next"]) == 10


def test_rows_of_an_untrimmable_cache_end_together(
    tiny: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "roll_back", lambda caches, before: False)
    with running(Poisoned(tiny.model)) as (loop, sink):
        loop.submit(Job("good", prompts[3], 40, STEADY))
        sink.tokens("good", 1)
        loop.submit(Job("bad", prompts[4], 40, Sampling(logit_bias={POISON: 1e9})))
        sink.ended("good", "bad")
        assert isinstance(sink.last["good"].error, Internal)
        loop.submit(Job("next", prompts[3], 4, STEADY))
        sink.ended("next")
        assert len(sink.ids["next"]) == 4


def start(model: Any, **options: Any) -> tuple[GenerationLoop, Sink, list[str]]:
    sink, deaths = Sink(), list[str]()
    loop = GenerationLoop(model, deliver=sink, on_death=deaths.append, **options)
    loop.start()
    assert loop.wait_ready(30)
    return loop, sink, deaths


def test_three_lost_steps_in_a_row_end_the_thread(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every open job is told at once, and later ones are refused instead of hanging (E5)."""
    loop, sink, deaths = start(tiny.model, completion_batch_size=1)
    monkeypatch.setattr(kv, "launch", failing(kv.launch, *range(100)))
    uids = [str(i) for i in range(6)]
    for uid in uids:
        loop.submit(Job(uid, [5], 5, GREEDY))
    sink.ended(*uids)
    assert loop.stop(10)
    assert not loop.alive
    kinds = [type(sink.last[uid].error) for uid in uids]
    assert kinds == [Internal] * 3 + [EngineDead] * 3
    assert deaths == ["3 generation steps failed in a row: MemoryError: no room on the device"]
    with pytest.raises(EngineDead, match="3 generation steps failed"):
        loop.submit(Job("late", [5], 1, GREEDY))
    assert set(loop.statistics().values()) == {0}


def test_a_step_that_succeeds_forgives_earlier_ones(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, sink, deaths = start(tiny.model, prompt_cache_bytes=0)
    monkeypatch.setattr(kv, "launch", failing(kv.launch, 1, 2, 5, 6, 9))
    for i in range(9):
        loop.submit(Job(str(i), [5], 2, GREEDY))
        sink.ended(str(i))
    assert [sink.last[str(i)].error is None for i in range(4)] == [False, False, True, False]
    assert loop.stop(10)
    assert deaths == []


@pytest.mark.parametrize("method", ["prune", "find_culprits", "add"])
def test_a_fault_outside_the_model_is_a_lost_step(
    tiny: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Caches of different sizes that could not be joined killed the thread (E5)."""
    with running(Poisoned(tiny.model)) as (loop, sink):
        loop.submit(Job("first", prompts[3], 900, STEADY))
        sink.tokens("first", 2)
        with monkeypatch.context() as patch:
            patch.setattr(DecodeBatch, method, failing(getattr(DecodeBatch, method), 1))
            bad = Sampling(temperature=0, logit_bias={POISON: 1e9})
            loop.submit(Job("second", prompts[4], 9, bad))
            sink.ended("first", "second")
        assert isinstance(sink.last["first"].error, Internal)
        loop.submit(Job("next", prompts[3], 4, STEADY))
        sink.ended("next")
        assert len(sink.ids["next"]) == 4


def test_any_death_of_the_thread_is_told(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sink, deaths = start(tiny.model)
    loop.submit(Job("open", [5, 6], 900, GREEDY))
    sink.tokens("open", 3)
    monkeypatch.setattr(loop._inbox, "take", failing(loop._inbox.take, 1))
    sink.ended("open")
    assert isinstance(sink.last["open"].error, EngineDead)
    assert loop.stop(10)
    assert deaths == ["the generation thread failed: MemoryError: no room on the device"]


def test_a_receiver_that_fails_is_a_death(tiny: Any) -> None:
    deaths: list[str] = []
    told: list[list[Any]] = []

    def deliver(events: list[Any]) -> None:
        told.append(events)
        raise RuntimeError("the event loop is closed")

    loop = GenerationLoop(tiny.model, deliver=deliver, on_death=deaths.append)
    loop.start()
    assert loop.wait_ready(30)
    loop.submit(Job("a", [5], 5, GREEDY))
    loop._thread.join(30)
    assert not loop.alive
    assert deaths == ["the generation thread failed: RuntimeError: the event loop is closed"]
    assert [event.last for events in told for event in events] == [False, True]


def test_a_model_that_does_not_run_is_said_at_the_start() -> None:
    class Broken:
        layers = ()

        def __call__(self, tokens: Any, cache: Any) -> Any:
            raise ValueError("no such kernel")

    deaths: list[str] = []
    loop = GenerationLoop(Broken(), deliver=lambda events: None, on_death=deaths.append)
    loop.start()
    with pytest.raises(ValueError, match="no such kernel"):
        loop.wait_ready(30)
    assert loop.stop(10)
    assert deaths == ["the model does not run: ValueError: no such kernel"]
    with pytest.raises(Unavailable):
        loop.submit(Job("a", [5], 5, GREEDY))


class Broken:
    """A model that works until it is told not to."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.broken = False

    def __call__(self, tokens: Any, cache: Any) -> Any:
        if self.broken:
            raise RuntimeError("the device is gone")
        return self.model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_a_model_that_fails_for_everybody_ends_the_engine(tiny: Any) -> None:
    """Each request alone looks like a bad row; three in a row make the runtime ask a plain one."""
    model = Broken(tiny.model)
    deaths: list[str] = []
    sink = Sink()
    loop = GenerationLoop(model, deliver=sink, on_death=deaths.append)
    loop.start()
    assert loop.wait_ready(30)
    model.broken = True
    for uid in "abc":
        loop.submit(Job(uid, [5, 6, 7], 4, GREEDY))
        sink.ended(uid)
        assert isinstance(sink.last[uid].error, (Internal, EngineDead))
    assert loop.stop(30)
    assert len(deaths) == 1
    assert "the device is gone" in deaths[0]


def test_bad_requests_in_a_row_do_not_end_the_engine(tiny: Any) -> None:
    model = Poisoned(tiny.model)
    with running(model) as (loop, sink):
        for i in range(5):
            loop.submit(Job(f"bad-{i}", [5, POISON, 6, 7], 4, STEADY))
            sink.ended(f"bad-{i}")
            assert isinstance(sink.last[f"bad-{i}"].error, Internal)
        loop.submit(Job("good", [5, 6, 7], 4, STEADY))
        sink.ended("good")
        assert len(sink.ids["good"]) == 4
