"""Getting mlx ready, without mlx: every decision before the import."""

from __future__ import annotations

import ctypes
import importlib
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.mlx import backend


class Libraries:
    """Stands in for the dynamic loader: which libraries exist and whether they are a BLAS."""

    def __init__(self, **found: bool) -> None:
        self.found = found
        self.loaded: list[tuple[str, int]] = []

    def __call__(self, path: str, mode: int) -> Any:
        if path not in self.found:
            raise OSError(f"{path}: cannot open shared object file")
        self.loaded.append((path, mode))
        return SimpleNamespace(**({"cblas_sgemm": 1} if self.found[path] else {}))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    fake = Libraries()
    monkeypatch.setattr(ctypes, "CDLL", fake)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    return fake


def test_the_first_blas_found_is_loaded_for_all(libraries: Libraries) -> None:
    libraries.found = {"libopenblas.so.0": False, "libblis.so.4": True}
    environ: dict[str, str] = {}
    assert backend.load_blas(environ, "linux") == "libblis.so.4"
    assert libraries.loaded[-1] == ("libblis.so.4", ctypes.RTLD_GLOBAL)
    assert ("libopenblas.so.0", ctypes.RTLD_GLOBAL) not in libraries.loaded
    assert environ == {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def test_the_operators_thread_count_stays(libraries: Libraries) -> None:
    libraries.found = {"libopenblas.so.0": True}
    environ = {"OPENBLAS_NUM_THREADS": "4"}
    backend.load_blas(environ, "linux")
    assert environ["OPENBLAS_NUM_THREADS"] == "4"


def test_none_found_says_what_to_install(libraries: Libraries) -> None:
    assert "libopenblas0-pthread" in backend.load_blas({}, "linux")


def test_the_operators_choice(libraries: Libraries) -> None:
    libraries.found = {"/opt/blas.so": True, "/opt/other.so": False, "libopenblas.so.0": True}
    assert backend.load_blas({"SMG_MLX_BLAS": "/opt/blas.so"}, "linux") == "/opt/blas.so"
    assert "off" in backend.load_blas({"SMG_MLX_BLAS": "OFF"}, "linux")
    for path in ("/opt/other.so", "/gone.so"):
        with pytest.raises(ConfigError, match=f"SMG_MLX_BLAS: {path}"):
            backend.load_blas({"SMG_MLX_BLAS": path}, "linux")


def test_nothing_is_done_on_a_mac_or_too_late(
    libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.found = {"libopenblas.so.0": True}
    environ: dict[str, str] = {}
    assert backend.load_blas(environ, "darwin") == "of the system"
    monkeypatch.setitem(sys.modules, "mlx.core", ModuleType("mlx.core"))
    assert "imported before" in backend.load_blas(environ, "linux")
    assert environ == {}
    assert libraries.loaded == []


def importing(monkeypatch: pytest.MonkeyPatch, **failures: str) -> None:
    def load(name: str) -> ModuleType:
        if name in failures:
            raise ImportError(failures[name])
        return ModuleType(name)

    monkeypatch.setattr(importlib, "import_module", load)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("mlx.core", "mlx_lm"):
        importing(monkeypatch, **{missing: f"No module named {missing!r}"})
        with pytest.raises(ImportError, match=r'pip install "smg-grpc-servicer\[mlx\]"'):
            backend.import_mlx()


def test_mlx_without_its_linux_backend_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    importing(monkeypatch, **{"mlx.core": "libmlx.so: cannot open shared object file"})
    with pytest.raises(ImportError, match=r'pip install "mlx\[cpu\]"'):
        backend.import_mlx()


def prepared(
    monkeypatch: pytest.MonkeyPatch, device: str, options: backend.BackendOptions
) -> tuple[backend.Backend, list[str]]:
    done: list[str] = []
    core = SimpleNamespace(
        gpu="gpu",
        Device=lambda kind: kind,
        default_device=lambda: device,
        disable_compile=lambda: done.append("disable_compile"),
        metal=SimpleNamespace(is_available=lambda: device == "gpu"),
        device_info=lambda: {"max_recommended_working_set_size": 7},
        set_wired_limit=lambda size: done.append(f"wired {size}"),
    )
    monkeypatch.setattr(backend, "import_mlx", lambda: core)
    monkeypatch.setattr(backend, "load_blas", lambda environ: "libopenblas.so.0")
    monkeypatch.setattr(metadata, "version", lambda name: "1.2")
    return backend.prepare(options, {"OPENBLAS_NUM_THREADS": "1"}), done


def test_policy_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    got, done = prepared(monkeypatch, "cpu", backend.BackendOptions())
    assert (got.dtype, got.compile, done) == ("float32", False, ["disable_compile"])
    assert got.describe() == (
        "mlx 1.2, mlx-lm 1.2, device cpu, weights float32, BLAS libopenblas.so.0,"
        " BLAS threads 1, compile off"
    )


def test_policy_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    got, done = prepared(monkeypatch, "gpu", backend.BackendOptions())
    assert (got.dtype, got.compile, done) == (None, True, ["wired 7"])
    assert got.describe() == "mlx 1.2, mlx-lm 1.2, device gpu, weights as stored, compile on"


def test_what_the_operator_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    wish = backend.BackendOptions(dtype="bfloat16", compile=True)
    got, done = prepared(monkeypatch, "cpu", wish)
    assert (got.dtype, got.compile, done) == ("bfloat16", True, [])
    with pytest.raises(ConfigError, match="--dtype must be one of"):
        backend.prepare(backend.BackendOptions(dtype="int8"))
