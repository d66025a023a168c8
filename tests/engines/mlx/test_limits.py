"""What importing mlx-lm must not do to the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.support.servers import ROOT

SCRIPT = """
import resource, sys
from smg_grpc_servicer.mlx import backend
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
before, setrlimit = resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit
backend.import_mlx()
assert "mlx_lm.utils" in sys.modules
assert resource.setrlimit is setrlimit
print(before == resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("limit", [0, 1024], ids=["the operator's", "hard limit 1024"])
async def test_the_import_changes_no_limit(limit: int) -> None:
    """A server keeps the open files it was given: mlx-lm sets 2048 of its own while it is imported,
    which also fails where the hard limit is lower.
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SCRIPT, str(limit)],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
