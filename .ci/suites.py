"""The suites of the test command: what each needs and what it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from venvs import Venv, Wanted

MAIN = Wanted(preferred=11, oldest=11)
"""The locks of the newest releases are resolved for 3.11 and newer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a suite; `{python}` is the suite's own interpreter, `{bin}` its folder.

    With `junit` the command is pytest and its tests are counted; without, it counts as one.
    """

    name: str
    argv: Sequence[str]
    junit: bool = False


def _pytest(*where: str) -> Step:
    return Step("pytest", ("{python}", "-m", "pytest", "-q", *where), junit=True)


@dataclass(frozen=True, slots=True)
class Suite:
    """Steps over one venv; `others` are further venvs, given to the steps by variable."""

    name: str
    about: str
    venv: Venv
    steps: Sequence[Step]
    others: dict[str, Venv] = field(default_factory=dict)
    minutes: int = 30


# These need an engine, a router or the network, and are suites of their own.
_NOT_CORE = ("engines", "faults/rust", "gateway", "packaging")
_CORE = _pytest("tests", *(f"--ignore=tests/{name}" for name in _NOT_CORE))
_MLX = _pytest("tests/engines/mlx")
_MLX_VENV = Venv("mlx", MAIN)
_ROUTER = {"SMG_ROUTER_PYTHON": Venv("router", Wanted(11, 10), project=False)}
_NEWER_BINDING = {"SMG_NEWER_BINDING": Venv("rust-newer", Wanted(11, 10), project=False)}
_TORCHVISION = {"SMG_TORCHVISION": Venv("torchvision", MAIN, project=False)}
_NIXL = {"SMG_SGLANG_NIXL": Venv("sglang-nixl", MAIN, project=False)}

SUITES = (
    Suite(
        "lint",
        "ruff, mypy --strict and the import contracts",
        Venv("lint", MAIN),
        (
            Step("ruff check", ("{bin}/ruff", "check", ".")),
            Step("ruff format", ("{bin}/ruff", "format", "--check", ".")),
            Step("mypy", ("{python}", "-m", "mypy")),
            Step("import contracts", ("{bin}/lint-imports", "--no-logo")),
        ),
    ),
    Suite("core", "everything that needs no engine", Venv("core", MAIN), (_CORE,)),
    Suite(
        "core-lowest",
        "the same on the oldest Python and the lower end of every range",
        Venv("core-lowest", Wanted(preferred=10, oldest=10)),
        (_CORE,),
    ),
    Suite("mlx", "the MLX engine, newest mlx-lm", _MLX_VENV, (_MLX,)),
    Suite(
        "mlx-oldest",
        "the MLX engine, oldest mlx-lm",
        Venv("mlx-oldest", Wanted(preferred=11, oldest=10)),
        (_MLX,),
    ),
    Suite(
        "gateway",
        "the real router in front of the MLX engine",
        _MLX_VENV,
        (_pytest("tests/gateway"),),
        others=_ROUTER,
    ),
    Suite(
        "rust",
        "the hand-off to Rust with two generations of the binding, over a stub of an engine core",
        Venv("rust", MAIN),
        (_pytest("tests/unit/rust", "tests/faults/rust"),),
        others=_NEWER_BINDING,
    ),
    Suite(
        "vllm",
        "vLLM on its CPU engine, the router in front of it, its launchers of every release",
        Venv("vllm", MAIN),
        (_pytest("tests/engines/vllm"),),
        others=_ROUTER | _NEWER_BINDING | _TORCHVISION,
    ),
    Suite(
        "sglang",
        "SGLang's real scheduler on a CPU, the router in front of it, a stub of it for its faults",
        Venv("sglang", MAIN),
        (_pytest("tests/engines/sglang"),),
        others=_ROUTER | _NIXL | _TORCHVISION,
    ),
    Suite(
        "tokenspeed",
        "TokenSpeed's own publisher of KV events, from its wheel",
        _MLX_VENV,  # which has what that one file imports
        (_pytest("tests/engines/tokenspeed"),),
    ),
    Suite(
        "packaging",
        "wheel, sdist, a clean install, the commands of the README",
        Venv("core", MAIN),
        (_pytest("tests/packaging"),),
    ),
)
