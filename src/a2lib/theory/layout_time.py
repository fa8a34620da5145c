"""How long a step of a layout takes: what each micro-batch asks of a device, and what hides.

Three answers: ``floor``, where all messages run beside computation; ``serial``, where none do; and
``expected``, where those of FSDP, data parallelism and pipeline do, and tensor, context and expert
parallelism's, which the next operation waits for, do not. Collectives are rings over two levels of
links; sequence parallelism's are those of Korthikanti et al., 2022.
"""

from typing import NamedTuple, Self

from a2lib.theory.attention import attention_flops
from a2lib.theory.collectives import all_gather_s
from a2lib.theory.jobs import Job
from a2lib.theory.other_axes import ring_attention_bytes
from a2lib.theory.products import matmul_flops
from a2lib.theory.stages import Layout, Stage, inside, shards, stages, tables, tokens, weights
from a2lib.theory.step_floor import score_bytes


class Seconds(NamedTuple):
    """Of messages on the links of a node, and on the network."""

    links: float = 0.0
    network: float = 0.0

    def __add__(self, other: Self) -> Self:
        return Seconds(self.links + other.links, self.network + other.network)


class Busy(NamedTuple):
    """Seconds that a micro-batch takes: of arithmetic, of device memory, on either links; and of
    the last two those that the next operation waits for: of tensor, context and expert."""

    compute: float
    memory: float
    links: tuple[float, float, float]  # of tensor, of data and context, of pipeline
    network: float
    waited: float


def times(job: Job, layout: Layout) -> tuple[float, float, float, dict[str, float]]:
    """Seconds of a step, floor, expected and serial, of a layout that keeps the rules; and what is
    busy in it for how long."""
    m, every = layout.microbatches, stages(job, layout)
    busy = [_stage(job, layout, stage) for stage in every]
    fullest = max(every, key=lambda stage: weights(job, layout, stage))
    once = _once(job, layout, fullest)
    if layout.sharding == "none":
        updated = weights(job, layout, fullest)
    else:
        updated = weights(job, layout, fullest, 1) / shards(job, layout)
    update = job.update_bytes * (1 - job.frozen) * updated / job.device.memory_bandwidth
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
        return together((tensor, data + once.links, pipeline))

    links = max(in_all(one) for one in busy)
    network = m * max(one.network for one in busy) + once.network
    work, wait = pipelined([least(one) for one in busy])
    alone = [max(one.compute, one.memory) + sum(one.links) + one.network for one in busy]
    return (
        max(work + wait, links, network) + update,
        max(sum(pipelined([likely(one) for one in busy])), links, network) + update,
        sum(pipelined(alone)) + sum(once) + update,
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
    trained = 2 * (1 - job.frozen) * job.shape.block_matrices
    weight = trained / block_flops(job, 1, layout.checkpointing)
    return 1 - (2 if layout.schedule == "zb-h1" else 3) * weight


def block_flops(job: Job, rows: float, checkpointing: str) -> float:
    """Operations of a block on ``rows`` tokens, forward and backward, over all of tensor; of a
    router none, nor of gradients of what is not trained."""
    shape = job.shape
    products = 2 * rows * shape.block_matrices
    # Each query meets half of the whole sequence, whichever part of it the device has; eager's
    # meets all of it, and keeps what flash computes again.
    flash = job.attention == "flash"
    sizes = 1, shape.num_heads, rows, job.context, shape.head_dim
    scores = attention_flops(*sizes, flash, "forward")
    last = matmul_flops(rows, shape.d_ff, shape.d_model)
    again = {"none": 0, "selective": scores, "block": products + scores - last}
    return (3 - job.frozen) * products + (3.5 if flash else 3) * scores + again[checkpointing]


def stage_flops(job: Job, rows: float, stage: Stage, checkpointing: str) -> float:
    """Operations of a stage on ``rows`` tokens, as ``block_flops``, with routers and the head."""
    shape = job.shape
    flops = stage.blocks * block_flops(job, rows, checkpointing)
    passes = 3 - job.frozen  # of products: two in the backward, one of them for trained weights
    mixtures = (stage.blocks - stage.dense) if shape.experts else 0
    flops += mixtures * (passes + (checkpointing == "block")) * 2 * rows * shape.router
    return flops + stage.last * passes * matmul_flops(rows, shape.vocab_size, shape.d_model)


def _stage(job: Job, layout: Layout, stage: Stage) -> Busy:
    """What one micro-batch asks of a device of a stage, forward and backward."""
    shape, t, blocks = job.shape, layout.tensor, stage.blocks
    rows, d = tokens(job, layout), job.shape.d_model
    flops = stage_flops(job, rows, stage, layout.checkpointing)
    mixtures = (blocks - stage.dense) if shape.experts else 0
    size = weights(job, layout, stage) * job.element
    # Weights pass in the forward and for either product of the backward, and if it runs again.
    moved = (3 - job.frozen + (layout.checkpointing == "block")) * size
    forward, backward = score_bytes(job.precision)
    runs = 1 + (layout.checkpointing != "none")
    moved += blocks * rows * job.scores / t * (runs * forward + backward)
    tensor, context = _waited(job, layout, rows, blocks, stage.first, stage.last)
    routed = _routed(job, layout, rows, mixtures)
    data = Seconds()
    if often := {"fsdp": 3, "hsdp": 3, "zero2": 1}.get(layout.sharding, 0):
        layers = blocks + tables(shape, stage)
        data = _replicated(job, layout, stage, often - job.frozen, often * layers)
    if layout.sharding == "hsdp":
        data = Seconds(data.links)  # within a node
    hop = job.element * rows * d / layout.rows
    # Each piece sends its output on and a gradient back, but for the model's first and last.
    hops = 2 * layout.chunks - stage.first - stage.last
    pipeline = _hops(job, layout, "pipeline", hop * hops, hops)
    beside = data + context + routed
    return Busy(
        compute=flops / t / job.flops,
        memory=moved / job.device.memory_bandwidth,
        links=(tensor.links, beside.links, pipeline.links),
        network=(tensor + beside + pipeline).network,
        waited=sum(tensor) + sum(context) + sum(routed),
    )


def _waited(
    job: Job, layout: Layout, rows: float, blocks: float, first: bool, last: bool
) -> tuple[Seconds, Seconds]:
    """Tensor's messages, and context's, for ``rows`` tokens."""
    shape, t, whole = job.shape, layout.tensor, layout.checkpointing == "block"
    if layout.rows > 1:
        # Two gathers and two scatters a block in either pass, and the backward gathers the inputs
        # of the products again; a block that runs again ends before its last scatter.
        messages = gathers = blocks * (13 if whole else 10) + 2 * first + 3 * last
    else:  # an all-reduce is a scatter and a gather
        messages = blocks * (5 if whole else 4) + first + last
        gathers = 2 * messages
    size = gathers * job.element * rows * shape.d_model
    tensor = _rings(job, layout, "tensor", size, messages)
    # The backward sends keys, values and the gradients of both.
    rounds = ring_attention_bytes(rows, shape.kv_width / t, layout.context, job.element)
    rings = blocks * (4 if whole else 3)
    return tensor, _hops(job, layout, "context", rings * rounds, rings * (layout.context - 1))


def _routed(job: Job, layout: Layout, rows: float, mixtures: float) -> Seconds:
    """Tokens that go to the experts of so many blocks and back.

    A token goes to each node of its experts once, at most to all there are, and from there to each
    of them over the links.
    """
    n, k = inside(job, layout, "expert")
    if n == 1 or not mixtures:
        return Seconds()
    shape, messages = job.shape, mixtures * (5 if layout.checkpointing == "block" else 4)
    size = messages * job.element * rows * shape.d_model
    nodes = min(shape.top_k, shape.nodes or shape.top_k, n // k)
    late = messages * job.device.latency
    return Seconds(
        all_gather_s(size * shape.top_k, k, job.device.link) + late * (k > 1),
        all_gather_s(size * nodes, n // k, job.device.network) + late * (n > k),
    )


def least_waited(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds, a token and in any case, in which a device at least waits for messages of tensor and
    context in one block; experts may be on one device."""
    if layout.tensor == layout.context == 1:
        return 0.0, 0.0
    one, two = (sum(map(sum, _waited(job, layout, rows, 1, False, False))) for rows in (1, 2))
    return two - one, 2 * one - two


def _once(job: Job, layout: Layout, stage: Stage) -> Seconds:
    """What is sent once a step: zero1's gradients and weights, zero2's weights, between nodes
    hsdp's gradients. An all-reduce of gradients, where nothing is cut, sends as much as zero1."""
    if layout.sharding == "fsdp":
        return Seconds()
    first, shape = stages(job, layout)[0], job.shape
    messages = (first.blocks + tables(shape, first)) * (2 if layout.sharding == "zero1" else 1)
    rings = (1 if layout.sharding == "zero2" else 2) * (1 - job.frozen)
    found = _replicated(job, layout, stage, rings, messages)
    return Seconds(0.0, found.network) if layout.sharding == "hsdp" else found


def _replicated(job: Job, layout: Layout, stage: Stage, rings: float, messages: int) -> Seconds:
    """Rings of a stage's weights over all that have the same ones: for its experts fewer than for
    the others."""
    shape = job.shape
    size = rings * weights(job, layout, stage) * job.element
    mixtures = (stage.blocks - stage.dense) if shape.experts else 0
    experts = mixtures * shape.experts * shape.expert_matrices / layout.expert * job.element
    found = _rings(job, layout, "data", size - rings * experts, messages)
    return found + _rings(job, layout, "replicas", rings * experts, 0) if experts else found


def _rings(job: Job, layout: Layout, axis: str, size: float, messages: float) -> Seconds:
    """All-gathers that end with ``size`` bytes in all, in so many messages; reduce-scatters take as
    long.

    k of n devices are in a node: each gathers a k-th of the tensor over the network from n / k
    nodes, then all of it in its node.
    """
    n, k = inside(job, layout, axis)
    late = messages * job.device.latency
    return Seconds(
        all_gather_s(size, k, job.device.link) + late * (k > 1),
        all_gather_s(size / k, n // k, job.device.network) + late * (n > k),
    )


def _hops(job: Job, layout: Layout, axis: str, size: float, messages: float) -> Seconds:
    """Bytes to the next of an axis: over the network if any hop is."""
    n, k = inside(job, layout, axis)
    late = messages * job.device.latency
    if n == 1:
        return Seconds()
    if k == n:
        return Seconds(size / job.device.link + late)
    return Seconds(0.0, size / job.device.network + late)
