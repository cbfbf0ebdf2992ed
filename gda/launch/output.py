"""The output of many processes on stdout and stderr of this one, line by line, with prefixes.

Bytes are passed on as they are: none is decoded, so none can fail to decode.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
from collections import deque
from collections.abc import Sequence
from typing import IO

from gda.multihost.background import in_thread

# A longer line is passed on in pieces, so that memory stays bounded.
_MAX_LINE = 1 << 20

# No pipe holds more, unless root made it so.
_MAX_PIPE = 1 << 20

_KEPT_LINES = 30

# The words with which faulthandler begins the stack of each thread.
_STACK = b"(most recent call first):"

# Gloo reports its connections in each process, for each group of devices. It writes piece by piece,
# so lines of several threads may be mixed.
_GLOO = re.compile(
    rb"(?=.*(?:Gloo|peer ranks))(?:\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )+"
)

# In the middle of a line, such as that of print("sum", array): the array is computed in between.
_GLOO_WITHIN = re.compile(
    rb"(?:\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+)+\n+"
)


# A progress bar ends its lines by carriage returns.
_END = re.compile(rb"(\r?\n|\r)")


class Log:
    """A file at whose end all output of one process is written, as it comes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, data: bytes) -> bytes:
        """Write data; return a line that tells that the file can no longer be written, once."""
        try:
            if self._file is not None:
                write(self._file, data)
        except OSError as error:
            self.close()
            return f"gda.launch: no more is written to {self._path}: {error}\n".encode()
        return b""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


class Lines:
    """The lines of one pipe, each written to the file descriptor ``target`` with a prefix.

    A line ends as the program ended it, that of a progress bar by a carriage return. ``stacks``
    counts the stacks of threads so far. The messages of gloo about its connections are omitted.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, target: int, log: Log | None = None) -> None:
        self.pipe = pipe
        self.target = target
        self._log = log
        self.stacks = 0
        self._prefix = prefix.encode()
        self._partial = b""
        self._last: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def take(self, data: bytes) -> bytes:
        """Take bytes, and return the lines that they complete, prefixed."""
        told = self._log.write(data) if self._log is not None else b""
        data = _GLOO_WITHIN.sub(b"", self._partial + data)
        *parts, self._partial = _END.split(data)
        lines = [line + end for line, end in zip(parts[::2], parts[1::2], strict=True)]
        if len(self._partial) > _MAX_LINE:
            lines.append(self._partial + b"\n")
            self._partial = b""
        return told + self._prefixed(lines)

    def end(self) -> bytes:
        """Return an incomplete last line, prefixed, as a line."""
        lines = [self._partial + b"\n"] if self._partial else []
        self._partial = b""
        return self._prefixed(lines)

    def last(self) -> bytes:
        """Return the last lines, prefixed."""
        return b"".join(self._last)

    def _prefixed(self, lines: list[bytes]) -> bytes:
        self.stacks += sum(_STACK in line for line in lines)
        prefixed = []
        for line in lines:
            is_after_bar = bool(self._last) and self._last[-1].endswith(b"\r")
            if line == b"\r" or _GLOO.fullmatch(line.rstrip(b"\r\n")):
                continue  # a bar may begin with a carriage return
            # The newline of a last line that a carriage return has ended already.
            prefixed.append(line if is_after_bar and line == b"\n" else self._prefix + line)
            if is_after_bar:
                self._last.pop()  # a bar has one line at a time
            self._last.append(prefixed[-1])
        return b"".join(prefixed)


class PrefixedOutput:
    """A thread that copies the lines of pipes as they come, until it is finished.

    A target without a reader, or a full one, is given up: this process gets a SIGPIPE. The pipes
    are still emptied, so that their writers do not block.
    """

    def __init__(self, streams: Sequence[Lines]) -> None:
        self._streams = streams
        self._given_up: set[int] = set()
        self._ending, self._end = os.pipe()
        self._copied = in_thread("gda-output", self._copy)

    def finish(self) -> None:
        """Write the rest of the pipes, even of those whose other end is still open."""
        os.close(self._end)
        self._copied.result()
        os.close(self._ending)

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ending, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream.pipe, selectors.EVENT_READ, stream)
            ended = False
            while not ended:
                for key, _ in selector.select():
                    if key.data is None:
                        ended = True
                    elif data := os.read(key.fd, 1 << 16):
                        self._write(key.data.target, key.data.take(data))
                    else:
                        selector.unregister(key.fd)
                        self._write(key.data.target, key.data.end())
        for stream in self._streams:
            self._write(stream.target, stream.take(_rest(stream.pipe)) + stream.end())
            stream.pipe.close()

    def _write(self, target: int, data: bytes) -> None:
        if target in self._given_up:
            return
        try:
            write(target, data)
        except OSError:
            self._given_up.add(target)
            os.kill(os.getpid(), signal.SIGPIPE)


def write(target: int, data: bytes) -> None:
    """Write all data, even if the file descriptor does not block."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])


def _rest(pipe: IO[bytes]) -> bytes:
    # One read takes all bytes that are there. A grandchild may hold the pipe open for ever.
    os.set_blocking(pipe.fileno(), False)
    try:
        return os.read(pipe.fileno(), _MAX_PIPE)
    except BlockingIOError:
        return b""
