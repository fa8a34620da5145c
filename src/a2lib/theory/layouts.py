"""A training, a layout of it on devices, and the part of the model that each device has.

A layout divides the batch among ``data`` devices, each matrix among ``tensor``, the blocks among
``pipeline`` and the sequence among ``context``. ``layout_memory.py`` counts the bytes of a device,
``layout_time.py`` the seconds of a step, and ``estimate.py`` has both: ``evaluate(training, layout,
device)``. Models are dense: none has experts.

ZeRO: Rajbhandari et al., 2020. Tensor parallelism: Shoeybi et al., 2019; sequence parallelism and
selective recomputation: Korthikanti et al., 2022. 1F1B and interleaved stages: Narayanan et al.,
2021; zero bubble: Qi et al., 2024. Ring attention: Liu et al., 2023.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.devices import Device
from a2lib.theory.other_axes import peak_microbatches
from a2lib.theory.products import NARROW, WIDE

SHARDINGS = ("none", "zero1", "zero2", "fsdp")
SCHEDULES = ("1f1b", "zb-h1")
STRATEGIES = ("none", "selective", "block")
ATTENTIONS = ("flash", "eager")
GRADIENTS = {"fp32": WIDE, "bf16": NARROW}
MOMENTS = 2 * WIDE  # bytes per parameter that AdamW keeps from step to step
# The share of the data sheet's peak that matmuls of the 8B model's feed-forward layers reach on an
# H200 without communication: the best row of data/measured/parallelism. A claim of the page
# parallelism-measured fails when it is no longer that.
EFFICIENCY = 0.65


@dataclass(frozen=True)
class Training:
    """A model, its batch and how it is trained: in bf16, with fp32 weights and AdamW.

    - ``shape``: the model
    - ``batch``, ``context``: sequences of a step over all devices, and tokens of a sequence
    - ``attention``: "flash", or "eager", which makes the scores in memory
    - ``gradients``: their width while they add up
    - ``sent_gradients``: their width between devices; None for the same
    - ``loss_chunks``: parts of a micro-batch's tokens that have their logits one after the other
    - ``efficiency``: the rate of matmuls and of attention over the data sheet's

    Raises ValueError for values that are not allowed.
    """

    shape: Shape
    batch: int
    context: int
    attention: str = "flash"
    gradients: str = "fp32"
    sent_gradients: str | None = None
    loss_chunks: int = 1
    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context, loss_chunks=self.loss_chunks)
        check_name("attention", self.attention, ATTENTIONS)
        check_name("gradients", self.gradients, GRADIENTS)
        if self.sent_gradients is not None:
            check_name("sent_gradients", self.sent_gradients, GRADIENTS)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency!r}; allowed are numbers above 0 to 1")

    @property
    def sent_bytes(self) -> int:
        """Bytes of a gradient between devices."""
        return GRADIENTS[self.sent_gradients or self.gradients]

    @property
    def scores(self) -> int:
        """Scores per token and block, if attention makes them in memory."""
        return self.shape.num_heads * self.context if self.attention == "eager" else 0


@dataclass(frozen=True)
class Layout:
    """Devices along each axis, and how the work is divided among them.

    - ``data``, ``tensor``, ``pipeline``, ``context``: devices along each axis
    - ``microbatches``: those of a data rank in a step
    - ``sharding``: what is sharded over data and context: "none", "zero1" (optimizer state),
      "zero2" (gradients too) or "fsdp" (weights too)
    - ``checkpointing``: what the backward recomputes: "none", "selective" or "block"
    - ``chunks``: virtual stages of each pipeline stage
    - ``sequence``: whether the devices of tensor shard the residual stream as well
    - ``schedule``: the order of a pipeline: "1f1b" or "zb-h1"
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatches: int = 1
    sharding: str = "fsdp"
    checkpointing: str = "none"
    chunks: int = 1
    sequence: bool = True
    schedule: str = "1f1b"

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def rows(self) -> int:
        """Devices, beside those of context, over which the residual stream's tokens are sharded."""
        return self.tensor if self.sequence else 1


class Stage(NamedTuple):
    """A pipeline stage.

    first, last: whether it has the embedding, and the head
    blocks: its blocks
    held: micro-batches whose activations it holds at its peak
    """

    first: bool
    last: bool
    blocks: int
    held: float


class Group(NamedTuple):
    """The number of devices of one axis, and how many of them are in one node."""

    size: int
    inside: int


@dataclass(frozen=True)
class Case:
    """One training in one layout on devices of one kind, and sizes that follow from the three."""

    training: Training
    layout: Layout
    device: Device

    @property
    def shape(self) -> Shape:
        return self.training.shape

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one device, before sequence parallelism."""
        sequences = self.training.batch // self.layout.data // self.layout.microbatches
        return sequences * (self.training.context // self.layout.context)

    @cached_property
    def stages(self) -> list[Stage]:
        """Return the different stages; where there are three, the second stands for all between."""
        p = self.layout.pipeline
        first, middle, last = stage_blocks(self.shape.num_layers, p)
        stages = [self._stage(0, first)]
        if p > 2:
            stages.append(self._stage(1, middle))
        if p > 1:
            stages.append(self._stage(p - 1, last))
        return stages

    def _stage(self, number: int, blocks: int) -> Stage:
        layout = self.layout
        kind = "interleaved" if layout.chunks > 1 else layout.schedule
        sizes = layout.pipeline, layout.microbatches, layout.chunks
        held = peak_microbatches(kind, *sizes, number)
        return Stage(number == 0, number == layout.pipeline - 1, blocks, held)

    @property
    def block(self) -> float:
        """Parameters of a block on one of tensor's devices; each has all norms."""
        return self.shape.block_matrices / self.layout.tensor + self.shape.block_vectors

    @property
    def table(self) -> float:
        """Parameters of the embedding or of the head on one of tensor's devices, with padding."""
        return math.ceil(self.shape.vocab_size / self.layout.tensor) * self.shape.d_model

    def weights(self, stage: Stage) -> float:
        """Return the parameters of a stage on one device before they are sharded over data.
        Embedding and head count once if they are tied."""
        tables = stage.first + stage.last - (self.shape.tied and stage.first and stage.last)
        return stage.blocks * self.block + tables * self.table + stage.last * self.shape.d_model

    def group(self, axis: str) -> Group:
        """Return the devices of an axis.

        They are laid out in the order tensor, context, data, pipeline. "data" includes context, as
        gradients and shards do. Those inside a node are the largest number that every node has.
        """
        layout = self.layout
        tensor = layout.tensor
        data = layout.context * layout.data
        stride, size = {
            "tensor": (1, tensor),
            "context": (tensor, layout.context),
            "data": (tensor, data),
            "pipeline": (tensor * data, layout.pipeline),
        }[axis]
        node = self.device.node
        if layout.devices <= node:
            return Group(size, size)
        inside = math.gcd(size, node // stride) if node % stride == 0 else 1
        return Group(size, inside)


def stage_blocks(layers: int, stages: int) -> tuple[int, int, int] | None:
    """Return the blocks of the first, of each middle and of the last stage.

    They are equal, except that the first, with the embedding, may have one fewer, and the last,
    with the head, up to two fewer. Returns None where the layers cannot be divided so.
    """
    most = -(-layers // stages)
    lack = most * stages - layers
    first, last = most - lack // 2, most - (lack + 1) // 2
    if stages > layers or lack > min(3, stages - 1) or last < 1:
        return None
    return first, most, last


def check(case: Case) -> None:
    """Raise ValueError, which names the rule, for a layout that breaks one."""
    training, layout, shape = case.training, case.layout, case.shape
    axes = ("data", "tensor", "pipeline", "context", "microbatches", "chunks")
    check_sizes(**{name: getattr(layout, name) for name in axes})
    check_name("sharding", layout.sharding, SHARDINGS)
    check_name("checkpointing", layout.checkpointing, STRATEGIES)
    check_name("schedule", layout.schedule, SCHEDULES)
    data, t, p, c = layout.data, layout.tensor, layout.pipeline, layout.context
    m, chunks = layout.microbatches, layout.chunks
    is_flash = training.attention == "flash"
    if training.batch % (data * m):
        raise ValueError(f"data {data} x microbatches {m} must divide batch {training.batch}")
    if shape.kv_heads % t or shape.d_ff % t:
        raise ValueError(
            f"tensor {t} must divide the {shape.kv_heads} heads of keys and d_ff {shape.d_ff}"
        )
    spread = stage_blocks(shape.num_layers, p)
    if spread is None:
        raise ValueError(
            f"pipeline {p} with num_layers {shape.num_layers}; allowed are stages that divide the"
            " layers, or up to three more (the first has one fewer, the last up to two)"
        )
    _, middle, _ = spread
    if chunks > 1 and (p == 1 or middle % chunks or m % p):
        raise ValueError(
            f"chunks {chunks} with pipeline {p}, {middle} blocks per stage and microbatches {m};"
            " they must divide the blocks, and the stages (2 or more) the micro-batches"
        )
    if layout.schedule != "1f1b" and (p == 1 or chunks > 1 or m < p):
        raise ValueError(
            f"schedule {layout.schedule} with pipeline {p}, chunks {chunks}, microbatches {m};"
            " allowed are 2 stages or more, in one piece, and as many micro-batches or more"
        )
    if c > 1 and (training.context % (2 * c) or not is_flash):
        raise ValueError(
            f"context {c} with context length {training.context} and {training.attention}"
            " attention; its double must divide the length, and attention must be flash"
        )
    if layout.checkpointing == "selective" and is_flash:
        raise ValueError(
            "checkpointing selective with flash attention, which keeps no scores; allowed are none"
            " and block"
        )
