"""One rank of a launch: guard, output, process group, the function, its result or its traceback.

``launch`` starts this through torchrun. The function is called with the arguments that the launch
was given; ``progress`` in it speaks to the launcher.
"""

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

from a2lib.experiments.launching.channel import path_of, send
from a2lib.experiments.launching.lifeline import FOLDER, TASK, die_with_parent

# Where a rank stands is asked with this one, which is ignored by who does not know it.
STACKS = signal.SIGURG


def progress(**event: object) -> None:
    """Send ``event``, which JSON can write, to the launcher's ``on_progress``; with no launcher,
    print it."""
    if FOLDER not in os.environ:
        print(json.dumps(event), flush=True)
        return
    _send("event", event)


def main() -> None:
    die_with_parent(int(os.environ["A2LIB_AGENT"]))
    # Before anything is printed: the launcher knows then whose it is.
    _send("rank", (int(os.environ["RANK"]), os.getpid()))
    folder, who = os.environ[FOLDER], os.environ["LOCAL_RANK"]
    _redirect(folder, who)
    code = 0
    try:
        task = json.loads(Path(folder, TASK).read_text())
        _send("result", _call(task))
        if task["device"]:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:  # SystemExit too: the others would wait for this rank
        _send("error", _record(error))
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What failed may hold locks that an orderly end, or the group's, would wait for.
    os._exit(code)


def _send(kind: str, value: object) -> None:
    send(os.environ[FOLDER], os.environ["LOCAL_RANK"], kind, value)


def _redirect(folder: str, who: str) -> None:
    """Whatever this process prints, also from C, goes to its own pipe."""
    out = os.open(path_of(folder, who, "out"), os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout.reconfigure(line_buffering=True)
    stacks = path_of(folder, who, "stacks").open("wb", buffering=0)
    faulthandler.register(STACKS, file=stacks, all_threads=False)


def _call(task: dict) -> object:
    world, nodes, processes = int(os.environ["WORLD_SIZE"]), task["nodes"], task["processes"]
    if world != nodes * processes:
        raise ValueError(
            f"the world has {world} ranks, this node was launched for {nodes} x {processes}; nodes "
            "and processes must be the same on every node"
        )
    if task["device"]:
        _init_process_group(task["device"], task["collective_timeout_s"])
    sys.path += [folder for folder in task["path"] if folder not in sys.path]
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


if __name__ == "__main__":
    main()
