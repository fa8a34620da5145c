"""One rank of a launch: guard, output, process group, the function, its result or its traceback.

``launch`` starts this through torchrun. The function is called with the arguments that the launch
was given; ``progress`` in it speaks to the launcher.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from a2lib.parallel.lifeline import die_with_parent


def path_of(folder: str | os.PathLike, rank: int, kind: str) -> Path:
    """A rank's file: "pid", "out" (what it prints), "events", "stacks", "error" or "result"."""
    return Path(folder, f"rank-{rank}.{kind}")


def progress(**event: object) -> None:
    """Send ``event``, which JSON can write, to the launcher's ``on_progress``; with no launcher,
    print it."""
    if "A2LIB_RUN_DIR" not in os.environ:
        print(json.dumps(event), flush=True)
        return
    path = path_of(os.environ["A2LIB_RUN_DIR"], int(os.environ["RANK"]), "events")
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def main() -> None:
    die_with_parent(int(os.environ["A2LIB_AGENT"]))
    folder, rank = os.environ["A2LIB_RUN_DIR"], int(os.environ["RANK"])
    _redirect(folder, rank)
    code = 0
    try:
        task = json.loads(Path(folder, "task.json").read_text())
        result = _call(task)
        _write(path_of(folder, rank, "result"), result)
        if task["device"]:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _write(path_of(folder, rank, "result"), None)
        else:
            traceback.print_exc()
            _write(path_of(folder, rank, "error"), _record(error))
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What failed may hold locks that an orderly end, or the group's, would wait for.
    os._exit(code)


def _redirect(folder: str, rank: int) -> None:
    """Whatever this process prints, also from C, goes to its own file: a pipe would be held open by
    what it starts."""
    out = os.open(path_of(folder, rank, "out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout.reconfigure(line_buffering=True)
    # The launcher asks with this signal where a rank stands, also one that waits in C.
    stacks = path_of(folder, rank, "stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    # Only now: the launcher takes it that a rank with this file understands the signal.
    _write(path_of(folder, rank, "pid"), os.getpid())


def _call(task: dict) -> object:
    world, nodes, processes = int(os.environ["WORLD_SIZE"]), task["nodes"], task["processes"]
    if world != nodes * processes:
        raise ValueError(
            f"the world has {world} ranks, this node was launched for {nodes} x {processes}; nodes "
            "and processes must be the same on every node"
        )
    if task["device"]:
        _init_process_group(task["device"], task["collective_timeout_s"])
    module, _, name = task["target"].partition(":")
    return getattr(importlib.import_module(module), name)(**task["arguments"])


def _init_process_group(device: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", timeout=timeout, device_id=own)


def _record(error: BaseException) -> dict:
    line = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error))
    return {"error": line, "traceback": text.strip(), "time": time.time()}


def _write(path: Path, value: object) -> None:
    # In one rename: the launcher reads while ranks write.
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(value))
    part.replace(path)


if __name__ == "__main__":
    main()
