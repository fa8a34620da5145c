"""A training, a layout of it on devices, and the part of the model that each device has.

A layout divides the batch among ``data`` devices, each matrix among ``tensor``, the blocks among
``pipeline`` and the sequence among ``context``. Experts are divided among ``expert`` of the devices
of tensor, context and data. ``layout_memory.py`` counts the bytes of a device, ``layout_time.py``
the seconds of a step, and ``estimate.py`` has both: ``evaluate(training, layout, device)``.

ZeRO: Rajbhandari et al., 2020; hybrid sharding: Zhao et al., 2023. Tensor parallelism: Shoeybi et
al., 2019; sequence parallelism and selective recomputation: Korthikanti et al., 2022. 1F1B and
interleaved stages: Narayanan et al., 2021; zero bubble: Qi et al., 2024. Ring attention: Liu et
al., 2023. Experts: DeepSeek-AI, 2024. The formulas of each axis are derived in parallelism.py and
other_axes.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.devices import Device
from a2lib.theory.other_axes import least_microbatches, peak_microbatches
from a2lib.theory.products import NARROW, WIDE

AXES = ("data", "tensor", "pipeline", "context")
SHARDINGS = ("none", "zero1", "zero2", "fsdp", "hsdp")
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
STRATEGIES = ("none", "selective", "block")
PRECISIONS = ("bf16", "fp32")
ATTENTIONS = ("flash", "eager")
ACTIVATIONS = ("fused", "library")
GRADIENTS = {"fp32": WIDE, "bf16": NARROW}
# Bytes per parameter that an optimizer keeps from step to step.
OPTIMIZERS = {"adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2, "momentum": 4, "sgd": 0}
# The share of the data sheet's peak that matmuls of feed-forward layers reach on an H200 (rows of
# section parallelism).
EFFICIENCY = 0.65


@dataclass(frozen=True)
class Training:
    """A model, its batch and how it is trained.

    shape: the model
    batch, context: sequences of a step over all devices, and tokens of a sequence
    precision: of matmuls, one of PRECISIONS
    attention: "flash", or "eager", which makes the scores in memory
    activations: what a block saves: "fused", as fused kernels on a residual stream in the width of
        computation (Megatron-LM), or "library", as this library's uncompiled blocks, whose stream
        and norms stay fp32
    optimizer: one of OPTIMIZERS
    gradients: their width while they add up
    loss_chunks: parts of a micro-batch's tokens that have their logits one after the other
    efficiency, attention_efficiency: the rates of matmuls and of attention over the data sheet's

    Raises ValueError for values that are not allowed.
    """

    shape: Shape
    batch: int
    context: int
    precision: str = "bf16"
    attention: str = "flash"
    activations: str = "fused"
    optimizer: str = "adamw"
    gradients: str = "fp32"
    loss_chunks: int = 1
    efficiency: float = EFFICIENCY
    attention_efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context, loss_chunks=self.loss_chunks)
        check_name("precision", self.precision, PRECISIONS)
        check_name("attention", self.attention, ATTENTIONS)
        check_name("activations", self.activations, ACTIVATIONS)
        check_name("optimizer", self.optimizer, OPTIMIZERS)
        check_name("gradients", self.gradients, GRADIENTS)
        for name in ("efficiency", "attention_efficiency"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ValueError(f"{name} is {share!r}; allowed are numbers above 0 to 1")

    @property
    def element(self) -> int:
        """Bytes per element of matmuls and of communication."""
        return NARROW if self.precision == "bf16" else WIDE

    @property
    def residual(self) -> int:
        """Bytes per element of the residual stream."""
        return WIDE if self.activations == "library" else self.element

    @property
    def scores(self) -> int:
        """Scores per token and block, if attention makes them in memory."""
        return self.shape.num_heads * self.context if self.attention == "eager" else 0

    def peak(self, device: Device) -> float:
        """Return the FLOPs per second that the data sheet states for this precision."""
        return device.flops if self.precision == "bf16" else device.fp32


@dataclass(frozen=True)
class Layout:
    """Devices along each axis, and how the work is divided among them.

    data, tensor, pipeline, context: devices along each axis
    microbatches: those of a data rank in a step
    sharding: which of weights, gradients and optimizer state are sharded over data and context,
        one of SHARDINGS
    checkpointing: what the backward recomputes, one of STRATEGIES
    chunks: virtual stages of each pipeline stage
    sequence: whether the devices of tensor shard the residual stream as well
    expert: devices that hold different experts of a block
    schedule: the order of a pipeline, one of SCHEDULES
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
    expert: int = 1
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
    blocks, dense: its blocks, and how many of them have no experts
    count: how many stages are like it
    held: micro-batches whose activations it holds at its peak
    """

    first: bool
    last: bool
    blocks: int
    dense: int
    count: int
    held: float

    @property
    def mixtures(self) -> int:
        return self.blocks - self.dense


class Weights(NamedTuple):
    """Parameters on one device: those of its experts, and all others (``dense``)."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


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
        """The different stages; where there are three, the second stands for all between."""
        p = self.layout.pipeline
        if p == 1:
            return [self._stage(True, True, self.shape.num_layers, 1, 1)]
        first, middle, last = stage_blocks(self.shape.num_layers, p)
        stages = [
            self._stage(True, False, first, 1, self._held(0)),
            self._stage(False, False, middle, p - 2, self._held(1)),
            self._stage(False, True, last, 1, self._held(p - 1)),
        ]
        return [stage for stage in stages if stage.count]

    def _stage(self, first: bool, last: bool, blocks: int, count: int, held: float) -> Stage:
        dense = blocks
        if self.shape.experts:
            dense = min(blocks, self.shape.dense) if first else 0
        return Stage(first, last, blocks, dense, count, held)

    def _held(self, stage: int) -> float:
        layout = self.layout
        kind = "interleaved" if layout.chunks > 1 else layout.schedule
        return peak_microbatches(kind, layout.pipeline, layout.microbatches, layout.chunks, stage)

    @property
    def kv_width(self) -> float:
        """Width of the keys on one of tensor's devices: at least a head, of which several devices
        then have copies."""
        return max(self.shape.kv_width / self.layout.tensor, self.shape.head_dim)

    @property
    def attention_weights(self) -> float:
        """Parameters of a block's attention on one of tensor's devices."""
        repeated = self.kv_width - self.shape.kv_width / self.layout.tensor
        matrices = self.shape.attention_matrices / self.layout.tensor
        return matrices + 2 * self.shape.d_model * repeated

    @property
    def dense_block(self) -> float:
        """Parameters of a dense block on one of tensor's devices; each has all norms."""
        shape = self.shape
        ffn = shape.ffn_matrices * shape.d_model * shape.d_ff / self.layout.tensor
        return self.attention_weights + ffn + shape.block_vectors

    @property
    def mixture_block(self) -> Weights:
        """Parameters of a block of experts on one device; each expert is whole where it is."""
        shape = self.shape
        shared = shape.shared * shape.expert_matrices / self.layout.tensor
        router = shape.router + shape.experts
        dense = self.attention_weights + shape.block_vectors + shared + router
        return Weights(dense, shape.experts * shape.expert_matrices / self.layout.expert)

    @property
    def table(self) -> float:
        """Parameters of the embedding or of the head on one of tensor's devices, with padding."""
        return math.ceil(self.shape.vocab_size / self.layout.tensor) * self.shape.d_model

    def tables(self, stage: Stage) -> int:
        """Return how many tables a stage has: embedding and head, which count once if tied."""
        return stage.first + stage.last - (self.shape.tied and stage.first and stage.last)

    def weights(self, stage: Stage) -> Weights:
        """Return the parameters of a stage on one device before they are sharded over data."""
        mixture = self.mixture_block
        dense = stage.dense * self.dense_block + stage.mixtures * mixture.dense
        dense += self.tables(stage) * self.table + stage.last * self.shape.d_model
        return Weights(dense, stage.mixtures * mixture.experts)

    def sharded(self, weights: Weights) -> float:
        """Return how many of these parameters a device keeps where they are sharded: dense ones
        over data and context, experts over the devices that have the same; with hsdp in a node."""
        dense, experts = self.group("data"), self.group("replicas")
        if self.layout.sharding == "hsdp":
            return weights.dense / dense.inside + weights.experts / experts.inside
        return weights.dense / dense.size + weights.experts / experts.size

    def group(self, axis: str) -> Group:
        """Return the devices of an axis.

        They are laid out in the order tensor, context, data, pipeline. Experts take the first of
        tensor, context and data together; "replicas" are the devices that have the same experts.
        "data" includes context, as gradients and shards do. Those inside a node are the largest
        number that every node has.
        """
        layout = self.layout
        tensor, expert = layout.tensor, layout.expert
        data = layout.context * layout.data
        stride, size = {
            "tensor": (1, tensor),
            "context": (tensor, layout.context),
            "data": (tensor, data),
            "expert": (1, expert),
            "replicas": (expert, tensor * data // expert),
            "pipeline": (tensor * data, layout.pipeline),
        }[axis]
        node = self.device.node
        if self.layout.devices <= node:
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
    layout = case.layout
    sizes = {name: getattr(layout, name) for name in (*AXES, "microbatches", "chunks", "expert")}
    check_sizes(**sizes)
    check_name("sharding", layout.sharding, SHARDINGS)
    check_name("checkpointing", layout.checkpointing, STRATEGIES)
    check_name("schedule", layout.schedule, SCHEDULES)
    for broken in _broken_rules(case):
        raise ValueError(broken)


def _broken_rules(case: Case) -> Iterator[str]:
    training, layout, shape = case.training, case.layout, case.shape
    if case.training.precision == "fp32" and case.device.fp32 is None:
        yield f"precision fp32: allowed is bf16 on {case.device.slug}, which has no rate in fp32"
    yield from _data_rules(training, layout)
    yield from _tensor_rules(shape, layout)
    yield from _pipeline_rules(shape, layout)
    yield from _context_rules(training, layout)
    yield from _expert_rules(shape, layout)
    if layout.checkpointing == "selective" and training.attention == "flash":
        yield (
            "checkpointing selective with flash attention; allowed are none and block, since "
            "flash keeps no scores"
        )


def _data_rules(training: Training, layout: Layout) -> Iterator[str]:
    if training.batch % layout.data:
        yield f"data {layout.data} does not divide batch {training.batch}; it must"
    sequences = training.batch // layout.data
    if sequences % layout.microbatches:
        yield (
            f"microbatches {layout.microbatches} does not divide the {sequences} sequences of a "
            f"data rank (batch {training.batch} / data {layout.data}); it must"
        )


def _tensor_rules(shape: Shape, layout: Layout) -> Iterator[str]:
    t = layout.tensor
    for name, size in (("num_heads", shape.num_heads), ("d_ff", shape.d_ff)):
        if size % t:
            yield f"tensor {t} does not divide {name} {size}; it must"
    if shape.kv_heads % t and t % shape.kv_heads:
        yield (
            f"tensor {t} with num_kv_heads {shape.kv_heads}; one must divide the other, since "
            "devices share whole heads of keys"
        )


def _pipeline_rules(shape: Shape, layout: Layout) -> Iterator[str]:
    p, m, chunks = layout.pipeline, layout.microbatches, layout.chunks
    layers = shape.num_layers
    spread = stage_blocks(layers, p)
    if spread is None:
        yield (
            f"pipeline {p} with num_layers {layers}; allowed are up to {layers} stages that divide "
            "the layers or up to three more, the first having one fewer, the last up to two"
        )
        return
    first, blocks, _ = spread
    if p > 1 and shape.experts and first < shape.dense:
        yield (
            f"pipeline {p}: the first stage has fewer blocks than the {shape.dense} dense; it must "
            "have all of them"
        )
    if chunks > 1 and p == 1:
        yield f"chunks {chunks} with pipeline 1; allowed is 1"
    if chunks > 1 and blocks % chunks:
        yield f"chunks {chunks} does not divide the {blocks} blocks of a stage; it must"
    if chunks > 1 and m % p:
        yield f"microbatches {m} with chunks {chunks}; allowed are multiples of the {p} stages"
    least = least_microbatches(layout.schedule, p)
    if layout.schedule != "1f1b" and (p == 1 or chunks > 1 or m < least):
        yield (
            f"schedule {layout.schedule} with pipeline {p}, chunks {chunks}, microbatches {m}; "
            f"allowed are 2 stages or more, in one piece, and from {least} micro-batches on"
        )


def _context_rules(training: Training, layout: Layout) -> Iterator[str]:
    c = layout.context
    if c == 1:
        return
    if training.context % (2 * c):
        yield (
            f"context {c}: its double does not divide context length {training.context}; it must, "
            "since each device has an early and a late part of a causal sequence"
        )
    if training.attention == "eager":
        yield f"context {c} with eager attention; allowed is 1, since a ring of keys needs flash"


def _expert_rules(shape: Shape, layout: Layout) -> Iterator[str]:
    expert = layout.expert
    if layout.tensor > 1 and shape.experts and not layout.sequence:
        yield "sequence False with tensor and experts; allowed is True: a token is sent once"
    if expert == 1:
        return
    devices = layout.tensor * layout.context * layout.data
    for name, whole in (("experts", shape.experts), ("tensor x context x data", devices)):
        if whole % expert or not whole:
            yield f"expert {expert} does not divide {name} {whole}; it must"
    if layout.sharding == "hsdp":
        yield f"expert {expert} with sharding hsdp; allowed is 1, since nodes hold the same then"
