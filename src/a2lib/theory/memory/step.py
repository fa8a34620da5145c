"""The memory of a training step at its fullest moments, by closed forms.

    step = StepMemory(SIZES["2.7B"], batch=4, context=512)
    peak(step).total                   # bytes of tensors; .by_category
    asked(step)                        # with cuBLAS's workspaces

The step is that of ``a2lib.benchmark``: the eager model and fused AdamW on CUDA. In the backward,
each block frees what it saved and makes its gradients. So memory is fullest at one of a few
moments: at the gradient of the logits; at the softmax's gradient or in the FFN, of the first or the
last block that the backward passes; or when all gradients are there. ``peak`` writes each moment
down and takes the largest. A block in the middle is never the fullest, since the bytes in use
change by the same amount from block to block. A few small tensors of moments that come close are
left out; ``a2lib.lab.tape`` counts every tensor of a step that PyTorch runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.devices import WORKSPACE
from a2lib.theory.memory.saved import PRECISIONS, block_saved
from a2lib.theory.products import INDEX, NARROW, WIDE
from a2lib.theory.transformer import block_parameter_count

ATTENTIONS = ("eager", "flash")
MODES = ("inference", "forward", "forward-backward", "train-step")
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, TEMPORARIES, OTHER = "saved for backward", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES, OTHER)
LOSS = 2 * WIDE  # the loss and its gradient


@dataclass(frozen=True)
class StepMemory:
    """One step of a model of ``shape``, whose tensors are counted.

    mode: of ``MODES``
    attention: of ``ATTENTIONS``; "flash" in fp32 without the sums and terms of its backward's
        kernels, which depend on the sizes
    precision: "fp32" or "bf16", as in ``saved.py``
    first: whether it is the first step of a process, which makes the optimizer's state
    fresh: whether the backward allocates the gradients, as after ``zero_grad(set_to_none=True)``;
        else they exist before, as in gradient accumulation

    Raises ValueError, in one line, for other names and sizes.
    """

    shape: Shape
    batch: int = 4
    context: int = 512
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    first: bool = False
    fresh: bool = True

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context)
        check_name("mode", self.mode, MODES)
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
        if self.mode == "train-step" and not self.first:
            held[OPTIMIZER] = optimizer_bytes(self)
        if "backward" in self.mode or self.mode == "train-step":
            held[GRADIENTS] = 0 if self.fresh or self.first else sum(sizes)
        return held


def optimizer_bytes(step: StepMemory) -> int:
    """Return the bytes of AdamW's state: two moments, and a counter of 4 bytes per tensor."""
    sizes = step.parameters().values()
    return 2 * sum(sizes) + WIDE * len(sizes)


@dataclass(frozen=True)
class Peak:
    """A moment of a step: its phase ("loss" until the gradient of the logits), and its bytes by
    category."""

    phase: str
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
    if step.mode in ("inference", "forward"):
        return peak(step).total + WORKSPACE
    if not step.first:
        return peak(step).total + 2 * WORKSPACE
    # The backward's workspace comes with its first matmul, after the gradient of the logits.
    return max(
        moment.total + (1 if moment.phase in ("forward", "loss") else 2) * WORKSPACE
        for moment in moments(step)
    )


def moments(step: StepMemory) -> Iterator[Peak]:
    """Yield the moments of a step of which one is the fullest."""
    standing = step.standing()

    def held(phase: str, **more: int) -> Peak:
        names = {"saved": SAVED, "temporary": TEMPORARIES, "gradients": GRADIENTS}
        return Peak(phase, standing | {names[n]: standing[names[n]] + more[n] for n in more})

    if step.mode == "inference":
        for size in forward_alone(step):
            yield held("forward", temporary=size)
        return
    layers, block = step.shape.num_layers, sum(step.saved.values())
    logits, stream = step.sizes["logits"], step.sizes["stream"]
    waiting = (layers - 1) * block
    attention = attention_forward(step)
    yield held("forward", saved=waiting, temporary=attention)
    head = head_saved(step)
    norm = stream if step.precision == "bf16" else 0  # the head's input, which is cast
    result = norm + logits * step.width // WIDE
    yield held("forward", saved=layers * block + head, temporary=result)
    if step.mode == "forward":
        return
    yield held("loss", saved=layers * block + head + logits, temporary=2 * logits + LOSS)
    row = WIDE * step.shape.d_model
    table = row * step.shape.vocab_size
    gradients = WIDE * block_parameter_count(step.shape) if step.fresh else 0
    above = (table + row if step.fresh else 0) + LOSS
    for half in block_peaks(step):
        # In the first block of the backward, and in the last.
        yield held(
            "backward",
            saved=waiting + half.saved,
            temporary=half.temporary,
            gradients=above + half.gradients,
        )
        yield held(
            "backward",
            saved=half.saved,
            temporary=half.temporary,
            gradients=above + half.gradients + (layers - 1) * gradients,
        )
    end = table + above + layers * gradients
    yield held("backward", temporary=stream, gradients=end)
    if step.mode == "train-step" and step.first:
        whole = sum(step.parameters().values())
        yield Peak(
            "optimizer", standing | {OPTIMIZER: optimizer_bytes(step), GRADIENTS: whole + WIDE}
        )


def head_saved(step: StepMemory) -> int:
    """Return the bytes that the last norm and the head save: the norm's input, its scale per row,
    the normalized input, and the head's input."""
    stream, rows = step.sizes["stream"], step.batch * step.context
    kept = 2 * stream + WIDE * rows + step.width * rows * step.shape.d_model
    if step.precision == "bf16":
        kept += NARROW * step.shape.vocab_size * step.shape.d_model
    return kept


def forward_alone(step: StepMemory) -> Iterator[int]:
    """Yield the bytes that a forward which saves nothing holds at its fullest moments: in the last
    block's attention, at the end of its FFN, and with the logits. Autocast's copies of weights are
    kept."""
    s, stream = step.shape, step.sizes["stream"]
    scores, logits = step.sizes["scores"], step.sizes["logits"]
    narrow, hidden = (step.sizes[name] * step.width // WIDE for name in ("stream", "hidden"))
    copies = block = head = 0
    if step.precision == "bf16":
        block = NARROW * s.block_matrices
        copies = (s.num_layers - 1) * block
        head = NARROW * s.vocab_size * s.d_model
    if step.attention == "flash":
        yield copies + 2 * stream + 4 * narrow
    elif step.precision == "bf16":  # the scores in either width, and what the softmax makes of them
        three = NARROW * s.d_model * (s.q_width + 2 * s.kv_width)
        yield copies + three + 2 * stream + 3 * narrow + 5 * scores // 2 + INDEX * step.context
    else:
        yield 7 * stream + 2 * scores + INDEX * step.context
    if step.precision == "bf16":
        yield copies + block + 3 * stream + narrow + 3 * hidden
        yield copies + block - NARROW * s.d_model * s.d_ff + 3 * stream + 4 * hidden
    else:
        yield 3 * stream + 4 * hidden
    yield copies + block + head + 2 * stream + (narrow if head else 0) + logits * step.width // WIDE


def attention_forward(step: StepMemory) -> int:
    """Return the bytes of a block's attention while its softmax or its last matmul runs, in a
    forward that saves what its backward needs."""
    stream, scores, rows = step.sizes["stream"], step.sizes["scores"], step.batch * step.context
    narrow = stream * step.width // WIDE
    mask = step.context**2 + INDEX * step.context
    if step.attention == "flash":
        return 3 * stream + WIDE * rows + 4 * narrow
    if step.precision == "fp32":
        return 8 * stream + WIDE * rows + 2 * scores + mask
    s = step.shape
    copies = NARROW * s.d_model * (s.q_width + 2 * s.kv_width)
    return 3 * stream + WIDE * rows + copies + 6 * narrow + 5 * scores // 2 + mask


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
