"""The report of ``gda.memory``: the arrays that take the memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from gda.layout.boundary import set_module
from gda.layout.text import (
    counted,
    format_bytes,
    format_more,
    format_numbers,
    typed_shape,
)
from gda.show.array_table import ROWS_SHOWN, WIDTH, array_table
from gda.show.report import Report, Table

UNNAMED = "unnamed"


@set_module("gda")
class ArrayMemory(NamedTuple):
    """The memory of a named array, or of the unnamed arrays of one shape, dtype and layout.

    Attributes:
      names: the places of the array, such as ``'params/w'``; none for unnamed arrays.
      num_arrays: number of arrays; 1 for a named one.
      shape, dtype: of each global array, with its padding.
      layout: the spec and the mesh, or the device, as text.
      memory_kind: the kind of memory; None for the default of the devices.
      nbytes: bytes of their buffers in this process, replicas included, without those that an
        earlier row counts.
      nbytes_per_device: those on the device that has the most of them.

    >>> import gda, jax.numpy as jnp
    >>> x = jnp.zeros((8, 2), jnp.float32)
    >>> row = next(row for row in gda.memory(x=x).arrays if row.names)
    >>> row.names, row.dtype, row.nbytes
    (('x',), 'float32', 64)
    """

    names: tuple[str, ...]
    num_arrays: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    memory_kind: str | None
    nbytes: int
    nbytes_per_device: int

    @property
    def label(self) -> str:
        """The names, or the number of unnamed arrays, as text."""
        return " = ".join(self.names) or f"{self.num_arrays:,} {UNNAMED}"

    @property
    def kind(self) -> str:
        """Dtype and shape, as XLA writes them."""
        return typed_shape(self.dtype, self.shape)

    @property
    def place(self) -> str:
        """The layout with the kind of memory."""
        return self.layout if self.memory_kind is None else f"{self.layout}, {self.memory_kind}"


@set_module("gda")
class DeviceMemory(NamedTuple):
    """The memory of one device of this process, or one kind of its memory.

    Attributes:
      device: platform and id, such as ``'TPU 0'``.
      memory_kind: the kind of memory; None for the default of the device.
      nbytes: bytes of all arrays.
      by_tree: bytes of the arrays of each named tree, and of ``'unnamed'`` ones.
      bytes_in_use, bytes_limit: as the device reports them; None if it does not, as a CPU, and for
        other kinds of memory.

    >>> import gda, jax.numpy as jnp
    >>> x = jnp.zeros((8, 2), jnp.float32)
    >>> first = gda.memory(x=x).devices[0]
    >>> first.device, first.by_tree['x'], first.bytes_in_use
    ('CPU 0', 64, None)
    """

    device: str
    memory_kind: str | None
    nbytes: int
    by_tree: dict[str, int]
    bytes_in_use: int | None = None
    bytes_limit: int | None = None

    @property
    def bytes_not_in_arrays(self) -> int | None:
        """Bytes in use beyond the arrays: programs, their temporaries, and other users."""
        return None if self.bytes_in_use is None else max(self.bytes_in_use - self.nbytes, 0)


@set_module("gda")
@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """The arrays that take the memory of this process's devices, the largest first.

    ``gda.memory`` makes it; ``print`` and notebooks show it as tables. It holds no array.

    Attributes:
      arrays: a row for each named array, and for each group of unnamed ones.
      devices: the local devices, by platform and id.

    >>> import gda, jax.numpy as jnp
    >>> report = gda.memory(params={'w': jnp.zeros((1024, 2), jnp.float32)})
    >>> [(row.names, row.nbytes, row.nbytes_per_device) for row in report.arrays if row.names]
    [(('params/w',), 8192, 8192)]
    """

    arrays: tuple[ArrayMemory, ...]
    devices: tuple[DeviceMemory, ...] = field(hash=False)  # a dict has no hash

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in this process."""
        return sum(device.nbytes for device in self.devices)

    def _parts(self) -> list[str | Table]:
        found: list[str | Table] = [self.headline]
        for part in (_table_of_devices(self), _table_of_arrays(self)):
            found += ["", *part] if part else []
        return found

    @property
    def headline(self) -> str:
        """The sum, in words."""
        num_arrays = sum(row.num_arrays for row in self.arrays)
        used = {each.device for each in self.devices if each.nbytes}
        on = f" on {counted(len(used), 'device')}" if used else ""
        return f"{format_bytes(self.nbytes)} in {counted(num_arrays, 'array')}{on}"


def _table_of_arrays(report: MemoryReport) -> list[str | Table]:
    header = ["array", "", "layout", "per device", "in all"]
    return array_table(header, report.arrays, _cells_of_array, attrgetter("nbytes"))


def _cells_of_array(row: ArrayMemory) -> list[str]:
    sizes = map(format_bytes, (row.nbytes_per_device, row.nbytes))
    return [row.label, row.kind, row.place, *sizes]


def _table_of_devices(report: MemoryReport) -> list[str | Table]:
    """Return a table with a row for each run of equal devices, and a line for the omitted ones."""
    trees = [*dict.fromkeys(name for each in report.devices for name in each.by_tree)]
    groups = [[*group] for _, group in groupby(report.devices, lambda each: _cells(each, trees))]
    if not groups:
        return []
    rows = [[_devices_of(group), *_cells(group[0], trees)[1:]] for group in groups[:ROWS_SHOWN]]
    header = ["device", *trees, "arrays", "in use", "not in arrays", "limit"]
    told = [at for at in range(len(header)) if at < len(trees) + 2 or any(row[at] for row in rows)]
    lines = [[line[at] for at in told] for line in (header, *rows)]
    left = len(report.devices) - sum(map(len, groups[:ROWS_SHOWN]))
    more = [format_more(left)] if left else []
    return [Table(lines, lines[0][1:], WIDTH), *more]


def _cells(device: DeviceMemory, trees: Sequence[str]) -> list[str]:
    reported = device.bytes_in_use, device.bytes_not_in_arrays, device.bytes_limit
    sizes = [*(device.by_tree.get(tree, 0) for tree in trees), device.nbytes, *reported]
    texts = ["" if nbytes is None else format_bytes(nbytes) for nbytes in sizes]
    return [device.memory_kind or "", *texts]


def _devices_of(group: Sequence[DeviceMemory]) -> str:
    """Return the devices of one platform and kind of memory as text: ``TPU 0-7``.

    >>> _devices_of([DeviceMemory(f"TPU {i}", "pinned_host", 0, {}) for i in range(4)])
    'TPU 0-3 pinned_host'
    """
    named = [each.device.rsplit(" ", 1) for each in group]
    runs = groupby(named, lambda each: each[0])
    text = ", ".join(f"{name} {format_numbers(int(at) for _, at in run)}" for name, run in runs)
    kind = group[0].memory_kind
    return text if kind is None else f"{text} {kind}"
