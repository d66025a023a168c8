"""Finding a model in the hub cache, and which links its files may follow."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import FailedPrecondition
from smg_grpc_servicer.core.hub_cache import SHARED_STORE_MARKER, blob_stores, cache_dir, resolve
from smg_grpc_servicer.core.tokenizer import build

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache that the environment points to; the network is out of reach."""
    directory = tmp_path / "hub"
    directory.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(directory))

    def refuse(*_: object) -> None:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return directory


def download(cache: Path, hub_id: str = "org/name", ref: str = "main") -> Path:
    """Lays out what a hub download of one tokenizer file leaves; returns its snapshot."""
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "aa11").write_text("the tokenizer")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/aa11")
    (repository / "refs" / ref).parent.mkdir(parents=True)
    (repository / "refs" / ref).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "~/x"}, "HOME/x/hub"),
        ({"HF_HOME": "~nobody-of-this-name/x"}, "~nobody-of-this-name/x/hub"),
        ({}, "HOME/.cache/huggingface/hub"),
    ],
)
def test_cache_dir_follows_the_hub_librarys_variables(
    environ: dict[str, str], expected: str
) -> None:
    assert cache_dir(environ) == Path(expected.replace("HOME", str(Path.home())))


def test_local_directory_wins_and_is_made_real(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(cache)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == (tmp_path / "org" / "name").resolve()
    assert resolve("link") == (tmp_path / "org" / "name").resolve()


def test_hub_id_is_served_from_the_cache_without_network(cache: Path) -> None:
    """I1: a hub id whose files are in the local cache gives its archive, network off."""
    snapshot = download(cache)
    assert resolve("org/name") == snapshot.resolve()
    assert build(resolve("org/name")).names == ("tokenizer.json",)


@pytest.mark.parametrize("ref", ["main", "v1.0", "refs/pr/1"])
def test_revisions(cache: Path, ref: str) -> None:
    snapshot = download(cache, ref=ref)
    assert resolve("org/name", None if ref == "main" else ref) == snapshot.resolve()
    assert resolve("org/name", COMMIT) == snapshot.resolve()


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("org/other", None, "not in the local cache"),
        ("org/name", "dev", "revision 'dev' of hub model 'org/name' is not in the local cache"),
        ("org/name", "../refs/main", "revision"),
        ("org/name", "/etc/passwd", "revision"),
        ("org/name", "f" * 40, "revision"),
        ("../../nowhere-at-all", None, "neither a local directory nor a hub id"),
        ("a/b/c", None, "neither a local directory nor a hub id"),
        ("org--name", None, "neither a local directory nor a hub id"),
        ("a\0b", None, "no tokenizer path"),
        (" ", None, "no tokenizer path"),
        ("x" * 5000, None, "cannot be read|not in the local cache"),
    ],
)
def test_what_is_not_there_says_why(
    cache: Path, model: str, revision: str | None, reason: str
) -> None:
    """I1: FAILED_PRECONDITION with the reason, never a download."""
    download(cache)
    with pytest.raises(FailedPrecondition, match=reason):
        resolve(model, revision)


def test_a_file_is_no_model_directory(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(FailedPrecondition, match="is a file; a directory is needed"):
        resolve(tmp_path / "model.gguf")


def test_credentials_in_a_path_are_not_repeated(cache: Path) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        resolve("s3://key:hunter2@bucket/model")
    assert "hunter2" not in str(caught.value)


def test_a_reference_that_leads_elsewhere_is_not_followed(cache: Path) -> None:
    """A refs file with `../..` in it must not name a directory outside the snapshots."""
    download(cache)
    (cache / "models--org--name" / "refs" / "main").write_text("../../..")
    with pytest.raises(FailedPrecondition, match="revision 'main'"):
        resolve("org/name")


# Links


def test_shared_blob_store_is_followed_when_it_is_one(cache: Path) -> None:
    """A repository's blob may link into the cache-wide store, if that carries its marker."""
    snapshot = download(cache)
    stored = cache / "blobs" / "bb" / "bb22"
    stored.parent.mkdir(parents=True)
    stored.write_text("a shared tokenizer")
    blob = cache / "models--org--name" / "blobs" / "aa11"
    blob.unlink()
    blob.symlink_to("../../blobs/bb/bb22")
    with pytest.raises(FailedPrecondition, match="leaves the model directory"):
        build(snapshot)
    (cache / "blobs" / SHARED_STORE_MARKER).write_text("1\n")
    assert build(snapshot).names == ("tokenizer.json",)


def test_a_snapshot_may_not_use_another_models_blobs(cache: Path) -> None:
    snapshot = download(cache)
    download(cache, "org/private")
    (snapshot / "x.model").symlink_to("../../../models--org--private/blobs/aa11")
    with pytest.raises(FailedPrecondition, match=r"'x\.model' is a link that leaves"):
        build(snapshot)


def test_a_directory_that_links_into_the_cache_is_served(cache: Path, tmp_path: Path) -> None:
    """Older hub downloads with `local_dir` left such links."""
    download(cache)
    local = tmp_path / "local"
    local.mkdir()
    (local / "tokenizer.json").symlink_to(cache / "models--org--name" / "blobs" / "aa11")
    assert build(local).names == ("tokenizer.json",)
    (local / "x.model").symlink_to(cache / "models--org--name" / "refs" / "main")
    with pytest.raises(FailedPrecondition, match="leaves the model directory"):
        build(local)


def test_a_cache_behind_a_link_works(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(cache)
    (tmp_path / "elsewhere").symlink_to(cache)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert build(resolve("org/name")).names == ("tokenizer.json",)


def test_blob_stores_of_a_plain_directory_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "gone"))
    assert blob_stores(tmp_path) == ()
