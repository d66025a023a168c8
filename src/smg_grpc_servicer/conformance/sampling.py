"""How tokens are picked and why they end: stop ids, EOS, greedy, seeds, values that are off."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.conformance.registry import NotApplicable, Order, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, output, status

TOKENS = 16
HEAVY = 100.0
"""A bias that outweighs any logit; the largest that OpenAI's API allows."""


def matched(complete: Any) -> int | str | None:
    """The stop that the complete names: a field of its own on MLX, a oneof elsewhere."""
    if "matched_stop_token_id" in complete.DESCRIPTOR.fields_by_name:
        if complete.HasField("matched_stop_token_id"):
            return int(complete.matched_stop_token_id)
        return None
    which = complete.WhichOneof("matched_stop")
    return getattr(complete, which) if which else None


async def _ids(target: Target, **options: Any) -> list[int]:
    options = {"max_tokens": TOKENS, **options}
    return output(await target.generate(**options))


@check("greedy-repeats", "temperature 0 gives the same ids each time")
async def greedy_repeats(target: Target) -> None:
    first, second = await _ids(target), await _ids(target)
    expect(first == second, f"{first}, then {second}")


@check("stop-token", "a stop token id ends the choice with reason stop and is named as matched")
async def stop_token(target: Target) -> None:
    ids = await _ids(target)
    # With ignore_eos SGLang ignores the caller's own stop ids too, so EOS must not come before.
    end = next((at for at, token in enumerate(ids) if token in target.facts.eos), len(ids))
    if not end:
        raise NotApplicable("the model's first token is EOS")
    # The last id that is new at its place, so that the stop cannot strike earlier.
    at = max(at for at, token in enumerate(ids[:end]) if token not in ids[:at])
    for stream in (True, False):
        history = await target.generate(
            max_tokens=TOKENS + 8, stop_token_ids=[ids[at]], ignore_eos=False, stream=stream
        )
        complete = history.complete()
        made, reason = output(history), complete.finish_reason
        expect(reason == "stop", f"finish_reason {reason!r}, {len(made)} ids")
        expect(made in (ids[:at], ids[: at + 1]), f"{made} for a stop at id {at} of {ids}")
        expect(matched(complete) == ids[at], f"matched {matched(complete)}, not {ids[at]}")


@check("stop-token-absent", "a stop id that never comes changes nothing")
async def stop_token_absent(target: Target) -> None:
    ids = await _ids(target)
    absent = next(token for token in range(target.vocab_size) if token not in ids)
    history = await target.generate(max_tokens=TOKENS, stop_token_ids=[absent])
    complete = history.complete()
    expect(output(history) == ids, "other ids than without it")
    expect(complete.finish_reason == "length", f"finish_reason {complete.finish_reason!r}")
    expect(matched(complete) is None, f"matched {matched(complete)}")


def _eos(target: Target) -> int:
    if not target.facts.eos:
        raise NotApplicable("GetModelInfo names no EOS token")
    return target.facts.eos[0]


@check("eos-stops", "EOS ends a choice with reason stop, and is not reported as a caller's stop")
async def eos_stops(target: Target) -> None:
    eos = _eos(target)
    history = await target.generate(logit_bias={eos: HEAVY}, ignore_eos=False)
    complete = history.complete()
    ids, reason = output(history), complete.finish_reason
    expect(reason == "stop", f"finish_reason {reason!r} with ids {ids} for EOS {eos}")
    expect(ids in ([], [eos]), f"ids {ids} for EOS {eos} at once")
    expect(matched(complete) is None, f"matched {matched(complete)} although nobody asked")


@check("ignore-eos", "ignore_eos goes on past EOS to max_tokens")
async def ignore_eos(target: Target) -> None:
    eos = _eos(target)
    history = await target.generate(logit_bias={eos: HEAVY}, max_tokens=5)
    ids, reason = output(history), history.complete().finish_reason
    expect(len(ids) == 5, f"{len(ids)} ids, 5 asked for")
    expect(reason == "length", f"finish_reason {reason!r}")


@check("logit-bias", "a heavy bias on a token makes it the output")
async def logit_bias(target: Target) -> None:
    token = target.prompt[0]
    ids = await _ids(target, logit_bias={token: HEAVY}, max_tokens=4)
    expect(ids == [token] * 4, f"{ids} with +{HEAVY:g} on {token}")


@check("seed-repeats", "the same seed gives the same sampled ids")
async def seed_repeats(target: Target) -> None:
    for seed in (7, 0):
        first = await _ids(target, temperature=1.0, seed=seed)
        second = await _ids(target, temperature=1.0, seed=seed)
        expect(first == second, f"seed {seed}: {first}, then {second}")


@check("seed-matters", "other seeds give other ids")
async def seed_matters(target: Target) -> str:
    outputs = {
        tuple(await _ids(target, temperature=1.5, seed=seed)) for seed in (0, 1, 7, 12, 99, 1234)
    }
    expect(len(outputs) > 1, "six seeds at temperature 1.5 gave one output")
    return f"{len(outputs)} outputs of 6 seeds"


@check("seed-in-company", "a seed gives the same ids while other requests are sampled")
async def seed_in_company(target: Target) -> None:
    alone = await _ids(target, temperature=1.0, seed=42)
    others = [
        target.send(target.request(temperature=1.0, seed=at, max_tokens=target.long))
        for at in range(3)
    ]
    for other in others:
        await other.first()
    company = await _ids(target, temperature=1.0, seed=42)
    # A batch rounds differently, so a near tie may turn; not the start.
    expect(company[:3] == alone[:3], f"{company} in company, {alone} alone")


@check("temperature-tiny", "a temperature near 0 is served, and is as good as greedy")
async def temperature_tiny(target: Target) -> None:
    options: dict[str, Any] = {"temperature": 1e-4, "max_tokens": 4}
    ids, greedy = await _ids(target, **options), await _ids(target, max_tokens=4)
    expect(ids[0] == greedy[0], f"{ids} at 0.0001, {greedy} greedy")


@check("max-tokens-beyond-room", "max_tokens beyond the context is clamped, or refused by name")
async def max_tokens_beyond_room(target: Target) -> str:
    context = target.facts.context
    if not context:
        raise NotApplicable("the context length is unknown")
    stream = target.send(target.request(max_tokens=2 * context))
    if await stream.first():
        return "served"
    history = await stream.end()
    names = ("max_tokens", target.dialect.path("max_tokens"))
    refused = any(name in history.details for name in names) and not _is_fault(history.code)
    expect(refused and target.dialect.engine != "mlx", f"ended {status(history)}")
    return "refused by name"


def _is_fault(code: Any) -> bool:
    return code is None or code.name != "INVALID_ARGUMENT"


@check("top-k-beyond-vocabulary", "top_k larger than the vocabulary is off", Order.ROUGH)
async def top_k_beyond_vocabulary(target: Target) -> None:
    request = target.request(temperature=1.0, top_k=target.vocab_size + 1, max_tokens=4)
    answered(await target.ask(request))
