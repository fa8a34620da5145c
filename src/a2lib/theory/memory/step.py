"""The memory of a training step at its fullest moments, by closed forms.

    step = StepMemory(SIZES["2.7B"], batch=4, context=512)
    peak(step).total                   # bytes of tensors; .by_category
    asked(step)                        # with cuBLAS's workspaces

The step is a training step after the first, that of ``a2lib.benchmark``: the eager model and fused
AdamW on CUDA. In the backward, each block frees what it saved and makes its gradients. So memory is
fullest at one of a few moments: at the gradient of the logits; at the softmax's gradient or in the
FFN, of the first or the last block that the backward passes; or when all gradients are there.
``peak`` writes each moment down and takes the largest. A block in the middle is never the fullest,
since the bytes in use change by the same amount from block to block. A few small tensors of moments
that come close are left out; ``a2lib.lab.tape`` counts every tensor of a step that PyTorch runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.devices import WORKSPACE
from a2lib.theory.memory.saved import ATTENTIONS, PRECISIONS, block_saved
from a2lib.theory.products import INDEX, NARROW, WIDE
from a2lib.theory.transformer import block_parameter_count

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, TEMPORARIES, OTHER = "saved for backward", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES, OTHER)
LOSS = 2 * WIDE  # the loss and its gradient


@dataclass(frozen=True)
class StepMemory:
    """A training step of a model of ``shape``, whose tensors are counted.

    attention: of ``ATTENTIONS``; "flash" in fp32 without the sums and terms of its backward's
        kernels, which depend on the sizes
    precision: "fp32" or "bf16", as in ``saved.py``
    fresh: whether the backward allocates the gradients, as after ``zero_grad(set_to_none=True)``;
        else they exist before, as in gradient accumulation

    Raises ValueError, in one line, for other names and sizes.
    """

    shape: Shape
    batch: int = 4
    context: int = 512
    precision: str = "fp32"
    attention: str = "eager"
    fresh: bool = True

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context)
        check_name("precision", self.precision, PRECISIONS)
        check_name("attention", self.attention, ATTENTIONS)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes in float32 of the residual stream (B, T, D), the FFN's hidden (B, T, F), the scores
        (B, H, T, T) and the logits (B, T, V)."""
        rows = WIDE * self.batch * self.context
        return {
            "stream": rows * self.shape.d_model,
            "hidden": rows * self.shape.d_ff,
            "scores": rows * self.shape.num_heads * self.context,
            "logits": rows * self.shape.vocab_size,
        }

    @property
    def width(self) -> int:
        """Bytes per element of matmuls."""
        return NARROW if self.precision == "bf16" else WIDE

    @property
    def saved(self) -> dict[str, int]:
        """Name -> bytes of each tensor that a block saves for its backward."""
        return block_saved(self.shape, self.batch, self.context, self.attention, self.precision)

    def parameters(self) -> dict[str, int]:
        """Return the bytes of each parameter by name, in the order of the state dict."""
        s = self.shape
        row = WIDE * s.d_model
        block = {
            "ln1": row,
            "attn.q_proj": row * s.q_width,
            "attn.k_proj": row * s.kv_width,
            "attn.v_proj": row * s.kv_width,
            "attn.output_proj": row * s.q_width,
            "ln2": row,
            "ffn.w1": row * s.d_ff,
            "ffn.w2": row * s.d_ff,
            "ffn.w3": row * s.d_ff,
        }
        sizes = {"token_embeddings": row * s.vocab_size}
        for i in range(s.num_layers):
            sizes |= {f"layers.{i}.{name}": size for name, size in block.items()}
        return sizes | {"ln_final": row, "lm_head": row * s.vocab_size}

    def standing(self) -> dict[str, int]:
        """Return the bytes by category that are in use when the step begins: parameters with RoPE's
        two tables, the optimizer's state (two moments, and a counter per tensor), the batch and its
        targets."""
        sizes = self.parameters().values()
        held = dict.fromkeys(CATEGORIES, 0)
        held[PARAMETERS] = sum(sizes) + WIDE * self.context * self.shape.head_dim
        held[OTHER] = 2 * self.batch * self.context * INDEX
        held[OPTIMIZER] = optimizer_bytes(self)
        held[GRADIENTS] = 0 if self.fresh else sum(sizes)
        return held


def optimizer_bytes(step: StepMemory) -> int:
    """Return the bytes of AdamW's state: two moments, and a counter of 4 bytes per tensor."""
    sizes = step.parameters().values()
    return 2 * sum(sizes) + WIDE * len(sizes)


@dataclass(frozen=True)
class Peak:
    """A moment of a step, by its bytes of each category."""

    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def peak(step: StepMemory) -> Peak:
    """Return the moment of a step's peak."""
    return max(moments(step), key=lambda moment: moment.total)


def asked(step: StepMemory) -> int:
    """Return the bytes that a step has requested from the GPU's allocator at its peak: tensors, and
    a cuBLAS workspace for each thread with matmuls, forward and backward.

    A process that has captured a step keeps as many again for the capture's stream.
    """
    return peak(step).total + 2 * WORKSPACE


def moments(step: StepMemory) -> Iterator[Peak]:
    """Yield the moments of a step of which one is the fullest."""
    standing = step.standing()

    def held(saved: int, temporary: int, gradients: int = 0) -> Peak:
        more = {SAVED: saved, TEMPORARIES: temporary, GRADIENTS: gradients}
        return Peak(standing | {name: standing[name] + more[name] for name in more})

    layers, block = step.shape.num_layers, sum(step.saved.values())
    logits, stream = step.sizes["logits"], step.sizes["stream"]
    waiting = (layers - 1) * block
    # The gradient of the logits.
    yield held(layers * block + head_saved(step) + logits, 2 * logits + LOSS)
    row = WIDE * step.shape.d_model
    table = row * step.shape.vocab_size
    gradients = WIDE * block_parameter_count(step.shape) if step.fresh else 0
    above = (table + row if step.fresh else 0) + LOSS
    for half in block_peaks(step):
        # In the first block of the backward, and in the last.
        in_use = above + half.gradients
        yield held(waiting + half.saved, half.temporary, in_use)
        yield held(half.saved, half.temporary, in_use + (layers - 1) * gradients)
    yield held(0, stream, table + above + layers * gradients)


def head_saved(step: StepMemory) -> int:
    """Return the bytes that the last norm and the head save: the norm's input, its scale per row,
    the normalized input, and the head's input."""
    stream, rows = step.sizes["stream"], step.batch * step.context
    kept = 2 * stream + WIDE * rows + step.width * rows * step.shape.d_model
    if step.precision == "bf16":
        kept += NARROW * step.shape.vocab_size * step.shape.d_model
    return kept


@dataclass(frozen=True)
class Half:
    """A half of a block at the fullest moment of its backward, in bytes.

    saved: what is left of the block's saved tensors
    temporary: temporary tensors
    gradients: the block's gradients that are finished
    """

    name: str
    saved: int
    temporary: int
    gradients: int

    @property
    def total(self) -> int:
        return self.saved + self.temporary + self.gradients


def block_peaks(step: StepMemory) -> list[Half]:
    """Return the moments of one block's backward that may be its peak, the FFN's before
    attention's.

    The FFN's are w2, whose gradient is made beside that of its input, and the gate, with three
    gradients of the FFN's width. Eager attention's is the softmax's gradient: CUDA's kernel makes a
    third tensor of the scores' size, beside its input and its output. At the end the gradients of
    all parameters of the block are there.
    """
    saved = step.saved
    attention = sum(n for name, n in saved.items() if name.startswith(("x0", "0a/")))
    ffn = sum(saved.values()) - attention
    stream, hidden = step.sizes["stream"], step.sizes["hidden"] * step.width // WIDE
    narrow = stream * step.width // WIDE
    s, fresh = step.shape, int(step.fresh)
    w2 = WIDE * s.d_model * s.d_ff
    # While w2's gradient is computed its 16-bit copies are there, and are freed after it.
    copy = w2 // 2 if step.precision == "bf16" else 0
    gradients_of_w2 = w2 if step.precision == "bf16" else w2 + hidden
    halves = [
        Half("ffn", attention + ffn, stream + gradients_of_w2 - fresh * w2, fresh * w2),
        Half("ffn", attention + ffn - hidden - copy, stream + 3 * hidden, fresh * w2),
    ]
    output = WIDE * s.d_model * s.q_width
    done = fresh * (3 * w2 + WIDE * s.d_model + output)
    if step.attention == "eager":
        used = saved["0a/o"] + saved["0a/values"] + saved.get("0a/prob16", 0)
        used += saved.get("0a/attn.output_proj.16", 0)
        three = 3 * step.sizes["scores"]
        halves.append(Half("attention", attention - used, three + stream + narrow, done))
    else:  # gradients of q, k, v and of the result
        used = saved.get("0a/attn.output_proj.16", 0)
        halves.append(Half("attention", attention - used, stream + 4 * narrow, done))
    gradients = fresh * WIDE * block_parameter_count(s)
    return [*halves, Half("attention", stream, 3 * stream, gradients)]
