"""The bytes of the device with the largest peak in a step of a layout, by component.

Parameters and AdamW's moments are fp32, gradients fp32 or bf16. Computation is in bf16, with copies
of the weights, by fused kernels on a residual stream in bf16. Over data x context

    fsdp   shards all of that, and gathers three layers at once: in use, next, gradients
    zero2  shards all but the bf16 weights
    zero1  shards all but the bf16 weights and the gradients
    none   shards nothing

Left out are the allocator's blocks and the buffers of a communication library. The sum agrees
with the measured peaks of FSDP's steps (book/parallelism-measured.md).
"""

from dataclasses import dataclass

from a2lib.theory.layouts import GRADIENTS, MOMENTS, Case, Stage
from a2lib.theory.products import NARROW, WIDE

# fp32 tensors of the logits' shape: log-softmax, its gradient, that of the logits.
LOGIT_TENSORS = 3
# fp32 matrices of scores that the softmax of eager attention has in its backward.
SCORE_TENSORS = 3


@dataclass(frozen=True)
class Kept:
    """Bytes that one block saves for its backward, of a micro-batch on one device.

    stream: the residual stream and norms
    inner: within attention and the feed-forward layer
    scores: eager attention's scores with their mask
    """

    stream: float
    inner: float
    scores: float

    @property
    def total(self) -> float:
        return self.stream + self.inner + self.scores


def kept_by_block(case: Case) -> Kept:
    """Return the bytes that one block saves."""
    training, shape, layout, t = case.training, case.shape, case.layout, case.layout.tensor
    stream = 4 * NARROW * shape.d_model + 2 * WIDE  # input, output and fp32 root of two norms
    hidden = 3 if shape.gated else 2  # the gate, the value, their product
    log_sums = 0 if training.scores else WIDE * shape.num_heads
    inner = NARROW * 2 * (shape.q_width + shape.kv_width) / t  # queries, results, keys, values
    inner += log_sums / t + hidden * NARROW * shape.d_ff / t
    mask = training.context**2 if training.scores else 0
    scores = case.tokens * NARROW * training.scores / t + mask
    return Kept(case.tokens * stream / layout.rows, case.tokens * inner, scores)


def memory(case: Case) -> dict[str, float]:
    """Return the bytes by component at the largest peak of any device."""
    moments = []
    for stage in case.stages:
        moments += stage_moments(case, stage)
    return max(moments, key=lambda components: sum(components.values()))


def stage_moments(case: Case, stage: Stage) -> list[dict[str, float]]:
    """Return the bytes by component at the moments of a stage of which one is its peak.

    With several micro-batches all gradients are there all the time. With one they appear as
    activations are freed, so the peak is where the backward starts or where it ends.
    """
    of_a_block, block = saved(case), block_temporaries(case)
    last_norm = stage.last * case.tokens * 2 * NARROW * case.shape.d_model / case.layout.rows
    activations = stage.held * stage.blocks * of_a_block + last_norm
    temporaries = max(block, logits(case, stage))
    if case.layout.microbatches > 1:
        return [components(case, stage, True, activations, temporaries)]
    return [
        components(case, stage, False, activations, temporaries),
        components(case, stage, True, of_a_block, block),
    ]


def saved(case: Case) -> float:
    """Return the bytes that a block saves of a micro-batch under the layout's checkpointing."""
    block = kept_by_block(case)
    if case.layout.checkpointing == "none":
        return block.total
    if case.layout.checkpointing == "selective":
        return block.stream + block.inner
    return case.tokens * NARROW * case.shape.d_model / case.layout.rows


def block_temporaries(case: Case) -> float:
    """Return the temporaries of a block's backward: what it recomputes, the stream's gradient
    twice, three tensors of the hidden width or of scores, and the gathered input of a matmul with
    its gradient."""
    two_streams = 2 * NARROW * case.shape.d_model
    recomputed = kept_by_block(case).total - saved(case)
    hidden = 3 * NARROW * case.shape.d_ff
    scores = SCORE_TENSORS * WIDE * case.training.scores
    gathered = two_streams if case.layout.rows > 1 else 0
    per_token = two_streams / case.layout.rows + gathered + max(hidden, scores) / case.layout.tensor
    return recomputed + case.tokens * per_token


def logits(case: Case, stage: Stage) -> float:
    """Return the bytes of the logits of a loss chunk, and of their gathered input."""
    vocabulary = case.table / case.shape.d_model
    chunk = LOGIT_TENSORS * WIDE * vocabulary / case.training.loss_chunks
    gathered = NARROW * case.shape.d_model if case.layout.rows > 1 else 0
    return stage.last * case.tokens * (chunk + gathered)


def working_weights(case: Case, stage: Stage) -> float:
    """Return the bytes of bf16 weights, and of a layer's gradients before they are sent."""
    table = case.table if stage.first or stage.last else 0
    layer = max(table, case.block)
    if case.layout.sharding == "fsdp":
        return NARROW * 3 * layer
    sent = layer if case.layout.sharding == "zero2" else 0
    return NARROW * (case.weights(stage) + sent)


def components(
    case: Case, stage: Stage, has_gradients: bool, activations: float, temporaries: float
) -> dict[str, float]:
    """Return the bytes of a device of a stage by component, with all gradients or with none."""
    sharding, shards = case.layout.sharding, case.group("data").size
    weights = case.weights(stage)
    own = weights / (1 if sharding == "none" else shards)
    gradients = weights / (shards if sharding in ("fsdp", "zero2") else 1)
    return {
        "parameters": WIDE * own,
        "gradients": GRADIENTS[case.training.gradients] * gradients * has_gradients,
        "optimizer": MOMENTS * own,
        "working weights": working_weights(case, stage),
        "activations": activations,
        "temporaries": temporaries + case.device.workspace,
    }
