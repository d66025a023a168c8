"""The test command tells the truth: what did not run, or did not set up, has failed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"


class ReadyVenv:
    """Stands in for a venv: this interpreter, or the error of one that could not be made."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def ready(self) -> Path:
        if self._error is not None:
            raise self._error
        return Path(sys.executable)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """`.ci/test.py` as a module, with its neighbours importable while it is loaded."""
    sys.path.insert(0, str(CI))
    try:
        spec = importlib.util.spec_from_file_location("ci_test_command", CI / "test.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(CI))
        for name in ("ci_test_command", "suites", "venvs"):
            sys.modules.pop(name, None)


def suite(runner: ModuleType, code: str, *, junit: bool, venv: ReadyVenv | None = None) -> Any:
    """A suite of one step, `python -c CODE`; pytest's report option becomes an argument of it."""
    step = runner.Step("step", ("{python}", "-c", code), junit=junit)
    return runner.Suite("sample", "a sample", venv or ReadyVenv(), (step,))


def counts(runner: ModuleType, sample: Any, tmp_path: Path) -> tuple[int, int, int]:
    done = runner.run_suite(sample, False, tmp_path).counts
    return done.passed, done.failed, done.skipped


REPORT = (
    "import sys; open(sys.argv[1].partition('=')[2], 'w').write("
    '\'<testsuites><testsuite tests="{tests}" failures="{failures}" errors="{errors}" '
    'skipped="{skipped}"/></testsuites>\'); sys.exit({code})'
)


@pytest.mark.parametrize(
    ("tests", "failures", "errors", "skipped", "code", "expected"),
    [
        (5, 0, 0, 0, 0, (5, 0, 0)),
        (5, 1, 1, 1, 1, (2, 2, 1)),
        (5, 0, 0, 0, 3, (5, 1, 0)),
        (0, 0, 0, 0, 0, (0, 1, 0)),
        (3, 0, 0, 3, 0, (0, 1, 3)),
        (0, 0, 0, 0, 5, (0, 1, 0)),
    ],
    ids=["all pass", "failures", "crash after a clean report", "none", "all skipped", "exit 5"],
)
def test_counts_come_from_the_report_and_the_exit_code(
    runner: ModuleType,
    tmp_path: Path,
    tests: int,
    failures: int,
    errors: int,
    skipped: int,
    code: int,
    expected: tuple[int, int, int],
) -> None:
    line = REPORT.format(tests=tests, failures=failures, errors=errors, skipped=skipped, code=code)
    assert counts(runner, suite(runner, line, junit=True), tmp_path) == expected


UNLUCKY = """
import pathlib, pytest
SEEN = pathlib.Path(__file__).with_name("seen")
def test_good(): pass
@pytest.mark.parametrize("at", range({count}))
def test_bad(at):
    tries = int(SEEN.read_text()) if SEEN.exists() else 0
    SEEN.write_text(str(tries + 1))
    assert tries >= {failures}
"""


@pytest.mark.parametrize(
    ("count", "failures", "expected", "again"),
    [
        (2, 0, (3, 0, 0), 0),
        (2, 2, (3, 0, 0), 2),
        (2, 3, (1, 2, 0), 0),
        (3, 3, (1, 3, 0), 0),
    ],
    ids=["good", "bad luck", "bad twice", "too many for bad luck"],
)
def test_a_few_that_failed_are_run_once_more(
    runner: ModuleType,
    tmp_path: Path,
    count: int,
    failures: int,
    expected: tuple[int, int, int],
    again: int,
) -> None:
    """And are told apart."""
    (tmp_path / "test_it.py").write_text(UNLUCKY.format(count=count, failures=failures))
    argv = ("{python}", "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tmp_path}")
    step = runner.Step("pytest", (*argv, str(tmp_path)), junit=True)
    done = runner.run_suite(runner.Suite("sample", "", ReadyVenv(), (step,)), False, tmp_path)
    assert (done.counts.passed, done.counts.failed, done.counts.skipped) == expected
    assert done.counts.again == again


def test_a_report_that_was_never_written_is_a_failure(runner: ModuleType, tmp_path: Path) -> None:
    assert counts(runner, suite(runner, "pass", junit=True), tmp_path) == (0, 1, 0)


@pytest.mark.parametrize(("code", "expected"), [("pass", (1, 0, 0)), ("exit(2)", (0, 1, 0))])
def test_a_tool_counts_as_one(
    runner: ModuleType, tmp_path: Path, code: str, expected: tuple[int, int, int]
) -> None:
    assert counts(runner, suite(runner, code, junit=False), tmp_path) == expected


def test_a_venv_that_cannot_be_made_is_a_failure(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ReadyVenv(runner.SetupError("pip said no"))
    assert counts(runner, suite(runner, "pass", junit=False, venv=broken), tmp_path) == (0, 1, 0)
    assert "pip said no" in capsys.readouterr().out


def test_the_closing_line_has_the_counts(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = suite(runner, "pass", junit=True)
    done = [runner.Outcome(sample, runner.Counts(3, 1, 0, again=2), 1.0)]
    assert runner.summary(done, []) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 passed, 1 failed"
    assert lines[-3] == "passed at the second try only: 2; the output above has why"


def test_every_suite_has_its_lock(runner: ModuleType) -> None:
    venvs = [v for s in runner.SUITES for v in (s.venv, *s.others.values())]
    assert [v.lock for v in venvs if not v.lock_file.is_file()] == []


def test_locks_pin_versions_and_name_no_index(runner: ModuleType) -> None:
    for path in sorted((CI / "locks").glob("*.txt")):
        lines = [li for li in path.read_text().splitlines() if not li.startswith("#")]
        assert lines
        assert [li for li in lines if "==" not in li or "://" in li] == [], path.name


def test_lower_bounds(runner: ModuleType) -> None:
    venvs = sys.modules["venvs"]
    given = ["a>=1.2,<3", "b[x]>=2; platform_system == 'Linux'", "c!=5.13.*"]
    assert venvs.lower_bounds(given) == ["a==1.2", "b[x]==2; platform_system == 'Linux'"]
