"""The 4D layout that trains a Transformer fastest on at most N devices, by search.

Every size that keeps the rules of layouts.py is tried, with every number of micro-batches, either
sharding and either strategy of checkpointing, but for meshes whose arithmetic alone takes longer
than the best found. What a plan rests on is ``layouts.ASSUMPTIONS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from a2lib.theory.layouts import (
    AXES,
    STRATEGIES,
    Job,
    Layout,
    Plan,
    block_flops,
    check,
    cut_by_axis,
    memory,
    timed,
)
from a2lib.theory.products import matmul_flops

SEARCHED = ("zero1", "fsdp")  # several plain replicas send as much as zero1 and hold more


def search(job: Job, fixed: dict[str, int | str] | None = None, *, overlap: bool = True) -> Plan:
    """The plan of the shortest step that fits; ``fixed`` holds fields of ``Layout`` to a value.

    The step is the floor, in which communication hides, or without ``overlap`` the one in which
    nothing does; of equal ones (to six figures) the shorter by the other, then the one of least
    memory. Layouts whose arithmetic and bubble alone take longer than the best are passed over.
    Raises ValueError, in one line, for a fixed value that breaks a rule, and where nothing fits.
    """
    fixed = fixed or {}
    allowed = [field.name for field in fields(Layout)]
    for name in fixed:
        if name not in allowed:
            raise ValueError(f"fixed {name!r}: allowed are {', '.join(allowed)}")
    check(job, Layout(**fixed))  # with 1 for what is free, so it refuses what no search can mend
    flops = {name: _least_flops(job, name == "block") for name in STRATEGIES}
    best = key = None
    least = math.inf
    for data, tensor, pipeline, context in _meshes(job, fixed):
        # Sorted by devices, so no later mesh is faster either.
        rate = job.flops * data * tensor * pipeline * context
        if key is not None and flops["none"] / rate > key[0] * (1 + 1e-5):
            break
        for layout in _layouts(job, fixed, data, tensor, pipeline, context):
            bubble = 1 + (pipeline - 1) / layout.microbatches
            least_s = bubble * flops[layout.checkpointing] / rate
            if key is not None and least_s > key[0] * (1 + 1e-5):
                continue
            moment, held = memory(job, layout)
            total = sum(held.values())
            least = min(least, total)
            if total > job.memory:
                continue
            plan = timed(job, layout, moment, held)
            this = _rank(plan, overlap)
            if key is None or this < key:
                best, key = plan, this
    if best is None and least == math.inf:
        held = ", ".join(f"{name} {value}" for name, value in fixed.items())
        raise ValueError(
            f"no layout of at most {job.devices} devices keeps the rules with {held}; free one"
        )
    if best is None:
        raise ValueError(
            f"no layout of at most {job.devices} devices fits: the least takes "
            f"{least / 1e9:.1f} GB of the {job.memory / 1e9:.1f} GB allowed on each"
        )
    return best


def largest_batch(job: Job, layout: Layout) -> int:
    """The most sequences of a step that fit on a layout of this ``data`` and ``microbatches``, 0 if
    one for each of these does not. Raises ValueError as ``evaluate``, for the job's own batch."""
    check(job, layout)
    unit = layout.data * layout.microbatches

    def fits(k: int) -> bool:
        _, held = memory(replace(job, batch=k * unit), layout)
        return sum(held.values()) <= job.memory

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def _least_flops(job: Job, again: bool) -> float:
    """Operations of a step, in which blocks run again or nothing does."""
    tokens = job.batch * job.context
    head = 3 * matmul_flops(tokens, job.shape.vocab_size, job.shape.d_model)
    return job.shape.num_layers * block_flops(job, tokens, again) + head


def _rank(plan: Plan, overlap: bool) -> tuple[float, ...]:
    """What the search makes small, in turn; rounded, so that equal sums are equal."""
    steps = (plan.step_s, plan.serial_s) if overlap else (plan.serial_s, plan.step_s)
    return tuple(float(f"{number:.6g}") for number in (*steps, plan.memory_bytes))


def _divisors(n: int) -> list[int]:
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def _sizes(job: Job, axis: str) -> list[int]:
    """All sizes of an axis that keep its rule."""
    found = [k for k in _divisors(math.gcd(*cut_by_axis(job)[axis].values())) if k <= job.devices]
    if axis == "context":
        return [k for k in found if k == 1 or job.context % (2 * k) == 0]
    return found


def _meshes(job: Job, fixed: dict) -> list[tuple[int, int, int, int]]:
    """Sizes of the four axes, those of most devices first."""
    data, tensor, pipeline, context = (
        [fixed[axis]] if axis in fixed else _sizes(job, axis) for axis in AXES
    )
    found = [
        (d, t, p, c)
        for t in tensor
        for p in pipeline
        if t * p <= job.devices
        for c in context
        if t * p * c <= job.devices
        for d in data
        if t * p * c * d <= job.devices
    ]
    return sorted(found, key=lambda mesh: -math.prod(mesh))


def _layouts(job: Job, fixed: dict, *mesh: int) -> Iterator[Layout]:
    """The layouts of one mesh."""
    microbatches = _divisors(job.batch // mesh[0])
    if "microbatches" in fixed:
        microbatches = [m for m in microbatches if m == fixed["microbatches"]]
    for m in microbatches:
        for sharding in [fixed["sharding"]] if "sharding" in fixed else SEARCHED:
            for strategy in [fixed["checkpointing"]] if "checkpointing" in fixed else STRATEGIES:
                yield Layout(*mesh, m, sharding, strategy)
