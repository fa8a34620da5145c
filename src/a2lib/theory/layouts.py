"""What a 4D layout of a Transformer on N devices holds and how long its step takes at least.

A layout cuts the batch over ``data``, each matrix over ``tensor``, the blocks over ``pipeline`` and
the sequence over ``context`` devices. For each one: bytes of a device by component, and the least
time of a step. ``ASSUMPTIONS`` is what the figures rest on; every plan is printed with it. On one
GPU the memory agrees with the measured peaks of whole models (tests/theory/test_jobs.py); cut over
several it was compared with none. Links have their makers' bandwidth and no latency, or those of
the job's device.

ZeRO: Rajbhandari et al., 2020. Tensor parallelism: Shoeybi et al., 2019. 1F1B: Narayanan et al.,
2021. Ring attention: Liu et al., 2023. The formulas of each axis are those of parallelism.py and
other_axes.py; collectives are rings over two levels of links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from a2lib.theory.attention import attention_flops
from a2lib.theory.collectives import all_gather_s
from a2lib.theory.jobs import NARROW, OPTIMIZERS, WIDE, Job, check_names, score_bytes
from a2lib.theory.other_axes import peak_microbatches, ring_attention, stage_boundary_bytes
from a2lib.theory.products import check_sizes, matmul_flops
from a2lib.theory.transformer import Shape, step_flops

AXES = ("data", "tensor", "pipeline", "context")
SHARDINGS, STRATEGIES = ("none", "zero1", "fsdp"), ("none", "block")
# fp32 tensors of the logits' shape: log-softmax, its gradient, that of the logits (gone by then).
LOGIT_TENSORS = 3
# fp32 matrices of scores that eager's softmax has in its backward (eager.py): dp, dp p, ds.
SCORE_TENSORS = 3

ASSUMPTIONS = (
    "parameters and gradients in fp32 (8 bytes a parameter), the optimizer's state beside them "
    "(AdamW's two moments: 8 more); computation and messages in bf16 under autocast, else in fp32",
    "fsdp cuts all of that over data x context and gathers a block for each pass of each "
    "micro-batch (three of the largest layer are there at once: in use, next, gradients); "
    "zero1 keeps gradients and the weights it computes with whole and exchanges both once a step; "
    "none keeps all of it whole and exchanges gradients once a step",
    "the search leaves none out: zero1 sends as many bytes and holds less on several devices",
    "activations as this library's block keeps them (saved.py); eager attention adds the scores, a "
    "mask, and three fp32 matrices of scores while it goes backward; tensor parallelism cuts the "
    "heads and the FFN's hidden, not the residual stream and the norms",
    "checkpointing none keeps all of that, block keeps each block's fp32 input and runs the block "
    "again but for its last product",
    "gradients come as activations go if a step has one micro-batch, and are there all the time if "
    "it has more; 12 bytes a logit, for all tokens of a micro-batch at once; cuBLAS's workspaces "
    "on NVIDIA's devices; no allocator's blocks, no buffers of a communication library",
    "pipeline: 1F1B, stages of equal blocks, the embedding in the first and the head in the last; "
    "micro-batches are whole sequences",
    "communication runs beside computation; axes on the same links wait for each other, node links "
    "and network do not; on a torus tensor, data with context, and pipeline have an axis each; a "
    "message costs its bytes over the maker's bandwidth and no latency, unless others are given; "
    "a layer's weights or gradients are one message",
    "axes are laid out tensor, context, data, pipeline, the first within a node",
    "FlashAttention computes half of the scores and its backward 2.5 forwards, eager all of them "
    "and 2; matrix products at the given share of the maker's peak, or their weights at the "
    "memory's bandwidth; of what is elementwise eager's scores alone; the optimizer at the "
    "memory's bandwidth",
)


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
    """Seconds that a micro-batch takes: of arithmetic, of device memory, on either links."""

    compute: float
    memory: float
    links: tuple[float, float, float]  # of tensor, of data and context, of pipeline
    network: float


@dataclass(frozen=True)
class Plan:
    """A layout with bytes by component on its fullest device at the fullest ``moment``, and the
    seconds of a step.

    ``step_s`` is the floor, where communication hides; ``serial_s`` what it takes if none does.
    ``busy`` has seconds by what may bind, the largest being ``bound``.
    """

    layout: Layout
    memory: dict[str, float]
    moment: str
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
    check_names(layout, sharding=SHARDINGS, checkpointing=STRATEGIES)
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
    if axis == "context" and size > 1 and job.attention == "eager":
        raise ValueError(
            f"context {size} with eager attention; allowed is 1, since a ring of keys needs flash"
        )


def evaluate(job: Job, layout: Layout) -> Plan:
    """The plan of one layout, whether or not it fits. Raises ValueError as ``check``."""
    check(job, layout)
    return timed(job, layout, *memory(job, layout))


def memory(job: Job, layout: Layout) -> tuple[str, dict[str, float]]:
    """The fullest moment of a step on the fullest device, which is of the first or of the last
    stage of a layout, and its bytes by component."""
    p = layout.pipeline
    ends = [(True, p == 1), (False, True)] if p > 1 else [(True, True)]
    moments = [moment for end in ends for moment in _stage_memory(job, layout, *end)]
    return max(moments, key=lambda moment: sum(moment[1].values()))


def _stage_memory(
    job: Job, layout: Layout, first: bool, last: bool
) -> list[tuple[str, dict[str, float]]]:
    """Bytes by component at the moments of which one is the fullest.

    With one micro-batch gradients come as activations go, each block leaving G and freeing A. That
    is linear in the blocks, so one of its ends is the fullest, or the logits before it.
    """
    shape, t, n = job.shape, layout.tensor, layout.shards
    blocks = shape.num_layers / layout.pipeline
    weights = _weights(job, layout, first, last)
    fsdp, bf16, element = layout.sharding == "fsdp", job.precision == "bf16", job.element
    table, block = shape.vocab_size * shape.d_model / t, _block_weights(shape, t)
    head = table + shape.d_model if last else 0
    tokens = _tokens(job, layout)
    whole, cut = job.saved
    mask = job.context**2 if job.attention == "eager" else 0
    kept_whole, entry = tokens * (whole + cut / t) + mask, tokens * WIDE * shape.d_model
    stays = kept_whole if layout.checkpointing == "none" else entry
    held = peak_microbatches("1f1b", layout.pipeline, layout.microbatches) if first else 1
    # In a block's backward: the residual's gradient in fp32 and in what is computed with, and three
    # tensors of the FFN's hidden or of eager's scores.
    inner = max(3 * element * shape.d_ff / t, SCORE_TENSORS * WIDE * job.scores / t)
    temporary = kept_whole - stays + tokens * ((WIDE + element) * shape.d_model + inner)
    # The last norm, in and out, and under autocast the head's narrow input.
    top = tokens * (2 * WIDE + (NARROW if bf16 else 0)) * shape.d_model if last else 0
    logits = tokens * shape.vocab_size / t * LOGIT_TENSORS * WIDE if last else 0
    state = {
        "parameters": WIDE * weights / (n if fsdp or (layout.sharding == "zero1" and bf16) else 1),
        "optimizer": OPTIMIZERS[job.optimizer] * weights / (1 if layout.sharding == "none" else n),
    }

    def at(gone: float, gradients: float, kept: float, temporaries: float) -> dict[str, float]:
        """The components when so many weights are done with, and so many have gradients."""
        if fsdp:
            working = element * 3 * max(block, table if first or last else 0)
        elif not bf16:
            working = 0  # the weights are what is computed with
        elif layout.sharding == "zero1":
            working = NARROW * weights
        else:  # autocast's copies, which go with the graph; the embedding has none
            working = NARROW * (weights - first * table - gone)
        return {
            "parameters": state["parameters"],
            "gradients": WIDE * gradients / (n if fsdp else 1),
            "optimizer": state["optimizer"],
            "working weights": working,
            "activations": kept,
            "temporaries": temporaries + job.device.workspace,
        }

    everything = held * blocks * stays + top
    before = head + (blocks - 1) * block
    if layout.microbatches > 1:
        return [("accumulating", at(0, weights, everything, max(temporary, logits)))]
    return [
        ("loss", at(0, 0, everything, logits)),
        ("first block's backward", at(head, head, everything - top, temporary)),
        ("last block's backward", at(before, before, stays, temporary)),
        ("after the backward", at(weights - first * table, weights, 0, 0)),
    ]


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


def timed(job: Job, layout: Layout, moment: str, held: dict[str, float]) -> Plan:
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
    updated = weights / (1 if layout.sharding == "none" else layout.shards)
    update = job.update_bytes * updated / job.device.memory_bandwidth

    def pipelined(seconds: list[float]) -> tuple[float, float]:
        """Seconds of m micro-batches: the slowest stage's, and the wait for the others."""
        slowest = max(seconds)
        through = sum(s * count for s, (_, count) in zip(seconds, stages, strict=True))
        return m * slowest, through - slowest

    def together(links: tuple[float, ...]) -> float:
        return max(links) if job.device.torus else sum(links)

    def least(one: Busy) -> float:
        return max(one.compute, one.memory, together(one.links), one.network)

    def in_all(one: Busy) -> float:
        tensor, data, pipeline = (m * seconds for seconds in one.links)
        return together((tensor, data + once_links, pipeline))

    work, wait = pipelined([least(stage) for stage, _ in stages])
    links = max(in_all(stage) for stage, _ in stages)
    network = m * max(stage.network for stage, _ in stages) + once_network
    step = max(work + wait, links, network) + update
    alone = [max(one.compute, one.memory) + sum(one.links) + one.network for one, _ in stages]
    serial = sum(pipelined(alone)) + once_links + once_network + update
    busy = {
        "computation": m * max(stage.compute for stage, _ in stages),
        "memory bandwidth": m * max(stage.memory for stage, _ in stages) + update,
        "node links": links,
        "network": network,
        "pipeline bubble": wait,
    }
    share = flops_share(job, layout, step)
    return Plan(layout, held, moment, step, serial, busy, max(busy, key=busy.get), share)


def flops_share(job: Job, layout: Layout, seconds: float) -> float:
    """Model FLOPs utilisation of a step of so many seconds: the operations of the model, with half
    of the scores and nothing computed again, over the devices' peak in the job's precision."""
    useful = step_flops(job.shape, job.batch, job.context, causal=True)
    return useful / (layout.devices * job.peak * seconds)


def _stage(job: Job, layout: Layout, first: bool, last: bool) -> Busy:
    """What one micro-batch asks of a device of a stage, forward and backward."""
    shape, t, blocks = job.shape, layout.tensor, job.shape.num_layers // layout.pipeline
    tokens = _tokens(job, layout)
    again = layout.checkpointing == "block"
    flops = blocks * block_flops(job, tokens, again)
    if last:
        flops += 3 * matmul_flops(tokens, shape.vocab_size, shape.d_model)
    weights = _weights(job, layout, first, last) * job.element
    # Weights pass in the forward and for either product of the backward, and if it runs again.
    moved = (3 + again) * weights
    forward, backward = score_bytes(job.precision)
    moved += blocks * tokens * job.scores / t * ((1 + again) * forward + backward)
    d = shape.d_model
    message = job.element * tokens * d
    # Two sums a block in either pass; a block that runs again ends before its last.
    sums = blocks * (5 if again else 4) + first + last
    tensor = _added(_scaled(2 * sums, _ring(job, layout, "tensor", message)),
                    _waits(job, layout, "tensor", sums))  # fmt: skip
    data = (0.0, 0.0)
    if layout.sharding == "fsdp":
        data = _added(_scaled(3, _ring(job, layout, "data", weights)),
                      _waits(job, layout, "data", 3 * (blocks + first + last)))  # fmt: skip
    # The backward sends keys, values and the gradients of both.
    rounds = ring_attention(tokens, d / t, d / t, layout.context, 1, 1,
                            element_bytes=job.element).bytes  # fmt: skip
    rings = blocks * (4 if again else 3)
    context = _added(_sent(job, layout, "context", rings * rounds),
                     _waits(job, layout, "context", rings * (layout.context - 1)))  # fmt: skip
    hop = stage_boundary_bytes(tokens, d, 1, element_bytes=job.element)
    hops = (not last) + (not first)
    pipeline = _added(_sent(job, layout, "pipeline", hop * hops),
                      _waits(job, layout, "pipeline", hops))  # fmt: skip
    return Busy(
        compute=flops / t / job.flops,
        memory=moved / job.device.memory_bandwidth,
        links=(tensor[0], data[0] + context[0], pipeline[0]),
        network=tensor[1] + data[1] + context[1] + pipeline[1],
    )


def block_flops(job: Job, tokens: float, again: bool) -> float:
    """Operations of a block on ``tokens``, forward and backward, over all of tensor."""
    shape = job.shape
    square = matmul_flops(tokens, shape.d_model, shape.d_model)
    wide = matmul_flops(tokens, shape.d_ff, shape.d_model)
    # Each query meets half of the whole sequence, whichever part of it the device has; eager's
    # meets all of it, and keeps what flash computes again.
    flash = job.attention == "flash"
    scores = attention_flops(1, shape.num_heads, tokens, job.context, shape.head_dim, flash,
                             "forward")  # fmt: skip
    forward = 4 * square + 3 * wide + scores
    both = 3 * (4 * square + 3 * wide) + (3.5 if flash else 3) * scores
    return both + (forward - wide if again else 0)


def _once(job: Job, layout: Layout, weights: float) -> tuple[float, float]:
    """Seconds on links and network of zero1's gradients and weights, sent once a step. An
    all-reduce of gradients, where nothing is cut, sends as much."""
    if layout.sharding == "fsdp":
        return 0.0, 0.0
    # One for each block and for either table that the device has.
    layers = job.shape.num_layers // layout.pipeline + (2 if layout.pipeline == 1 else 1)
    messages = layers * (2 if layout.sharding == "zero1" else 1)
    return _added(_scaled(2, _ring(job, layout, "data", job.element * weights)),
                  _waits(job, layout, "data", messages))  # fmt: skip


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


def _waits(job: Job, layout: Layout, axis: str, messages: int) -> tuple[float, float]:
    """Seconds that so many messages along an axis take beside their bytes, on either links."""
    n, k = _inside(job, layout, axis)
    each = messages * job.device.latency
    if axis in ("context", "pipeline"):  # a hop, over the network if any is
        return (each if 1 < n == k else 0.0, each if k < n else 0.0)
    return (each if k > 1 else 0.0, each if n > k else 0.0)


def _added(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


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
