"""Hardware counters of the headline shapes: what passes each level of memory, what is busy.

Nsight Compute counts; where it is missing, or the driver keeps the counters to itself, each row is
`unsupported` with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

from a2lib.experiments.flash.counted import MARKER
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness.sweep import Task
from a2lib.measure import counters
from a2lib.measure.failures import note

SHAPES = {
    "cuda": (
        Shape("bf16", 1, 16, 16384, 64, True),
        Shape("bf16", 1, 16, 16384, 128, True),
        Shape("bf16", 1, 1, 65536, 64, True),
    ),
    "cpu": (Shape("fp32", 1, 2, 128, 64, True),),
}
IMPLEMENTATIONS = {"cuda": ("a2lib", "sdpa_cudnn", "sdpa_flash"), "cpu": ("eager",)}
PASSES = ("forward", "backward")
TIMEOUT_S = 240  # below the silence that a worker is allowed

Row = dict[str, object]
Call = tuple[str, str]  # implementation, pass


def tasks(parameters: Parameters, device: str) -> list[Task]:
    """What to count on ``device`` ("cuda" or "cpu"); [] for a sweep without this table."""
    if parameters.sweep not in ("leaderboard", "all"):
        return []
    made = []
    for shape in SHAPES[device]:
        asked = parameters.chosen_implementations(shape, device)
        names = [name for name in IMPLEMENTATIONS[device] if name in asked]
        calls = [(name, pass_) for name in names for pass_ in PASSES]
        if calls:
            spec = {"shape": dataclasses.asdict(shape), "calls": calls}
            keys = tuple(key(shape, call, 0) for call in calls)
            made.append(Task(str(shape), spec, {str(shape): keys}))
    return made


def key(shape: Shape, call: Sequence[str], launch: int) -> Row:
    """The key columns of one kernel of a call."""
    return shape.key(*call) | {"launch": launch}


def measure(spec: Mapping[str, object], device: str, seed: int) -> Iterator[Row]:
    """The rows of one of ``tasks``: one per kernel launched, in order.

    A call that is not counted has one row, of launch 0, with the reason.
    """
    shape, calls = Shape(**spec["shape"]), spec["calls"]
    if device != "cuda":
        yield from _refused(shape, calls, "hardware counters need a CUDA GPU")
        return
    asked = json.dumps({"shape": spec["shape"], "calls": calls, "seed": seed})
    try:
        command = [sys.executable, "-m", "a2lib.experiments.flash.counted", asked]
        counted = split(counters.read(command, timeout_s=TIMEOUT_S))
        if len(counted) != len(calls):
            raise counters.CountersError(f"{len(counted)} of {len(calls)} calls were counted")
    except counters.CountersError as error:
        yield from _refused(shape, calls, str(error))
        return
    for call, kernels in zip(calls, counted, strict=True):
        if not kernels:
            yield from _refused(shape, [call], "the call failed, or launched nothing")
        for launch, kernel in enumerate(kernels):
            text = {"kernel": note(str(kernel["kernel"])), "note": ""}
            yield key(shape, call, launch) | kernel | text | {"status": "ok"}


def split(kernels: Sequence[Row]) -> list[list[Row]]:
    """The kernels between one marker and the next, a list for each marker."""
    groups: list[list[Row]] = []
    for kernel in kernels:
        if MARKER in str(kernel["kernel"]):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _refused(shape: Shape, calls: Sequence[Sequence[str]], reason: str) -> Iterator[Row]:
    for call in calls:
        yield key(shape, call, 0) | {"status": "unsupported", "note": note(reason)}
