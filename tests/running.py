"""Whether processes are still there."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # nobody may reap an orphan in a container


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < limit, f"still running: {[*filter(is_running, pids)]}"
        time.sleep(0.02)
