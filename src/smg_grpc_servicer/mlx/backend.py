"""Getting mlx ready before it is imported: BLAS, threads, compilation, dtype.

`prepare` must be the first thing in the process that imports mlx. On a Linux CPU it loads a fast
BLAS, because the one mlx bundles runs float32 at a tenth of OpenBLAS's speed (measured: 4 against
35 GFLOP/s a thread); only float32 goes through BLAS, so weights are cast to it there. This module
imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError

BLAS_VARIABLE = "SMG_MLX_BLAS"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
BLAS_NAMES = ("openblas", "blis", "mkl_rt")
"""In the order they are tried; each offers the CBLAS symbols mlx calls."""
BLAS_PATHS = (
    "libopenblas.so.0",
    "libopenblas.so",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/opt/OpenBLAS/lib/libopenblas.so",
    "libblis.so.4",
    "/opt/intel/oneapi/mkl/latest/lib/libmkl_rt.so",
)
BLAS_SYMBOL = "cblas_sgemm"
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What the operator may choose."""

    dtype: str = "auto"
    """`auto`: float32 on a CPU, the model's own elsewhere."""
    compile: bool = False
    """Keep `mx.compile` on a CPU: each new shape and temperature then costs about a second."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What mlx runs on."""

    device: str
    """`cpu` or `gpu`."""
    versions: Mapping[str, str]
    blas: str
    """Path of the BLAS that was loaded, or why none was."""
    threads: str | None
    compile: bool
    dtype: str | None
    """What weights are cast to; None leaves them as they are."""

    def describe(self) -> str:
        """One line for the start log."""
        parts = [f"{name} {version}" for name, version in self.versions.items()]
        parts += [f"device {self.device}", f"weights {self.dtype or 'as stored'}"]
        if self.device == "cpu":
            parts.append(f"BLAS {self.blas}")
            if self.threads is not None:
                parts.append(f"BLAS threads {self.threads}")
        parts.append(f"compile {'on' if self.compile else 'off'}")
        return ", ".join(parts)


def prepare(
    options: BackendOptions | None = None, environ: MutableMapping[str, str] = os.environ
) -> Backend:
    """Load BLAS, import mlx and mlx-lm and set them up.

    Raises ImportError naming the extra to install, ConfigError for a setting that cannot work.
    """
    chosen = BackendOptions() if options is None else options
    if chosen.dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {chosen.dtype!r}")
    blas = load_blas(environ)
    mx = import_mlx()
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    compiles = chosen.compile or device == "gpu"
    if not compiles:
        mx.disable_compile()
    if device == "gpu" and mx.metal.is_available():
        # As mlx-lm does: without it macOS may page weights out between requests.
        mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    dtype: str | None = chosen.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else None
    return Backend(
        device=device,
        versions={name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        blas=blas,
        threads=environ.get(THREAD_VARIABLES[0]),
        compile=compiles,
        dtype=dtype,
    )


def load_blas(environ: MutableMapping[str, str] = os.environ, platform: str = sys.platform) -> str:
    """Interpose a fast BLAS on Linux; the path loaded or the reason why not.

    Sets the thread variables to 1 unless the operator set them: more threads spin against each
    other and against the event loop on anything but a large idle machine.
    """
    wish = environ.get(BLAS_VARIABLE, "").strip()
    if wish.lower() == "off":
        return "of mlx (off by the operator)"
    if not platform.startswith("linux"):
        return "of the system"
    if "mlx.core" in sys.modules:
        return "of mlx (mlx was imported before it could be replaced)"
    for variable in THREAD_VARIABLES:
        environ.setdefault(variable, "1")
    if wish:
        if not _load(wish):
            raise ConfigError(
                f"{BLAS_VARIABLE}: {wish} cannot be loaded or has no {BLAS_SYMBOL};"
                " give the path of a CBLAS library, or off"
            )
        return wish
    for path in _candidates():
        if _load(path):
            return path
    return "of mlx, slow (apt-get install libopenblas0-pthread makes float32 about 8 times faster)"


def import_mlx() -> Any:
    """`mlx.core`, with one clear ImportError when mlx or mlx-lm is not there.

    The process's limits stay as the operator set them.
    """
    try:
        core = importlib.import_module("mlx.core")
    except ImportError as error:
        if "libmlx" in str(error) and sys.platform.startswith("linux"):
            raise ImportError(
                f'mlx is installed without a Linux backend; run: pip install "mlx[cpu]" ({error})'
            ) from error
        raise _missing("mlx", error) from error
    try:
        with _limits_kept():
            importlib.import_module("mlx_lm")
    except ImportError as error:
        raise _missing("mlx-lm", error) from error
    return core


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """Within it nobody changes a resource limit.

    mlx_lm.utils sets 2048 open files while it is imported (0.30 to 0.32): far fewer than a server
    was given, or, under a lower hard limit, an import that fails.
    """
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def _missing(package: str, error: ImportError) -> ImportError:
    return ImportError(
        f'{package} cannot be imported; run: pip install "smg-grpc-servicer[mlx]" ({error})'
    )


def _candidates() -> list[str]:
    found = [ctypes.util.find_library(name) for name in BLAS_NAMES]
    paths = [p for p in BLAS_PATHS if not p.startswith("/") or Path(p).exists()]
    return list(dict.fromkeys([name for name in found if name] + paths))


def _load(path: str) -> bool:
    """Load for the whole process if it offers CBLAS: probed privately first."""
    try:
        if not hasattr(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL), BLAS_SYMBOL):
            return False
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
