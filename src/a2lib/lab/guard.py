"""End everything that a sweep started, also when the sweep itself was killed.

`watch(mark, folder)` starts this file as a process of its own. It waits until the pipe to its
parent is closed, which the system does however the parent ends, then kills every process that has
the mark in its environment and removes the folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "A2LIB_SWEEP"
PASSES = 40
PAUSE_S = 0.05


@contextlib.contextmanager
def watch(mark: str, folder: Path):
    """Within it, processes started with `VARIABLE=mark` may run; afterwards there are none."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def kill_marked(mark: str) -> None:
    """Kill the processes that have the mark, and those that they start meanwhile."""
    for _ in range(PASSES):
        alive = marked(mark)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not alive:
            return
        time.sleep(PAUSE_S)


def marked(mark: str) -> list[int]:
    """Return the living processes with the mark in their environment, without the caller."""
    entry = f"{VARIABLE}={mark}".encode()
    pids = []
    for pid, words in _environments():
        if entry in words and pid != os.getpid():
            pids.append(pid)
    return pids


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Yield each process and the words of its environment; on macOS those of its command too."""
    if not Path("/proc/self/environ").exists():
        listed = subprocess.run(["ps", "-axEwwo", "pid=,command="], capture_output=True).stdout
        for line in listed.splitlines():
            pid, *words = line.split()
            yield int(pid), words
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It reads empty for a process that has ended and waits for its parent.
        with contextlib.suppress(OSError):
            yield int(name), Path(f"/proc/{name}/environ").read_bytes().split(b"\0")


def main(mark: str, folder: str) -> None:
    sys.stdin.read()
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
