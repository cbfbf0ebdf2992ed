"""The meaning of ``@pytest.mark.processes(4, devices=2, timeout=60)``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

NAME = "processes"
HELP = (
    f"{NAME}(num_processes, *, devices=1, timeout=60): run the test in that many processes of this "
    "machine, each with its own virtual CPU devices (gda.testing)"
)


@dataclass(frozen=True)
class WantedProcesses:
    """The number of processes, virtual devices of each, and seconds for the test."""

    num_processes: int
    devices: int = 1
    timeout: float = 60.0

    @property
    def size(self) -> tuple[int, int]:
        """The size of the pool for such a test."""
        return self.num_processes, self.devices


def is_marked(item: pytest.Item) -> bool:
    """Return True if a test has the marker."""
    return item.get_closest_marker(NAME) is not None


def size_of(item: pytest.Item) -> tuple[int, int] | None:
    """Return the size of the pool for a test, or ``None`` if it has no valid marker."""
    try:
        return wanted(item).size if is_marked(item) else None
    except ValueError:  # reported when the test runs
        return None


def wanted(item: pytest.Item) -> WantedProcesses:
    """Return the arguments of a test's marker, or raise ``ValueError`` if they are not valid."""
    mark = item.get_closest_marker(NAME)
    assert mark is not None
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        raise ValueError(
            "@given under @pytest.mark.processes would draw other examples in each process. "
            "Remove the marker, and call a function of the test module in all processes with the "
            "fixture process_pool: process_pool(2).run(check, example)"
        )
    options = {**dict(zip(["num_processes"], mark.args, strict=False)), **mark.kwargs}
    kinds = {"num_processes": int, "devices": int, "timeout": (int, float)}
    are_right = all(
        isinstance(value, kinds.get(name, ())) and not isinstance(value, bool) and value > 0
        for name, value in options.items()
    )
    if len(mark.args) <= 1 and "num_processes" in options and are_right:
        return WantedProcesses(**options)
    written = [repr(value) for value in mark.args]
    written += [f"{name}={value!r}" for name, value in mark.kwargs.items()]
    raise ValueError(
        f"@pytest.mark.{NAME}({', '.join(written)}) is not valid; give the number of processes, "
        "and maybe devices of each and a timeout in seconds, all above 0: "
        f"@pytest.mark.{NAME}(4, devices=2, timeout=60)"
    )
