"""Whether restored arrays are, by their fingerprints, those that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from gda import fingerprint
from gda.agreement import join_some
from gda.array import GlobalArray
from gda.checkpoint.errors import CorruptionError
from gda.checkpoint.structure import format_path
from gda.checkpoint.targets import Target
from gda.checkpoint.together import together


def check_fingerprints(url: str, targets: Sequence[Target], values: Sequence[Any]) -> None:
    """Raise unless every array has the fingerprint that was recorded. All processes must call it.

    Raises:
      CorruptionError: some have another, or were saved without.
      ValueError: an array was cast, so that it cannot have it.
    """
    cast = [target for target in targets if target.dtype != target.leaf.dtype]
    if cast:
        paths = join_some([format_path(target.leaf.path) for target in cast])
        raise ValueError(f"what is cast has no fingerprint that was recorded: {paths}")
    lacking = [target for target in targets if target.leaf.fingerprint is None]
    if lacking:
        paths = join_some([format_path(target.leaf.path) for target in lacking])
        raise CorruptionError(f"{url} was saved without the fingerprints of {paths}")
    shares = [_Share(target, value) for target, value in zip(targets, values, strict=True)]

    def judge(parts: list[list[Any]]) -> list[str]:
        return [
            format_path(share.target.leaf.path)
            for share, *of_all in zip(shares, *parts, strict=True)
            if share.digest(of_all) != share.target.leaf.fingerprint
        ]

    what = f"comparing fingerprints with the checkpoint {url}"
    wrong = together(lambda: [share.sums() for share in shares], judge, what, timeout=600)
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
        self._is_shared = isinstance(getattr(self._array, "sharding", None), NamedSharding)

    def sums(self) -> list[int]:
        if self._pending is None:
            return fingerprint.sums_of_numpy(np.asarray(self._array)).tolist()
        return self._pending.result().tolist()

    def digest(self, parts: Sequence[list[int]]) -> str | None:
        """Return the fingerprint, of the sums of all processes; ``None`` if they differ."""
        sums = [np.array(part, np.uint32) for part in parts]
        if self._is_shared:
            sums = [fingerprint.add(sums)]
        elif any((each != sums[0]).any() for each in sums):
            return None
        return fingerprint.digest_of(*self.target.saved_type, sums[0])
