"""The rules by which a run keeps steps, as its user gives them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from gda.checkpoint.step_folders import rules
from gda.checkpoint.step_folders.folder import RunFolder
from gda.storage.options import check_count

Keep = int | Callable[[list[int]], Iterable[int]] | None


class Keeping(NamedTuple):
    """The rules of one run; ``Run`` has their meaning."""

    keep: Keep
    every: int | None
    num_best: int
    best: tuple[str, bool] | None  # the metric, and True if the highest is best

    @classmethod
    def of(cls, keep: Keep, every: int | None, best: Any) -> Keeping:
        """Return the rules; ``ValueError`` if they are wrong."""
        if keep is not None and not callable(keep):
            check_count(keep, "keep")
        if every is not None:
            check_count(every, "keep_every")
        if best is None:
            return cls(keep, every, 0, None)
        parts = [*best, "min"] if isinstance(best, tuple | list) and len(best) == 2 else best
        is_rule = isinstance(parts, tuple | list) and len(parts) == 3 and isinstance(parts[1], str)
        if not is_rule or parts[2] not in ("min", "max"):
            raise ValueError(
                "keep_best must be a number of steps and a metric, such as (2, 'loss'), or "
                f"(2, 'accuracy', 'max') if the highest is best, not {best!r}"
            )
        check_count(parts[0], "the number of keep_best")
        return cls(keep, every, operator.index(parts[0]), (parts[1], parts[2] == "max"))

    def compared(self) -> dict[str, Any]:
        """Return what must be equal in all processes, beside ``keep``."""
        return {"keep_every": self.every, "keep_best": (self.num_best, self.best)}

    def is_milestone(self, step: int, before: int | None) -> bool:
        """Return True if ``every`` keeps a step after the one before."""
        return self.every is not None and rules.is_due(step, before or 0, self.every)

    def kept(self, folder: RunFolder) -> set[int]:
        """Return the complete steps to keep; the newest and those held are always kept."""
        folders = folder.complete()
        steps = sorted(folders)
        held = {number for number, each in folders.items() if each.is_held}
        if callable(self.keep):
            chosen: Collection[int] = {*self.keep(steps)}.intersection(steps)
        else:
            best: Sequence[int] = ()
            if self.best is not None and self.keep is not None:
                metric, is_highest = self.best
                best = folder.best_first(metric, is_highest=is_highest)[: self.num_best]
            chosen = rules.kept(steps, self.keep, self.every, best)
        return {*chosen, *held, *steps[-1:]}
