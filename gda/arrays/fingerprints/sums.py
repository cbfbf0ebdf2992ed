"""The sums of a part of an array, which devices may still be working on."""

from __future__ import annotations

import jax
import numpy as np

from gda.arrays.fingerprints.formula import LANES, Words, add
from gda.multihost.settings import own_settings


class Sums:
    """The share of some blocks in a fingerprint. Any thread may ask for the result."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Words | jax.Array) -> None:
        self._parts = parts

    def result(self) -> Words:
        """Wait, and return the sums: uint32 ``[LANES]``. Raises what the computation raised."""
        with own_settings():
            return add(sums for part in self._parts for sums in np.asarray(part).reshape(-1, LANES))

    def to_json(self) -> list[int]:
        """Wait, and return the sums for other processes; ``digest_of`` takes those of all."""
        return self.result().tolist()
