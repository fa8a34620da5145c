"""torchrun, which ends whatever the launch has started.

    python -m ...launching.agent --nproc-per-node 2 --standalone -m ...launching.rank

Everything after the name is torchrun's. With nothing after it one rank is started without torchrun,
and so without torch. When all is through, and also when the launcher ends or removes the launch's
task, this process kills every descendant, those with a session of their own too, and removes the
launch's folder. It sends the exit codes of the ranks that did not end well (negative: a signal) and
when, in seconds, it saw them, as "ends"; where torchrun itself fails, the cause in one line as
"failed".
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from a2lib.experiments.launching.channel import send
from a2lib.experiments.launching.lifeline import FOLDER, TASK, adopt_orphans, end

POLL_S = 0.05


def main(arguments: list[str]) -> int:
    folder = os.environ[FOLDER]
    adopt_orphans()
    over = threading.Event()
    # Not by a signal: those are torchrun's, and while nodes meet its thread takes none.
    threading.Thread(target=_end_with_the_launcher, args=(folder, over), daemon=True).start()
    os.environ["A2LIB_AGENT"] = str(os.getpid())
    try:
        return run_torchrun(arguments, folder) if arguments else run_alone(folder)
    finally:
        over.set()
        end(folder)


def _end_with_the_launcher(folder: str, over: threading.Event) -> None:
    launcher, task = int(os.environ["A2LIB_LAUNCHER"]), Path(folder, TASK)
    while not over.wait(POLL_S) and os.getppid() == launcher and task.exists():
        pass
    if not over.is_set():
        end(folder)
        os._exit(1)


def run_torchrun(arguments: list[str], folder: str) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        ends = {rank: (one.exitcode, one.timestamp) for rank, one in error.failures.items()}
        send(folder, "torchrun", "ends", ends)
        return 1
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        send(folder, "torchrun", "failed", f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    return 0


def run_alone(folder: str) -> int:
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "a2lib.experiments.launching.rank"]
    code = subprocess.run(command, env={**os.environ, **numbers}, start_new_session=True).returncode
    if code:
        send(folder, "torchrun", "ends", {0: (code, time.time())})
    return bool(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
