"""The reports of all processes about one test, merged into one for each phase of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from gda.testing.answer import (
    Answer,
    details,
    in_order_of_blame,
    last_words,
    stacks_of_others,
    trim_stacks,
)
from gda.testing.session import TEXT

Phase = Literal["setup", "call", "teardown"]
_PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")


@dataclass(frozen=True)
class Crash:
    """The place and message that pytest prints in its summary, and with --tb=line."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


@dataclass(frozen=True)
class ProcessesRepr:
    """A failure as pytest shows it: a text of several processes."""

    text: str
    reprcrash: Crash

    def toterminal(self, out: Any) -> None:
        for line in self.text.splitlines():
            out.line(line, red=line.startswith("E  "), bold=line.startswith("E  "))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _PhaseFailure:
    """The failure of one process in one phase."""

    answer: Answer
    text: str
    message: str
    crash: Crash | None = None

    @property
    def line(self) -> str:
        place = "" if self.crash is None else f" ({self.crash.path}:{self.crash.lineno})"
        return self.message.partition("\n")[0] + place


def merge(item: pytest.Item, answers: Sequence[Answer], timeout: float) -> list[pytest.TestReport]:
    """Return the reports of setup, call and teardown of a test that ran in several processes.

    A phase fails if it failed in any process, or if some processes skipped it and others did not.
    """
    make = item.config.hook.pytest_report_from_serializable
    for answer in answers:
        answer.reports = [make(config=item.config, data=data) for data in answer.reports]
    reports: list[pytest.TestReport] = []
    answers = in_order_of_blame(list(answers))
    for phase in _PHASES:
        if phase == "call" and reports[0].outcome != "passed":
            continue
        reports.append(_merge_phase(item, answers, phase, timeout))
    return reports


def failed_setup(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """Return the reports of a test that could not begin."""
    return [
        _report(item, "setup", "failed", longrepr=_repr_of(item, text, text)),
        _report(item, "teardown", "passed"),
    ]


def _merge_phase(
    item: pytest.Item, answers: list[Answer], phase: Phase, timeout: float
) -> pytest.TestReport:
    of_process: dict[int, pytest.TestReport] = {}
    for answer in answers:
        # A test with subtests has several reports of its call.
        reports = [report for report in answer.reports if report.when == phase]
        failed = [report for report in reports if report.outcome == "failed"]
        for report in (failed or reports[::-1])[:1]:
            of_process[answer.process] = report
    failures = _failures(answers, of_process, phase, timeout)
    expected = [report for report in of_process.values() if hasattr(report, "wasxfail")]
    xfailed = [report for report in expected if report.outcome == "skipped"]
    skipped = {
        process: report
        for process, report in of_process.items()
        if report.outcome == "skipped" and report not in xfailed
    }
    if xfailed:
        # A process had the expected failure, so the others may pass.
        failures = [failure for failure in failures if "[XPASS(strict)]" not in failure.text]
    if failures:
        return _failed(item, phase, answers, of_process, failures)
    if skipped and len(skipped) < len(answers):
        return _failed(item, phase, answers, of_process, _skip_failures(answers, skipped))
    times = _times(of_process.values())
    if skipped:
        place = next(iter(skipped.values())).longrepr
        return _report(item, phase, "skipped", longrepr=place, **times)
    if xfailed:
        text, reason = getattr(xfailed[0], TEXT), xfailed[0].wasxfail
        return _report(item, phase, "skipped", longrepr=text, wasxfail=reason, **times)
    if expected:
        return _report(item, phase, "passed", wasxfail=expected[0].wasxfail, **times)
    return _report(item, phase, "passed", **times)


def _failures(
    answers: list[Answer], of_process: dict[int, pytest.TestReport], phase: Phase, timeout: float
) -> list[_PhaseFailure]:
    """Return the failures of processes in a phase, the likely causes of the others first."""
    failures: list[tuple[float, _PhaseFailure]] = []
    for answer in answers:
        report = of_process.get(answer.process)
        if report is not None and report.outcome == "failed":
            crash, text = _crash_of(report), getattr(report, TEXT)
            message = f"{answer.label}: {crash.message if crash else text.strip()}"
            failure = _PhaseFailure(answer, f"{answer.label} failed:\n\n{text}", message, crash)
            failures.append((report.stop, failure))
        elif answer.ending in ("died", "hung", "raised") and phase == _broken_phase(answer):
            limit = f" (timeout={timeout:g})" if answer.ending == "hung" else ""
            summary = answer.summary + limit
            is_dead = answer.ending == "died"
            more = last_words(answer) if is_dead else details(answer)
            failure = _PhaseFailure(answer, f"{summary}\n{more}", summary)
            failures.append((0 if is_dead else time.time(), failure))
    return [failure for _, failure in sorted(failures, key=lambda pair: pair[0])]


def _crash_of(report: pytest.TestReport) -> Crash | None:
    if isinstance(report.longrepr, tuple):
        return Crash(*report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    return None if crash is None else Crash(crash.path, crash.lineno, crash.message)


def _skip_failures(
    answers: list[Answer], skipped: dict[int, pytest.TestReport]
) -> list[_PhaseFailure]:
    failures = []
    for answer in answers:
        if answer.process in skipped:
            crash = _crash_of(skipped[answer.process])
            reason = crash.message if crash else "Skipped"
            text = f"{answer.label} skipped this test, but others did not: {reason}"
            failures.append(_PhaseFailure(answer, text, text, crash))
    return failures


def _failed(
    item: pytest.Item,
    phase: Phase,
    answers: list[Answer],
    of_process: dict[int, pytest.TestReport],
    failures: list[_PhaseFailure],
) -> pytest.TestReport:
    first, *others = failures
    parts = [first.text, *[f"also failed: {other.line}" for other in others]]
    if behind := stacks_of_others(answers, first.answer):
        parts.append(behind)
    sections = []
    for answer in sorted(answers, key=lambda answer: answer.process):
        report = of_process.get(answer.process)
        if report is not None and report.outcome == "failed":
            sections += [(f"{title} of {answer.label}", text) for title, text in report.sections]
        if answer.output.strip():
            sections.append((f"output of {answer.label}", trim_stacks(answer.output)))
    longrepr = _repr_of(item, "\n\n".join(parts), first.message, first.crash)
    times = _times(of_process.values())
    return _report(item, phase, "failed", longrepr=longrepr, sections=sections, **times)


def _broken_phase(answer: Answer) -> Phase:
    """Return the phase of a process after its last report."""
    outcomes = {report.when: report.outcome for report in answer.reports}
    if "setup" not in outcomes:
        return "setup"
    return "call" if outcomes["setup"] == "passed" and "call" not in outcomes else "teardown"


def _times(reports: Any) -> dict[str, Any]:
    """Return duration, start and stop over all processes, and the properties of the first."""
    reports = list(reports)
    if not reports:
        return {}
    return {
        "duration": max(report.duration for report in reports),
        "start": min(report.start for report in reports),
        "stop": max(report.stop for report in reports),
        "user_properties": reports[0].user_properties,
    }


def _repr_of(
    item: pytest.Item, text: str, message: str, crash: Crash | None = None
) -> ProcessesRepr:
    path, line, _ = item.location
    where = crash or Crash(path, (line or 0) + 1, message)
    return ProcessesRepr(text, replace(where, message=message))


def _report(
    item: pytest.Item, phase: Phase, outcome: Any, *, longrepr: Any = None, **rest: Any
) -> pytest.TestReport:
    now = time.time()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=longrepr,
        when=phase,
        **{"start": now, "stop": now, **rest},
    )
