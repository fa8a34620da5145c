"""What a 4D layout of a Transformer on N devices holds and how long its step takes at least.

A layout cuts the batch over ``data``, each matrix over ``tensor``, the blocks over ``pipeline`` and
the sequence over ``context`` devices. For each one: bytes of a device by component, and the time of
a step (layout_time.py). ``ASSUMPTIONS`` is what the figures rest on; every plan is printed with it.
On one GPU the memory agrees with measured peaks of whole models (book/parallelism-measured.md);
cut over several, twelve published trainings are held against it (published.py). Links have their
makers' bandwidth and no latency, or those of the job's device.

ZeRO: Rajbhandari et al., 2020; hybrid sharding: Zhao et al., 2023. Tensor parallelism: Shoeybi et
al., 2019; sequence parallelism and selective recomputation: Korthikanti et al., 2022. 1F1B:
Narayanan et al., 2021; zero bubble: Qi et al., 2024. Ring attention: Liu et al., 2023. Experts:
DeepSeek-AI, 2024. The formulas of each axis are those of parallelism.py and other_axes.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.theory import stages
from a2lib.theory.jobs import OPTIMIZERS, Job
from a2lib.theory.layout_time import times
from a2lib.theory.other_axes import least_microbatches
from a2lib.theory.products import NARROW, WIDE, check_name, check_sizes
from a2lib.theory.stages import Layout, Stage
from a2lib.theory.transformer import forward_flops_by_part, more_of_experts

AXES = ("data", "tensor", "pipeline", "context")
SHARDINGS = ("none", "zero1", "zero2", "fsdp", "hsdp")
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
STRATEGIES = ("none", "selective", "block")
# What of a step's communication hides: all of it, all but tensor's and context's, none.
HIDDEN = ("all", "data", "none")
# fp32 tensors of the logits' shape: log-softmax, its gradient, that of the logits (gone by then).
LOGIT_TENSORS = 3
# fp32 matrices of scores that eager's softmax has in its backward (eager.py): dp, dp p, ds.
SCORE_TENSORS = 3

ASSUMPTIONS = (
    "parameters and gradients in fp32 (8 bytes a parameter), the optimizer's state beside them "
    "(AdamW's two moments: 8 more); computation and messages in bf16 under autocast, else in fp32",
    "fsdp cuts all of that over data x context and gathers a block for each pass of each "
    "micro-batch (three of the largest layer are there at once: in use, next, gradients); "
    "zero2 cuts it too, keeps the bf16 weights whole and sends gradients with each micro-batch; "
    "zero1 keeps the gradients whole as well and sends them once a step; none keeps all of it "
    "whole and exchanges gradients once a step; hsdp is fsdp within each node, and averages "
    "gradients over the nodes once a step",
    "activations library: as this library's block keeps them (saved.py); fused: all in the 16 bits "
    "of computation, of a norm its input and output, of the gate its two inputs and its output; "
    "eager attention adds the scores, a mask, and three fp32 matrices of scores while it goes "
    "backward; tensor parallelism cuts all of them, the residual stream and the norms by the "
    "sequence unless that is held back",
    "checkpointing none keeps all of that; selective computes eager attention's scores again; "
    "block keeps each block's input and runs the block again but for its last product",
    "gradients come as activations go if a step has one micro-batch, and are there all the time if "
    "it has more; 12 bytes a logit, for all tokens of a micro-batch at once; cuBLAS's workspaces "
    "on NVIDIA's devices; no allocator's blocks, no buffers of a communication library",
    "pipeline: 1F1B, interleaved if stages have several pieces, or zero bubble, where weights' "
    "gradients wait (zb-h2 begins a step on a stage before others have ended the last); stages of "
    "equal blocks, the first of one and the last of up to two fewer where that makes them so; the "
    "embedding in the first and the head in the last; micro-batches are whole sequences",
    "experts: all equally loaded, cut over devices of context and data; each token goes to its "
    "experts' nodes and back, there over node links, and in the backward again; what they get is "
    "kept, a copy for each, in dense blocks too, and of latents what their norms get and give",
    "frozen: so large a share of every matrix is not trained: it is there as all are, and has no "
    "gradient, no optimizer's state and no message of either; activations stay as they are",
    "communication runs beside computation as far as the step says, experts' exchanges as "
    "tensor's and context's messages do; axes on the same links wait "
    "for each other, node links and network do not; on a torus tensor, data with context, and "
    "pipeline have an axis each; a message costs its bytes over the maker's bandwidth and no "
    "latency, unless others are given; a layer's weights or gradients are one message",
    "axes are laid out tensor, context, data, pipeline, the first within a node",
    "FlashAttention computes half of the scores and its backward 2.5 forwards, eager all of them "
    "and 2; matrix products at the given share of the maker's peak, or their weights at the "
    "memory's bandwidth; of what is elementwise eager's scores alone; the optimizer at the "
    "memory's bandwidth",
)


@dataclass(frozen=True)
class Plan:
    """A layout with bytes by component on its fullest device at the fullest ``moment``, and the
    seconds of a step.

    ``step_s`` is the floor, where communication hides; ``serial_s`` what it takes if none does;
    ``expected_s`` if all but tensor, context and expert parallelism's does. ``busy`` has seconds by
    what may bind, the largest being ``bound``. ``tried`` is False of a search that left some out.
    """

    layout: Layout
    memory: dict[str, float]
    moment: str
    step_s: float
    expected_s: float
    serial_s: float
    busy: dict[str, float]
    bound: str
    flops_share: float
    tried: bool = True

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    def seconds(self, hidden: str | float = "data") -> float:
        """A step's seconds if what ``hidden`` names hides: one of ``HIDDEN``, or so large a share
        of all that could."""
        if hidden == "data":
            return self.expected_s
        share = {"all": 1.0, "none": 0.0}.get(hidden, hidden)
        return self.serial_s - share * (self.serial_s - self.step_s)


def check(job: Job, layout: Layout) -> None:
    """Raise ValueError, in one line that names the rule, for a layout that breaks one."""
    sizes = (*AXES, "microbatches", "chunks", "expert")
    check_sizes(**{name: getattr(layout, name) for name in sizes})
    check_name("sharding", layout.sharding, SHARDINGS)
    check_name("checkpointing", layout.checkpointing, STRATEGIES)
    check_name("schedule", layout.schedule, SCHEDULES)
    for broken in _broken_rules(job, layout):
        raise ValueError(broken)


def _broken_rules(job: Job, layout: Layout) -> Iterator[str]:
    m, chunks, expert = layout.microbatches, layout.chunks, layout.expert
    for axis in AXES:
        yield from of_axis(job, axis, getattr(layout, axis))
    p, blocks = layout.pipeline, stages.stage_blocks(job.shape.num_layers, layout.pipeline)[1]
    sequences = job.batch // layout.data
    if sequences % m:
        yield (
            f"microbatches {m} does not divide the {sequences} sequences of a data rank "
            f"(batch {job.batch} / data {layout.data}); it must"
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
    same = layout.data * layout.context  # devices that have the same weights, or parts of them
    for name, whole in (("experts", job.shape.experts), ("data x context", same)):
        if expert > 1 and (whole % expert or not whole):
            yield f"expert {expert} does not divide {name} {whole}; it must"
    if expert > 1 and layout.sharding == "hsdp":
        yield f"expert {expert} with sharding hsdp; allowed is 1, since nodes hold the same then"
    if layout.checkpointing == "selective" and job.attention == "flash":
        yield (
            "checkpointing selective with flash attention; allowed are none and block, since "
            "flash keeps no scores"
        )
    if layout.devices > job.devices:
        yield (
            f"data x tensor x pipeline x context is {layout.devices}; allowed are at most the "
            f"{job.devices} devices"
        )


def of_axis(job: Job, axis: str, size: int) -> Iterator[str]:
    """The rules that so many devices along an axis break, by what it cuts."""
    layers, dense = job.shape.num_layers, job.shape.dense
    for name, whole in cut_by_axis(job)[axis].items():
        if whole % size:
            yield f"{axis} {size} does not divide {name} {whole}; it must"
    spread = stages.stage_blocks(layers, size) if axis == "pipeline" else (layers,)
    if spread is None:
        yield (
            f"pipeline {size} does not divide num_layers {layers}, nor up to three more, in "
            f"{layers} stages or fewer; it must, the first having one fewer, the last up to two"
        )
    elif axis == "pipeline" and size > 1 and spread[0] < dense:
        yield (
            f"pipeline {size}: the first stage has fewer blocks than the {dense} dense; it must "
            "have all of them"
        )
    if axis == "tensor" and size > 1 and job.shape.experts:
        yield f"tensor {size} with experts; allowed is 1, since expert cuts them"
    if axis == "context" and size > 1 and job.context % (2 * size):
        yield (
            f"context {size}: its double does not divide context length {job.context}; it must, "
            "since each device has an early and a late part of a causal sequence"
        )
    if axis == "context" and size > 1 and job.attention == "eager":
        yield f"context {size} with eager attention; allowed is 1, since a ring of keys needs flash"


def evaluate(job: Job, layout: Layout) -> Plan:
    """The plan of one layout, whether or not it fits. Raises ValueError as ``check``."""
    check(job, layout)
    return timed(job, layout, *memory(job, layout))


def timed(job: Job, layout: Layout, moment: str, held: dict[str, float]) -> Plan:
    """``evaluate`` of a layout that was checked and whose ``memory`` is known."""
    *ends, busy = times(job, layout)
    share = flops_share(job, layout, ends[0])
    return Plan(layout, held, moment, *ends, busy, max(busy, key=busy.get), share)


def flops_share(job: Job, layout: Layout, seconds: float) -> float:
    """Model FLOPs utilisation of a step of so many seconds: the operations of the model, with half
    of the scores, nothing computed again and no gradient of what is not trained, over the devices'
    peak in the job's precision."""
    parts = forward_flops_by_part(job.shape, job.batch, job.context, causal=True)
    useful = (3 - job.frozen) * sum(parts.values()) + job.frozen * parts["attention"]
    return useful / (layout.devices * job.peak * seconds)


def memory(job: Job, layout: Layout) -> tuple[str, dict[str, float]]:
    """The fullest moment of a step on the fullest device, and its bytes by component."""
    every = stages.stages(job, layout)
    if len(every) == 3 and every[1].blocks == every[0].blocks:
        every = every[::2]  # the second holds less than the first
    moments = [moment for stage in every for moment in _stage_memory(job, layout, stage)]
    return max(moments, key=lambda moment: sum(moment[1].values()))


def _stage_memory(job: Job, layout: Layout, stage: Stage) -> list[tuple[str, dict[str, float]]]:
    """Bytes by component at the moments of which one is the fullest.

    With one micro-batch gradients come as activations go, each block leaving G and freeing A. That
    is linear in the blocks, so one of its ends is the fullest, or the logits before it.
    """
    shape, t, rows, n = job.shape, layout.tensor, layout.rows, stages.shards(job, layout)
    first, last, blocks = stage.first, stage.last, stage.blocks
    own, sharding = stages.weights(job, layout, stage), layout.sharding
    fsdp, bf16, element = sharding in ("fsdp", "hsdp"), job.precision == "bf16", job.element
    # Experts are cut by their own devices first, so that n of all have as much of each.
    share = (1 if layout.expert == 1 else stages.weights(job, layout, stage, 1) / own) / n
    stream = job.residual * shape.d_model
    table, block = shape.vocab_size * shape.d_model / t, stages.block_weights(shape, t)
    most = block + more_of_experts(shape, layout.expert) if blocks > stage.dense else block
    largest = max(most, table if first or last else 0)
    head = table + shape.d_model if last else 0
    bare = table if first and not (last and shape.tied) else 0  # an embedding that is no head
    many = stages.tokens(job, layout)
    whole, cut, scores = job.saved
    mask = job.context**2 if job.attention == "eager" else 0
    without = many * (whole / rows + cut / t)
    kept_whole = without + many * scores / t + mask
    stays = {"none": kept_whole, "selective": without, "block": many * stream / rows}
    stays = stays[layout.checkpointing]
    # Of a sequence that is cut, a product's input is gathered, and its gradient before the scatter.
    gathered = 2 * element * shape.d_model if rows > 1 else 0
    # In a block's backward: the residual's gradient in fp32 and in what is computed with, and three
    # tensors of the FFN's hidden or of eager's scores.
    inner = max(3 * element * shape.d_ff / t, SCORE_TENSORS * WIDE * job.scores / t)
    gradient = (stream + element * shape.d_model) / rows
    temporary = kept_whole - stays + many * (gradient + gathered + inner)
    # The last norm, in and out, and under autocast the head's narrow input.
    copy = NARROW if bf16 and job.residual == WIDE else 0
    top = many * (2 * stream + copy * shape.d_model) / rows if last else 0
    logits = many * (shape.vocab_size / t * LOGIT_TENSORS * WIDE + gathered / 2) if last else 0
    trained, is_cut = 1 - job.frozen, sharding != "none"
    parameters = WIDE * own * (share if fsdp or (is_cut and bf16) else 1)
    optimizer = OPTIMIZERS[job.optimizer] * trained * own * (share if is_cut else 1)

    def at(gone: float, gradients: float, kept: float, temporaries: float) -> dict[str, float]:
        """The components when so many weights are done with, and so many have gradients."""
        if fsdp:
            working = element * (2 + trained) * largest
        elif not bf16:
            working = 0  # the weights are what is computed with
        elif is_cut:
            working = NARROW * own
        else:  # autocast's copies, which go with the graph; the embedding has none
            working = NARROW * (own - bare - gone)
        if sharding == "zero2":  # a layer's gradients, before they are sent
            working += element * trained * largest
        return {
            "parameters": parameters,
            "gradients": WIDE * trained * gradients * (share if fsdp or sharding == "zero2" else 1),
            "optimizer": optimizer,
            "working weights": working,
            "activations": kept,
            "temporaries": temporaries + job.device.workspace,
        }

    everything = stage.held * blocks * stays + top
    before = own - bare - (block if stage.dense else most)
    if layout.microbatches > 1:
        return [("accumulating", at(0, own, everything, max(temporary, logits)))]
    return [
        ("loss", at(0, 0, everything, logits)),
        ("first block's backward", at(head, head, everything - top, temporary)),
        ("last block's backward", at(before, before, stays, temporary)),
        ("after the backward", at(own - bare, own, 0, 0)),
    ]


def cut_by_axis(job: Job) -> dict[str, dict[str, int]]:
    """What the size of each axis must divide, by name."""
    shape = job.shape
    tensor = {"num_heads": shape.num_heads, "num_kv_heads": shape.kv_heads, "d_ff": shape.d_ff}
    return {
        "data": {"batch": job.batch},
        "tensor": tensor | {"vocab_size": shape.vocab_size},
        "pipeline": {},  # whose sizes are those of stage_blocks
        "context": {"context length": job.context},
    }
