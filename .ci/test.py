#!/usr/bin/env python3
"""The test command: one venv per suite, the suites one after another, one closing line of counts.

Standard library only; any Python 3.10 or newer starts it. A suite that cannot be set up, or that
runs no test, has failed. One or two tests that fail in a suite are run once more, alone: thousands
of tests of real processes meet a machine that stands still now and then. The table tells of it.
Exit code 0 when all passed, 1 otherwise, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from suites import SUITES, Step, Suite
from venvs import ROOT, SetupError, say

FEW = 2
"""So many failed tests of a suite may have had bad luck; more have a reason."""


@dataclass
class Counts:
    """Tests of one suite, as its reports have them."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    again: int = 0
    """Of those that passed: at the second try."""

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.again += other.again


@dataclass(frozen=True)
class Outcome:
    """What one suite came to."""

    suite: Suite
    counts: Counts
    seconds: float
    note: str = ""


def read_junit(report: Path) -> Counts:
    """Sum the test cases of a JUnit report; a test with an error counts as failed."""
    counts = Counts()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        number = {k: int(suite.get(k, "0")) for k in ("tests", "failures", "errors", "skipped")}
        bad = number["failures"] + number["errors"]
        counts.add(
            Counts(
                passed=max(0, number["tests"] - bad - number["skipped"]),
                failed=bad,
                skipped=number["skipped"],
            )
        )
    return counts


def run_step(argv: list[str], env: dict[str, str], seconds: float) -> int:
    """Run with the output going straight through; past the time its whole group is ended."""
    process = subprocess.Popen(argv, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except BaseException as reason:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(reason, subprocess.TimeoutExpired):
            say(f"ended after {seconds:.0f} s: {shlex.join(argv)}")
            return 124
        raise


def count_step(step: Step, code: int, report: Path) -> Counts:
    """Counts of one finished step; an exit code that no counted failure explains is a failure."""
    if not step.junit:
        return Counts(passed=int(code == 0), failed=int(code != 0))
    try:
        counts = read_junit(report)
    except (OSError, ET.ParseError):
        counts = Counts()
    if code != 0 and counts.failed == 0:
        counts.failed = 1
    return counts


def _environment(suite: Suite, scratch: Path) -> dict[str, str]:
    """The caller's environment, less what would reach another Python or a model hub."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(scratch),
        "COVERAGE_FILE": str(ROOT / ".coverage"),
    }
    for variable, venv in suite.others.items():
        env[variable] = str(venv.ready())
    return env


def try_step(
    suite: Suite, step: Step, argv: list[str], env: dict[str, str], scratch: Path
) -> tuple[int, Counts]:
    """Run a step once: its exit code and its counts."""
    report = scratch / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    if step.junit:
        argv = [*argv, f"--junit-xml={report}"]
    code = run_step(argv, env, suite.minutes * 60)
    return code, count_step(step, code, report)


def run_suite(suite: Suite, coverage: bool, scratch: Path) -> Outcome:
    """Set up and run all steps of one suite."""
    began = time.monotonic()
    counts = Counts()
    try:
        python = suite.venv.ready()
        env = _environment(suite, scratch)
    except SetupError as error:
        say(f"{suite.name}: could not be set up\n{error}")
        return Outcome(suite, Counts(failed=1), time.monotonic() - began, "set-up failed")
    for step in suite.steps:
        argv = [a.format(python=python, bin=python.parent) for a in step.argv]
        if step.junit and coverage:
            argv[1:2] = ["-m", "coverage", "run", "-m"]
        say(f"{suite.name}: {step.name} ...")
        code, done = try_step(suite, step, argv, env, scratch)
        # Exit code 1 is pytest's word for tests that failed, and nothing else.
        if step.junit and code == 1 and done.failed <= FEW:
            say(f"{suite.name}: {step.name}: {done.failed} failed; once more, alone ...")
            alone = [*argv, "--last-failed", "--last-failed-no-failures=none"]
            code, second = try_step(suite, step, alone, env, scratch)
            if code == 0 and second.passed >= done.failed:
                done = Counts(done.passed + done.failed, 0, done.skipped, again=done.failed)
        counts.add(done)
        say(f"{suite.name}: {step.name}: {'ok' if code == 0 else f'FAILED, exit code {code}'}")
    note = ""
    if counts.passed + counts.failed == 0:
        counts.failed, note = 1, "ran no test"
    return Outcome(suite, counts, time.monotonic() - began, note)


def report_coverage(chosen: list[Suite]) -> None:
    """Put the data of all suites together and print it; the venvs are there by now."""
    suite = next((s for s in chosen if any(step.junit for step in s.steps)), None)
    if suite is not None:
        coverage = [str(suite.venv.ready()), "-m", "coverage"]
        subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, check=False)
        subprocess.run([*coverage, "report"], cwd=ROOT, check=False)


def summary(outcomes: list[Outcome], left_out: list[str]) -> int:
    """Print the table and the closing line; the exit code."""
    total = Counts()
    print("\nsuite          passed  failed  skipped  again  seconds")
    for done in outcomes:
        c = done.counts
        total.add(c)
        row = f"{done.suite.name:<14}{c.passed:>7}{c.failed:>8}{c.skipped:>9}{c.again:>7}"
        print(f"{row}{done.seconds:>9.1f}  {done.note}".rstrip())
    if left_out:
        print(f"not run: {', '.join(left_out)}")
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    if total.again:
        print(f"passed at the second try only: {total.again}; the output above has why")
    print(f"\n{total.passed} passed, {total.failed} failed{skipped}", flush=True)
    return int(total.failed > 0)


def main() -> int:
    """Run the chosen suites."""
    names = [s.name for s in SUITES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the suites and stop")
    parser.add_argument("--keep-going", action="store_true", help="run on after a failed suite")
    parser.add_argument("--coverage", action="store_true", help="measure coverage, then report it")
    options = parser.parse_args()
    if options.list:
        for suite in SUITES:
            print(f"{suite.name:<14}{suite.about}")
        return 0
    chosen = [s for s in SUITES if s.name in options.suite]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="smg-test-") as scratch:
        for suite in chosen:
            say(f"=== {suite.name}: {suite.about}")
            outcomes.append(run_suite(suite, options.coverage, Path(scratch)))
            if outcomes[-1].counts.failed and not options.keep_going:
                break
        if options.coverage:
            report_coverage(chosen)
    return summary(outcomes, [s.name for s in chosen[len(outcomes) :]])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
