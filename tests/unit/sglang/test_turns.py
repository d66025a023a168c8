"""Prompts of ids and of embeddings take turns; those of one kind go together."""

from __future__ import annotations

import asyncio

from smg_grpc_servicer.sglang.turns import Turns

IDLE = {"computing_prompts": 0, "waiting_for_turn": 0}


async def turn(turns: Turns, log: list[str], name: str) -> None:
    await turns.wait(embeds=name.startswith("e"))
    turns.began(name, embeds=name.startswith("e"))
    log.append(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_kind_never_waits() -> None:
    turns = Turns()
    log: list[str] = []
    await asyncio.gather(*(turn(turns, log, f"i{at}") for at in range(5)))
    assert len(log) == 5
    assert turns.busy
    for at in range(5):
        turns.over(f"i{at}")
    assert turns.statistics() == IDLE


async def test_the_other_kind_waits_and_is_not_overtaken() -> None:
    turns = Turns()
    log: list[str] = []
    await turn(turns, log, "i1")
    tasks = [asyncio.ensure_future(turn(turns, log, name)) for name in ("e1", "e2", "i2", "e3")]
    await settle()
    assert log == ["i1"]
    turns.over("i1")
    await settle()
    assert log == ["i1", "e1", "e2"]
    turns.over("e1")
    await settle()
    assert len(log) == 3
    turns.over("e2")
    turns.over("e2")
    await settle()
    assert log[3:] == ["i2"]
    turns.over("i2")
    await settle()
    assert log[4:] == ["e3"]
    turns.over("e3")
    await asyncio.gather(*tasks)
    await settle()
    assert turns.statistics() == IDLE


async def test_one_that_leaves_lets_the_next_one_in() -> None:
    turns = Turns()
    log: list[str] = []
    await turn(turns, log, "i1")
    leaving = asyncio.ensure_future(turn(turns, log, "e1"))
    staying = asyncio.ensure_future(turn(turns, log, "i2"))
    await settle()
    leaving.cancel()
    await settle()
    await staying
    assert log == ["i1", "i2"]
    turns.over("i1")
    turns.over("i2")
    assert turns.statistics() == IDLE
