"""How long a step of a layout takes: what each micro-batch asks of a device, and what hides.

Three answers: ``floor``, where all messages run beside computation; ``serial``, where none do; and
``expected``, where those of FSDP, data parallelism and pipeline do, and tensor, context and expert
parallelism's, which the next operation waits for, do not. Collectives are rings over two levels of
links; sequence parallelism's are those of Korthikanti et al., 2022.
"""

from __future__ import annotations

from typing import NamedTuple

from a2lib.theory.attention import attention_flops
from a2lib.theory.collectives import all_gather_s, all_to_all_s
from a2lib.theory.jobs import Job, score_bytes
from a2lib.theory.other_axes import ring_attention_bytes, stage_boundary_bytes
from a2lib.theory.products import matmul_flops
from a2lib.theory.stages import Layout, Stage, inside, shards, stages, tables, tokens, weights


class Busy(NamedTuple):
    """Seconds that a micro-batch takes: of arithmetic, of device memory, on either links; and of
    the last two those that the next operation waits for: of tensor, context and expert."""

    compute: float
    memory: float
    links: tuple[float, float, float]  # of tensor, of data and context, of pipeline
    network: float
    waited: float


class Times(NamedTuple):
    """Seconds of a step, and what is busy in it for how long."""

    floor: float
    expected: float
    serial: float
    busy: dict[str, float]


def times(job: Job, layout: Layout) -> Times:
    """Those of a layout that keeps the rules."""
    m, every = layout.microbatches, stages(job, layout)
    busy = [_stage(job, layout, stage) for stage in every]
    fullest = max(every, key=lambda stage: weights(job, layout, stage))
    once_links, once_network = _once(job, layout, fullest)
    if layout.sharding == "none":
        updated = weights(job, layout, fullest)
    else:
        updated = weights(job, layout, fullest, 1) / shards(job, layout)
    update = job.update_bytes * updated / job.device.memory_bandwidth
    waits = waiting(job, layout)

    def pipelined(seconds: list[float]) -> tuple[float, float]:
        """Seconds of m micro-batches: the slowest stage's, and the wait for the others."""
        slowest = max(seconds)
        through = sum(s * stage.count for s, stage in zip(seconds, every, strict=True))
        return m * slowest, (through - slowest) * waits

    def together(links: tuple[float, ...]) -> float:
        return max(links) if job.device.torus else sum(links)

    def least(one: Busy) -> float:
        return max(one.compute, one.memory, together(one.links), one.network)

    def likely(one: Busy) -> float:
        return max(least(one), max(one.compute, one.memory) + one.waited)

    def in_all(one: Busy) -> float:
        tensor, data, pipeline = (m * seconds for seconds in one.links)
        return together((tensor, data + once_links, pipeline))

    links = max(in_all(one) for one in busy)
    network = m * max(one.network for one in busy) + once_network
    work, wait = pipelined([least(one) for one in busy])
    alone = [max(one.compute, one.memory) + sum(one.links) + one.network for one in busy]
    return Times(
        max(work + wait, links, network) + update,
        max(sum(pipelined([likely(one) for one in busy])), links, network) + update,
        sum(pipelined(alone)) + once_links + once_network + update,
        {
            "computation": m * max(one.compute for one in busy),
            "memory bandwidth": m * max(one.memory for one in busy) + update,
            "node links": links,
            "network": network,
            "pipeline bubble": wait,
        },
    )


def waiting(job: Job, layout: Layout) -> float:
    """Seconds that the first and last micro-batch of a stage leave another idle, over those of a
    micro-batch: 1 of 1F1B, and where weights' gradients wait, less them once or twice; they are
    then no part of what comes between (Qi et al., 2024, table 2)."""
    if layout.schedule == "1f1b":
        return 1 / layout.chunks
    weight = 2 * job.shape.block_matrices / block_flops(job, 1, layout.checkpointing)
    return 1 - (2 if layout.schedule == "zb-h1" else 3) * weight


def block_flops(job: Job, rows: float, checkpointing: str) -> float:
    """Operations of a block on ``rows`` tokens, forward and backward, over all of tensor; of a
    router none."""
    shape = job.shape
    products = 2 * rows * shape.block_matrices
    # Each query meets half of the whole sequence, whichever part of it the device has; eager's
    # meets all of it, and keeps what flash computes again.
    flash = job.attention == "flash"
    scores = attention_flops(1, shape.num_heads, rows, job.context, shape.head_dim, flash,
                             "forward")  # fmt: skip
    again = {
        "none": 0,
        "selective": scores,
        "block": products + scores - matmul_flops(rows, shape.d_ff, shape.d_model),
    }
    return 3 * products + (3.5 if flash else 3) * scores + again[checkpointing]


def _stage(job: Job, layout: Layout, stage: Stage) -> Busy:
    """What one micro-batch asks of a device of a stage, forward and backward."""
    shape, t, blocks = job.shape, layout.tensor, stage.blocks
    rows, d = tokens(job, layout), job.shape.d_model
    whole = layout.checkpointing == "block"
    flops = blocks * block_flops(job, rows, layout.checkpointing)
    mixtures = (blocks - stage.dense) if shape.experts else 0
    flops += mixtures * (3 + whole) * 2 * rows * shape.router
    if stage.last:
        flops += 3 * matmul_flops(rows, shape.vocab_size, d)
    size = weights(job, layout, stage) * job.element
    # Weights pass in the forward and for either product of the backward, and if it runs again.
    moved = (3 + whole) * size
    forward, backward = score_bytes(job.precision)
    passes = 1 + (layout.checkpointing != "none")
    moved += blocks * rows * job.scores / t * (passes * forward + backward)
    tensor, context = _waited(job, layout, rows, blocks, stage.first, stage.last)
    routed = _routed(job, layout, rows, mixtures)
    data = (0.0, 0.0)
    often = {"fsdp": 3, "hsdp": 3, "zero2": 1}.get(layout.sharding, 0)
    if often:
        layers = blocks + tables(shape, stage)
        data = _added(_scaled(often, _replicated(job, layout, stage, size)),
                      _waits(job, layout, "data", often * layers))  # fmt: skip
    if layout.sharding == "hsdp":
        data = data[0], 0.0  # within a node
    hop = stage_boundary_bytes(rows, d, 1, element_bytes=job.element) / layout.rows
    # Each piece sends its output on and a gradient back, but for the model's first and last.
    hops = 2 * layout.chunks - stage.first - stage.last
    pipeline = _added(_sent(job, layout, "pipeline", hop * hops),
                      _waits(job, layout, "pipeline", hops))  # fmt: skip
    return Busy(
        compute=flops / t / job.flops,
        memory=moved / job.device.memory_bandwidth,
        links=(tensor[0], data[0] + context[0] + routed[0], pipeline[0]),
        network=tensor[1] + data[1] + context[1] + routed[1] + pipeline[1],
        waited=sum(tensor) + sum(context) + sum(routed),
    )


def _waited(
    job: Job, layout: Layout, rows: float, blocks: float, first: bool, last: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds on links and network of tensor's messages, and of context's, for ``rows`` tokens."""
    shape, t, whole = job.shape, layout.tensor, layout.checkpointing == "block"
    if layout.rows > 1:
        # Two gathers and two scatters a block in either pass, and the backward gathers the inputs
        # of the products again; a block that runs again ends before its last scatter.
        messages = gathers = blocks * (13 if whole else 10) + 2 * first + 3 * last
    else:  # an all-reduce is a scatter and a gather
        messages = blocks * (5 if whole else 4) + first + last
        gathers = 2 * messages
    ring = _ring(job, layout, "tensor", job.element * rows * shape.d_model)
    tensor = _added(_scaled(gathers, ring), _waits(job, layout, "tensor", messages))
    # The backward sends keys, values and the gradients of both.
    rounds = ring_attention_bytes(rows, shape.kv_width / t, layout.context, job.element)
    rings = blocks * (4 if whole else 3)
    context = _added(_sent(job, layout, "context", rings * rounds),
                     _waits(job, layout, "context", rings * (layout.context - 1)))  # fmt: skip
    return tensor, context


def _routed(job: Job, layout: Layout, rows: float, mixtures: float) -> tuple[float, float]:
    """Seconds on links and network of tokens that go to the experts of so many blocks and back.

    A token goes to each node of its experts once, at most to all there are, and from there to each
    of them over the links.
    """
    n, k = inside(job, layout, "expert")
    if n == 1 or not mixtures:
        return 0.0, 0.0
    shape, messages = job.shape, mixtures * (5 if layout.checkpointing == "block" else 4)
    size = messages * job.element * rows * shape.d_model
    nodes = min(shape.top_k, shape.nodes or shape.top_k, n // k)
    seconds = (all_to_all_s(size * shape.top_k, k, job.device.link),
               all_to_all_s(size * nodes, n // k, job.device.network))  # fmt: skip
    return _added(seconds, _waits(job, layout, "expert", messages))


def least_waited(job: Job, layout: Layout) -> float:
    """Seconds of a step in which a device of the average stage at least waits for messages of
    tensor and context, however many micro-batches there are; experts may be on one device."""
    if layout.tensor == layout.context == 1:
        return 0.0
    rows = job.batch * job.context / (layout.data * layout.context)
    blocks = job.shape.num_layers / layout.pipeline
    return sum(map(sum, _waited(job, layout, rows, blocks, False, False)))


def _once(job: Job, layout: Layout, stage: Stage) -> tuple[float, float]:
    """Seconds on links and network of what is sent once a step: zero1's gradients and weights,
    zero2's weights, between nodes hsdp's gradients. An all-reduce of gradients, where nothing is
    cut, sends as much as zero1."""
    if layout.sharding == "fsdp":
        return 0.0, 0.0
    first, shape = stages(job, layout)[0], job.shape
    messages = (first.blocks + tables(shape, first)) * (2 if layout.sharding == "zero1" else 1)
    rings = 1 if layout.sharding == "zero2" else 2
    size = weights(job, layout, stage) * job.element
    found = _added(_scaled(rings, _replicated(job, layout, stage, size)),
                   _waits(job, layout, "data", messages))  # fmt: skip
    return (0.0, found[1]) if layout.sharding == "hsdp" else found


def _replicated(job: Job, layout: Layout, stage: Stage, size: float) -> tuple[float, float]:
    """Seconds of a ring of a stage's weights, ``size`` bytes, over all that have the same ones: for
    its experts fewer than for the others."""
    shape = job.shape
    mixtures = (stage.blocks - stage.dense) if shape.experts else 0
    experts = mixtures * shape.experts * shape.expert_matrices / layout.expert * job.element
    if not experts:
        return _ring(job, layout, "data", size)
    return _added(_ring(job, layout, "data", size - experts),
                  _ring(job, layout, "replicas", experts))  # fmt: skip


def _ring(job: Job, layout: Layout, axis: str, size: float) -> tuple[float, float]:
    """Seconds of an all-gather that ends with ``size`` bytes, on node links and on the network.

    k of n devices are in a node: each gathers a k-th of the tensor over the network from n / k
    nodes, then all of it in its node. A reduce-scatter takes as long.
    """
    n, k = inside(job, layout, axis)
    return (all_gather_s(size, k, job.device.link),
            all_gather_s(size / k, n // k, job.device.network))  # fmt: skip


def _sent(job: Job, layout: Layout, axis: str, size: float) -> tuple[float, float]:
    """Seconds of ``size`` bytes to the next of an axis: over the network if any hop is."""
    n, k = inside(job, layout, axis)
    if n == 1:
        return 0.0, 0.0
    return (size / job.device.link, 0.0) if k == n else (0.0, size / job.device.network)


def _waits(job: Job, layout: Layout, axis: str, messages: int) -> tuple[float, float]:
    """Seconds that so many messages along an axis take beside their bytes, on either links."""
    n, k = inside(job, layout, axis)
    each = messages * job.device.latency
    if axis in ("context", "pipeline"):  # a hop, over the network if any is
        return (each if 1 < n == k else 0.0, each if k < n else 0.0)
    return (each if k > 1 else 0.0, each if n > k else 0.0)


def _added(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _scaled(times: float, seconds: tuple[float, float]) -> tuple[float, float]:
    return times * seconds[0], times * seconds[1]
