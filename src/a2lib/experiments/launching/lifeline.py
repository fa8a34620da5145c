"""No process and no folder outlives its launch.

The agent adopts what its descendants leave behind, and ends all of it once torchrun is through or
the launcher is gone. Whatever a launch starts has the launch's folder in its environment, so that
the launcher, or the next launch, finds it where the agent itself was killed. A lock on a file in
the folder says that one of them lives.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "a2lib-launch-"
TASK = "task.json"
FOLDER = "A2LIB_RUN_DIR"  # the variable that every process of a launch has
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
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


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, in whatever session it is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def new_folder() -> tuple[str, int]:
    """A temporary folder, and the descriptor of its locked file: while that is open here or in a
    child, no launch takes the folder for left. Those that are left are removed first."""
    for owner in abandoned(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner")):
        end(owner.parent)
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        return folder, locked(Path(folder, "owner"))
    except OSError:
        shutil.rmtree(folder)
        raise


def locked(path: Path) -> int:
    """Make a file that is locked before it has its name; its descriptor, which holds the lock."""
    new = path.with_name(f"new-{path.name}")
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nobody takes it either
        fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(path)
    return lock


def abandoned(paths: Iterable[Path]) -> Iterator[Path]:
    """Those of ``locked`` whose process has ended."""
    for path in paths:
        with contextlib.suppress(OSError), open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path


def end(folder: str | os.PathLike) -> None:
    """Kill every process of the launch in ``folder`` but this one, with all their descendants, wait
    until they are gone, and remove the folder. A zombie is gone: only its parent can remove it."""
    until = time.monotonic() + VANISH_S
    while (alive := _family(folder)) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def _family(folder: str | os.PathLike) -> set[int]:
    """The living that have the folder in their environment, and their descendants."""
    mark = os.fsencode(f"{FOLDER}={folder}")
    parents, found = {}, set()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if stat := _stat(pid):
            parents[pid] = int(stat[1])
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not. True where there is no /proc to say."""
    return not Path("/proc/self").exists() or _stat(pid) is not None


def _stat(pid: int) -> list[str] | None:
    """The fields of its /proc/.../stat from the state on; None for what is gone or a zombie."""
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields
