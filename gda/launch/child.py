"""The first code in a process of ``gda.launch``, which runs the program and reports its end.

The report goes through a pipe *before* the interpreter shuts down. The exit hooks of JAX wait up to
five minutes for the other processes, which wait in a collective for this one: the exit code would
report a failure too late. Success is reported when the threads of the program have ended too.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress

from gda.launch.children import listen_on_loopback
from gda.launch.leaving import leave
from gda.layout.boundary import below

_OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")

# Bytes that fit in a pipe which is not read yet, so that reporting never blocks.
_MAX_TRACEBACK = 50_000


def run(report: int, kind: str, program: str) -> None:
    """Run a script or a module as ``__main__``, with the rest of ``sys.argv`` as its arguments.

    At the end, the file descriptor ``report`` takes a line with the exit code and the bytes of a
    traceback, and then these bytes.
    """
    os.set_inheritable(report, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    listen_on_loopback()
    atexit.register(leave)
    try:
        _run_as_main(kind, program)
        atexit.register(_report_good_end, report)
        return
    except SystemExit as end:
        if code := _exit_code(end.code):
            atexit.unregister(leave)
            _send(report, code, "")
        else:
            atexit.register(_report_good_end, report)
        raise
    except BaseException as error:
        atexit.unregister(leave)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        frames = below(_OWN_FILES, error.__traceback__)
        lines = traceback.format_exception(type(error), error, frames)
        _send(report, code, "".join(lines))
    sys.exit(code)


def _run_as_main(kind: str, program: str) -> None:
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(program))
    runpy.run_path(os.path.abspath(program), run_name="__main__")


def _exit_code(code: object) -> int:
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _report_good_end(report: int) -> None:
    # Garbage may hold XLA's client, which must not be destroyed, see leave().
    gc.disable()
    pending = sys.modules.get("gda.checkpoint.pending")
    if pending and (failures := pending.unheard_failures()):
        atexit.unregister(leave)
        _send(report, 1, "".join(f"{failure}\n" for failure in failures))
    else:
        _send(report, 0, "")


def _send(report: int, code: int, text: str) -> None:
    data = text.encode(errors="backslashreplace")
    if len(data) > _MAX_TRACEBACK:
        end = data[-_MAX_TRACEBACK:].decode(errors="ignore")  # from the first complete character on
        data = f"[…]\n{end}".encode()
    with suppress(OSError):  # a program may have closed all files
        os.write(report, b"%d %d\n" % (code, len(data)) + data)
        os.close(report)


if __name__ == "__main__":
    _report, _kind, _program = sys.argv[1:4]
    # As Python sets it; runpy replaces the first one by the full path.
    sys.argv = [_program, *sys.argv[4:]]
    run(int(_report), _kind, _program)
