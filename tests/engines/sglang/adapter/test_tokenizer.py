"""The tokenizer's archive of a model that is named by its hub id."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.types import ModelFacts
from tests.support.sglang_served import served_sglang

HUB = ModelFacts("org/name", "name", tokenizer_path="org/name", vocab_size=1000)
BRANCHES = {"main": "a" * 40, "dev": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with a model of two branches."""
    model = tmp_path / "models--org--name"
    (model / "refs").mkdir(parents=True)
    for branch, commit in BRANCHES.items():
        (model / "refs" / branch).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer.json").write_text(f'"{branch}"')
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("revision", [None, "dev"])
async def test_rows_13_and_37_a_hub_id_is_served_from_the_cache(
    cache: Path, revision: str | None
) -> None:
    """§11-13 and 37: of the revision that was asked for, and the same bytes wherever it is made."""
    async with served_sglang(facts=HUB, revision=revision) as server:
        chunks = [c async for c in server.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json").decode() == f'"{revision or "main"}"'
        assert {info.date_time[0] for info in archive.infolist()} == {1980}
