"""The tokenizer archive: what is in it, that its bytes never vary, and who may build it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from smg_grpc_servicer.core import tokenizer
from smg_grpc_servicer.core.errors import FailedPrecondition
from smg_grpc_servicer.core.tokenizer import Bundle, TokenizerSource, build, chunks

FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"model_max_length": 128}',
    "config.json": '{"model_type": "tiny"}',
    "chat_template.jinja": "{{ messages }}",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


def contents(bundle: Bundle) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_archive_holds_the_files_sorted(model: Path) -> None:
    bundle = build(model)
    assert contents(bundle) == {name: text.encode() for name, text in FILES.items()}
    assert bundle.names == tuple(sorted(FILES))
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "spiece.model", "tiktoken.model",
        "qwen.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "source.spm",
    ],
)  # fmt: skip
def test_every_kind_of_tokenizer_alone_is_enough(tmp_path: Path, name: str) -> None:
    """I2: a directory with only `tiktoken.model` and a config gives an archive that has it."""
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    assert set(build(tmp_path).names) == {name, "config.json"}


def test_companions_go_along_and_nothing_else_does(tmp_path: Path) -> None:
    """Code, weights, hidden files and folders never leave the server."""
    sent = {
        "tokenizer.json", "merges.txt", "vocab.json", "vocab.txt", "added_tokens.json",
        "special_tokens_map.json", "tokenizer_config.json", "chat_template.json",
        "chat_template.jinja", "tool.jinja", "config.json", "generation_config.json",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    }  # fmt: skip
    kept = {
        "tokenization_x.py", "model.safetensors", "README.md", "._tokenizer.model", ".env",
        "secrets.json", "a\\b.model", "c:x.model", "line\nbreak.model",
    }  # fmt: skip
    for name in sent | kept:
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.model").mkdir()
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("x")
    assert set(build(tmp_path).names) == sent


def test_no_tokenizer_file_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FailedPrecondition, match=r"no tokenizer file; looked for tokenizer\.json"):
        build(tmp_path)


def test_missing_directory_is_a_precondition(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="cannot be read: No such file"):
        build(tmp_path / "gone")


BUILD_IN_A_PROCESS = """
import os, pathlib, sys
from smg_grpc_servicer.core.tokenizer import build
directory, stamp, mode, *names = sys.argv[1:]
os.umask(0)
for name in names:
    path = pathlib.Path(directory, name)
    path.write_text(("text of " + name + " ") * 100_000)
    path.chmod(int(mode, 8))
    os.utime(path, (int(stamp), int(stamp)))
bundle = build(pathlib.Path(directory))
print(bundle.sha256, len(bundle.data))
"""


def test_same_files_give_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    """V4: replicas with touched files, other modes and another order have one fingerprint."""
    results = set()
    # The second date is before 1980, which a zip entry cannot hold.
    for seed, (stamp, mode) in enumerate([("1700000000", "644"), ("0", "400"), ("99", "777")]):
        names = sorted(FILES)
        random.Random(seed).shuffle(names)
        directory = tmp_path / str(seed)
        directory.mkdir()
        source = str(Path(tokenizer.__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", BUILD_IN_A_PROCESS, str(directory), stamp, mode, *names],
            env={
                **os.environ,
                "PYTHONHASHSEED": str(seed),
                "PYTHONPATH": source,
                "TZ": f"X-{seed}",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        results.add(done.stdout.strip())
    assert len(results) == 1


def test_other_contents_give_another_fingerprint(model: Path) -> None:
    before = build(model).sha256
    (model / "config.json").write_text('{"model_type": "other"}')
    assert build(model).sha256 != before


# Limits


def test_too_much_is_refused_before_it_is_read(model: Path) -> None:
    """A 100 GiB file (sparse: reading it would take minutes) is refused by its size."""
    with (model / "huge.model").open("wb") as file:
        file.truncate(100 * 1024**3)
    start = time.monotonic()
    with pytest.raises(FailedPrecondition, match=r"'huge\.model' with 102400\.0 MiB.*500\.0 MiB"):
        build(model)
    assert time.monotonic() - start < 5


def test_archive_size_is_capped(model: Path) -> None:
    (model / "noise.model").write_bytes(random.Random(1).randbytes(300_000))
    with pytest.raises(FailedPrecondition, match=r"passes 0\.1 MiB at file 'noise\.model'"):
        build(model, max_bytes=100_000)


def test_unpacked_limit_is_the_sum(model: Path) -> None:
    total = sum(map(len, FILES.values()))
    assert build(model, max_unpacked_bytes=total).names
    with pytest.raises(FailedPrecondition, match="in all"):
        build(model, max_unpacked_bytes=total - 1)


def test_file_count_is_capped(model: Path) -> None:
    for number in range(tokenizer.MAX_FILES - len(FILES)):
        (model / f"{number}.jinja").write_text("x")
    assert len(build(model).names) == tokenizer.MAX_FILES
    (model / "one_more.jinja").write_text("x")
    with pytest.raises(FailedPrecondition, match="has 51 tokenizer files; allowed are 50"):
        build(model)


def test_git_lfs_pointer_is_not_sent(model: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(FailedPrecondition, match=r"'tokenizer\.json' is a git-lfs pointer"):
        build(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "x.model"])
def test_empty_tokenizer_file_is_not_sent(model: Path, name: str) -> None:
    """An interrupted download: a gateway would get an archive that no tokenizer can be made of."""
    (model / name).write_bytes(b"")
    with pytest.raises(FailedPrecondition, match=f"file '{name}' is empty"):
        build(model)


def test_empty_companion_is_sent_as_it_is(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"")
    assert contents(build(model))["chat_template.jinja"] == b""


def test_file_that_grows_while_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def smaller(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[6] = max(found[6] - 1, 0)
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", smaller)
    with pytest.raises(FailedPrecondition, match="changed while it was read"):
        build(model)


# What is not a plain file of this directory


def test_link_out_of_the_directory_is_refused(model: Path, tmp_path: Path) -> None:
    """A file named x.model that links to a secret must not hand it out."""
    (tmp_path / "secret").write_text("hunter2")
    (model / "x.model").symlink_to(tmp_path / "secret")
    with pytest.raises(FailedPrecondition, match=r"'x\.model' is a link that leaves the model"):
        build(model)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_special_files_are_refused_without_waiting(model: Path, kind: str) -> None:
    path = model / "x.model"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(FailedPrecondition, match=r"not a regular file|leaves the model directory"):
        build(model)


def test_dangling_link_is_an_incomplete_download(model: Path) -> None:
    (model / "x.model").symlink_to("gone")
    with pytest.raises(FailedPrecondition, match="link to nothing"):
        build(model)


# Chunks


@pytest.mark.parametrize(("length", "count"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (25, 3)])
def test_chunks_join_to_the_archive_and_the_last_has_the_hash(length: int, count: int) -> None:
    data = bytes(range(length))
    bundle = Bundle(data, hashlib.sha256(data).hexdigest(), ())
    sent = list(chunks(bundle, 10))
    assert len(sent) == count
    assert b"".join(part for part, _ in sent) == data
    assert [sha for _, sha in sent] == [""] * (count - 1) + [bundle.sha256]


@pytest.mark.parametrize("size", [0, -1, 4 * 1024 * 1024])
def test_chunks_stay_under_a_gateways_message_limit(size: int) -> None:
    with pytest.raises(ValueError, match="size: got"):
        next(chunks(Bundle(b"x", "", ()), size))


# The source that callers share


class Builds:
    """Stands in for the build: each waits at a gate and counts."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.count = 0
        self.error: Exception | None = None

    def __call__(self, path: str, revision: str | None) -> Bundle:
        self.count += 1
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return Bundle(path.encode(), "00", (str(revision),))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    stand_in = Builds()
    monkeypatch.setattr(tokenizer, "_resolve_and_build", stand_in)
    return stand_in


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - the subject's own state, which nothing signals
            await asyncio.sleep(0)


async def test_concurrent_callers_share_one_build(builds: Builds) -> None:
    """I2: concurrent calls give identical bytes, and one build."""
    source = TokenizerSource(lambda: "model", lambda: "main")
    callers = [asyncio.create_task(source.bundle()) for _ in range(20)]
    await until(lambda: source.statistics() == {"building": 1, "waiting": 20})
    builds.gate.set()
    bundles = await asyncio.gather(*callers)
    assert {id(bundle) for bundle in bundles} == {id(bundles[0])}
    assert bundles[0].names == ("main",)
    assert await source.bundle() is bundles[0]
    assert builds.count == 1
    assert source.statistics() == {"building": 0, "waiting": 0}


async def test_a_caller_that_leaves_does_not_stop_the_build(builds: Builds) -> None:
    """The first caller, who began the build, is cancelled; the second still gets the archive."""
    source = TokenizerSource(lambda: "model")
    first = asyncio.create_task(source.bundle())
    second = asyncio.create_task(source.bundle())
    await until(lambda: source.statistics()["waiting"] == 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert source.statistics() == {"building": 1, "waiting": 1}
    builds.gate.set()
    assert (await second).data == b"model"
    assert builds.count == 1


async def test_build_goes_on_when_all_callers_left_and_its_failure_is_quiet(
    builds: Builds,
) -> None:
    """A failure nobody waits for is not reported as lost; the next call tries again."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    builds.error = FailedPrecondition("not yet")
    source = TokenizerSource(lambda: "model")
    caller = asyncio.create_task(source.bundle())
    await until(lambda: source.statistics()["waiting"] == 1)
    caller.cancel()
    await asyncio.wait([caller])
    builds.gate.set()
    await until(lambda: source.statistics() == {"building": 0, "waiting": 0})
    builds.error = None
    assert (await source.bundle()).data == b"model"
    assert (builds.count, reported) == (2, [])


async def test_failure_reaches_all_who_waited_and_is_not_kept(builds: Builds) -> None:
    builds.error = FailedPrecondition("not yet")
    builds.gate.set()
    source = TokenizerSource(lambda: "model")
    results = await asyncio.gather(source.bundle(), source.bundle(), return_exceptions=True)
    assert [str(result) for result in results] == ["not yet", "not yet"]
    builds.error = None
    assert (await source.bundle()).data == b"model"
    assert builds.count == 2


@pytest.mark.parametrize("path", [None, ""])
async def test_no_path_is_a_precondition(path: str | None) -> None:
    source = TokenizerSource(lambda: path)
    with pytest.raises(FailedPrecondition, match="no tokenizer path"):
        await source.bundle()
    assert source.statistics() == {"building": 0, "waiting": 0}


async def test_the_loop_stays_free_during_a_large_build(tmp_path: Path) -> None:
    """V4: building from a 20 MB tokenizer.json must not hold up the streams and probes."""
    vocabulary = json.dumps({f"{n * 2654435761 % 2**40:x}": n for n in range(200_000)})
    (tmp_path / "tokenizer.json").write_text(vocabulary * 5)
    assert (tmp_path / "tokenizer.json").stat().st_size > 20_000_000
    source = TokenizerSource(lambda: str(tmp_path))
    longest = 0.0
    start = last = time.monotonic()
    task = asyncio.create_task(source.bundle())
    while not task.done():
        await asyncio.sleep(0.001)  # a heartbeat
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert (await task).names == ("tokenizer.json",)
    # On the loop the longest pause would be the whole build.
    assert longest < (last - start) / 4
