"""Hardware counters of the headline shapes: what passes each level of memory, what is busy.

Nsight Compute counts; where it is missing, or the driver keeps the counters to itself, each row is
`unsupported` with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

from a2lib.experiments.counted import MARKER
from a2lib.experiments.peers import note
from a2lib.experiments.shapes import Shape
from a2lib.measure import counters

SHAPES = (
    Shape("bf16", 1, 16, 16384, 64, True),
    Shape("bf16", 1, 16, 16384, 128, True),
    Shape("bf16", 1, 1, 65536, 64, True),
)
IMPLEMENTATIONS = ("a2lib", "sdpa_cudnn", "sdpa_flash")
PASSES = ("forward", "backward")
TIMEOUT_S = 300

Call = tuple[str, str, Shape]  # implementation, pass, shape


def calls() -> list[Call]:
    """What is counted, in order."""
    return [(name, pass_, s) for s in SHAPES for name in IMPLEMENTATIONS for pass_ in PASSES]


def measure(wanted: list[Call], device: str) -> Iterator[dict[str, object]]:
    """The rows of section flash_counters for ``wanted``: one per kernel launched, in order."""
    if device != "cuda":
        yield from _refused(wanted, "hardware counters need a CUDA GPU")
        return
    asked = json.dumps([[name, pass_, dataclasses.asdict(s)] for name, pass_, s in wanted])
    try:
        command = [sys.executable, "-m", "a2lib.experiments.counted", asked]
        counted = split(counters.read(command, timeout_s=TIMEOUT_S))
        if len(counted) != len(wanted):
            raise counters.CountersError(f"{len(counted)} of {len(wanted)} calls were counted")
    except counters.CountersError as error:
        yield from _refused(wanted, str(error))
        return
    for call, kernels in zip(wanted, counted, strict=True):
        if not kernels:
            yield from _refused([call], "the call failed, or launched nothing")
        for launch, kernel in enumerate(kernels):
            text = {"kernel": note(str(kernel["kernel"])), "note": ""}
            yield _key(call, launch) | kernel | text | {"status": "ok"}


def split(kernels: list[dict[str, object]]) -> list[list[dict[str, object]]]:
    """The kernels between one marker and the next, a list for each marker."""
    groups: list[list[dict[str, object]]] = []
    for kernel in kernels:
        if MARKER in str(kernel["kernel"]):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _refused(wanted: list[Call], reason: str) -> Iterator[dict[str, object]]:
    for call in wanted:
        yield _key(call, 0) | {"status": "unsupported", "note": note(reason)}


def _key(call: Call, launch: int) -> dict[str, object]:
    implementation, pass_, shape = call
    return shape.key(implementation, pass_) | {"launch": launch}
