"""The life of a request: what comes back, in which pieces, and that it adds up.

Source of the promises: the contract table in DEVELOPMENT.md and what the gateway reads.
"""

from __future__ import annotations

import asyncio

import grpc

from smg_grpc_servicer.conformance.registry import NotApplicable, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, kept, output, served, status
from smg_grpc_servicer.testing.history import History

TOKENS = 24


async def _stream(target: Target, tokens: int = TOKENS) -> History:
    return served(await target.ask(target.request(max_tokens=tokens)))


@check("stream-deltas", "chunks carry new ids only; joined they equal the complete's output_ids")
async def stream_deltas(target: Target) -> str:
    history = await _stream(target)
    ids, whole = history.streamed_ids(), list(history.complete().output_ids)
    expect(ids == whole, f"{len(ids)} streamed ids, {len(whole)} in the complete")
    expect(len(ids) == TOKENS, f"{len(ids)} ids streamed, {TOKENS} asked for")
    return f"{len(ids)} ids in {len(history.chunks)} chunks"


@check("stream-no-empty-chunk", "no chunk comes without token ids")
async def stream_no_empty_chunk(target: Target) -> None:
    history = await _stream(target)
    empty = sum(not chunk.token_ids for chunk in history.chunks)
    expect(not empty, f"{empty} of {len(history.chunks)} chunks are empty")


@check("stream-counts", "completion_tokens of a chunk counts all ids up to it")
async def stream_counts(target: Target) -> None:
    total = 0
    for chunk in (await _stream(target)).chunks:
        total += len(chunk.token_ids)
        expect(chunk.completion_tokens == total, f"{chunk.completion_tokens} after {total} ids")


@check("stream-one-complete", "a stream ends with one complete, then OK")
async def stream_one_complete(target: Target) -> None:
    history = await _stream(target)
    kinds = [message.WhichOneof("response") for message in history.messages]
    expect(kinds.count("complete") == 1, f"{kinds.count('complete')} completes, status OK")
    expect(kinds[-1] == "complete", "messages after the complete")
    expect(set(kinds) <= {"chunk", "complete"}, "a message with neither chunk nor complete")


@check("stream-whole", "a stream keeps every promise of the shipped history checker")
async def stream_whole(target: Target) -> None:
    kept(await _stream(target))


@check("unary-one-message", "stream=false is answered by one message: the complete, with all ids")
async def unary_one_message(target: Target) -> None:
    history = kept(await target.ask(target.request(stream=False, max_tokens=TOKENS)))
    expect(len(history.messages) == 1, f"{len(history.messages)} messages")
    count = len(history.complete().output_ids)
    expect(count == TOKENS, f"{count} ids, {TOKENS} asked for")


@check("unary-equals-stream", "the same greedy request yields the same ids streamed or whole")
async def unary_equals_stream(target: Target) -> None:
    streamed = output(await target.generate())
    whole = output(await target.generate(stream=False))
    expect(streamed == whole, f"streamed {streamed}, whole {whole}")


@check("prompt-tokens", "prompt_tokens is the prompt's length, in chunks and in the complete")
async def prompt_tokens(target: Target) -> None:
    for length in (1, 2, 9):
        prompt = (target.prompt * length)[:length]
        history = await target.generate(prompt=prompt, max_tokens=2)
        parts = [*history.chunks, history.complete()]
        said = {part.prompt_tokens for part in parts}
        expect(said == {length}, f"{sorted(said)} for a prompt of {length} ids")


@check("token-zero", "token id 0 is a token like any other")
async def token_zero(target: Target) -> None:
    history = await target.generate(prompt=[0, *target.prompt, 0], max_tokens=2)
    said = history.complete().prompt_tokens
    expect(said == len(target.prompt) + 2, f"prompt_tokens {said}, {len(target.prompt) + 2} sent")


@check("max-tokens-exact", "max_tokens is reached exactly and the reason is length")
async def max_tokens_exact(target: Target) -> None:
    for tokens in (1, 2, 7):
        for stream in (True, False):
            history = await target.generate(max_tokens=tokens, stream=stream)
            complete, made = history.complete(), len(output(history))
            said = complete.completion_tokens
            expect(said == made, f"completion_tokens {said} for {made} ids, stream={stream}")
            expect(made == tokens, f"{made} ids for max_tokens {tokens}, stream={stream}")
            reason = complete.finish_reason
            expect(reason == "length", f"finish_reason {reason!r} for max_tokens {tokens}")


@check("index-zero", "the only choice has index 0")
async def index_zero(target: Target) -> None:
    history = await _stream(target, 4)
    seen = {part.index for part in [*history.chunks, *history.completes]}
    expect(seen == {0}, f"indexes {sorted(seen)}")


@check("response-id", "every response names its request")
async def response_id(target: Target) -> None:
    if "request_id" not in target.dialect.pb.GenerateResponse.DESCRIPTOR.fields_by_name:
        raise NotApplicable("the proto's responses carry no id")
    request_id = target.new_id()
    for message in (await target.generate(request_id)).messages:
        expect(message.request_id == request_id, f"got {message.request_id!r}")


@check("bare-request", "a request with nothing but ids and max_tokens is served: zero is unset")
async def bare_request(target: Target) -> None:
    pb = target.dialect.pb
    request = pb.GenerateRequest(request_id=target.new_id(), stream=True)
    request.tokenized.input_ids.extend(target.prompt)
    name = target.dialect.renames.get("max_tokens", "max_tokens")
    setattr(request.sampling_params, name, 4)
    answered(await target.ask(request))


@check("text-prompt", "a text prompt is tokenized by the server")
async def text_prompt(target: Target) -> str:
    complete = (await target.generate(text="Hello", max_tokens=2)).complete()
    expect(complete.prompt_tokens > 0, "prompt_tokens 0")
    return f"{complete.prompt_tokens} prompt tokens"


@check("choices-stream", "n choices: each streams under its index and has its own complete")
async def choices_stream(target: Target) -> None:
    await _choices(target, stream=True)


@check("choices-unary", "n choices of a whole answer: one complete each")
async def choices_unary(target: Target) -> None:
    await _choices(target, stream=False)


async def _choices(target: Target, *, stream: bool) -> None:
    # Greedy choices are all alike, and some engines refuse them.
    history = await target.generate(choices=3, n=3, stream=stream, temperature=1.0, max_tokens=6)
    for index in range(3):
        made = len(output(history, index))
        expect(made == 6, f"choice {index} has {made} ids, 6 asked for")


@check("concurrent", "streams that run at once keep their own prompts, ids and counts")
async def concurrent(target: Target) -> str:
    base = target.prompt
    asked = [((base[at % len(base) :] + base * 2)[: at + 1], 6 + at) for at in range(8)]
    alone = [await target.generate(prompt=prompt, max_tokens=top) for prompt, top in asked]
    together = await asyncio.gather(
        *(target.generate(prompt=prompt, max_tokens=top) for prompt, top in asked)
    )
    same = 0
    for (prompt, top), one, many in zip(asked, alone, together, strict=True):
        said = many.complete()
        expect(said.prompt_tokens == len(prompt), f"prompt_tokens {said.prompt_tokens}")
        first, ids = output(one), output(many)
        expect(len(ids) == top, f"{len(ids)} ids, {top} asked for")
        expect(ids[0] == first[0], f"first id {ids[0]} in company, {first[0]} alone")
        same += ids == first
    # A batch rounds differently, so a near tie may turn; not in most of them.
    expect(same >= len(asked) // 2, f"only {same} of {len(asked)} outputs are those made alone")
    return f"{same} of {len(asked)} outputs identical to those made alone"


@check("slow-reader", "a client that reads slowly gets every token, in order")
async def slow_reader(target: Target) -> str:
    tokens = target.tokens_for(1.5, 1000)
    request = target.request(max_tokens=tokens)
    history = answered(await target.send(request, pause=lambda at: 0.02 if at < 25 else 0.0).end())
    made = len(output(history))
    expect(made == tokens, f"{made} of {tokens} tokens arrived")
    return f"{tokens} tokens in {len(history.chunks)} chunks"


@check("stop-strings", "stop strings are served, or refused by name")
async def stop_strings(target: Target) -> str:
    history = await target.ask(target.request(stop=["\u2603 never said"]))
    if history.code is grpc.StatusCode.INVALID_ARGUMENT:
        expect("stop" in history.details, f"{status(history)} does not name stop")
        return "refused by name"
    answered(history)
    return "served"
