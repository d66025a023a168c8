"""A suite that catches nothing proves nothing: each broken servicer fails the check for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.conformance import cancel, health, target
from smg_grpc_servicer.conformance.runner import Outcome, run
from smg_grpc_servicer.conformance.suite import select
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.conformance import mutants, spoilers
from tests.conformance.mutants import writing
from tests.conformance.servers import spoiled, target_of, tokenizer_in


@dataclass(frozen=True)
class Mutant:
    """A broken server, and the checks that must fail on it."""

    caught_by: tuple[str, ...]
    servicer: Callable[..., MlxEngineServicer] = MlxEngineServicer
    options: dict[str, Any] = field(default_factory=dict)


class _Vllm(vllm_engine_pb2_grpc.VllmEngineServicer):
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return vllm_pb.HealthCheckResponse(healthy=True)


def _two_engines(server: grpc.aio.Server) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(_Vllm(), server)


MUTANTS = {
    "an empty chunk": Mutant(
        ("stream-no-empty-chunk", "stream-whole"), writing(spoilers.empty_chunk)
    ),
    "cumulative chunks": Mutant(("stream-deltas", "stream-counts"), writing(spoilers.cumulative)),
    "repeats ids": Mutant(("stream-deltas", "stream-whole"), writing(spoilers.repeats_ids)),
    "drops a chunk": Mutant(("slow-reader", "stream-deltas"), writing(spoilers.drops_a_chunk)),
    "a quiet OK": Mutant(
        ("stream-one-complete", "unary-one-message"), writing(spoilers.no_complete)
    ),
    "two completes": Mutant(("stream-one-complete",), writing(spoilers.ends_twice)),
    "counts per chunk": Mutant(("stream-counts",), writing(spoilers.counts_per_chunk)),
    "prompt counted wrong": Mutant(
        ("prompt-tokens", "concurrent"), writing(spoilers.counts_the_prompt)
    ),
    "one token too many": Mutant(("max-tokens-exact", "id-reused"), mutants.OffByOne),
    "mixes prompts": Mutant(("concurrent",), mutants.MixesPrompts),
    "unsorted rows": Mutant(
        ("logprobs-sorted", "logprobs-greedy"), writing(spoilers.unsorted_rows)
    ),
    "logprobs of the last": Mutant(("logprobs-unary",), writing(spoilers.logprobs_of_the_last)),
    "logprobs again": Mutant(("logprobs-off", "logprobs-stream"), writing(spoilers.logprobs_again)),
    "positive logprobs": Mutant(("logprobs-finite",), writing(spoilers.positive_logprobs)),
    "large messages": Mutant(("message-size-stream",), writing(spoilers.large_messages)),
    "reason eos": Mutant(("eos-stops", "stop-token"), writing(spoilers.eos_reason)),
    "no matched stop": Mutant(("stop-token",), writing(spoilers.no_match)),
    "ignores seeds": Mutant(("seed-repeats", "seed-in-company"), mutants.IgnoresSeed),
    "one seed for all": Mutant(("seed-matters",), mutants.OneSeed),
    "runs past EOS": Mutant(("eos-stops",), mutants.IgnoresEos),
    "ignores stop ids": Mutant(("stop-token",), mutants.IgnoresStopIds),
    "swallows Abort": Mutant(("abort-stream", "abort-unary", "abort-list"), mutants.SwallowsAbort),
    "Abort wants a known id": Mutant(("abort-unknown", "abort-twice"), mutants.AbortNeedsAnId),
    "Abort by prefix": Mutant(("abort-whole-id",), mutants.AbortsByPrefix),
    "Abort ends quietly": Mutant(("abort-stream", "abort-at-once"), mutants.AbortEndsQuietly),
    "cancel leaks": Mutant(("cancel-frees", "deadline", "connection-cut"), mutants.CancelLeaks),
    "accepts duplicates": Mutant(("id-duplicate",), mutants.AcceptsDuplicates),
    "clamps bad numbers": Mutant(
        ("invalid-temperature-nan", "invalid-top-p-above-1", "invalid-min-p-negative"),
        mutants.ClampsEverything,
    ),
    "names no field": Mutant(("invalid-max-tokens-0", "id-empty"), mutants.NamesNoField),
    "says INTERNAL": Mutant(("invalid-no-input", "invalid-bias-outside"), mutants.SaysInternal),
    "dies of bad input": Mutant(("invalid-prompt-empty",), mutants.DiesOfBadInput),
    "dead but healthy": Mutant(("health-true",), mutants.DeadButHealthy),
    "HealthCheck disagrees": Mutant(("health-agrees", "health-busy"), mutants.SaysUnhealthy),
    "Watch ends": Mutant(
        ("watch-server", "watch-service", "watch-unknown"), options={"health": mutants.WatchEnds}
    ),
    "knows every name": Mutant(("health-unknown",), options={"health": mutants.KnowsEveryName}),
    "slow health": Mutant(("health-busy",), options={"health": mutants.SlowToTell}),
    "two engines": Mutant(("one-engine",), options={"more": _two_engines}),
    "says null": Mutant(("model-info-honest",), mutants.SaysNull),
    "not generative": Mutant(("model-info",), mutants.NotGenerative),
    "tells secrets": Mutant(("no-secrets",), mutants.TellsSecrets),
    "counts nothing": Mutant(("server-info",), mutants.CountsNothing),
    "a hash on every chunk": Mutant(("tokenizer-sha256",), mutants.HashOnEveryChunk),
    "a new zip each time": Mutant(("tokenizer-same", "tokenizer-names"), mutants.NewZipEachTime),
    "strict about pings": Mutant(("keepalive",), options={"options": []}),
}


LIMITS = (
    (health, "OPEN_SECONDS", 0.2),
    (target, "LONG", 1600),
    (cancel, "FREE_SECONDS", 0.7),
    (cancel, "TRIES", 2),
)
"""A thousand tokens a second are made here, and nobody is far away."""


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each named check fails on it, and passes on the same server unspoilt."""
    mutant = MUTANTS[name]
    for module, limit, value in LIMITS:
        monkeypatch.setattr(module, limit, value)
    dialect, tokenizer = DIALECTS["mlx"], tokenizer_in(tmp_path / "model")
    async with (
        spoiled(dialect, mutant.servicer, tokenizer=tokenizer, **mutant.options) as address,
        target_of(address, engine="mlx", timeout=10.0) as subject,
    ):
        results = await run(subject, select(mutant.caught_by))

    assert {r.check.name for r in results} == set(mutant.caught_by)
    assert [r.check.name for r in results if r.outcome is not Outcome.FAIL] == []


async def test_the_unspoilt_server_passes_all_of_them(tmp_path: Path) -> None:
    """Otherwise the mutants would be caught for the way they are served."""
    names = sorted({name for mutant in MUTANTS.values() for name in mutant.caught_by})
    tokenizer = tokenizer_in(tmp_path / "model")
    async with (
        spoiled(DIALECTS["mlx"], MlxEngineServicer, tokenizer=tokenizer) as address,
        target_of(address) as subject,
    ):
        results = await run(subject, select(names))

    assert {r.check.name: r.detail for r in results if r.outcome is not Outcome.PASS} == {}


async def test_the_rest_is_not_run_when_the_server_is_gone(tmp_path: Path) -> None:
    """P1: after a check that took the server down nothing else is blamed on the next ones."""
    async with (
        spoiled(DIALECTS["mlx"], mutants.DiesOfBadInput) as address,
        target_of(address) as subject,
    ):
        results = await run(subject, select(["invalid-prompt-empty", "invalid-prompt-id"]))

    assert [r.outcome for r in results] == [Outcome.FAIL, Outcome.FAIL]
    assert "then a plain request ended UNAVAILABLE" in results[0].detail
    assert results[1].detail == "not run: the server no longer serves since invalid-prompt-empty"
