"""Requests to an object store: temporary failures are retried, and long waits are logged."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gda.layout.text import counted, printable
from gda.storage.options import Retry

# TensorStore's own attempts: one more at once, because a server may have closed a connection that
# was kept open. By default it retries silently for 15 minutes, even without a server.
FEW_ATTEMPTS = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}

SILENT = 5.0  # seconds that a request may take before that is logged
_BETWEEN_LINES = 60.0  # seconds from one line to the next, over all requests to a store
UNREACHED = 3.0  # seconds until a server that has never answered counts as absent
TIMEOUT_AFTER_ONE = 10.0
PAUSES = Retry(OSError)

# TensorStore's messages for failures that it retries: 408, 429, 5xx, a broken connection. Requests
# that it does not retry, such as those for credentials, have the bare status.
_PASSING = re.compile(r"(ABORTED: All \d+ retry attempts failed|UNAVAILABLE|DEADLINE_EXCEEDED): ")
# curl: unknown protocol, proxy or host, refused connection, or no TLS.
_NOT_REACHED = re.compile(r"\[curl_code='(1|5|6|7|35)'\]")


class Waiting:
    """The requests to one store, waited for in any thread.

    Args:
      timeout: seconds after which a request fails, with all its attempts.
      repeats: True to send a request again after a temporary failure.
    """

    def __init__(self, timeout: float, *, repeats: bool) -> None:
        self._timeout = timeout
        self._repeats = repeats
        self._has_answered = False
        self._unreached = UNREACHED
        self._guard = threading.Lock()
        self._next_line = 0.0

    def result(self, url: str, begin: Callable[[], Any]) -> Any:
        """Return the result of a request that ``begin`` sends, or raise its permanent error."""
        request = _Repeated(url, self._timeout)
        attempts = 0
        while request.left > 0:
            attempts += 1
            future = begin()
            try:
                for seconds in self._parts(request, request.left):
                    with contextlib.suppress(TimeoutError):
                        answer = future.result(seconds)
                        self._has_answered = True
                        return answer
            except Exception as error:
                request.failure = _PASSING.sub("", printable(str(error)[:1000]))
                if not self._repeats or not _PASSING.match(str(error)):
                    raise
                pause = min(PAUSES.seconds_after(attempts), request.left)
                self._check_reached(request, pause)
                for seconds in self._parts(request, pause):
                    time.sleep(seconds)
            finally:
                future.cancel()  # nothing waits for it any more
        # Later requests, such as those to clean up, wait less for a store that does not answer.
        self._timeout = min(self._timeout, TIMEOUT_AFTER_ONE)
        said = f"no answer within {request.timeout:g} s, retries included"
        if request.failure:
            said = (
                f"no success within {request.timeout:g} s, in {counted(attempts, 'attempt')}; the "
                f"last failure was: {request.failure}"
            )
        raise TimeoutError(errno.ETIMEDOUT, said, url)

    def _check_reached(self, request: _Repeated, pause: float) -> None:
        """Raise ``ConnectionError`` if no server has ever answered; others may come back."""
        if not _NOT_REACHED.search(request.failure):
            self._has_answered = True
        elif not self._has_answered and request.seconds + pause > self._unreached:
            self._unreached = 0.0
            raise ConnectionError(
                f"{request.url} cannot be reached: {request.failure}. Check the address "
                "and the server"
            ) from None

    def _parts(self, request: _Repeated, seconds: float) -> Iterator[float]:
        """Yield the parts of a wait; between them, log a line from time to time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            due = max(request.begun + SILENT, self._next_line)
            yield min(left, max(due - time.monotonic(), 0))
            with self._guard:
                now = time.monotonic()
                if now < max(due, self._next_line):
                    continue
                self._next_line = now + _BETWEEN_LINES
            logging.getLogger("gda").warning(
                "waiting for %s: %s (for %.0f s, at most %g s)",
                request.url,
                request.failure or "no answer yet",
                request.seconds,
                request.timeout,
            )


@dataclass
class _Repeated:
    """One request, with all its attempts."""

    url: str
    timeout: float
    begun: float = field(default_factory=time.monotonic)
    failure: str = ""  # of the last attempt

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        return self.timeout - self.seconds
