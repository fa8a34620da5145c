"""The kernels of a training step, for its floor (``roofline.floor``): as PyTorch launches them, and
as a compiler could.

``eager_step`` has the kernels of the model with eager attention: every matmul, and the elementwise
kernels between them by the bytes that they move (``TRAFFIC``, counted operator by operator). In
``fused_step`` everything between two matmuls is one kernel, attention is tiled, and matmuls that
share an input are one. No compiler is faster on this model, unless it keeps a tensor on the chip
from one matmul to the next. ``compiled_step`` is a fused step with eager attention's matmuls.
"""

from collections.abc import Iterator
from dataclasses import replace

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.eager import attention_kernels, tiled_kernel
from a2lib.theory.products import INDEX, WIDE, matmul_flops
from a2lib.theory.roofline import NARROW, PRECISIONS, Kernel
from a2lib.theory.transformer import block_parameter_count, parameter_count

# Bytes that an eager block reads and writes between its matmuls, by part, per element of the
# residual stream, of the FFN's hidden width, of the scores and of its matrices (which autocast
# casts each time). Attention's are the scores' scale, mask and softmax. A few numbers per token are
# left out.
TRAFFIC = {
    ("fp32", "forward"): {
        "elementwise": {"stream": 168, "hidden": 20},
        "attention": {"scores": 32},
    },
    ("fp32", "backward"): {
        "elementwise": {"stream": 324, "hidden": 36},
        "attention": {"stream": 32, "scores": 48},
    },
    ("bf16", "forward"): {
        "elementwise": {"stream": 210, "hidden": 10, "matrices": 6},
        "attention": {"scores": 32},
    },
    ("bf16", "backward"): {
        "elementwise": {"stream": 390, "hidden": 18, "matrices": 6},
        "attention": {"stream": 16, "scores": 48},
    },
}
# The same outside of the blocks, by phase: embedding, last norm and head; the loss with its
# gradient.
BESIDE = {
    "fp32": [
        ("forward", "elementwise", {"stream": 36}),
        ("loss", "loss", {"logits": 8}),
        ("backward", "loss", {"logits": 16}),
        ("backward", "elementwise", {"stream": 100, "table": 4}),
    ],
    "bf16": [
        ("forward", "elementwise", {"stream": 42, "table": 6}),
        ("loss", "loss", {"logits": 14}),
        ("backward", "loss", {"logits": 22}),
        ("backward", "elementwise", {"stream": 106, "table": 10}),
    ],
}


def eager_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Return the kernels of an eager train-step with eager attention and fused AdamW.

    ``bf16`` is CUDA's autocast: each matmul casts its inputs, and RoPE and the softmax run in
    float32. The kernels between matmuls are one for each part of ``TRAFFIC``. Raises ValueError for
    sizes that are not positive integers, and for another precision.
    """
    check_name("precision", precision, PRECISIONS)
    check_sizes(batch=batch, context=context)
    width = _width(precision)
    numbers = "bf16" if precision == "bf16" else "fp32"
    tokens, layers, heads = batch * context, shape.num_layers, batch * shape.num_heads
    d, f = shape.d_model, shape.d_ff
    linear = [
        ("q, k, v and output", d, d, 4 * layers),
        ("w1 and w3", d, f, 2 * layers),
        ("w2", f, d, layers),
        ("lm_head", d, shape.vocab_size, 1),
    ]
    kernels = list(_linear(linear, tokens, width, width))
    sizes = {
        "stream": tokens * d,
        "hidden": tokens * f,
        "scores": heads * context**2,
        "matrices": shape.block_matrices,
        "logits": tokens * shape.vocab_size,
        "table": shape.vocab_size * d,
    }

    def moving(phase: str, part: str, moved: dict[str, int], count: int) -> Kernel:
        total = 0
        for tensor, per_element in moved.items():
            total += per_element * sizes[tensor]
        return Kernel(phase, part, "between matmuls", total, 0, count)

    for pass_ in ("forward", "backward"):
        matmul, _ = attention_kernels("eager", True, pass_, heads, context, shape.head_dim, width)
        count = layers * matmul.count
        kernels.append(replace(matmul, part="attention", name="scores", count=count))
        for part, moved in TRAFFIC[numbers, pass_].items():
            kernels.append(moving(pass_, part, moved, layers))
    for phase, part, moved in BESIDE[numbers]:
        kernels.append(moving(phase, part, moved, 1))
    return [*kernels, _adamw(shape)]


def _linear(
    layers: list[tuple[str, int, int, int]], tokens: int, width: int, gradient_width: int
) -> Iterator[Kernel]:
    """Yield the three matmuls of each linear layer (name, inputs, outputs, how many of it): its
    output, the gradient of its weight, with ``gradient_width`` bytes per element, and that of its
    input."""
    for name, inputs, outputs, count in layers:
        flops = matmul_flops(tokens, outputs, inputs)
        activations, weights = tokens * (inputs + outputs), inputs * outputs
        whole = width * (activations + weights)
        gradient = width * activations + gradient_width * weights
        yield Kernel("forward", "products", name, whole, flops, count)
        yield Kernel("backward", "products", f"{name} dw", gradient, flops, count)
        yield Kernel("backward", "products", f"{name} dx", whole, flops, count)


def _adamw(shape: Shape) -> Kernel:
    """Return AdamW's kernel: it reads weights, gradients and two moments, and writes all but the
    gradients. With masters it moves as much: 16 bits of a gradient, and of the weight beside."""
    return Kernel("optimizer", "optimizer", "adamw", 7 * WIDE * parameter_count(shape))


def fused_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Return the kernels of a perfectly fused train-step.

    Weights stay in float32, and under ``bf16`` are cast once. Each matmul writes the dtype that its
    reader needs, and gradients of weights in float32. Under ``bf16_weights`` the weights of matmuls
    have 16 bits, and the optimizer, which has fp32 master weights, writes them as well. Attention
    computes the half of its scores that the mask leaves, and five matmuls in its backward. Raises
    ValueError as ``eager_step``.
    """
    check_name("precision", precision, (*PRECISIONS, NARROW))
    check_sizes(batch=batch, context=context)
    heads, d, width = shape.num_heads, shape.head_dim, _width(precision)
    attention = []
    for pass_ in ("forward", "backward"):
        attention.append(tiled_kernel(pass_, batch, heads, context, d, True, width))
    return _fused(shape, batch, context, precision, attention)


def compiled_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Return the kernels of ``fused_step`` with attention as torch.compile leaves it if it is
    written as its definition with a mask: matmuls of all scores, and one kernel between two of
    them. Raises ValueError as ``eager_step``."""
    check_name("precision", precision, PRECISIONS)
    check_sizes(batch=batch, context=context)
    sizes = batch * shape.num_heads, context, shape.head_dim, _width(precision)
    attention = []
    for pass_ in ("forward", "backward"):
        attention += attention_kernels("compile", True, pass_, *sizes)
    return _fused(shape, batch, context, precision, attention)


def _width(precision: str) -> int:
    return 2 if precision in ("bf16", NARROW) else WIDE


def _fused(
    shape: Shape, batch: int, context: int, precision: str, attention: list[Kernel]
) -> list[Kernel]:
    layers, d, f, vocabulary = shape.num_layers, shape.d_model, shape.d_ff, shape.vocab_size
    masters, width, tokens = precision == NARROW, _width(precision), batch * context
    ids, rows = INDEX * tokens, WIDE * tokens  # bytes of ids, and of one number per token
    stream, hidden = WIDE * tokens * d, width * tokens * f
    narrow = width * tokens * d  # the stream as matmuls read it
    logits, gain = width * tokens * vocabulary, WIDE * d
    gradient = stream + (narrow if width < WIDE else 0)  # the stream's, and a copy for matmuls
    table = WIDE * vocabulary * d
    matrices = vocabulary * d + layers * (block_parameter_count(shape) - 2 * d)
    linear = [
        ("q, k, v", d, 3 * d, layers),
        ("output", d, d, layers),
        ("w1, w3", d, 2 * f, layers),
        ("w2", f, d, layers),
        ("lm_head", d, vocabulary, 1),
    ]
    kernels = list(_linear(linear, tokens, width, width if masters else WIDE))
    for kernel in attention:
        kernels.append(replace(kernel, part="attention", count=layers * kernel.count))

    rope, gate = 4 * narrow + WIDE * context * shape.head_dim, 3 * hidden
    # Before the FFN, and before the next block's attention or the head.
    residual = 2 * stream + 2 * narrow + gain + rows
    embedding = ids + 2 * stream + gain + narrow + rows
    casts = (WIDE + width) * matrices if width < WIDE and not masters else 0
    norm = narrow + stream + rows + gradient + 2 * gain
    of_block = 5 * hidden + rope + 2 * (norm + stream)
    return [
        *kernels,
        Kernel("forward", "elementwise", "embedding and casts", embedding + casts),
        Kernel("forward", "elementwise", "rope", rope, 0, layers),
        Kernel("forward", "elementwise", "gate", gate, 0, layers),
        Kernel("forward", "elementwise", "residual and norm", residual, 0, 2 * layers),
        Kernel("backward", "elementwise", "between matmuls", of_block, 0, layers),
        Kernel("backward", "elementwise", "norm and embedding", norm + stream + ids + table),
        Kernel("loss", "loss", "cross entropy", logits + ids + rows + WIDE),
        Kernel("backward", "loss", "cross entropy", 2 * logits + ids + rows),
        _adamw(shape),
    ]
