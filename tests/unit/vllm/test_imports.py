"""vLLM's launchers import the servicers before they need them; that must cost nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smg_grpc_servicer import vllm
from smg_grpc_servicer.vllm import health_servicer, servicer


@pytest.mark.parametrize("name", ["servicer", "health_servicer", "adapter", "rust", "rust_media"])
def test_importing_a_room_imports_no_engine(name: str) -> None:
    """D6: an import of vLLM that moves must not break the launcher's import of ours."""
    code = (
        f"import sys, smg_grpc_servicer.vllm.{name}\n"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'vllm', 'torch', 'transformers'})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout.split() == []


def test_the_package_names_them() -> None:
    assert vllm.VllmEngineServicer is servicer.VllmEngineServicer
    assert vllm.VllmHealthServicer is health_servicer.VllmHealthServicer
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = vllm.other
