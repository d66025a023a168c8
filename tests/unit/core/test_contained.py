"""Opening a file of a directory, whatever its links say."""

from __future__ import annotations

from pathlib import Path

import pytest

from smg_grpc_servicer.core import contained
from smg_grpc_servicer.core.contained import RefusedFile, open_regular


@pytest.fixture
def room(tmp_path: Path) -> Path:
    directory = (tmp_path / "room").resolve()
    (directory / "inner").mkdir(parents=True)
    (directory / "inner" / "file").write_text("inside")
    (tmp_path / "outside").write_text("outside")
    return directory


def read(room: Path, name: str, *stores: Path) -> str:
    before = len(list(Path("/dev/fd").iterdir()))
    try:
        with open_regular(room, name, stores) as file:
            return file.read().decode()
    finally:
        assert len(list(Path("/dev/fd").iterdir())) == before  # nothing leaks, also on a refusal


@pytest.mark.parametrize("target", ["inner/file", "./inner/../inner/file", "ABSOLUTE"])
def test_links_inside_are_followed(room: Path, target: str) -> None:
    (room / "link").symlink_to(target.replace("ABSOLUTE", str(room / "inner" / "file")))
    assert read(room, "link") == "inside"


def test_a_mounted_volumes_double_links_are_followed(room: Path) -> None:
    """Kubernetes volumes: file -> ..data/file, ..data -> ..2026_01_01/."""
    (room / "..2026").mkdir()
    (room / "..2026" / "file").write_text("mounted")
    (room / "..data").symlink_to("..2026")
    (room / "file").symlink_to("..data/file")
    assert read(room, "file") == "mounted"


@pytest.mark.parametrize("target", ["../outside", "inner/../../outside", "ABSOLUTE", "out/outside"])
def test_links_that_leave_are_refused(room: Path, target: str) -> None:
    """No way out: relative, through a folder, absolute, through a linked folder."""
    (room / "out").symlink_to("..")
    (room / "link").symlink_to(target.replace("ABSOLUTE", str(room.parent / "outside")))
    with pytest.raises(RefusedFile, match="leaves the model directory"):
        read(room, "link")


def test_a_sibling_with_the_same_beginning_is_outside(room: Path) -> None:
    sibling = room.parent / "room2"
    sibling.mkdir()
    (sibling / "file").write_text("x")
    (room / "link").symlink_to("../room2/file")
    with pytest.raises(RefusedFile, match="leaves"):
        read(room, "link")


def test_a_store_is_inside_but_its_own_links_are_checked_too(room: Path) -> None:
    store = room.parent / "store"
    store.mkdir()
    (store / "blob").write_text("stored")
    (store / "bad").symlink_to("../outside")
    (room / "good").symlink_to("../store/blob")
    (room / "evil").symlink_to("../store/bad")
    assert read(room, "good", store) == "stored"
    with pytest.raises(RefusedFile, match="leaves"):
        read(room, "evil", store)


def test_endless_links_end(room: Path) -> None:
    (room / "a").symlink_to("b")
    (room / "b").symlink_to("a")
    with pytest.raises(RefusedFile, match="chain of more than 8 links"):
        read(room, "a")


@pytest.mark.parametrize("target", ["inner", ".", "..", "/"])
def test_folders_are_no_files(room: Path, target: str) -> None:
    (room / "link").symlink_to(target)
    with pytest.raises(RefusedFile):
        read(room, "link")


def test_a_folder_swapped_for_a_link_between_two_looks(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race of a link checker: a checked folder becomes a link before the open."""
    evil = room.parent / "evil"
    evil.mkdir()
    (evil / "file").write_text("outside")
    (room / "link").symlink_to("inner/file")
    real = contained._containing

    def swap(folder: Path, allowed: tuple[Path, ...]) -> Path:
        base = real(folder, allowed)
        if folder.name == "inner":
            (room / "inner").rename(room / "moved")
            (room / "inner").symlink_to(evil)
        return base

    monkeypatch.setattr(contained, "_containing", swap)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        read(room, "link")


def test_missing_file(room: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(room, "gone")
