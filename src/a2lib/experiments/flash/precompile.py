"""What of a sweep of attention can be compiled ahead of its timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Shape, needed_bytes
from a2lib.experiments.harness.ahead import Compilation

COMPILED = ("a2lib", *peers.COMPILED)
HANDLER = "a2lib.experiments.flash.handlers:compile_"


def compilation(shape: Shape, implementation: str) -> Compilation:
    """One implementation at one shape, forward and backward."""
    inputs = 8 * shape.tensor_bytes
    mask = shape.seq_len**2 * 4 if implementation == "flex" else 0
    return Compilation(
        label=f"{implementation} {shape}",
        spec={"shape": dataclasses.asdict(shape), "implementation": implementation},
        bytes=inputs + mask + needed_bytes(implementation, shape, "end_to_end"),
    )


def compilations(pending: Mapping[Shape, Iterable[str]]) -> list[Compilation]:
    """What ``pending`` (the implementations still to measure at each shape) needs compiled.

    Our own kernels take their lengths at run time: they are compiled per head size, dtype and mask,
    and again where a size is 1, which Triton folds into the code.
    """
    found: dict[tuple, Compilation] = {}
    for shape, implementations in pending.items():
        for name in implementations:
            if name in COMPILED:
                same = (
                    shape.dtype,
                    shape.head_dim,
                    shape.causal,
                    shape.batch == 1,
                    shape.heads == 1,
                )
                found.setdefault(
                    (name, *same) if name == "a2lib" else (name, shape), compilation(shape, name)
                )
    return list(found.values())
