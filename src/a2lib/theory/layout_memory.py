"""The bytes of the device with the largest peak in a step of a layout, by component.

Parameters and AdamW's moments are fp32, gradients fp32 or bf16. Computation is in bf16, with copies
of the weights, by fused kernels on a residual stream in bf16. Over data x context

    fsdp   shards all of that, and gathers three layers at once: in use, next, gradients
    zero2  shards all but the bf16 weights
    zero1  shards all but the bf16 weights and the gradients
    none   shards nothing

With one micro-batch gradients appear as activations are freed. With several they are there all the
time. Left out are the allocator's blocks and the buffers of a communication library. The sum agrees
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
    inner = NARROW * (2 * shape.q_width / t + 2 * case.kv_width)  # queries, results, keys, values
    inner += log_sums / t + hidden * NARROW * shape.d_ff / t
    mask = training.context**2 if training.scores else 0
    scores = case.tokens * NARROW * training.scores / t + mask
    return Kept(case.tokens * stream / layout.rows, case.tokens * inner, scores)


def memory(case: Case) -> tuple[str, dict[str, float]]:
    """Return the moment of the largest peak of any device, and its bytes by component."""
    moments = []
    for stage in case.stages:
        moments += StageMemory(case, stage).moments()
    return max(moments, key=lambda moment: sum(moment[1].values()))


class StageMemory:
    """Bytes of a device of one stage at the moments that may be its peak."""

    def __init__(self, case: Case, stage: Stage):
        self.case, self.stage = case, stage
        self.weights = case.weights(stage)
        self.kept = kept_by_block(case)

    def moments(self) -> list[tuple[str, dict[str, float]]]:
        """Return the moments and their bytes by component.

        With one micro-batch each block of the backward adds gradients and frees activations. The
        sum is linear in the blocks, so the peak is at the backward's start, at its end, or at the
        logits before it.
        """
        case, stage = self.case, self.stage
        whole, block, logits = self.weights, self.block_temporaries(), self.logits()
        of_a_block = self.saved()
        saved = stage.held * stage.blocks * of_a_block
        norm = self.last_norm()
        if case.layout.microbatches > 1:
            return [("accumulating", self.components(0, whole, saved + norm, max(block, logits)))]
        # Weights that are done with: the head's, all but a block's, all but the embedding's.
        head = case.table + case.shape.d_model if stage.last else 0
        end = whole - self.embedding()
        before = end - case.block
        return [
            ("loss", self.components(0, 0, saved + norm, logits)),
            ("first block's backward", self.components(head, head, saved, block)),
            ("last block's backward", self.components(before, before, of_a_block, block)),
            ("after the backward", self.components(end, whole, 0, 0)),
        ]

    def saved(self) -> float:
        """Return the bytes that a block saves of a micro-batch under this checkpointing."""
        case, block = self.case, self.kept
        stream = case.tokens * NARROW * case.shape.d_model / case.layout.rows
        without_scores = block.stream + block.inner
        kept = {"none": block.total, "selective": without_scores, "block": stream}
        return kept[case.layout.checkpointing]

    def block_temporaries(self) -> float:
        """Return the temporaries of a block's backward: what it recomputes, the stream's gradient
        twice, three tensors of the hidden width or of scores, and the gathered input of a matmul
        with its gradient."""
        case, t = self.case, self.case.layout.tensor
        two_streams = 2 * NARROW * case.shape.d_model
        again = self.kept.total - self.saved()
        hidden = 3 * NARROW * case.shape.d_ff
        scores = SCORE_TENSORS * WIDE * case.training.scores
        gathered = two_streams if case.layout.rows > 1 else 0
        per_token = two_streams / case.layout.rows + gathered + max(hidden, scores) / t
        return again + case.tokens * per_token

    def last_norm(self) -> float:
        """Return the bytes of the last norm's input and output."""
        case = self.case
        return self.stage.last * case.tokens * 2 * NARROW * case.shape.d_model / case.layout.rows

    def logits(self) -> float:
        """Return the bytes of the logits of a loss chunk, and of their gathered input."""
        case = self.case
        vocabulary = case.table / case.shape.d_model
        logits = LOGIT_TENSORS * WIDE * vocabulary / case.training.loss_chunks
        gathered = NARROW * case.shape.d_model if case.layout.rows > 1 else 0
        return self.stage.last * case.tokens * (logits + gathered)

    def embedding(self) -> float:
        """Return the parameters of an embedding that is not also the head: no matmul reads it."""
        tied = self.stage.last and self.case.shape.tied
        return self.case.table if self.stage.first and not tied else 0

    def working_weights(self, gone: float) -> float:
        """Return the bytes of bf16 weights, and of a layer's gradients before they are sent.
        Without sharding they are autocast's copies, of which those of ``gone`` weights were
        freed."""
        case, stage, sharding = self.case, self.stage, self.case.layout.sharding
        table = case.table if stage.first or stage.last else 0
        largest = max(table, case.block)
        if sharding == "fsdp":
            return NARROW * 3 * largest
        if sharding == "none":
            return NARROW * (self.weights - self.embedding() - gone)
        sent = largest if sharding == "zero2" else 0
        return NARROW * (self.weights + sent)

    def components(
        self, gone: float, with_gradients: float, kept: float, temporaries: float
    ) -> dict[str, float]:
        """Return the bytes by component when ``gone`` weights are done with in the backward and
        ``with_gradients`` of them have gradients."""
        case, sharding = self.case, self.case.layout.sharding
        shards = case.group("data").size
        own = self.weights / (1 if sharding == "none" else shards)
        gradients = with_gradients / (shards if sharding in ("fsdp", "zero2") else 1)
        return {
            "parameters": WIDE * own,
            "gradients": GRADIENTS[case.training.gradients] * gradients,
            "optimizer": MOMENTS * own,
            "working weights": self.working_weights(gone),
            "activations": kept,
            "temporaries": temporaries + case.device.workspace,
        }
