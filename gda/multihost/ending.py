# placeholder
"""The announced end of a program, the same at the same call in all processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence


class Ending:
    def __init__(
        self, signals: Sequence[int] = (signal.SIGTERM,), save_on: Sequence[int] = ()
    ) -> None:
        self.is_ending = False
        self.reason = ""

    def check(self) -> bool:
        return False

    def close(self) -> None:
        pass
