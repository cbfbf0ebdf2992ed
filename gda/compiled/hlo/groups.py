"""Replica groups: every form that XLA prints, and the mesh axes that they follow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]


def axes_of_groups(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes along which devices form these groups; None if no axes do.

    The order of the groups, and of the positions in one, does not matter. Axes of size 1 are
    omitted, since they separate no devices.
    """
    sizes = tuple(mesh_shape.values())
    if len({len(group) for group in groups}) != 1 or not groups[0]:
        return None
    given = np.sort(np.array(groups, np.int64), axis=1)
    if given.size != math.prod(sizes) or not 0 <= given.min() <= given.max() < given.size:
        return None
    coordinates = np.array(np.unravel_index(given[0], sizes)).reshape(len(sizes), -1)
    along = [axis for axis, values in enumerate(coordinates) if len(set(values.tolist())) > 1]
    if math.prod(sizes[axis] for axis in along) != given.shape[1]:
        return None
    positions = np.arange(given.size).reshape(sizes)
    # Each row ascends, and so do the first numbers of the rows, as in the sorted groups.
    expected = np.moveaxis(positions, along, range(-len(along), 0)).reshape(given.shape)
    if not np.array_equal(given[given[:, 0].argsort()], expected):
        return None
    names = tuple(mesh_shape)
    return tuple(names[axis] for axis in along)


def axes_of_pairs(pairs: Pairs, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the axes along which a permutation moves data; None if one end is outside the mesh."""
    sizes = tuple(mesh_shape.values())
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    if ends.size and not 0 <= ends.min() <= ends.max() < math.prod(sizes):
        return None
    return tuple(
        name
        for name, along in zip(mesh_shape, np.unravel_index(ends, sizes), strict=True)
        if (along[:, 0] != along[:, 1]).any()
    )


# The forms.

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
# A name is in quotes since XLA of 2026, and may have any other character.
_MESH = re.compile(
    r"@?mesh(?:\[((?:'[^']*'|[^'\]])*)\]|<([^>]*)>)"
    r"(?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{((?:'[^']*'|[^'}])*)\}"
)
_AXIS_SIZE = re.compile(r"(?:'([^']*)'|([^',=]+))=(\d+)")
_AXIS_PART = re.compile(r"(?:'([^']*)'|([^',:]+))(?::\((\d+)\)(\d+))?")


def parse_groups(text: str) -> Groups | None:
    """Return replica groups of any form of XLA's, ``()`` for all devices; None if unknown."""
    text = text.strip()
    if re.fullmatch(r"\{[\s\d,{}]*\}", text):
        inner = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
        return tuple(numbers(group) for group in inner if group.strip())
    if (iota := _IOTA.fullmatch(text)) and iota[2]:
        return _as_groups(_iota(iota[2], iota[3]).reshape(numbers(iota[1])))
    if mesh := _MESH.fullmatch(text):
        return _groups_of_mesh(mesh[1] or mesh[2] or "", mesh[3], mesh[4])
    return None


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _iota(shape: str, order: str | None) -> npt.NDArray[np.int64]:
    dims = numbers(shape)
    counted = np.arange(math.prod(dims)).reshape(dims)
    return counted.transpose(numbers(order)) if order else counted


def _as_groups(array: npt.NDArray[np.int64]) -> Groups:
    return tuple(map(tuple, array.reshape(-1, array.shape[-1]).tolist()))


def _groups_of_mesh(mesh: str, device_ids: str | None, axes: str) -> Groups | None:
    sizes = {quoted or bare: int(size) for quoted, bare, size in _AXIS_SIZE.findall(mesh)}
    if device_ids is None:
        positions = np.arange(math.prod(sizes.values()))
    elif iota := _IOTA.fullmatch(device_ids.strip()):
        positions = _iota(iota[2] or iota[1], iota[3]).ravel()
    else:
        positions = np.array(numbers(device_ids))
    # A part of an axis, 'a':(2)4, has size 4 after slower parts of size 2: split axes like this.
    wanted = [
        (quoted or bare, int(before or 1), int(size or sizes.get(quoted or bare, 0)))
        for quoted, bare, before, size in _AXIS_PART.findall(axes)
    ]
    if not {name for name, _, _ in wanted} <= sizes.keys():
        return None
    dims: list[int] = []
    dimension_of: dict[tuple[str, int, int], int] = {}
    for name, size in sizes.items():
        rest = 1
        for part in sorted(part for part in wanted if part[0] == name):
            _, before, of_part = part
            dims += [before // rest, of_part]
            dimension_of[part] = len(dims) - 1
            rest = before * of_part
        dims.append(size // rest)
    if math.prod(dims) != positions.size:
        return None
    chosen = [dimension_of[part] for part in wanted]  # the first that is written varies slowest
    grouped = np.moveaxis(positions.reshape(dims), chosen, range(-len(chosen), 0))
    return _as_groups(grouped.reshape(-1, math.prod(dims[axis] for axis in chosen)))
