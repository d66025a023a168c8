"""Load rows: the engine's figures first, our own count where it has none, nothing invented."""

from __future__ import annotations

import sys
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING

from smg_grpc_servicer.vllm.loads import HIT_RATE_REQUESTS, LoadTable, Tracked
from smg_grpc_servicer.vllm.stats import RankStats, StatsListener, families, without_prometheus

if TYPE_CHECKING:
    import pytest

IDLE = {"tracked": 0, "silent": 0, "silent_tokens": 0}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def table(*ranks: int, clock: Clock | None = None, max_running: int | None = 2) -> LoadTable:
    return LoadTable(ranks, max_running=max_running, max_tokens=1600, clock=clock or Clock())


def test_without_the_engines_word_the_own_count_stands() -> None:
    """T9 and weak point 15: `--disable-log-stats` must not read as an idle worker."""
    books = table(0)
    requests = [books.submitted(100, None) for _ in range(3)]
    (load,) = books.loads({})
    assert (load.running_requests, load.waiting_requests) == (2, 1)
    assert load.waiting_uncached_tokens == 100
    assert load.token_usage is None
    assert load.used_tokens is None
    assert load.max_total_tokens == 1600
    for request in requests:
        request.left()
    assert books.statistics() == IDLE


def test_the_engines_figures_go_first() -> None:
    books = table(0)
    request = books.submitted(100, None)
    (load,) = books.loads({0: RankStats(running=5, waiting=4, kv_usage=0.25)})
    assert (load.running_requests, load.waiting_requests) == (5, 4)
    assert (load.token_usage, load.used_tokens) == (0.25, 400)
    # Only one silent request is ours, so its tokens are all that is known to wait.
    assert load.waiting_uncached_tokens == 100
    request.left()


def test_rows_carry_global_ranks() -> None:
    books = table(4, 5)
    pinned = books.submitted(10, 5)
    first, second = books.loads({4: RankStats(running=1)})
    assert (first.rank, first.running_requests) == (4, 1)
    assert (second.rank, second.running_requests) == (5, 1)
    pinned.left()


def test_a_request_on_no_known_rank_makes_the_own_count_unknown() -> None:
    books = table(0, 1)
    homeless = books.submitted(10, None)
    assert [load.running_requests for load in books.loads({})] == [None, None]
    homeless.settle(1)
    assert [load.running_requests for load in books.loads({})] == [0, 1]
    homeless.left()
    assert books.statistics() == IDLE


def test_the_hit_rate_is_of_the_last_requests() -> None:
    books = table(0)

    def serve(prompt: int, cached: int | None) -> None:
        request: Tracked = books.submitted(prompt, None)
        request.answered(cached)
        request.answered(cached)
        request.left()

    serve(100, None)
    assert books.loads({})[0].cache_hit_rate is None
    serve(100, 100)
    assert books.loads({})[0].cache_hit_rate == 1.0
    for _ in range(HIT_RATE_REQUESTS):
        serve(100, 50)
    assert books.loads({})[0].cache_hit_rate == 0.5
    assert books.statistics() == IDLE


def test_cached_prompts_wait_for_less() -> None:
    books = table(0, max_running=1)
    done = books.submitted(100, None)
    done.answered(50)
    waiting = books.submitted(80, None)
    assert books.loads({})[0].waiting_uncached_tokens == 40
    done.left()
    waiting.left()


def test_the_rate_is_of_the_last_seconds() -> None:
    clock = Clock()
    books = table(0, clock=clock)
    assert books.loads({})[0].gen_throughput is None
    request = books.submitted(10, None)
    request.generated(300)
    clock.now += 3.0
    assert books.loads({})[0].gen_throughput == 100.0
    clock.now += 3.0
    assert books.loads({})[0].gen_throughput == 0.0
    request.left()


def test_the_listener_hears_every_rank_and_survives_a_new_manager() -> None:
    """Elastic scaling makes new loggers; the figures of the old ones are history."""
    listener = StatsListener()
    llm = SimpleNamespace(logger_manager=None)
    assert not listener.attach(llm)
    assert not listener.attached
    llm.logger_manager = SimpleNamespace(stat_loggers=[])
    assert listener.attach(llm)
    assert listener.attach(llm)
    assert llm.logger_manager.stat_loggers == [listener]
    stats = SimpleNamespace(
        num_running_reqs=2, num_waiting_reqs=1, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
    )
    listener.record(stats, None, mm_cache_stats=None, engine_idx=3)
    listener.record(None, None, engine_idx=4)
    assert listener.ranks == {3: RankStats(2, 2, 0.5)}
    assert listener.last_step is not None
    llm.logger_manager = SimpleNamespace(stat_loggers=[])
    assert listener.attach(llm)
    assert listener.ranks == {}


def test_without_steps_to_hear_no_work_is_taken_for_a_hang() -> None:
    """`--disable-log-stats`: a long prefill shows nothing, so silence never counts as one."""
    listener = StatsListener()
    before = monotonic()
    assert (listener.sign_of_life() or 0.0) >= before
    listener.attach(SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[])))
    assert listener.sign_of_life() is None
    listener.record()
    assert listener.sign_of_life() == listener.last_step is not None


def test_what_a_warm_up_did_is_nobodys_load() -> None:
    """Weak point 10: it stood in the hit rate and the throughput that a router balances by."""
    clock = Clock()
    books = table(0, 1, clock=clock)
    late = books.submitted(50, 0)
    done, homeless = books.submitted(100, 1), books.submitted(10, None)
    done.answered(100)
    done.generated(500)
    done.left()
    books.start_over()
    clock.now += 10
    for load in books.loads({}):
        assert (load.running_requests, load.gen_throughput, load.cache_hit_rate) == (None,) * 3
    homeless.left()
    for load in books.loads({}):
        assert (load.running_requests, load.waiting_requests) == (0, 0)
        assert (load.gen_throughput, load.cache_hit_rate) == (0.0, None)
    late.generated(3)
    late.left()
    assert books.statistics() == IDLE
    mine = books.submitted(10, 0)
    mine.answered(4)
    assert books.loads({})[0].cache_hit_rate == 0.4
    mine.left()


def test_families_are_vllms_own_and_none_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "vllm.v1.metrics.prometheus"
    for loading in (None, SimpleNamespace()):
        monkeypatch.setitem(sys.modules, module, loading)
        assert families() == []
    found = [SimpleNamespace(name=name) for name in ("vllm:steps", "python_info")]
    loaded = SimpleNamespace(
        get_prometheus_registry=lambda: SimpleNamespace(collect=lambda: iter(found))
    )
    monkeypatch.setitem(sys.modules, module, loaded)
    assert families() == found[:1]


def test_a_logger_that_nobody_reads_is_taken_out() -> None:
    """vLLM's for Prometheus, and no other."""

    class PrometheusStatLogger: ...

    class LoggingStatLogger: ...

    kept = LoggingStatLogger()
    loggers = [PrometheusStatLogger(), kept]
    listener = StatsListener()
    llm = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=loggers))
    assert listener.attach(llm)
    without_prometheus(llm)
    assert loggers == [kept, listener]
    without_prometheus(SimpleNamespace(logger_manager=None))
