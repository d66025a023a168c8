"""A prefill and a decode, two real servers: the prompt's KV moves from one to the other by NIXL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client, connected
from tests.support.real_sglang import (
    CPU,
    NAME,
    SGLANG,
    START_SECONDS,
    environment,
    started,
)
from tests.support.router import routing
from tests.support.sglang_cases import GREEDY, prompt

NIXL = "SMG_SGLANG_NIXL"
HOST = "127.0.0.1"
ROOMS = count(1000)


@dataclass
class Pair:
    prefill: Client
    decode: Client
    addresses: tuple[str, str]
    bootstrap_port: int

    def legs(self, ids: list[int], **sampling: Any) -> tuple[Any, Any]:
        """The same request for both, as the gateway sends it."""
        room = next(ROOMS)
        made = []
        for leg in (self.prefill, self.decode):
            request = leg.request(ids, **sampling)
            request.request_id = f"pair-{room}"
            request.disaggregated_params.bootstrap_host = HOST
            request.disaggregated_params.bootstrap_port = self.bootstrap_port
            request.disaggregated_params.bootstrap_room = room
            made.append(request)
        return made[0], made[1]

    async def send(self, ids: list[int], **sampling: Any) -> tuple[History, History]:
        first, second = self.legs(ids, **sampling)
        return await asyncio.gather(self.prefill.send(first), self.decode.send(second))


@pytest.fixture(scope="module")
async def pair(offline: Any, model: Path) -> AsyncIterator[Pair]:
    python = os.environ.get(NIXL)
    assert python, f"{NIXL} must name the Python of a venv with NIXL: pip install nixl"
    (nixl,) = (Path(python).parents[1] / "lib").glob("python*/site-packages")
    env = {"PYTHONPATH": os.pathsep.join((environment()["PYTHONPATH"], str(nixl)))}
    port = auto.free_ports(1)
    flags = (
        *CPU, "--grammar-backend", "none", "--served-model-name", NAME,
        "--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(port),
    )  # fmt: skip
    async with (
        started(model, *flags, "--disaggregation-mode", "prefill", env=env) as prefill,
        started(model, *flags, "--disaggregation-mode", "decode", env=env) as decode,
    ):
        for server in (prefill, decode):
            await server.ready(SGLANG.service, START_SECONDS)
        addresses = (prefill.address, decode.address)
        async with connected(addresses[0], SGLANG) as one, connected(addresses[1], SGLANG) as two:
            yield Pair(one, two, addresses, port)
        ended = await asyncio.gather(prefill.stop(60), decode.stop(60))
        assert list(ended) == [0, 0], prefill.log + decode.log


async def test_the_pair_answers_as_one_engine_does(pair: Pair, offline: Any) -> None:
    """The decode never computes the prompt: its tokens can only come from the prefill's KV."""
    for name, case in GREEDY.items():
        first, second = await pair.send(case.prompt, **case.sampling)
        assert check(first) == check(second) == []
        told = list(second.complete().output_ids)
        assert told == offline["llama"][name]["ids"]
        assert list(first.complete().output_ids) == told[:1]


async def test_choices_meet_in_rooms_of_their_own(pair: Pair) -> None:
    legs = await pair.send(prompt(30, 7), n=2, temperature=0.0, max_tokens=6, ignore_eos=True)
    for history in legs:
        assert check(history, choices=2) == []
    (one, two) = (list(legs[1].complete(index).output_ids) for index in (0, 1))
    assert one == two


async def test_each_tells_its_role_and_is_alive(pair: Pair) -> None:
    for role, client in (("prefill", pair.prefill), ("decode", pair.decode)):
        (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
        assert row.disaggregation.mode == role
        answer = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
        assert answer.healthy


async def test_a_leg_without_its_peer_is_refused(pair: Pair) -> None:
    """It would end the scheduler."""
    for client in (pair.prefill, pair.decode):
        history = await client.generate(prompt(4, 1), max_tokens=2)
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT
        assert history.details.startswith("disaggregated_params")
        answer = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
        assert answer.healthy


async def test_the_router_pairs_them(pair: Pair, words: Any, tmp_path: Path) -> None:
    prefill, decode = pair.addresses
    options = (
        "--pd-disaggregation", "--prefill", f"grpc://{prefill}", str(pair.bootstrap_port),
        "--decode", f"grpc://{decode}",
    )  # fmt: skip
    async with routing(tmp_path, options=options) as router:
        await router.serves(NAME)
        answer = await router.post(
            "/v1/completions", model=NAME, prompt="hello world", max_tokens=12, temperature=0
        )
        assert answer.status == 200, answer.text
        ids = words.encode("hello world").ids
        _, second = await pair.send(ids, temperature=0.0, max_tokens=12, ignore_eos=False)
        told = words.decode(list(second.complete().output_ids), skip_special_tokens=True)
        assert answer.json["choices"][0]["text"] == told
