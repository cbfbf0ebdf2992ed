"""A save in the background: its thread, and failures that ``result`` has not raised."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable

from gda.layout.boundary import public, set_module
from gda.multihost.meeting import forget

# A line for each failure that result() has not raised.
_unheard: list[str] = []


def unheard_failures() -> list[str]:
    """Return a line for each failure of a save that ``result`` has not raised."""
    return [f"{failure}; the program did not call result() of it" for failure in _unheard]


@atexit.register
def _warn_of_unheard() -> None:
    for failure in unheard_failures():
        logging.getLogger("gda").warning("%s", failure)


@set_module("gda.checkpoint")
class Pending:
    """A save that runs in the background.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending = gda.checkpoint.save_async(folder, {'w': np.arange(4)})
    ...     pending.result()
    ...     pending.done()
    True
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._failure = ""

    def done(self) -> bool:
        """Return True if the save has ended, with or without an error."""
        return self._is_over.is_set()

    @public
    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
          timeout: seconds to wait; by default without a limit.

        Raises:
          TimeoutError: the save is not complete after so many seconds; it goes on.
          Exception: any error of ``save``.
        """
        seconds = None if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX)
        # Not Thread.join: after Ctrl-C in it, Python 3.11 takes the thread for ended.
        if not self._is_over.wait(seconds):
            raise TimeoutError(f"saving to {self._path} goes on after {timeout:g} s; wait longer")
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            with contextlib.suppress(ValueError):
                _unheard.remove(self._failure)
            raise self._error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "complete"
        return f"<save to {self._path}: {state}>"

    def _start(self, work: Callable[[], None], name: str) -> None:
        caller_goes_on = threading.Event()

        def run() -> None:
            # Otherwise this thread may take the GIL, and delay the caller by up to 5 ms.
            caller_goes_on.wait()
            try:
                work()
            except BaseException as error:
                self._error = error
                kind = type(error).__name__
                self._failure = f"saving to {self._path} failed in the background: {kind}: {error}"
                _unheard.append(self._failure)
                logging.getLogger("gda").error("%s", self._failure)
            finally:
                if self._thread is not None:
                    forget()  # its name is that of one save
                self._is_over.set()

        # At exit, Python does not wait for a thread that starts now, and 3.12 starts none.
        if threading.main_thread().is_alive():
            # Not a daemon: a program that ends finishes the save first.
            self._thread = threading.Thread(target=run, name=name)
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                try:
                    self._thread.start()
                finally:
                    caller_goes_on.set()
                return
            self._thread = None
        caller_goes_on.set()
        run()
