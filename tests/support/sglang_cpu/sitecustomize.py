"""Lets SGLang run on a machine without an accelerator; its folder is put first on PYTHONPATH.

SGLang imports packages that have no build for a CPU: its kernels, Triton and torchvision. Of each
there is a stand-in here: everything in it exists, may be used as a decorator, and raises when it is
called for work. Nothing of them runs, because SGLang has a plain torch path for everything.

Where PYTHONPATH leads to a torchvision, that one is used, for media: its transforms are plain
Python, and its compiled operators, which are CUDA's, are never loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

VISION_OPERATORS = "torchvision._meta_registrations"
"""Registers torchvision's operators with torch, which fails without them."""
OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""What modules of SGLang take from torch while they are imported."""
STAND_INS = ("sgl_kernel", "triton", "torchvision")
NO_CALL = ("sgl_kernel", "triton.runtime.driver")
"""Prefixes of what modules do not call while they are imported, or expect to fail."""
VERSIONS = {"sgl_kernel": "0.4.10", "triton": "3.6.0", "torchvision": "0.28.0"}


class Missing(type):
    """The type of all that is in a stand-in: classes, so that modules may derive from them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls.__name__.startswith(NO_CALL):
            raise NotImplementedError(f"{cls.__name__} does not run on a CPU")
        return cls

    def __getattr__(cls, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{cls.__name__}.{name}")

    def __getitem__(cls, grid: Any) -> Missing:
        """A Triton kernel is launched as `kernel[grid](...)`."""
        return missing(f"sgl_kernel.{cls.__name__}")

    def __iter__(cls) -> Iterator[Any]:
        """Nothing is in it; by items it would never end."""
        return iter(())


def missing(name: str) -> Missing:
    return Missing(name, (), {})


class StandIn(types.ModuleType):
    """A module in which every name is `Missing`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the packages of `STAND_INS` and everything in them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in STAND_INS or (package == "torchvision" and TORCHVISION):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        version = VERSIONS.get(module.__name__)
        if version is not None:
            module.__version__ = version  # type: ignore[attr-defined]
        if module.__name__ == "sgl_kernel":
            without_accelerator()


def without_accelerator() -> None:
    """What SGLang asks for although there is no accelerator: pinned and registered memory, events.

    LoRA and disaggregation do.
    """
    import torch

    def unpinned(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return make(*args, **options)

        return made

    for name in ("empty", "empty_like", "full", "ones", "tensor", "arange", "zeros", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **options: self

    runtime = types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0),
        cudaHostRegister=lambda *args: 0,
        cudaHostUnregister=lambda *args: 0,
    )
    torch.cuda.cudart = lambda: runtime
    torch.cuda.Event = PastEvent
    for operator in OPERATORS:
        setattr(torch.ops.sgl_kernel, operator, missing(f"sgl_kernel.{operator}"))
    if importlib.util.find_spec("nixl") is not None:
        on_host_memory()


class PastEvent:
    """In place of a CUDA event: nothing is asynchronous here, so all has happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def on_host_memory() -> None:
    """To NIXL, which moves KV between two SGLangs, an accelerator's memory is this machine's."""
    nixl_agent = importlib.import_module("nixl._api").nixl_agent
    made = nixl_agent.__init__

    @functools.wraps(made)
    def agent(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.nixl_mems = self.nixl_mems | {"VRAM": self.nixl_mems["DRAM"]}

    nixl_agent.__init__ = agent


TORCHVISION = importlib.util.find_spec("torchvision") is not None
if TORCHVISION:
    sys.modules[VISION_OPERATORS] = types.ModuleType(VISION_OPERATORS)
sys.meta_path.insert(0, Finder())
