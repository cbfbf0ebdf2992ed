"""The meaning of ``@pytest.mark.processes(4, devices=2, timeout=60)``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

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
    _: KW_ONLY
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
    try:
        return WantedProcesses(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise ValueError(
            f"@pytest.mark.{NAME} is not valid: {error}; give the number of processes, and maybe "
            f"devices of each and a timeout: @pytest.mark.{NAME}(4, devices=2, timeout=60)"
        ) from None
