"""Measurements beside the sweep: units of a few rows, each in a worker that may die.

A unit is what a worker measures at one request: a dict with ``keys``, the rows it is to store (or
to be blamed for), ``title``, and whatever its handler wants. It is done where all of its keys are
stored; measuring again, where this run has stored them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from a2lib.experiments.process import WORKER, Worker, WorkerDied
from a2lib.measure import Store, StoreError

Unit = Mapping[str, object]
Key = Mapping[str, object]
NO_RESULT = "no result and no reason: a defect of a2lib"


def pending(units: Sequence[Unit], store: Store, *, remeasure: bool) -> list[Unit]:
    """Those of ``units`` that ``store`` lacks a row of; all of them for ``remeasure``."""
    return [u for u in units if remeasure or any(store.get(key) is None for key in u["keys"])]


def measure(
    units: Sequence[Unit],
    *,
    do: str,
    store: Store,
    run: str,
    device: str,
    seed: int,
    silence_s: float,
    until: float | None = None,
    step: Callable[[Unit], None] = lambda unit: None,
    begin: Callable[[Unit], None] = lambda unit: None,
    command: Sequence[str] = WORKER,
) -> int:
    """Have each unit measured by the worker's handler ``do``; how many keys ``until`` has left.

    A unit whose worker dies, or is silent for ``silence_s`` seconds, gets `error` rows for the keys
    that it has not stored. Raises StoreError where rows cannot be stored, and WorkerDied where a
    worker does not even start.
    """
    worker = None
    try:
        for position, unit in enumerate(units):
            if until is not None and time.time() > until:
                return sum(len(left["keys"]) for left in units[position:])
            if worker is None or worker.closed:
                worker = Worker(command)
            begin(unit)
            request = {
                "do": do,
                "unit": unit,
                "device": device,
                "slug": store.device,
                "data": str(store.data),
                "run": run,
                "seed": seed,
            }
            reason = NO_RESULT
            try:
                for event in worker.ask(request, silence_s):
                    if "fatal" in event:
                        raise StoreError(event["fatal"])
            except WorkerDied as died:
                if not worker.ready:
                    raise
                reason = str(died)
            _blame(unit, store, run, reason)
            step(unit)
    finally:
        if worker is not None:
            worker.close()
    return 0


def _blame(unit: Unit, store: Store, run: str, reason: str) -> None:
    from a2lib.experiments.peers import note

    for key in unit["keys"]:
        row = store.get(key)
        if row is None or row["run"] != run:
            store.put({**key, "status": "error", "note": note(reason), "run": run})
