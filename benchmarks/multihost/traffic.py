"""Meetings and bytes of a call in each process, through JAX's coordination service.

``python -m benchmarks.multihost.traffic`` prints the table of ``docs/many-hosts.md``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import gda
from benchmarks.report import table
from gda import checkpoint
from gda.multihost import coordination, meeting
from gda.multihost.agreement import checking_agreement
from gda.testing.pool import Pool

P = PartitionSpec
PROCESSES = (2, 4, 8, 16)
CALLS = {
    "check": "`check_processes_agree`",
    "save": "`checkpoint.save`",
    "restore": "`checkpoint.restore`",
    "reshard": "`reshard_tree`",
    "gather": "`gather`",
}


class Traffic(NamedTuple):
    """The meetings that a process held in a call, and the bytes it sent and received."""

    meetings: int
    sent: int
    received: int


def traffic_of(call: str, folder: str) -> Traffic:
    """Make a call on a tree of 10 arrays, in all processes, and return what this process did."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    devices = jax.device_count()
    values = {f"w{number}": np.zeros((devices, devices), np.float32) for number in range(10)}
    tree = gda.load_tree(values, mesh, P("x"))
    calls = {
        "check": lambda: gda.check_processes_agree(tree),
        "save": lambda: checkpoint.save(Path(folder, "second"), tree),
        "restore": lambda: checkpoint.restore(Path(folder, "first"), like=tree),
        "reshard": lambda: gda.reshard_tree(tree, mesh, P(None, "x")),
        "gather": lambda: tree["w0"].gather(),
    }
    if call in ("save", "restore"):  # the first save into a folder has one meeting more
        checkpoint.save(Path(folder, "first"), tree)
    service, meetings, sent, received = coordination.Service, 0, 0, 0
    begin, put, get, list_of = meeting._next_meeting, service.put, service.get, service.list

    def counted_meeting(*args: Any) -> Any:
        nonlocal meetings
        meetings += 1
        return begin(*args)

    def counted_put(self: Any, key: str, value: bytes, **options: Any) -> None:
        nonlocal sent
        sent += len(key) + len(value)
        put(self, key, value, **options)

    def counted_get(self: Any, key: str, timeout: float) -> bytes:
        nonlocal received
        value = get(self, key, timeout)
        received += len(value)
        return value

    def counted_list(self: Any, key: str) -> dict[str, bytes]:
        nonlocal received
        found = list_of(self, key)
        received += sum(len(key) + len(value) for key, value in found.items())
        return found

    with (
        checking_agreement(False),  # the pool switches it on
        patch.object(meeting, "_next_meeting", counted_meeting),
        patch.multiple(service, put=counted_put, get=counted_get, list=counted_list),
    ):
        calls[call]()
    return Traffic(meetings, sent, received)


def traffic_in(pool: Pool, call: str) -> list[Traffic]:
    """Return the traffic of a call in each process of a pool."""
    with tempfile.TemporaryDirectory() as folder:
        return pool.run(traffic_of, call, folder, timeout=300)


def main() -> None:
    rows = []
    for processes in PROCESSES:
        with Pool(processes) as pool:
            for call, name in CALLS.items():
                first, *_, last = traffic_in(pool, call)
                cells = [name, processes, first.meetings, first.sent, first.received]
                rows.append([*map(str, [*cells, last.sent, last.received])])
    head = ["call", "processes", "meetings", "process 0 sends", "receives"]
    print(
        *table([*head, "another sends", "receives"], sorted(rows, key=lambda row: row[0])), sep="\n"
    )


if __name__ == "__main__":
    main()
