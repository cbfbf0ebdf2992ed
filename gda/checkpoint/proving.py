"""Whether restored arrays are, by their fingerprints, those that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gda import digest, fingerprint
from gda.agreement import join_some
from gda.array import GlobalArray
from gda.checkpoint.errors import CorruptionError
from gda.checkpoint.structure import format_path
from gda.checkpoint.targets import Target
from gda.checkpoint.together import together
from gda.indices import processes_of
from gda.sharding import sharding_of


def check_provable(url: str, targets: Sequence[Target]) -> None:
    """Raise unless the fingerprints of arrays can be compared, before these are read.

    Raises:
      CorruptionError: some were saved without.
      ValueError: an array is to be cast, so that it cannot have it.
    """
    cast = [target for target in targets if target.dtype != target.leaf.dtype]
    if cast:
        paths = join_some([format_path(target.leaf.path) for target in cast])
        raise ValueError(f"what is cast has no fingerprint that was recorded: {paths}")
    lacking = [target for target in targets if target.leaf.fingerprint is None]
    if lacking:
        paths = join_some([format_path(target.leaf.path) for target in lacking])
        raise CorruptionError(f"{url} was saved without the fingerprints of {paths}")


def check_fingerprints(url: str, targets: Sequence[Target], values: Sequence[Any]) -> None:
    """Raise unless every array has the fingerprint that was recorded. All processes must call it.

    Raises:
      CorruptionError: some have another.
    """
    shares = [_Share(target, value) for target, value in zip(targets, values, strict=True)]

    def judge(parts: list[list[Any]]) -> list[str]:
        return [
            format_path(share.target.leaf.path)
            for share, *of_all in zip(shares, *parts, strict=True)
            if share.digests(of_all) != {share.target.leaf.fingerprint}
        ]

    what = f"comparing fingerprints with the checkpoint {url}"
    wrong = together(lambda: [share.part() for share in shares], judge, what, timeout=600)
    if wrong:
        problems = [
            f"array {path} is not what was saved: its fingerprint differs" for path in wrong
        ]
        raise CorruptionError(f"{url}: {join_some(problems)}", problems)


class _Share:
    """The share of this process in the fingerprint of a restored array."""

    def __init__(self, target: Target, value: Any) -> None:
        self.target = target
        self._array = value.array if isinstance(value, GlobalArray) else value
        self._pending = None
        if isinstance(self._array, jax.Array):
            self._pending = fingerprint.begin(self._array)

    def part(self) -> list[list[int]]:
        """Return the processes that hold the array together, and the sums over this one's share."""
        if self._pending is None:
            sums = digest.sums_of_numpy(np.asarray(self._array))
        else:
            sums = self._pending.result()
        return [list(self._holders()), sums.tolist()]

    def _holders(self) -> tuple[int, ...]:
        if not isinstance(self._array, jax.Array) or self._array.is_fully_addressable:
            return (jax.process_index(),)
        mesh: Any = sharding_of(self._array).mesh
        return tuple(processes_of(mesh).numbers)

    def digests(self, parts: Sequence[list[list[int]]]) -> set[str]:
        """Return the fingerprints, of the parts of all processes; one where all have the same."""
        by_holders: dict[tuple[int, ...], list[np.ndarray[Any, Any]]] = {}
        for holders, sums in parts:
            by_holders.setdefault(tuple(holders), []).append(np.array(sums, np.uint32))
        shape, dtype = self.target.saved_type
        return {
            digest.digest_of(shape, dtype, digest.add(shares)) for shares in by_holders.values()
        }
