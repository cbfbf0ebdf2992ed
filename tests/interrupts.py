"""Ctrl-C in this thread at the moments when Python looks for it.

That is when a function of Python begins, and when one of C returns, whose result is dropped.
Not when a generator expression begins: ``all`` and ``any`` may drop it before its end, which begins
it once more to be closed, and Python ignores what is raised there.
"""

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import gda

_PLACES = (str(Path(gda.__file__).parent), *[m.__file__ for m in (contextlib, queue, threading)])


class Calls:
    """Those moments in gda and in the modules that it waits with; at one of them comes Ctrl-C.

    Attributes:
      passed: the number of moments until now.
    """

    def __init__(self, interrupted: int | None = None, places: tuple[str, ...] = _PLACES) -> None:
        self.passed, self._interrupted, self._places = 0, interrupted, places

    def _pass(self, frame: FrameType, event: str, _: object) -> None:
        is_moment = event == "c_return" or (event == "call" and frame.f_code.co_name != "<genexpr>")
        if is_moment and frame.f_code.co_filename.startswith(self._places):
            self.passed += 1
            if self.passed == self._interrupted:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._pass)
        try:
            yield
        finally:
            sys.setprofile(None)
