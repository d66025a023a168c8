"""Whether the installed vLLM's gRPC launcher leads to the choice of a servicer: told from source.

Nothing of vLLM is imported: `smg serve --servicer-impl rust` asks before it starts a worker. A
launcher does when it imports our servicer at module level, which is when our switch sets itself
(`launcher_switch`), or when it asks `resolve_servicer_impl` in its own source.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_servicer.vllm.launcher_switch import LAUNCHERS

SYMBOL = "resolve_servicer_impl"
"""In its source a launcher asks for itself."""

_PACKAGE = "smg_grpc_servicer.vllm"
_MODULES = (f"{_PACKAGE}.servicer", f"{_PACKAGE}.health_servicer")
_CLASSES = ("VllmEngineServicer", "VllmHealthServicer")


def upstream_hook_installed(vllm_root: str | Path | None = None) -> bool:
    """Whether vLLM in `vllm_root` (the folder of the package; the installed one) asks us."""
    root = _installed() if vllm_root is None else Path(vllm_root)
    if root is None:
        return False
    for launcher in LAUNCHERS:
        file = root.joinpath(*launcher.split(".")[1:]).with_suffix(".py")
        if file.is_file() and _asks(file):
            return True
    return any(SYMBOL in _text(file) for file in sorted(root.glob("entrypoints/**/*.py")))


def require_upstream_hook(vllm_root: str | Path | None = None) -> None:
    """:raises RuntimeError: vLLM is not installed here, or has no gRPC launcher that asks us."""
    if not upstream_hook_installed(vllm_root):
        where = "the installed vLLM" if vllm_root is None else f"the vLLM in {vllm_root}"
        raise RuntimeError(
            f"--servicer-impl rust: {where} has no gRPC launcher that this package can switch "
            f"({' or '.join(LAUNCHERS)}); known to work: vLLM 0.28 to 0.33"
        )


def asks_itself(file: str | None) -> bool:
    """Whether the source of a loaded launcher has the question in it."""
    return file is not None and SYMBOL in _text(Path(file))


def _asks(file: Path) -> bool:
    text = _text(file)
    if SYMBOL in text:
        return True
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return any(map(_imports_us, _at_import(module.body)))


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that importing the module runs."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if name == "body" and isinstance(statement, ast.If) and _for_types(statement.test):
                continue
            yield from _at_import(getattr(statement, name, []))


def _for_types(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports_us(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return any(alias.name in _MODULES for alias in statement.names)
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        if statement.module == _PACKAGE:
            modules = {name.rpartition(".")[2] for name in _MODULES}
            return any(alias.name in {*_CLASSES, *modules} for alias in statement.names)
        return statement.module in _MODULES
    return False


def _installed() -> Path | None:
    found = importlib.util.find_spec("vllm")
    places = () if found is None else found.submodule_search_locations or ()
    return next(map(Path, places), None)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
