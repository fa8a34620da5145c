"""The process that touches the device: one JSON task per line in, one JSON event per line out.

Measuring happens here and not in the notebook, because a kernel can end its process (an assertion
in a compiler aborts, an illegal access spoils the CUDA context for good, the system kills what
takes the memory). The notebook then starts another worker, and the sweep goes on after the
culprit's row.

    {"do": "compare", "shape": {...}, "wanted": {...}, "run": ..., "seed": 0, ...} -> "begin", "row"
    {"do": "compile", "shape": {...}, "implementation": ..., "seed": 0}            -> "failed"
    {"do": "ceilings", "run": ...}                                                 -> "row"
    {"do": "protocols" or "accuracy", "unit": {...}, "run": ..., "seed": 0, ...}   -> "row"

Each task ends with {"done": true}. {"lost": why} says that this process ends now and another should
take over; {"fatal": why} that going on makes no sense, for instance since the disk is full.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from a2lib.experiments.shapes import Shape

Emit = Callable[[dict], None]


def main() -> None:
    """Serve tasks until the standard input ends, which it does when the parent is gone."""
    # Whatever prints must not end up among the events.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: dict) -> None:
        events.write(json.dumps(event) + "\n")

    from a2lib.experiments import peers

    peers.configure()
    emit({"ready": True})
    for task in _tasks():
        HANDLERS[task["do"]](task, emit)
        emit({"done": True})


def compare(task: dict, emit: Emit) -> None:
    """Measure one shape, storing each row before it is reported."""
    from a2lib.experiments import peers
    from a2lib.experiments.comparison import Comparison
    from a2lib.measure import FLASH, Store, StoreError

    store = Store(FLASH, task["slug"], data=Path(task["data"]))

    def put(row: dict) -> None:
        store.put(row | {"run": task["run"]})
        emit({"row": row})

    try:
        Comparison(
            Shape(**task["shape"]),
            {name: tuple(passes) for name, passes in task["wanted"].items()},
            task["device"],
            put,
            announce=lambda name: emit({"begin": name}),
            expired=lambda: task["until"] is not None and time.time() > task["until"],
            in_turns=task["in_turns"],
            seed=task["seed"],
        ).run()
    except StoreError as error:
        _leave(emit, {"fatal": str(error)})
    except peers.LostContext as error:
        _leave(emit, {"lost": str(error)})


def compile_(task: dict, emit: Emit) -> None:
    """Run one implementation forward and backward, so that its code is in the caches on disk."""
    import torch

    from a2lib.experiments import peers
    from a2lib.measure import synchronize

    try:
        shape = Shape(**task["shape"])
        torch._dynamo.reset()
        q, k, v, do = peers.inputs(shape, task["device"], task["seed"])
        o = peers.build(task["implementation"], shape, task["device"])(q, k, v)
        torch.autograd.grad(o, (q, k, v), do)
        synchronize(task["device"])
    except Exception as error:
        # Measuring meets the same error and makes the row.
        emit({"failed": peers.note(str(error))})
        if peers.is_lost(error):
            _leave(emit, {"lost": "CUDA error"})
    o = q = k = v = do = None
    gc.collect()
    if task["device"] == "cuda":
        torch.cuda.empty_cache()


def ceilings(task: dict, emit: Emit) -> None:
    """Measure the ceilings of the device."""
    from a2lib.experiments.ceilings import measure_ceilings
    from a2lib.measure import CEILING, Store, StoreError

    store = Store(CEILING, task["slug"], data=Path(task["data"]))
    try:
        for row in measure_ceilings(task["device"]):
            store.put(row | {"run": task["run"]})
            emit({"row": row})
    except StoreError as error:
        _leave(emit, {"fatal": str(error)})


def protocols(task: dict, emit: Emit) -> None:
    """Measure one unit of the protocols."""
    from a2lib.experiments.protocols import measure
    from a2lib.measure import FLASH_PROTOCOL

    _unit(task, emit, FLASH_PROTOCOL, measure)


def accuracy(task: dict, emit: Emit) -> None:
    """Measure one unit of the errors against float64."""
    from a2lib.experiments.accuracy import measure
    from a2lib.measure import FLASH_ACCURACY

    _unit(task, emit, FLASH_ACCURACY, measure)


def _unit(task: dict, emit: Emit, section, measure: Callable) -> None:
    import torch

    from a2lib.experiments import peers
    from a2lib.measure import Store, StoreError

    store = Store(section, task["slug"], data=Path(task["data"]))
    torch._dynamo.reset()
    try:
        for row in measure(task["unit"], task["device"], task["seed"]):
            store.put(row | {"run": task["run"]})
            emit({"row": row})
    except StoreError as error:
        _leave(emit, {"fatal": str(error)})
    except peers.LostContext as error:
        _leave(emit, {"lost": str(error)})
    gc.collect()
    if task["device"] == "cuda":
        torch.cuda.empty_cache()


HANDLERS = {
    "compare": compare,
    "compile": compile_,
    "ceilings": ceilings,
    "protocols": protocols,
    "accuracy": accuracy,
}


def _leave(emit: Emit, event: dict) -> None:
    # Not sys.exit: its clean-up would call into the device.
    emit(event)
    sys.stderr.flush()
    os._exit(3)


def _tasks():
    """Tasks as they arrive. Reads ahead, so that the parent's end is noticed in mid-task."""
    waiting: queue.Queue[dict] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


if __name__ == "__main__":
    main()
