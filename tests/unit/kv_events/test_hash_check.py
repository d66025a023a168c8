from __future__ import annotations

import logging
from hashlib import sha256
from typing import Any

import pytest

from smg_grpc_servicer.kv_events import hash_check
from smg_grpc_servicer.kv_events.hash_check import HashCheck, SglangCheck, make
from smg_grpc_servicer.kv_events.history import History
from smg_grpc_servicer.kv_events.record import RankRecord
from tests.support.kv_publisher import payload, removed

SIZE = 4


def chain(*pages: list[Any], prior: bytes = b"") -> list[bytes]:
    """SGLang's digests of pages of tokens, or of pairs of them."""
    made = []
    for page in pages:
        words = [word for cell in page for word in (cell if isinstance(cell, list) else [cell])]
        prior = sha256(prior + b"".join(word.to_bytes(4, "little") for word in words)).digest()
        made.append(prior)
    return made


def told(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def store(digests: list[bytes], *pages: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [told(digest) for digest in digests],
        "parent_block_hash": None,
        "token_ids": [cell for page in pages for cell in page],
        "block_size": SIZE,
        "medium": "GPU",
        **more,
    }


def counts(*events: dict[str, Any], check: HashCheck | None = None) -> tuple[int, int, int]:
    """Checked, mismatch, unverifiable; every event is forwarded all the same."""
    check = SglangCheck() if check is None else check
    record = RankRecord(0, History(), can_replay=False, check=check)
    record.live(0, payload(*events))
    assert record.totals()["forwarded"] == len(events)
    totals = check.totals()
    return tuple(totals[f"hash_{name}"] for name in ("checked", "mismatch", "unverifiable"))  # type: ignore[return-value]


ONE, TWO, THREE = [1, 2, 3, 4], [5, 6, 7, 2**32 - 1], [9, 9, 9, 9]


def test_a_chain_is_followed_from_event_to_event() -> None:
    first, second, third = chain(ONE, TWO, THREE)
    begin = store([first, second], ONE, TWO)
    assert counts(begin, store([third], THREE, parent_block_hash=told(second))) == (3, 0, 0)
    # A parent that was evicted meanwhile is still one.
    gone = removed([told(second)])
    assert counts(begin, gone, store([third], THREE, parent_block_hash=told(second))) == (3, 0, 0)


def test_what_hangs_on_an_unknown_parent_cannot_be_told() -> None:
    assert counts(store(chain(ONE, TWO), ONE, TWO, parent_block_hash=5)) == (0, 0, 2)


def test_a_wrong_hash_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    wrong = chain(TWO, ONE)
    assert counts(store(wrong, ONE, ONE), store(wrong, ONE, ONE)) == (0, 2, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_pairs_are_hashed_with_both_their_tokens() -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert counts(store(chain(pairs), pairs)) == (1, 0, 0)


def test_a_salt_begins_a_chain_of_its_own() -> None:
    seed = sha256(b"sglang-cache-salt-v1\0s").digest()
    first, second = chain(ONE, TWO, prior=seed)
    assert counts(store([first, second], ONE, TWO, cache_salt="s")) == (2, 0, 0)
    # Another format of SGLang's hashes those once more.
    assert counts(store(chain(ONE), ONE, cache_salt="s")) == (0, 0, 1)


def test_an_adapters_hashes_cannot_be_told() -> None:
    assert counts(store(chain(ONE), ONE, lora_name="L")) == (0, 0, 1)


def test_digests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_check, "KEPT", 3)
    check = SglangCheck()
    pages = [[at] * SIZE for at in range(10)]
    counts(*(store(chain(page), page) for page in pages), check=check)
    assert len(check._digests) == 3


@pytest.mark.parametrize("word", ["sglang", "SGLang "])
def test_the_variable_says_whose_hashes_they_are(word: str) -> None:
    assert isinstance(make({hash_check.VARIABLE: word}), SglangCheck)


@pytest.mark.parametrize("environ", [{}, {hash_check.VARIABLE: ""}])
def test_it_is_off_unless_asked_for(environ: dict[str, str]) -> None:
    assert make(environ) is None


def test_a_word_that_nobody_knows_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert make({hash_check.VARIABLE: "md5"}) is None
    assert "got 'md5'; allowed: sglang or vllm-sha256-cbor" in caplog.text


@pytest.mark.parametrize("word", ["vllm-sha256-cbor", "vllm_sha256_cbor"])
def test_without_cbor_the_check_of_vllm_is_off(
    word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(hash_check, "import_module", missing)
    assert make({hash_check.VARIABLE: word}) is None
    assert "cbor2" in caplog.text
