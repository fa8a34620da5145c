"""What ranks run in test_launch.py and test_failures.py. Those without torch start in no time.

As a program it launches two ranks that ``bears``, to be interrupted or killed: with "daemon" in a
daemon thread, and then it ends when its input does.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from a2lib.experiments.launching.launcher import launch
from a2lib.experiments.launching.rank import progress

RANK = int(os.environ.get("RANK", -1))
FOREVER_S = 600
MARK = "A2LIB_TEST_CASE"  # a variable that every process of a case has


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
            sys.exit("no such\nthing")
        print("last words")
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


def trains(step: int) -> None:
    """Rank 1 is killed in that step while the others wait for it in a collective."""
    import torch
    from torch import nn

    from a2lib.parallel import BucketedDDP

    ddp = BucketedDDP(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)), bucket_size_mb=0.0005)
    for number in itertools.count():
        loss = ddp(torch.ones(4, 8)).square().sum()
        if (RANK, number) == (1, step):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        ddp.finish_gradient_synchronization()
        # A plain step: PyTorch's optimizers import its compiler, which doubles the start.
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.01 * p.grad


def stand_ready() -> None:
    print("ready")
    stand_still()


def bears() -> None:
    """Wait for ever, with processes in a session of their own, left by their parent, and without an
    environment."""
    sleep = ["sleep", str(FOREVER_S)]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run([*"sh -c".split(), '"$@" & exit', "", *sleep], start_new_session=True)
    wait = [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
    subprocess.Popen([*wait, f"{MARK}={os.environ[MARK]}"], env={}, start_new_session=True)
    stand_ready()


if __name__ == "__main__":
    options = {"processes": 2, "time_limit_s": FOREVER_S, "device": None}
    if "daemon" in sys.argv:
        call = threading.Thread(target=launch, args=["launched:bears"], kwargs=options, daemon=True)
        call.start()
        sys.stdin.read()
    else:
        launch("launched:bears", **options)
