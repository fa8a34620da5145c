"""Waiting for what another process or thread does."""

import time
from pathlib import Path


def until(found, seconds=60):
    """Return what ``found()`` gives, as soon as that is true, or after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        value = found()
        if value or time.monotonic() > end:
            return value
        time.sleep(0.05)


def is_alive(pid):
    """Return whether a process runs; a zombie does not. True where there is no /proc to say."""
    if not Path("/proc/self").exists():
        return True
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"
