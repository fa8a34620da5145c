"""What of a sweep of attention can be compiled ahead of its timing."""

import dataclasses
from collections.abc import Iterable, Mapping

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.ahead import Compilation
from a2lib.experiments.harness.worker import Job
from a2lib.experiments.passes import one_pass
from a2lib.measure import synchronize

COMPILED = ("a2lib", *peers.COMPILED)
HANDLER = "a2lib.experiments.flash.precompile:run"

prepare = peers.configure


def compilation(shape: Shape, implementation: str) -> Compilation:
    """One implementation at one shape, forward and backward."""
    inputs = 8 * shape.tensor_bytes
    mask = shape.seq_len**2 * 4 if implementation == "flex" else 0
    return Compilation(
        label=f"{implementation} {shape}",
        spec={"shape": dataclasses.asdict(shape), "implementation": implementation},
        bytes=inputs + mask + peers.needed_bytes(implementation, shape, "end_to_end"),
    )


def compilations(pending: Mapping[Shape, Iterable[str]]) -> list[Compilation]:
    """What ``pending`` (the implementations still to measure at each shape) needs compiled.

    Our own kernels take their lengths at run time: they are compiled per head size, dtype and mask,
    and again where a size is 1, which Triton folds into the code.
    """
    found: dict[tuple, Compilation] = {}
    for shape, implementations in pending.items():
        for name in implementations:
            same = (shape.dtype, shape.head_dim, shape.causal, shape.batch == 1, shape.heads == 1)
            code = same if name == "a2lib" else shape
            if name in COMPILED:
                found.setdefault((name, code), compilation(shape, name))
    return list(found.values())


def run(job: Job) -> None:
    """Run one implementation forward and backward, so that its code is in the caches on disk.
    Measuring meets the same error as this, and makes a row of it."""
    import torch

    shape = Shape(**job.spec["shape"])
    torch._dynamo.reset()
    *qkv, do = peers.inputs(shape, job.device, job.seed)
    forward = peers.build(job.spec["implementation"], shape, job.device)
    one_pass(forward, qkv, do, "end_to_end")()
    synchronize(job.device)
