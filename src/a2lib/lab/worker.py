"""Do the tasks of a sweep, one after another, in a process that may die.

    python -m a2lib.lab.worker FOLDER                                            # one process
    torchrun --standalone --nproc-per-node 2 -m a2lib.lab.worker FOLDER          # ranks

`a2lib.lab.processes` starts it and says what lies in the folder.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from a2lib.lab.failures import classify, failed, is_lost
from a2lib.lab.lock import device_lock
from a2lib.lab.memory import free_memory
from a2lib.lab.store import StoreError
from a2lib.paths import quote_torch

# A rank that waits for a hanging one is ended by the sweep, never by the collective's own limit.
COLLECTIVE_LIMIT = timedelta(days=1)


def main(folder: Path) -> None:
    import cloudpickle

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    stack = open(folder / f"stack.{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack)  # the sweep asks a silent one where it is
    try:
        job = cloudpickle.loads((folder / "job").read_bytes())
        if ranks > 1 and job["device"] == "cuda":
            import torch

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with _locked(job["device"], rank, ranks):
            if ranks > 1:
                join_group(job["device"])
            work(job, json.loads((folder / "tasks.json").read_text()), folder, rank, ranks)
    except Exception as error:
        status, note = classify(error)
        if ranks > 1:
            note = f"rank {rank} of {ranks}: {note}"
        about = {"status": status, "note": note, "at": time.time()}
        if isinstance(error, StoreError):
            about["fatal"] = str(error)
        _write_whole(folder / f"error.{rank}.json", json.dumps(about))
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # what failed may hold locks that an orderly end would wait for
    if ranks > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def work(job: dict, tasks: list[list[dict]], folder: Path, rank: int, ranks: int) -> None:
    """Measure each task until the time limit; rank 0 stores what is yielded.

    An exception of a process that works alone, in a task that is not to be tried in parts, becomes
    the rows of its keys, and the next task follows. Any other ends this process.
    """
    table, measure = job["table"], job["measure"]
    table.run = job["run"]
    if "torch" in sys.modules:
        quote_torch()

    stored: set[tuple[str, ...]] = set()

    def put(row: dict) -> None:
        if rank != 0:
            return
        row = {"status": "ok", **row, "run": job["run"]}
        table.put(row)
        key = table.identify(row)
        stored.add(key)
        with open(folder / "rows.jsonl", "a") as file:
            file.write(json.dumps([*key, row["status"]]) + "\n")

    if rank == 0:
        _write_whole(folder / "reached", "0")  # from here on the sweep counts how long it is silent
    for number, keys in enumerate(tasks):
        if _is_late(job["until"], ranks):
            return
        try:
            for row in measure(keys):
                put(row)
        except StoreError:
            raise
        except Exception as error:
            if ranks > 1 or is_lost(error) or not job["whole"] and len(keys) > 1:
                raise
            traceback.print_exc()
            missing = [key for key in keys if table.identify(key) not in stored]
            if not missing:
                raise  # behind the last row: the sweep says it
            for key in missing:
                put({**key, **failed(error)})
        if rank == 0:
            _write_whole(folder / "reached", str(number + 1))
        free_memory(job["device"])


def _write_whole(path: Path, text: str) -> None:
    """Write a file of which there is nothing or all, whenever this process is killed."""
    unfinished = path.with_name(f"unfinished.{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def join_group(device: str) -> None:
    """Join the process group of torchrun's ranks: NCCL on GPUs, gloo on the CPU."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=local, timeout=COLLECTIVE_LIMIT)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)


def _locked(device: str, rank: int, ranks: int):
    """Hold the lock of this rank's GPU; the sweep holds that of the first one."""
    if device == "cuda" and rank > 0:
        return device_lock("cuda", f"rank {rank} of {ranks}")
    return contextlib.nullcontext()


def _is_late(until: float, ranks: int) -> bool:
    """Return whether nothing more is to be started: by rank 0's clock, so that all agree."""
    late = [time.time() > until]
    if ranks > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(late, src=0)
    return late[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
