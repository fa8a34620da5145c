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

# Bytes that an eager block reads and writes between its matmuls, per element of the residual
# stream, of the FFN's hidden width, of the scores and of its matrices (which autocast casts each
# time). "masked" is the scores' scale, mask and softmax. A few numbers per token are left out.
TRAFFIC = {
    ("fp32", "forward"): {
        "norms": {"stream": 80},
        "rope": {"stream": 88},
        "gate": {"hidden": 20},
        "masked": {"scores": 32},
    },
    ("fp32", "backward"): {
        "masked": {"stream": 32, "scores": 48},
        "rest": {"stream": 324, "hidden": 36},
    },
    ("bf16", "forward"): {
        "norms": {"stream": 76},
        "rope": {"stream": 80},
        "gate": {"hidden": 10},
        "masked": {"scores": 20},
        "casts": {"stream": 54, "matrices": 6},
        "casts of scores": {"scores": 12},
    },
    ("bf16", "backward"): {
        "masked": {"stream": 16, "scores": 48},
        "rest": {"stream": 390, "hidden": 18, "matrices": 6},
    },
}
# The same outside of the blocks: embedding, last norm and head; the loss with its gradient.
BESIDE = {
    ("fp32", "forward"): {"stream": 36},
    ("fp32", "loss"): {"logits": 8},
    ("fp32", "gradient of the loss"): {"logits": 16},
    ("fp32", "backward"): {"stream": 100, "table": 4},
    ("bf16", "forward"): {"stream": 42, "table": 6},
    ("bf16", "loss"): {"logits": 14},
    ("bf16", "gradient of the loss"): {"logits": 22},
    ("bf16", "backward"): {"stream": 106, "table": 10},
}


def eager_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Return the kernels of an eager train-step with eager attention and fused AdamW.

    ``bf16`` is CUDA's autocast: each matmul casts its inputs, and RoPE and the softmax run in
    float32. The kernels between matmuls are one for each name of ``TRAFFIC``. Raises ValueError for
    sizes that are not positive integers, and for another precision.
    """
    check_name("precision", precision, PRECISIONS)
    check_sizes(batch=batch, context=context)
    width, numbers = 4, "fp32"
    if precision == "bf16":
        width, numbers = 2, "bf16"
    tokens, layers = batch * context, shape.num_layers
    d, f = shape.d_model, shape.d_ff
    linear = [(name, d, d, layers) for name in ("q", "k", "v", "output")]
    linear += [("w1", d, f, layers), ("w3", d, f, layers), ("w2", f, d, layers)]
    linear += [("lm_head", d, shape.vocab_size, 1)]
    kernels = list(_linear(linear, tokens, width, width))

    heads = batch * shape.num_heads
    for pass_ in ("forward", "backward"):
        of_attention = attention_kernels(
            "eager", "causal", pass_, heads, context, shape.head_dim, width
        )
        for kernel in of_attention:
            if kernel.flops:
                count = layers * kernel.count
                kernels.append(replace(kernel, part="attention", name="scores", count=count))
    sizes = {
        "stream": tokens * d,
        "hidden": tokens * f,
        "scores": heads * context**2,
        "matrices": shape.block_matrices,
        "logits": tokens * shape.vocab_size,
        "table": shape.vocab_size * d,
    }
    for pass_ in ("forward", "backward"):
        for name, moved in TRAFFIC[numbers, pass_].items():
            part = "attention" if "scores" in moved else "elementwise"
            kernels.append(_moving(pass_, part, name, moved, sizes, layers))
    for name, phase, part in (
        ("forward", "forward", "elementwise"),
        ("loss", "loss", "loss"),
        ("gradient of the loss", "backward", "loss"),
        ("backward", "backward", "elementwise"),
    ):
        kernels.append(_moving(phase, part, "beside", BESIDE[numbers, name], sizes, 1))
    return [*kernels, *_adamw(shape)]


def _moving(
    phase: str, part: str, name: str, moved: dict[str, int], sizes: dict[str, int], count: int
) -> Kernel:
    """Return a kernel that moves ``moved`` bytes per element of ``sizes``, half of them read."""
    total = sum(per_element * sizes[name] for name, per_element in moved.items())
    return Kernel(phase, part, name, total - total // 2, total // 2, 0, count)


def _linear(
    layers: list[tuple[str, int, int, int]], tokens: int, width: int, gradient_width: int
) -> Iterator[Kernel]:
    """Yield the three matmuls of each linear layer (name, inputs, outputs, how many of it): its
    output, the gradient of its weight, with ``gradient_width`` bytes per element, and that of its
    input."""
    for name, inputs, outputs, count in layers:
        flops = matmul_flops(tokens, outputs, inputs)
        x, y, w = tokens * inputs, tokens * outputs, inputs * outputs
        forward = width * (x + w), width * y
        weight = width * (x + y), gradient_width * w
        entry = width * (y + w), width * x
        yield Kernel("forward", "products", name, *forward, flops, count)
        yield Kernel("backward", "products", f"{name} dw", *weight, flops, count)
        yield Kernel("backward", "products", f"{name} dx", *entry, flops, count)


def _adamw(shape: Shape) -> list[Kernel]:
    """Return AdamW's kernel: it reads weights, gradients and two moments, and writes all but the
    gradients."""
    size = WIDE * parameter_count(shape)
    return [Kernel("optimizer", "optimizer", "adamw", 4 * size, 3 * size)]


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
    heads, d = shape.num_heads, shape.head_dim
    width = _width(precision)
    attention = [
        tiled_kernel(pass_, batch, heads, context, d, True, width)
        for pass_ in ("forward", "backward")
    ]
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
        attention += attention_kernels("compile", "causal", pass_, *sizes)
    return _fused(shape, batch, context, precision, attention)


def _width(precision: str) -> int:
    return 2 if precision in ("bf16", NARROW) else WIDE


def _fused(
    shape: Shape, batch: int, context: int, precision: str, attention: list[Kernel]
) -> list[Kernel]:
    layers, d, f, vocabulary = shape.num_layers, shape.d_model, shape.d_ff, shape.vocab_size
    masters = precision == NARROW
    width = _width(precision)
    tokens = batch * context
    ids, rows = INDEX * tokens, WIDE * tokens  # bytes of ids, and of one number per token
    stream, hidden = WIDE * tokens * d, width * tokens * f
    narrow = width * tokens * d  # the stream as matmuls read it
    logits, gain = width * tokens * vocabulary, WIDE * d
    table = WIDE * context * shape.head_dim  # RoPE's
    gradient = stream + (narrow if width < WIDE else 0)  # the stream's, and a copy for matmuls
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

    # (phase, name, bytes read, bytes written, how many of it)
    between = [
        ("forward", "embedding and norm", ids + stream + gain, stream + narrow + rows, 1),
        ("forward", "rope", 2 * narrow + table, 2 * narrow, layers),
        ("forward", "gate", 2 * hidden, hidden, layers),
        # Before the FFN, and before the next block's attention or the head.
        (
            "forward",
            "residual and norm",
            stream + narrow + gain,
            stream + narrow + rows,
            2 * layers,
        ),
        ("backward", "norm", narrow + stream + rows + gain, gradient + gain, 1),
        ("backward", "gate", 3 * hidden, 2 * hidden, layers),
        ("backward", "rope", 2 * narrow + table, 2 * narrow, layers),
        (
            "backward",
            "norm and residual",
            narrow + 2 * stream + rows + gain,
            gradient + gain,
            2 * layers,
        ),
        ("backward", "embedding", stream + ids, WIDE * vocabulary * d, 1),
    ]
    if width < WIDE and not masters:
        between.append(("forward", "cast weights", WIDE * matrices, width * matrices, 1))
    for phase, name, read, written, count in between:
        kernels.append(Kernel(phase, "elementwise", name, read, written, 0, count))
    kernels.append(Kernel("loss", "loss", "cross entropy", logits + ids, rows + WIDE))
    kernels.append(Kernel("backward", "loss", "cross entropy", logits + ids + rows, logits))
    if not masters:
        return [*kernels, *_adamw(shape)]
    # Gradients are read and weights written in 16 bits beside masters and moments.
    passes, others = (3 * WIDE + width) * matrices, WIDE * (parameter_count(shape) - matrices)
    moved = passes + 4 * others, passes + 3 * others
    return [*kernels, Kernel("optimizer", "optimizer", "adamw", *moved)]
