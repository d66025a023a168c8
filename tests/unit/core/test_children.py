"""Ends of other processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from smg_grpc_servicer.core.children import end_descriptor, in_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "ended"),
        (0, "ended with exit code 0"),
        (7, "ended with exit code 7"),
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-200, "was ended by signal 200"),
    ],
)
def test_exit_codes_in_words(code: int | None, words: str) -> None:
    assert in_words(code) == words


def test_an_end_is_heard() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = end_descriptor(child.pid)
    assert (descriptor is not None) is (sys.platform == "linux")
    child.communicate()
    if descriptor is not None:
        assert select.select([descriptor], [], [], 5)[0] == [descriptor]
        os.close(descriptor)
    assert end_descriptor(child.pid) is None


def test_where_the_system_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert end_descriptor(os.getpid()) is None
