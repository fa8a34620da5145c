"""The seconds of a step of a layout, by part.

A device computes (matmuls, attention, elementwise kernels, the optimizer), is idle in a pipeline's
bubble, and communicates along each axis. How much of the communication hides behind computation
cannot be derived, so a step has three times: with everything hidden as far as it is shorter, with
nothing hidden, and half-way. The last is the estimate, since about half hides where it was measured
(book/parallelism-measured.md).

Collectives are rings over two levels of links. Axes on the same links wait for each other; the
links of a node and the network do not. The communication of sequence parallelism is that of
Korthikanti et al., 2022. FlashAttention computes half of the scores, and its backward as much as
2.5 forwards; eager attention computes all of them, and 2.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from a2lib.theory.attention import attention_flops
from a2lib.theory.collectives import all_gather_s
from a2lib.theory.layouts import GRADIENTS, OPTIMIZERS, Case, Stage
from a2lib.theory.other_axes import ring_attention_bytes
from a2lib.theory.products import WIDE

HIDDEN = 0.5  # the share of what can hide that the estimate takes as hidden
# Reads and writes of a score: a fused softmax between two matmuls.
SCORE_PASSES = {"forward": 4, "backward": 7}


class Seconds(NamedTuple):
    """Seconds of communication over the links of a node, and over the network."""

    links: float = 0.0
    network: float = 0.0

    def __add__(self, other: Self) -> Self:
        return Seconds(self.links + other.links, self.network + other.network)

    def times(self, n: float) -> Self:
        return Seconds(n * self.links, n * self.network)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    work: of computation and idle time, by part
    messages: of communication, by axis
    all_hidden_s, none_hidden_s: of the whole step if all communication hides, and if none does
    """

    work: dict[str, float]
    messages: dict[str, Seconds]
    all_hidden_s: float
    none_hidden_s: float

    def seconds(self, hidden: float = HIDDEN) -> float:
        """Return the seconds of a step if this share of what can hide does."""
        if not 0 <= hidden <= 1:
            raise ValueError(f"hidden is {hidden!r}; allowed are numbers from 0 to 1")
        return self.none_hidden_s - hidden * (self.none_hidden_s - self.all_hidden_s)

    @property
    def links_s(self) -> float:
        return sum(message.links for message in self.messages.values())

    @property
    def network_s(self) -> float:
        return sum(message.network for message in self.messages.values())

    @property
    def bound(self) -> str:
        """The part that takes longest: computation, node links or network."""
        parts = {
            "computation": sum(self.work.values()),
            "node links": self.links_s,
            "network": self.network_s,
        }
        return max(parts, key=parts.get)


def step_time(case: Case) -> StepTime:
    """Return the time of a step of a case that ``check`` has passed."""
    m, stages = case.layout.microbatches, case.stages
    work = [microbatch_work(case, stage) for stage in stages]
    messages = [microbatch_messages(case, stage) for stage in stages]
    compute = [sum(parts.values()) for parts in work]
    sent = [sum(by_axis.values(), Seconds()) for by_axis in messages]
    longest = [max(c, *s) for c, s in zip(compute, sent, strict=True)]
    apart = [c + sum(s) for c, s in zip(compute, sent, strict=True)]

    slowest = compute.index(max(compute))
    heaviest = max(stages, key=lambda stage: case.weights(stage).total)
    once, update = once_messages(case, heaviest), optimizer_s(case, heaviest)
    by_axis = {axis: seconds.times(m) for axis, seconds in messages[slowest].items()}
    by_axis["data"] += once

    busiest_links = m * max(seconds.links for seconds in sent) + once.links
    busiest_network = m * max(seconds.network for seconds in sent) + once.network
    hidden = m * max(longest) + bubble_s(case, longest)
    bare = m * max(apart) + bubble_s(case, apart) + sum(once)
    parts = {name: m * seconds for name, seconds in work[slowest].items()}
    parts |= {"pipeline bubble": bubble_s(case, compute), "optimizer": update}
    all_hidden = max(hidden, busiest_links, busiest_network) + update
    return StepTime(parts, by_axis, all_hidden, bare + update)


def bubble_s(case: Case, stage_s: list[float]) -> float:
    """Return the seconds that the slowest stage waits for the others' first and last micro-batch.

    1F1B waits for one micro-batch of each other stage, or for a chunk of one if stages are
    interleaved. Zero bubble waits less: two (H1) or three (H2) times the gradients of the weights
    are filled in (Qi et al., 2024, table 2).
    """
    layout = case.layout
    through = sum(s * stage.count for s, stage in zip(stage_s, case.stages, strict=True))
    others = through - max(stage_s)
    if layout.schedule == "1f1b":
        return others / layout.chunks
    weight_gradients = block_products(case) / block_flops(case)
    return others * (1 - (2 if layout.schedule == "zb-h1" else 3) * weight_gradients)


def block_products(case: Case, mixture: bool = False) -> float:
    """Return the FLOPs of a block's matmuls in the forward of a micro-batch, over all of tensor's
    devices."""
    shape = case.shape
    matrices = shape.mixture_matrices + shape.router if mixture else shape.block_matrices
    return 2 * case.tokens * matrices


def block_scores(case: Case) -> float:
    """Return the FLOPs of a block's attention in the forward. Each query meets half of the whole
    sequence, whichever part of it the device has; with eager attention it meets all."""
    shape, training = case.shape, case.training
    causal = training.attention == "flash"
    sizes = 1, shape.num_heads, case.tokens, training.context, shape.head_dim
    return attention_flops(*sizes, causal, "forward")


def product_passes(case: Case, mixture: bool = False) -> float:
    """Return how many forwards of a block's matmuls a step computes: three, and with recomputation
    one more without its last matmul, which nothing in the backward needs."""
    if case.layout.checkpointing != "block":
        return 3
    shape = case.shape
    last = 2 * case.tokens * shape.d_model * (shape.routed_ff if mixture else shape.d_ff)
    return 4 - last / block_products(case, mixture)


def score_passes(case: Case) -> float:
    """Return how many forwards of attention a step computes."""
    again = case.layout.checkpointing != "none"
    return (3.5 if case.training.attention == "flash" else 3) + again


def block_flops(case: Case) -> float:
    """Return the FLOPs of a dense block in a step's forward and backward."""
    products = product_passes(case) * block_products(case)
    return products + score_passes(case) * block_scores(case)


def microbatch_work(case: Case, stage: Stage) -> dict[str, float]:
    """Return the seconds of a micro-batch's forward and backward on a device of a stage."""
    training, device, shape = case.training, case.device, case.shape
    t, peak = case.layout.tensor, training.peak(device)
    products = stage.dense * product_passes(case) * block_products(case)
    if stage.mixtures:
        passes = product_passes(case, mixture=True)
        products += stage.mixtures * passes * block_products(case, mixture=True)
    if stage.last:
        products += 3 * 2 * case.tokens * shape.vocab_size * shape.d_model
    # Weights are read in the forward, for both matmuls of the backward, and for recomputation.
    reads = 4 if case.layout.checkpointing == "block" else 3
    read_s = reads * training.element * case.weights(stage).total / device.memory_bandwidth
    scores = stage.blocks * score_passes(case) * block_scores(case)
    return {
        "products": max(products / t / (training.efficiency * peak), read_s),
        "attention": scores / t / (training.attention_efficiency * peak),
        "elementwise": elementwise_bytes(case, stage) / device.memory_bandwidth,
    }


def elementwise_bytes(case: Case, stage: Stage) -> float:
    """Return the bytes that a micro-batch's elementwise kernels read and write, if everything
    between two matmuls is one kernel.

    Counted in widths per token, in forward and backward each: two residual additions with their
    norms read and write 4 widths of the stream, and RoPE 2 of queries and keys. The gate reads 2
    and writes 1 of the hidden width; its backward reads 3 and writes 2. The loss reads the logits
    twice and writes their gradient.
    """
    training, shape, layout = case.training, case.shape, case.layout
    e, t = training.element, layout.tensor
    again = 1 if layout.checkpointing == "block" else 0
    stream = training.residual * 2 * 4 * shape.d_model / layout.rows
    rope = e * 2 * (shape.q_width / t + case.kv_width)
    every_pass = (2 + again) * (stream + rope)
    gate_forward, gate_backward = (3, 5) if shape.gated else (2, 3)
    gate = e * ((1 + again) * gate_forward + gate_backward) / t
    hidden = gate * (stage.dense * shape.d_ff + stage.mixtures * shape.routed_ff)
    forward = 1 + (layout.checkpointing != "none")
    passes = forward * SCORE_PASSES["forward"] + SCORE_PASSES["backward"]
    scores = e * passes * training.scores / t
    loss = stage.last * 3 * e * shape.vocab_size / t
    return case.tokens * (stage.blocks * (every_pass + scores) + hidden + loss)


def optimizer_s(case: Case, stage: Stage) -> float:
    """Return the seconds of the optimizer: it reads weights, gradients and its state, and writes
    weights and state."""
    training, weights = case.training, case.weights(stage)
    moved = 2 * WIDE + GRADIENTS[training.gradients] + 2 * OPTIMIZERS[training.optimizer]
    updated = weights.total if case.layout.sharding == "none" else case.sharded(weights)
    return moved * updated / case.device.memory_bandwidth


def microbatch_messages(case: Case, stage: Stage) -> dict[str, Seconds]:
    """Return the communication of a micro-batch on a device of a stage, by axis."""
    return {
        "tensor": tensor_messages(case, stage),
        "context": context_messages(case, stage),
        "expert": expert_messages(case, stage),
        "data": data_messages(case, stage),
        "pipeline": pipeline_messages(case, stage),
    }


def tensor_messages(case: Case, stage: Stage) -> Seconds:
    """Return tensor parallelism's all-gathers and reduce-scatters of the residual stream.

    With sequence parallelism, attention and the feed-forward layer each gather and scatter once per
    pass, and the backward gathers the matmuls' inputs again: five each. A recomputed block gathers
    and scatters once more, without its last scatter. Embedding and head have two and three. Without
    sequence parallelism each half of a block has an all-reduce per pass, which is two of these.
    Experts get their tokens by ``expert_messages``; a shared one is sharded as a dense layer is.
    """
    layout = case.layout
    again = layout.checkpointing == "block"
    ffns = stage.blocks if case.shape.shared else stage.dense
    if layout.rows > 1:
        messages = stage.blocks * (7 if again else 5) + ffns * (6 if again else 5)
        messages += 2 * stage.first + 3 * stage.last
        rings = messages
    else:
        messages = stage.blocks * (3 if again else 2) + ffns * 2 + stage.first + stage.last
        rings = 2 * messages
    size = rings * case.training.element * case.tokens * case.shape.d_model
    return _rings(case, "tensor", size, messages)


def context_messages(case: Case, stage: Stage) -> Seconds:
    """Return ring attention's rounds: keys and values, and in the backward these and their
    gradients."""
    n = case.layout.context
    rings = stage.blocks * (4 if case.layout.checkpointing == "block" else 3)
    size = ring_attention_bytes(case.tokens, case.kv_width, n, case.training.element)
    return _hops(case, "context", rings * size, rings * (n - 1))


def expert_messages(case: Case, stage: Stage) -> Seconds:
    """Return the all-to-alls of tokens to their experts and back, in both passes.

    A token travels to each node of its experts once, and from there to each expert over the links.
    """
    shape, layout, device = case.shape, case.layout, case.device
    group = case.group("expert")
    if group.size == 1 or not stage.mixtures:
        return Seconds()
    messages = stage.mixtures * (5 if layout.checkpointing == "block" else 4)
    size = messages * case.training.element * case.tokens / layout.rows * shape.d_model
    n_nodes = group.size // group.inside
    nodes = min(shape.top_k, shape.nodes or shape.top_k, n_nodes)
    late = messages * device.latency
    return Seconds(
        all_gather_s(size * shape.top_k, group.inside, device.link) + late * (group.inside > 1),
        all_gather_s(size * nodes, n_nodes, device.network) + late * (n_nodes > 1),
    )


def data_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication of weights and gradients per micro-batch: FSDP gathers a layer in
    each pass and scatters its gradients; zero2 only scatters."""
    sharding = case.layout.sharding
    rings = {"fsdp": 3, "hsdp": 3, "zero2": 1}.get(sharding, 0)
    if not rings:
        return Seconds()
    sent = _weight_rings(case, stage, rings, rings * _layers(case, stage))
    return Seconds(sent.links) if sharding == "hsdp" else sent


def once_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication of weights and gradients once per step: zero1's scatter and gather
    (an all-reduce without sharding sends as much), zero2's gather, and hsdp's gradients between
    nodes."""
    sharding = case.layout.sharding
    if sharding == "fsdp":
        return Seconds()
    messages = _layers(case, case.stages[0]) * (2 if sharding == "zero1" else 1)
    sent = _weight_rings(case, stage, 1 if sharding == "zero2" else 2, messages)
    return Seconds(network=sent.network) if sharding == "hsdp" else sent


def pipeline_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication with the next stages: each chunk sends its output on and a gradient
    back, except the model's first and last. Each of tensor's devices sends a part; without sequence
    parallelism the next ones gather it."""
    layout = case.layout
    hops = 2 * layout.chunks - stage.first - stage.last
    size = hops * case.training.element * case.tokens * case.shape.d_model
    sent = _hops(case, "pipeline", size / layout.tensor, hops)
    if layout.pipeline == 1 or layout.rows == layout.tensor:
        return sent
    return sent + _rings(case, "tensor", size, hops)


def _layers(case: Case, stage: Stage) -> int:
    return stage.blocks + case.tables(stage)


def _weight_rings(case: Case, stage: Stage, rings: int, messages: int) -> Seconds:
    """Return so many rings of a stage's weights over all devices that have the same ones."""
    weights, element = case.weights(stage), case.training.element
    sent = _rings(case, "data", rings * element * weights.dense, messages)
    if weights.experts:
        sent += _rings(case, "replicas", rings * element * weights.experts, 0)
    return sent


def _rings(case: Case, axis: str, size: float, messages: float) -> Seconds:
    """Return the time of all-gathers, or reduce-scatters, of ``size`` bytes in so many messages.

    Each of the k devices of a node gathers a k-th from the other nodes over the network, then all
    of it within its node.
    """
    group, device = case.group(axis), case.device
    k, n_nodes = group.inside, group.size // group.inside
    late = messages * device.latency
    if not size:
        return Seconds()
    return Seconds(
        all_gather_s(size, k, device.link) + late * (k > 1),
        all_gather_s(size / k, n_nodes, device.network) + late * (n_nodes > 1),
    )


def _hops(case: Case, axis: str, size: float, messages: float) -> Seconds:
    """Return the time of ``size`` bytes to the next device of an axis: over the network if any hop
    is."""
    group, device = case.group(axis), case.device
    late = messages * device.latency
    if group.size == 1:
        return Seconds()
    if group.inside == group.size:
        return Seconds(links=size / device.link + late)
    return Seconds(network=size / device.network + late)
