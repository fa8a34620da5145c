"""What a 4D layout of a Transformer on N devices holds and how long its step takes at least.

A layout cuts the batch over ``data``, each matrix over ``tensor``, the blocks over ``pipeline`` and
the sequence over ``context`` devices. For each one: bytes of a device by component, and the least
time of a step. ``ASSUMPTIONS`` is what the figures rest on; every plan is printed with it. On one
device the memory is more than ``step_memory`` counts tensor by tensor, since gradients are taken to
be there all the time; links have their makers' bandwidth, since no collective is measured.

ZeRO: Rajbhandari et al., 2020. Tensor parallelism: Shoeybi et al., 2019. 1F1B: Narayanan et al.,
2021. Ring attention: Liu et al., 2023. The formulas of each axis are those of parallelism.py and
other_axes.py; collectives are rings over two levels of links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from a2lib.theory.attention import attention_flops
from a2lib.theory.collectives import all_gather_s
from a2lib.theory.devices import Device
from a2lib.theory.other_axes import peak_microbatches, ring_attention, stage_boundary_bytes
from a2lib.theory.products import check_sizes, matmul_flops
from a2lib.theory.saved import block_saved
from a2lib.theory.transformer import Shape, step_flops

AXES = ("data", "tensor", "pipeline", "context")
SHARDINGS, STRATEGIES = ("zero1", "fsdp"), ("none", "block")
WIDE, NARROW = 4, 2  # bytes of fp32, of bf16
# The bf16 logits, and in fp32 their log-softmax, the gradient of it and that of the logits.
LOGIT_BYTES = 14
# Bytes of parameters, gradients and two moments that AdamW reads, and what it writes but gradients.
ADAMW_BYTES = 7 * WIDE

ASSUMPTIONS = (
    "parameters, gradients and AdamW's two moments in fp32 (16 bytes a parameter), computation and "
    "messages in bf16",
    "fsdp cuts all of that over data x context and gathers a block for each pass of each "
    "micro-batch (three of the largest layer in bf16 are there at once: in use, next, gradients); "
    "zero1 keeps gradients and bf16 weights whole and exchanges both once a step",
    "plain replicas (DDP) are left out: zero1 sends as many bytes and holds less",
    "activations as this library's block under bf16 autocast with FlashAttention (saved.py); "
    "tensor parallelism cuts the heads and the FFN's hidden, not the residual stream and the norms",
    "checkpointing none keeps all of that, block keeps each block's fp32 input and runs the block "
    "again but for its last product",
    "gradients are there all the time; 14 bytes a logit, for all tokens of a micro-batch at once; "
    "no allocator's blocks, no buffers of a communication library",
    "pipeline: 1F1B, stages of equal blocks, the embedding in the first and the head in the last; "
    "micro-batches are whole sequences",
    "communication runs beside computation; axes on the same links wait for each other, node links "
    "and network do not; on a torus tensor, data with context, and pipeline have an axis each; a "
    "message costs its bytes over the maker's bandwidth and no latency",
    "axes are laid out tensor, context, data, pipeline, the first within a node",
    "causal attention, half of the scores, its backward 2.5 forwards; matrix products at the "
    "maker's peak, or their weights at the memory's bandwidth; nothing elementwise; AdamW at the "
    "memory's bandwidth",
)


@dataclass(frozen=True)
class Job:
    """What is to be trained on what: at most ``devices`` of ``device``, which may be used but for
    the share ``headroom`` of their memory; ``batch`` sequences of ``context`` tokens a step.

    Raises ValueError, in one line, for sizes that are not positive integers and for a headroom that
    is not from 0 to below 1.
    """

    shape: Shape
    device: Device
    devices: int
    batch: int
    context: int
    headroom: float = 0.1

    def __post_init__(self) -> None:
        check_sizes(devices=self.devices, batch=self.batch, context=self.context)
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is {self.headroom!r}; allowed are numbers from 0 to < 1")

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may use."""
        return (1 - self.headroom) * self.device.memory

    @cached_property
    def saved(self) -> tuple[int, int]:
        """Bytes that a token of one block leaves: whole on, and cut over, tensor's devices."""
        kept = [one for one in block_saved(self.shape, 1, 1, "flash", "bf16")
                if one.what != "16-bit weight"]  # fmt: skip
        whole = sum(one.bytes for one in kept
                    if one.module in ("ln1", "ln2") or one.what == "16-bit norm")  # fmt: skip
        return whole, sum(one.bytes for one in kept) - whole


@dataclass(frozen=True)
class Layout:
    """Devices along each axis, micro-batches of a step, how state is cut, what is kept."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatches: int = 1
    sharding: str = "fsdp"
    checkpointing: str = "none"

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Devices that state is cut over: those of data and of context."""
        return self.data * self.context


class Busy(NamedTuple):
    """Seconds that a micro-batch takes: of arithmetic, of reading weights, on either links."""

    compute: float
    weights: float
    links: tuple[float, float, float]  # of tensor, of data and context, of pipeline
    network: float


@dataclass(frozen=True)
class Plan:
    """A layout with bytes by component on its fullest device, and the seconds of a step.

    ``step_s`` is the floor, where communication hides; ``serial_s`` what it takes if none does.
    ``busy`` has seconds by what may bind, the largest being ``bound``.
    """

    layout: Layout
    memory: dict[str, float]
    step_s: float
    serial_s: float
    busy: dict[str, float]
    bound: str
    flops_share: float

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())


def check(job: Job, layout: Layout) -> None:
    """Raise ValueError, in one line that names the rule, for a layout that breaks one."""
    check_sizes(**{name: getattr(layout, name) for name in (*AXES, "microbatches")})
    for name, allowed in (("sharding", SHARDINGS), ("checkpointing", STRATEGIES)):
        if getattr(layout, name) not in allowed:
            raise ValueError(f"{name} {getattr(layout, name)!r}: allowed are {', '.join(allowed)}")
    for axis in AXES:
        check_axis(job, axis, getattr(layout, axis))
    if job.batch // layout.data % layout.microbatches:
        raise ValueError(
            f"microbatches {layout.microbatches} does not divide the {job.batch // layout.data} "
            f"sequences of a data rank (batch {job.batch} / data {layout.data}); it must"
        )
    if layout.devices > job.devices:
        raise ValueError(
            f"data x tensor x pipeline x context is {layout.devices}; allowed are at most the "
            f"{job.devices} devices"
        )


def check_axis(job: Job, axis: str, size: int) -> None:
    """Raise ValueError, in one line, unless ``size`` divides what its axis cuts."""
    check_sizes(**{axis: size})
    for name, whole in cut_by_axis(job)[axis].items():
        if whole % size:
            raise ValueError(f"{axis} {size} does not divide {name} {whole}; it must")
    if axis == "context" and size > 1 and job.context % (2 * size):
        raise ValueError(
            f"context {size}: its double does not divide context length {job.context}; it must, "
            "since each device has an early and a late part of a causal sequence"
        )


def evaluate(job: Job, layout: Layout) -> Plan:
    """The plan of one layout, whether or not it fits. Raises ValueError as ``check``."""
    check(job, layout)
    return timed(job, layout, memory(job, layout))


def memory(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes by component on the fullest device, of the first or of the last stage of a layout."""
    p = layout.pipeline
    ends = [(True, p == 1), (False, True)] if p > 1 else [(True, True)]
    return max((_stage_memory(job, layout, *end) for end in ends), key=lambda m: sum(m.values()))


def _stage_memory(job: Job, layout: Layout, first: bool, last: bool) -> dict[str, float]:
    shape, t, n = job.shape, layout.tensor, layout.shards
    weights = _weights(job, layout, first, last)
    fsdp = layout.sharding == "fsdp"
    table = shape.vocab_size * shape.d_model / t
    largest = max(_block_weights(shape, t), table if first or last else 0)
    tokens = _tokens(job, layout)
    whole, cut = job.saved
    kept_whole, entry = tokens * (whole + cut / t), tokens * WIDE * shape.d_model
    stays = kept_whole if layout.checkpointing == "none" else entry
    held = peak_microbatches("1f1b", layout.pipeline, layout.microbatches) if first else 1
    activations = held * shape.num_layers / layout.pipeline * stays
    # In a block's backward: the residual's gradient, wide and narrow, three of the FFN's hidden.
    temporary = kept_whole - stays + tokens * (6 * shape.d_model + 6 * shape.d_ff / t)
    if last:  # the last norm, in and out, and the head's narrow input
        activations += tokens * (2 * WIDE + NARROW) * shape.d_model
        temporary = max(temporary, LOGIT_BYTES * tokens * shape.vocab_size / t)
    return {
        "parameters": WIDE * weights / n,
        "gradients": WIDE * weights / (n if fsdp else 1),
        "optimizer": 2 * WIDE * weights / n,
        "working weights": NARROW * (3 * largest if fsdp else weights),
        "activations": activations,
        "temporaries": temporary,
    }


def _block_weights(shape: Shape, t: int) -> float:
    """Parameters of a block on one of ``t`` devices: the norms are on each."""
    return (4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff) / t + 2 * shape.d_model


def _weights(job: Job, layout: Layout, first: bool, last: bool) -> float:
    """Parameters of a stage on one of tensor's devices, before they are cut over data."""
    shape, t = job.shape, layout.tensor
    table = shape.vocab_size * shape.d_model / t
    blocks = shape.num_layers / layout.pipeline * _block_weights(shape, t)
    return blocks + first * table + last * (table + shape.d_model)


def _tokens(job: Job, layout: Layout) -> float:
    """Tokens of a micro-batch on one device."""
    return job.batch // layout.data // layout.microbatches * (job.context // layout.context)


def timed(job: Job, layout: Layout, held: dict[str, float]) -> Plan:
    """``evaluate`` of a layout that was checked and whose ``memory`` is known."""
    m, p = layout.microbatches, layout.pipeline
    if p == 1:
        stages = [(_stage(job, layout, True, True), 1)]
    else:
        stages = [(_stage(job, layout, True, False), 1), (_stage(job, layout, False, False), p - 2),
                  (_stage(job, layout, False, True), 1)]  # fmt: skip
        stages = [(stage, count) for stage, count in stages if count]
    weights = max(_weights(job, layout, True, p == 1), _weights(job, layout, p == 1, True))
    once_links, once_network = _once(job, layout, weights)
    adamw = ADAMW_BYTES * weights / layout.shards / job.device.memory_bandwidth

    def pipelined(seconds: list[float]) -> tuple[float, float]:
        """Seconds of m micro-batches: the slowest stage's, and the wait for the others."""
        slowest = max(seconds)
        through = sum(s * count for s, (_, count) in zip(seconds, stages, strict=True))
        return m * slowest, through - slowest

    def together(links: tuple[float, ...]) -> float:
        return max(links) if job.device.torus else sum(links)

    def least(one: Busy) -> float:
        return max(one.compute, one.weights, together(one.links), one.network)

    def in_all(one: Busy) -> float:
        tensor, data, pipeline = (m * seconds for seconds in one.links)
        return together((tensor, data + once_links, pipeline))

    work, wait = pipelined([least(stage) for stage, _ in stages])
    links = max(in_all(stage) for stage, _ in stages)
    network = m * max(stage.network for stage, _ in stages) + once_network
    step = max(work + wait, links, network) + adamw
    alone = [max(one.compute, one.weights) + sum(one.links) + one.network for one, _ in stages]
    serial = sum(pipelined(alone)) + once_links + once_network + adamw
    busy = {
        "computation": m * max(stage.compute for stage, _ in stages),
        "memory bandwidth": m * max(stage.weights for stage, _ in stages) + adamw,
        "node links": links,
        "network": network,
        "pipeline bubble": wait,
    }
    useful = step_flops(job.shape, job.batch, job.context, causal=True)
    share = useful / (layout.devices * job.device.flops * step)
    return Plan(layout, held, step, serial, busy, max(busy, key=busy.get), share)


def _stage(job: Job, layout: Layout, first: bool, last: bool) -> Busy:
    """What one micro-batch asks of a device of a stage, forward and backward."""
    shape, t, blocks = job.shape, layout.tensor, job.shape.num_layers // layout.pipeline
    tokens = _tokens(job, layout)
    again = layout.checkpointing == "block"
    flops = blocks * block_flops(job, tokens, again)
    if last:
        flops += 3 * matmul_flops(tokens, shape.vocab_size, shape.d_model)
    weights = _weights(job, layout, first, last) * NARROW
    # Weights pass in the forward and for either product of the backward, and if it runs again.
    reading = (3 + again) * weights / job.device.memory_bandwidth
    d = shape.d_model
    message = NARROW * tokens * d
    # Two sums a block in either pass; a block that runs again ends before its last.
    sums = blocks * (5 if again else 4) + first + last
    tensor = _scaled(2 * sums, _ring(job, layout, "tensor", message))
    data = (0.0, 0.0)
    if layout.sharding == "fsdp":
        data = _scaled(3, _ring(job, layout, "data", weights))
    # The backward sends keys, values and the gradients of both.
    rounds = ring_attention(tokens, d / t, d / t, layout.context, 1, 1).bytes
    context = _sent(job, layout, "context", blocks * (4 if again else 3) * rounds)
    hops = stage_boundary_bytes(tokens, d, 1) * ((not last) + (not first))
    pipeline = _sent(job, layout, "pipeline", hops)
    return Busy(
        compute=flops / t / job.device.flops,
        weights=reading,
        links=(tensor[0], data[0] + context[0], pipeline[0]),
        network=tensor[1] + data[1] + context[1] + pipeline[1],
    )


def block_flops(job: Job, tokens: float, again: bool) -> float:
    """Operations of a block on ``tokens``, forward and backward, over all of tensor."""
    shape = job.shape
    square = matmul_flops(tokens, shape.d_model, shape.d_model)
    wide = matmul_flops(tokens, shape.d_ff, shape.d_model)
    # Each query meets half of the whole sequence, whichever part of it the device has.
    scores = attention_flops(1, shape.num_heads, tokens, job.context, shape.head_dim, True,
                             "forward")  # fmt: skip
    forward = 4 * square + 3 * wide + scores
    return 3 * (4 * square + 3 * wide) + 3.5 * scores + (forward - wide if again else 0)


def _once(job: Job, layout: Layout, weights: float) -> tuple[float, float]:
    """Seconds on links and network of zero1's gradients and weights, sent once a step."""
    if layout.sharding == "fsdp":
        return 0.0, 0.0
    return _scaled(2, _ring(job, layout, "data", NARROW * weights))


def _inside(job: Job, layout: Layout, axis: str) -> tuple[int, int]:
    """Devices of an axis' group, and how many of them are in one node.

    The greatest number that lies in every node evenly. Data's group is that of context too.
    """
    t, c, d = layout.tensor, layout.context, layout.data
    before, n = {"tensor": (1, t), "context": (t, c), "data": (t, c * d),
                 "pipeline": (t * c * d, layout.pipeline)}[axis]  # fmt: skip
    node = job.device.node
    if layout.devices <= node:
        return n, n
    return n, math.gcd(n, node // before) if node % before == 0 else 1


def _ring(job: Job, layout: Layout, axis: str, size: float) -> tuple[float, float]:
    """Seconds of an all-gather that ends with ``size`` bytes, on node links and on the network.

    k of n devices are in a node: each gathers a k-th of the tensor over the network from n / k
    nodes, then all of it in its node. A reduce-scatter takes as long.
    """
    n, k = _inside(job, layout, axis)
    return (all_gather_s(size, k, job.device.link),
            all_gather_s(size / k, n // k, job.device.network))  # fmt: skip


def _sent(job: Job, layout: Layout, axis: str, size: float) -> tuple[float, float]:
    """Seconds of ``size`` bytes to the next of an axis: over the network if any hop is."""
    n, k = _inside(job, layout, axis)
    if n == 1:
        return 0.0, 0.0
    return (size / job.device.link, 0.0) if k == n else (0.0, size / job.device.network)


def _scaled(times: float, seconds: tuple[float, float]) -> tuple[float, float]:
    return times * seconds[0], times * seconds[1]


def cut_by_axis(job: Job) -> dict[str, dict[str, int]]:
    """What the size of each axis must divide, by name."""
    shape = job.shape
    return {
        "data": {"batch": job.batch},
        "tensor": {"num_heads": shape.num_heads, "d_ff": shape.d_ff,
                   "vocab_size": shape.vocab_size},
        "pipeline": {"num_layers": shape.num_layers},
        "context": {"context length": job.context},
    }  # fmt: skip
