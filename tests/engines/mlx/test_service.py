"""What a caller gets from the served engine: text, counts, ends, facts. Rows: test_promises.py."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.testing.history import check
from tests.support.mlx_client import END, VOCAB, Client, chat_prompt, random_prompt
from tests.support.servers import Server

EXAMPLES = demo.examples()


def ask(words: Any, text: str) -> list[int]:
    ids: list[int] = words.encode(chat_prompt(text)).ids
    return ids


def said(words: Any, ids: list[int]) -> str:
    text: str = words.decode(ids)
    return text


@pytest.mark.parametrize("stream", [True, False])
async def test_every_example_is_answered_word_for_word(
    demo_client: Client, words: Any, stream: bool
) -> None:
    """All examples at once: the batch must not change any of them."""
    requests = [demo_client.request(ask(words, e.question), stream=stream) for e in EXAMPLES]
    histories = await demo_client.together(requests)
    for example, history in zip(EXAMPLES, histories, strict=True):
        assert check(history) == []
        complete = history.complete()
        assert said(words, list(complete.output_ids)) == example.answer
        assert complete.finish_reason == "stop"
        assert complete.prompt_tokens == len(ask(words, example.question))
        assert complete.output_ids[-1] == END


async def test_batch_equals_alone_over_the_wire(noise_client: Client) -> None:
    """Greedy ids do not depend on the neighbours, whose prompts differ in length."""
    prompts = [random_prompt(1 + 7 * i, seed=1) for i in range(16)]
    alone = [await noise_client.ids(p, max_tokens=30) for p in prompts]
    together = await noise_client.together(
        [noise_client.request(p, max_tokens=30) for p in prompts]
    )
    assert [list(h.complete().output_ids) for h in together] == alone


async def test_text_input_is_tokenized_as_the_model_wants_it(
    demo_client: Client, words: Any
) -> None:
    """Special tokens written out in a text are read as such; counts are those of the ids."""
    question = EXAMPLES[0].question
    history = await demo_client.generate([], text=chat_prompt(question))
    assert check(history) == []
    assert said(words, list(history.complete().output_ids)) == EXAMPLES[0].answer
    assert history.complete().prompt_tokens == len(ask(words, question))


async def test_empty_text_is_an_empty_prompt(demo_client: Client) -> None:
    history = await demo_client.generate([], text="")
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "text: must not be empty" in history.details


async def test_the_end_of_text_is_no_stop_the_caller_asked_for(
    demo_client: Client, words: Any
) -> None:
    """F3: the model's own end leaves matched_stop_token_id unset; a caller's stop sets it."""
    prompt = ask(words, EXAMPLES[0].question)
    whole = await demo_client.generate(prompt)
    complete = whole.complete()
    assert complete.finish_reason == "stop"
    assert not complete.HasField("matched_stop_token_id")
    third = complete.output_ids[2]
    assert third not in list(complete.output_ids[:2])

    cut = (await demo_client.generate(prompt, stop_token_ids=[third])).complete()
    assert cut.finish_reason == "stop"
    assert cut.matched_stop_token_id == third
    assert list(cut.output_ids) == list(complete.output_ids[:3])

    own = (await demo_client.generate(prompt, stop_token_ids=[END])).complete()
    assert own.matched_stop_token_id == END


async def test_stop_id_zero_is_reported(noise_client: Client) -> None:
    """O5: id 0 is a token: biased to come first, it stops and is named."""
    history = await noise_client.generate(
        random_prompt(5), logit_bias={0: 1000.0}, stop_token_ids=[0], max_tokens=5
    )
    complete = history.complete()
    assert list(complete.output_ids) == [0]
    assert complete.HasField("matched_stop_token_id")
    assert complete.matched_stop_token_id == 0


async def test_ignore_eos_goes_on_to_the_limit(demo_client: Client, words: Any) -> None:
    prompt = ask(words, EXAMPLES[0].question)
    history = await demo_client.generate(prompt, max_tokens=60, ignore_eos=True)
    complete = history.complete()
    assert complete.finish_reason == "length"
    assert len(complete.output_ids) == 60
    assert END in list(complete.output_ids)


async def test_stop_wins_over_length_on_the_last_token(demo_client: Client, words: Any) -> None:
    prompt = ask(words, EXAMPLES[0].question)
    whole = (await demo_client.generate(prompt)).complete()
    size = len(whole.output_ids)
    exact = (await demo_client.generate(prompt, max_tokens=size, ignore_eos=False)).complete()
    assert exact.finish_reason == "stop"
    short = (await demo_client.generate(prompt, max_tokens=size - 1, ignore_eos=False)).complete()
    assert short.finish_reason == "length"
    assert len(short.output_ids) == size - 1


async def test_a_repeated_prefix_is_reported_as_cached(noise_client: Client) -> None:
    """P11: the same prompt, and a longer one over it, find the prefix; the ids stay the same."""
    prompt = random_prompt(300, seed=2)
    first = (await noise_client.generate(prompt, max_tokens=8)).complete()
    assert first.cached_tokens == 0
    again = (await noise_client.generate(prompt, max_tokens=8)).complete()
    assert 250 <= again.cached_tokens < len(prompt)
    assert list(again.output_ids) == list(first.output_ids)

    history = await noise_client.generate([*prompt, 7, 8, 9], max_tokens=8)
    longer = history.complete()
    assert 250 <= longer.cached_tokens <= len(prompt)
    assert history.chunks[0].cached_tokens == longer.cached_tokens
    assert longer.prompt_tokens == len(prompt) + 3


async def test_penalties_look_at_the_whole_output(noise_client: Client) -> None:
    """P10: a strong penalty forbids repeating anything of the output, not only its last 20 ids."""
    prompt = random_prompt(4, seed=3)
    plain = await noise_client.ids(prompt, max_tokens=120)
    assert len(set(plain)) < 120
    for name in ("presence_penalty", "frequency_penalty"):
        ids = await noise_client.ids(prompt, max_tokens=120, **{name: 1000.0})
        assert len(set(ids)) == 120


async def test_logit_bias_forces_and_forbids(noise_client: Client) -> None:
    prompt = random_prompt(6, seed=4)
    plain = await noise_client.ids(prompt, max_tokens=6)
    forced = await noise_client.ids(prompt, max_tokens=6, logit_bias={77: 1000.0})
    assert forced == [77] * 6
    without = await noise_client.ids(prompt, max_tokens=6, logit_bias={plain[0]: -1000.0})
    assert plain[0] not in without
    last = await noise_client.ids(prompt, max_tokens=2, logit_bias={VOCAB - 1: 1000.0})
    assert last == [VOCAB - 1] * 2


async def test_model_facts(demo_client: Client, demo_server: Server) -> None:
    pb = demo_client.pb
    info = await demo_client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.model_path == info.served_model_name == "demo"
    assert info.is_generation
    assert info.max_context_length == info.max_req_input_len + 1 == 2048
    assert info.vocab_size == VOCAB
    assert info.model_type == "llama"
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert list(info.eos_token_ids) == [2, 0]
    server = await demo_client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.server_type == "mlx-grpc"
    assert server.uptime_seconds > 0
    health = await demo_client.stub.HealthCheck(pb.HealthCheckRequest())
    assert health.healthy
    assert health.message == "OK"
    # What it runs on is said in one line at the start.
    assert len([line for line in demo_server.log.splitlines() if "mlx-lm" in line]) == 1
