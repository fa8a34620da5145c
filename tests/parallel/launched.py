"""What ranks run in test_launch.py. No torch: such a rank starts in no time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from a2lib.parallel.rank import progress

RANK = int(os.environ.get("RANK", -1))
FOREVER_S = 600


def talks(times: int) -> dict:
    for step in range(times):
        progress(step=step)
    print("printed")
    sys.stdout.write("no end of line")
    return {"rank": RANK, "world": int(os.environ["WORLD_SIZE"])}


def fails(how: str, pids: str) -> None:
    """Rank 1 fails in its way; rank 0, and what rank 1 started, would go on for ever."""
    Path(pids, str(os.getpid())).touch()
    if RANK == 1:
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
        Path(pids, str(child.pid)).touch()
        while len(os.listdir(pids)) < 3:  # until rank 0 is there too
            time.sleep(0.01)
        if how == "raises":
            raise LookupError("no such\nthing")
        if how == "raises SystemExit":
            sys.exit(0)
        print("last words")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "gets SIGUSR1":
            os.kill(os.getpid(), signal.SIGUSR1)
        if how == "exits":
            os._exit(0)
    if how == "raises":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stand_still()


def floods() -> None:
    if RANK == 1:
        subprocess.Popen(["yes"])
    while True:
        print("no end")


def stand_still() -> None:
    time.sleep(FOREVER_S)
