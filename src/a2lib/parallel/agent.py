"""torchrun, and a process above it that ends whatever the launch has started.

    python -m a2lib.parallel.agent --nproc-per-node 2 --standalone -m a2lib.parallel.rank

Everything after the name is torchrun's. This process forks torchrun and waits: for its end,
for that of the launcher, or for a signal. Then it kills every descendant, also those with a session
of their own, and removes the launch's folder. It exits as torchrun did (128 and the signal's number
where one ended it). Torchrun's half sends its process id as "torchrun"; the exit codes of the ranks
that did not end well (negative: a signal) and when, in seconds, it saw them, as "ends"; where it
fails itself, the cause in one line as "failed".
"""

from __future__ import annotations

import os
import signal
import sys
import time

from a2lib.parallel.channel import send
from a2lib.parallel.lifeline import FOLDER, adopt_orphans, die_with_parent, end

POLL_S = 0.05
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str]) -> int:
    asked: list[int] = []
    for number in ENDS:
        signal.signal(number, lambda number, frame: asked.append(number))
    adopt_orphans()
    own, launcher, code = os.getpid(), int(os.environ["A2LIB_LAUNCHER"]), None
    torchrun = os.fork()
    if not torchrun:
        for number in ENDS:
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(own)
        return run_torchrun(arguments)
    while code is None and not asked and os.getppid() == launcher:
        time.sleep(POLL_S)
        code = _ended(torchrun)
    end(os.environ[FOLDER])
    if code is None:
        code = -asked[0] if asked else 1
    return code if code >= 0 else 128 - code


def _ended(child: int) -> int | None:
    """Bury the dead among the children; returns the exit code of ``child``, None while it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if not pid:
            return None


def run_torchrun(arguments: list[str]) -> int:
    folder = os.environ[FOLDER]
    os.environ["A2LIB_AGENT"] = str(os.getpid())
    send(folder, "torchrun", "torchrun", os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        ends = {rank: (end.exitcode, end.timestamp) for rank, end in error.failures.items()}
        send(folder, "torchrun", "ends", ends)
        return 1
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        send(folder, "torchrun", "failed", f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
