"""torchrun as a process that ends with who started it and leaves a record of its ranks.

    python -m a2lib.parallel.agent --nproc-per-node 2 --standalone -m a2lib.parallel.rank

Everything after the module's name is torchrun's. What it adds: the guard of ``lifeline``, for
torchrun here and for the ranks through ``A2LIB_AGENT``, and ``agent.json`` with the exit code
of each rank that did not end well (negative: a signal) and when, in seconds, torchrun saw it. Where
torchrun itself fails, ``agent.error`` has the first cause in one line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from a2lib.parallel.lifeline import die_with_parent


def main(arguments: list[str]) -> int:
    die_with_parent(int(os.environ["A2LIB_LAUNCHER"]))
    os.environ["A2LIB_AGENT"] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        ends = {rank: (end.exitcode, end.timestamp) for rank, end in error.failures.items()}
        Path(os.environ["A2LIB_RUN_DIR"], "agent.json").write_text(json.dumps(ends))
        return 1
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        Path(os.environ["A2LIB_RUN_DIR"], "agent.error").write_text(line)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
