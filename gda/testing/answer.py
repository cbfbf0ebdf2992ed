"""The outcome of a command in the processes of a pool, and messages about failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gda.layout.boundary import set_module

# Seconds for the others after one process failed. They often wait for it in a collective.
GRACE = 3.0
_TAIL_LINES = 40
_FILES_ABOVE_USER = (
    "/_pytest/python.py",
    "/_pytest/main.py",
    "/_pytest/config/__init__.py",
    "/gda/testing/channel.py",
    "/gda/testing/worker.py",
)


@set_module("gda.testing")
class ProcessError(RuntimeError):
    """A failure in a process of a pool.

    Attributes:
      process: index of the process that failed first.

    >>> import gda.testing, os
    >>> with gda.testing.Pool(2) as pool:
    ...     try:
    ...         pool.run(os.rmdir, '/no/such/folder')
    ...     except gda.testing.ProcessError as error:
    ...         'FileNotFoundError' in str(error)
    True
    """

    def __init__(self, process: int, message: str) -> None:
        super().__init__(message)
        self.process = process

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.process, str(self))


@dataclass
class Answer:
    """The outcome of one command in one process.

    Attributes:
      ending: "returned", "raised", "died", "hung" (ran past the timeout), or "behind" (was still
        running a few seconds after another process had failed).
      at: time of the ending by ``time.monotonic``, the same clock in all processes of a machine.
      value: the result; after an exception a pair of texts: one line, and the traceback.
      outcome: a text, equal in all processes that are in step.
      status: the exit of the process, if it died.
      output: output of the process since the command.
      stack: stack of the process, if it or another one was hung or behind.
    """

    process: int
    num_processes: int
    ending: str = "behind"
    at: float = float("inf")
    value: Any = None
    outcome: str = ""
    reports: list[Any] = field(default_factory=list)
    status: str = ""
    output: str = ""
    stack: str = ""

    @property
    def label(self) -> str:
        """Return the name of the process in messages."""
        return f"process {self.process} of {self.num_processes}"

    @property
    def summary(self) -> str:
        """Return the ending of the command in one line."""
        if self.ending == "died":
            return f"{self.label} {self.status}"
        if self.ending == "raised":
            return f"{self.label}: {self.value[0]}"
        return {
            "returned": f"{self.label} succeeded",
            "hung": f"{self.label} gave no answer in time",
            "behind": f"{self.label} was still running {GRACE:g} s later",
        }[self.ending]


def raise_first(answers: list[Answer], call: str) -> None:
    """Raise the failure that came first, if there is one, and name the others."""
    failed = [answer for answer in in_order_of_blame(answers) if answer.ending != "returned"]
    if not failed:
        return
    first, *others = failed
    hung = f" ({call})" if first.ending == "hung" else ""
    parts = [first.summary + hung, details(first), last_words(first)]
    parts += [other.summary for other in others if other.ending in ("raised", "died")]
    parts.append(stacks_of_others(answers, first))
    raise ProcessError(first.process, "\n".join(part for part in parts if part))


def in_order_of_blame(answers: list[Answer]) -> list[Answer]:
    """Return the answers, likely causes first: a death makes others raise before it is seen."""
    ranks = {"died": 0, "raised": 1, "hung": 1, "behind": 2, "returned": 3}
    return sorted(answers, key=lambda answer: (ranks[answer.ending], answer.at))


def details(answer: Answer) -> str:
    """Return the traceback or the stack of a process."""
    if answer.ending == "raised":
        return answer.value[1]
    return f"Its stack:\n{answer.stack}" if answer.ending in ("hung", "behind") else ""


def last_words(answer: Answer) -> str:
    """Return the end of the output of a process."""
    lines = trim_stacks(answer.output).splitlines()[-_TAIL_LINES:]
    return "\n".join(["The end of its output:", *lines]) if lines else ""


def stacks_of_others(answers: list[Answer], first: Answer) -> str:
    """Return the stacks of processes without an answer, and the names of those that succeeded."""
    if not any(answer.ending in ("hung", "behind") for answer in answers):
        return ""
    return "\n".join(
        f"{answer.summary}. {details(answer)}".rstrip()
        for answer in answers
        if answer is not first and answer.ending in ("hung", "behind", "returned")
    )


def trim_stacks(text: str) -> str:
    """Return text without the frames above user code in the stacks of faulthandler."""
    kept = []
    is_above_user = False
    for line in text.splitlines():
        if not line.startswith("  File "):
            is_above_user = False
        elif any(file in line for file in _FILES_ABOVE_USER):
            is_above_user = True
        if not is_above_user and not line.startswith("Extension modules: "):
            kept.append(line)
    return "\n".join(kept).rstrip()
