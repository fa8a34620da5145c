"""No process outlives who started it: the guard in the child, and the search for what is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1
# How long killed processes may take to vanish; one in the middle of a driver call takes its time.
VANISH_S = 10.0


def die_with_parent(parent: int) -> None:
    """Have the system kill this process (SIGKILL) when ``parent``, which started it, ends.

    Linux only; elsewhere nothing is done. The system watches the thread that started this process,
    not the whole parent: that thread has to wait for it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def kill_all(roots: Iterable[int]) -> None:
    """Kill each process of ``roots``, its descendants and its session, and wait until all are gone.

    torchrun starts each rank in a session of its own, which holds what the rank started even
    after its parent is gone. A zombie is gone: only its parent can remove it.
    """
    roots = set(roots)
    until = time.monotonic() + VANISH_S
    while (alive := _family(roots)) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        roots |= alive
        time.sleep(0.02)


def _family(roots: set[int]) -> set[int]:
    """The living among ``roots``, their descendants and their sessions."""
    table = _processes()
    found = {pid for pid, (_, session) in table.items() if pid in roots or session in roots}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not. True where there is no /proc to say."""
    return not Path("/proc/self").exists() or _stat(Path("/proc", str(pid))) is not None


def _processes() -> dict[int, tuple[int, int]]:
    """Process id to (parent, session) of every process that runs; empty without /proc."""
    table = {int(folder.name): _stat(folder) for folder in Path("/proc").glob("[0-9]*")}
    return {pid: entry for pid, entry in table.items() if entry}


def _stat(folder: Path) -> tuple[int, int] | None:
    """(parent, session), None for what is gone or a zombie."""
    try:
        # The name in parentheses may hold anything.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[3]))
