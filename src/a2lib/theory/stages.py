"""A layout of a training on devices, and what its pipeline's stages are of.

Stages have as many blocks each, but that the first may have one fewer and the last one or two: they
hold the embedding and the head. With ``chunks`` of more than one each stage is so many pieces of
the model, interleaved with those of the others (Narayanan et al., 2021). The devices of ``expert``
are among those of context and data.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from a2lib.theory.jobs import Job
from a2lib.theory.other_axes import peak_microbatches
from a2lib.theory.transformer import Shape, more_of_experts


@dataclass(frozen=True)
class Layout:
    """Devices along each axis, micro-batches of a step, how state is cut, what is kept; pieces of
    the model on each device; whether tensor's devices also cut the sequence; devices that a block's
    experts are cut over; and the order of a pipeline."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatches: int = 1
    sharding: str = "fsdp"
    checkpointing: str = "none"
    chunks: int = 1
    sequence: bool = True
    expert: int = 1
    schedule: str = "1f1b"

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def rows(self) -> int:
        """Devices that the residual stream's tokens are cut over beside context's."""
        return self.tensor if self.sequence else 1


class Stage(NamedTuple):
    """A stage with ``blocks``, the first ``dense`` of them without experts, and either table;
    ``count`` of it; the activations of ``held`` micro-batches at its peak."""

    first: bool
    last: bool
    blocks: int
    count: int
    held: float
    dense: int = 0


def stage_blocks(layers: int, stages: int) -> tuple[int, int, int] | None:
    """Blocks of the first, of each middle and of the last stage, or None where the layers cannot
    be spread so."""
    most = -(-layers // stages)
    lack = most * stages - layers
    found = most - lack // 2, most, most - -(-lack // 2)
    return None if stages > layers or lack > min(3, stages - 1) or found[2] < 1 else found


def stages(job: Job, layout: Layout) -> tuple[Stage, ...]:
    """The different stages of a layout that keeps the rules; the second stands for all between."""
    kind = layout.schedule if layout.chunks == 1 else "interleaved"
    p, m, shape = layout.pipeline, layout.microbatches, job.shape
    return _stages(shape.num_layers, shape.dense, kind, p, m, layout.chunks)


@lru_cache(maxsize=4096)  # a search asks for the same ones many times in a row
def _stages(layers: int, dense: int, kind: str, p: int, m: int, chunks: int) -> tuple[Stage, ...]:
    if p == 1:
        return (Stage(True, True, layers, 1, 1, dense),)
    first, middle, last = stage_blocks(layers, p)
    held = [peak_microbatches(kind, p, m, chunks, stage) for stage in (0, 1, p - 1)]
    found = (
        Stage(True, False, first, 1, held[0], dense),
        Stage(False, False, middle, p - 2, held[1]),
        Stage(False, True, last, 1, held[2]),
    )
    return tuple(stage for stage in found if stage.count)


def block_weights(shape: Shape, t: int) -> float:
    """Parameters of a dense block on one of ``t`` devices: the norms are on each."""
    return shape.block_matrices / t + shape.block_vectors


def tables(shape: Shape, stage: Stage) -> int:
    """Embedding and head of a stage; both are one if they are tied and in one stage."""
    return stage.first + stage.last - (shape.tied and stage.first and stage.last)


def weights(job: Job, layout: Layout, stage: Stage, expert: int | None = None) -> float:
    """Parameters of a stage on one of the devices of tensor and expert, before they are cut over
    data; with ``expert`` of 1 those that all of expert's have together."""
    shape, t = job.shape, layout.tensor
    table = shape.vocab_size * shape.d_model / t
    blocks = stage.blocks * block_weights(shape, t)
    if shape.experts:
        more = more_of_experts(shape, expert or layout.expert)
        blocks += (stage.blocks - stage.dense) * more
    return blocks + tables(shape, stage) * table + stage.last * shape.d_model


def inside(job: Job, layout: Layout, axis: str) -> tuple[int, int]:
    """Devices of an axis' group, and how many of them are in one node.

    The greatest number that lies in every node evenly. Data's group is that of context too, and
    "replicas" are those of it that have the same experts.
    """
    t, c, d, e = layout.tensor, layout.context, layout.data, layout.expert
    before, n = {
        "tensor": (1, t),
        "context": (t, c),
        "data": (t, c * d),
        "expert": (t, e),
        "replicas": (t * e, c * d // e),
        "pipeline": (t * c * d, layout.pipeline),
    }[axis]
    node = job.device.node
    if layout.devices <= node:
        return n, n
    return n, math.gcd(n, node // before) if node % before == 0 else 1


def shards(job: Job, layout: Layout) -> int:
    """Devices that state is cut over: under hsdp those of data and context within a node."""
    return inside(job, layout, "data")[layout.sharding == "hsdp"]


def tokens(job: Job, layout: Layout) -> float:
    """Tokens of a micro-batch on one device."""
    return job.batch // layout.data // layout.microbatches * (job.context // layout.context)
