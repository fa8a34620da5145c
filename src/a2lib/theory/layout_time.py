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
from a2lib.theory.layouts import GRADIENTS, MOMENTS, Case, Stage
from a2lib.theory.products import NARROW, WIDE

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
    links_s, network_s: of communication over the links of a node, and over the network
    all_hidden_s, none_hidden_s: of the whole step if all communication hides, and if none does
    """

    work: dict[str, float]
    links_s: float
    network_s: float
    all_hidden_s: float
    none_hidden_s: float

    def seconds(self, hidden: float = HIDDEN) -> float:
        """Return the seconds of a step if this share of what can hide does."""
        return self.none_hidden_s - hidden * (self.none_hidden_s - self.all_hidden_s)


def step_time(case: Case) -> StepTime:
    """Return the time of a step of a case that ``check`` has passed. It is the slowest stage's, and
    the other stages are taken to be as slow."""
    m, stages = case.layout.microbatches, case.stages
    slowest = max(stages, key=lambda stage: sum(microbatch_work(case, stage).values()))
    heaviest = max(stages, key=case.weights)
    work, sent = microbatch_work(case, slowest), microbatch_messages(case, slowest)
    once, update = once_messages(case, heaviest), optimizer_s(case, heaviest)

    compute = sum(work.values())
    idle = idle_microbatches(case)
    messages = sent.times(m) + once
    all_hidden = max((m + idle) * max(compute, *sent), *messages)
    none_hidden = (m + idle) * (compute + sum(sent)) + sum(once)
    parts = {name: m * seconds for name, seconds in work.items()}
    parts |= {"pipeline bubble": idle * compute, "optimizer": update}
    return StepTime(parts, *messages, all_hidden + update, none_hidden + update)


def idle_microbatches(case: Case) -> float:
    """Return for how many micro-batches' time a stage waits in a step.

    1F1B waits for one micro-batch of each other stage, or for a chunk of one if stages are
    interleaved. Zero bubble fills in twice the gradients of the weights (Qi et al., 2024, table 2).
    """
    others = case.layout.pipeline - 1
    if case.layout.schedule == "1f1b":
        return others / case.layout.chunks
    return others * (1 - 2 * block_products(case) / block_flops(case))


def block_products(case: Case) -> float:
    """Return the FLOPs of a block's matmuls in the forward of a micro-batch, over all of tensor's
    devices."""
    return 2 * case.tokens * case.shape.block_matrices


def step_products(case: Case) -> float:
    """Return the FLOPs of a block's matmuls in a step: three forwards, and with recomputation one
    more without its last matmul, which nothing in the backward needs."""
    forward = block_products(case)
    if case.layout.checkpointing != "block":
        return 3 * forward
    return 4 * forward - 2 * case.tokens * case.shape.d_model * case.shape.d_ff


def step_scores(case: Case) -> float:
    """Return the FLOPs of a block's attention in a step. Each query meets half of the whole
    sequence, whichever part of it the device has; with eager attention it meets all."""
    shape, training = case.shape, case.training
    flash = training.attention == "flash"
    sizes = 1, shape.num_heads, case.tokens, training.context, shape.head_dim
    again = case.layout.checkpointing != "none"
    forwards = (3.5 if flash else 3) + again
    return forwards * attention_flops(*sizes, flash, "forward")


def block_flops(case: Case) -> float:
    """Return the FLOPs of a block in a step's forward and backward."""
    return step_products(case) + step_scores(case)


def microbatch_work(case: Case, stage: Stage) -> dict[str, float]:
    """Return the seconds of a micro-batch's forward and backward on a device of a stage."""
    training, device, shape = case.training, case.device, case.shape
    rate = case.layout.tensor * training.efficiency * device.flops
    products = stage.blocks * step_products(case)
    if stage.last:
        products += 3 * 2 * case.tokens * shape.vocab_size * shape.d_model
    return {
        "products": products / rate,
        "attention": stage.blocks * step_scores(case) / rate,
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
    training, shape, layout, t = case.training, case.shape, case.layout, case.layout.tensor
    again = 1 if layout.checkpointing == "block" else 0
    stream = 2 * 4 * shape.d_model / layout.rows
    rope = 2 * (shape.q_width + shape.kv_width) / t
    every_pass = (2 + again) * (stream + rope)
    gate_forward, gate_backward = (3, 5) if shape.gated else (2, 3)
    gate = ((1 + again) * gate_forward + gate_backward) / t
    hidden = gate * stage.blocks * shape.d_ff
    forward = 1 + (layout.checkpointing != "none")
    passes = forward * SCORE_PASSES["forward"] + SCORE_PASSES["backward"]
    scores = passes * training.scores / t
    loss = stage.last * 3 * shape.vocab_size / t
    numbers = stage.blocks * (every_pass + scores) + hidden + loss
    return NARROW * case.tokens * numbers


def optimizer_s(case: Case, stage: Stage) -> float:
    """Return the seconds of AdamW: it reads weights, gradients and moments, and writes weights and
    moments."""
    updated = case.weights(stage)
    moved = 2 * WIDE + GRADIENTS[case.training.gradients] + 2 * MOMENTS
    if case.layout.sharding != "none":
        updated /= case.group("data").size
    return moved * updated / case.device.memory_bandwidth


def microbatch_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication of a micro-batch on a device of a stage. FSDP gathers the weights in
    each pass and scatters their gradients; zero2, which keeps no whole gradients, only scatters."""
    sent = tensor_messages(case, stage) + context_messages(case, stage)
    sent += pipeline_messages(case, stage)
    sharding = case.layout.sharding
    if sharding == "fsdp":
        sent += weight_gather(case, stage).times(2)
    if sharding in ("fsdp", "zero2"):
        sent += gradient_scatter(case, stage)
    return sent


def once_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication of weights and gradients once per step: zero1's scatter and gather,
    zero2's gather, and without sharding an all-reduce, which is two scatters."""
    if case.layout.sharding == "none":
        return gradient_scatter(case, stage).times(2)
    if case.layout.sharding == "zero1":
        return gradient_scatter(case, stage) + weight_gather(case, stage)
    if case.layout.sharding == "zero2":
        return weight_gather(case, stage)
    return Seconds()


def weight_gather(case: Case, stage: Stage) -> Seconds:
    """Return an all-gather of a stage's bf16 weights over all devices that have the same ones."""
    return _rings(case, "data", NARROW * case.weights(stage))


def gradient_scatter(case: Case, stage: Stage) -> Seconds:
    """Return a reduce-scatter of a stage's gradients, as wide as they are sent, over all devices
    that have the same weights."""
    return _rings(case, "data", case.training.sent_bytes * case.weights(stage))


def tensor_messages(case: Case, stage: Stage) -> Seconds:
    """Return tensor parallelism's all-gathers and reduce-scatters of the residual stream.

    With sequence parallelism, attention and the feed-forward layer each gather and scatter once per
    pass, and the backward gathers the matmuls' inputs again: five each. A recomputed block gathers
    and scatters once more, without its last scatter. Embedding and head have two and three. Without
    sequence parallelism each half of a block has an all-reduce per pass, which is two of these.
    """
    layout = case.layout
    again = layout.checkpointing == "block"
    if layout.rows > 1:
        rings = stage.blocks * (13 if again else 10) + 2 * stage.first + 3 * stage.last
    else:
        all_reduces = stage.blocks * (5 if again else 4) + stage.first + stage.last
        rings = 2 * all_reduces
    return _rings(case, "tensor", rings * _stream_bytes(case))


def context_messages(case: Case, stage: Stage) -> Seconds:
    """Return ring attention's rounds: keys and values go to the next device, once less than there
    are devices, and in the backward these and their gradients."""
    rings = stage.blocks * (4 if case.layout.checkpointing == "block" else 3)
    round_bytes = 2 * NARROW * case.tokens * case.shape.kv_width / case.layout.tensor
    return _hops(case, "context", rings * (case.layout.context - 1) * round_bytes)


def pipeline_messages(case: Case, stage: Stage) -> Seconds:
    """Return the communication with the next stages: each chunk sends its output on and a gradient
    back, except the model's first and last. Each of tensor's devices sends a part; without sequence
    parallelism the next ones gather it."""
    layout = case.layout
    hops = 2 * layout.chunks - stage.first - stage.last
    size = hops * _stream_bytes(case)
    sent = _hops(case, "pipeline", size / layout.tensor)
    if layout.pipeline == 1 or layout.rows == layout.tensor:
        return sent
    return sent + _rings(case, "tensor", size)


def _stream_bytes(case: Case) -> float:
    """Return the bytes of a micro-batch's residual stream as it travels."""
    return NARROW * case.tokens * case.shape.d_model


def _rings(case: Case, axis: str, size: float) -> Seconds:
    """Return the time of all-gathers, or reduce-scatters, of ``size`` bytes in all.

    Each of the k devices of a node gathers a k-th from the other nodes over the network, then all
    of it within its node.
    """
    if not size:
        return Seconds()
    group, device = case.group(axis), case.device
    k, n_nodes = group.inside, group.size // group.inside
    network = all_gather_s(size / k, n_nodes, device.network)
    return Seconds(all_gather_s(size, k, device.link), network)


def _hops(case: Case, axis: str, size: float) -> Seconds:
    """Return the time of ``size`` bytes to the next device of an axis: over the network if any hop
    is."""
    group, device = case.group(axis), case.device
    if group.size == 1:
        return Seconds()
    if group.inside == group.size:
        return Seconds(links=size / device.link)
    return Seconds(network=size / device.network)
