"""The kernels of a training step: as PyTorch launches them, and as a compiler could.

``eager_step`` lists those that PyTorch launches for the model with eager attention, as a count of
its operators on CUDA gives them; ``fused_step`` those of a step in which everything between two
matrix products is one kernel, attention is tiled, and products that share an input are one;
``compiled_step`` those of a fused step that keeps eager attention's products.
"""

from dataclasses import replace

from a2lib.theory.compiling import attention_kernels, tiled_kernel
from a2lib.theory.memory.tensors import StepMemory
from a2lib.theory.products import INDEX, WIDE, check_name, check_sizes, matmul_flops
from a2lib.theory.roofline import NARROW, PRECISIONS, Kernel
from a2lib.theory.transformer import Shape, block_parameter_count, parameter_count

# Tensors of one list that PyTorch's foreach operators take in one launch; blocks of so many
# elements of one tensor that its fused AdamW does.
COUNTERS_LAUNCH, ADAMW_LAUNCH, ADAMW_BLOCK = 110, 320, 65_536


def eager_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Every kernel of an eager train-step with eager attention and fused AdamW, by the name of the
    tensor that it makes: those of ``memory/operations.py``, and the optimizer's.

    ``bf16`` is CUDA's autocast: each product casts its operands, RoPE and the softmax run in
    float32. The embedding's backward counts as for few tokens, where it does not sort. What
    libraries launch to clear their workspaces, or to sum a product's parts, is not counted. Raises
    ValueError for sizes that are not positive integers, and another precision.
    """
    check_name("precision", precision, PRECISIONS)
    step = StepMemory(shape, batch, context, precision=precision.replace("tf32", "fp32"))
    lists, rest = divmod(9 * shape.num_layers + 3, COUNTERS_LAUNCH)  # of the tensors
    counters = [
        Kernel("optimizer", "optimizer", "step counters", WIDE * n, WIDE * n, 0, count)
        for n, count in ((COUNTERS_LAUNCH, lists), (rest, 1))
        if n and count
    ]
    return [*step.kernels(), *counters, *_adamw(shape, adamw_launches(shape))]


def fused_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """The kernels of a perfectly fused train-step: what no compiler goes below on this model
    without keeping a tensor on the chip from one matrix product to the next.

    Weights stay in float32 and under ``bf16`` are cast once; each product writes the dtype that is
    wanted, gradients of weights float32. Under ``bf16_weights`` those of products are in 16 bits,
    and the optimizer, which keeps masters, writes them with its last pass. Attention computes the
    half of its scores that the mask leaves, and its backward's five products. Errors as
    ``eager_step``.
    """
    check_name("precision", precision, (*PRECISIONS, NARROW))
    return _fused(shape, batch, context, precision, compiled=False)


def compiled_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """The kernels of ``fused_step`` with attention as torch.compile leaves it where it is written
    by its definition with a mask: products of all scores, and one kernel between two. The optimizer
    is outside of the compiled graph, as in ``eager_step``. Errors as there.
    """
    check_name("precision", precision, PRECISIONS)
    return _fused(shape, batch, context, precision, compiled=True)


def adamw_launches(shape: Shape) -> int:
    """Kernels of one step of PyTorch's fused AdamW."""
    sizes = StepMemory(shape).parameters().values()
    return -(-sum(-(-size // WIDE // ADAMW_BLOCK) for size in sizes) // ADAMW_LAUNCH)


def _adamw(shape: Shape, launches: int) -> list[Kernel]:
    """AdamW reads weights, gradients and two moments, and writes all but the gradients."""
    # One entry for its launches: the bytes of one are those of all over their number.
    share, rest = divmod(WIDE * parameter_count(shape), launches)
    return [
        Kernel("optimizer", "optimizer", "adamw", 4 * size, 3 * size, 0, count)
        for size, count in ((share, launches - 1), (share + rest, 1))
        if count
    ]


def _fused(
    shape: Shape, batch: int, context: int, precision: str, *, compiled: bool
) -> list[Kernel]:
    check_sizes(batch=batch, context=context)
    L, D, F, V = shape.num_layers, shape.d_model, shape.d_ff, shape.vocab_size
    masters = precision == NARROW
    narrow = 2 if precision in ("bf16", NARROW) else WIDE
    tokens, made = batch * context, []
    # Bytes of ids and of a number a token, of the residual stream, also narrow, of the FFN's
    # hidden, of the logits, of a norm's weight and of RoPE's two tables.
    ids, rows, u, un = INDEX * tokens, WIDE * tokens, WIDE * tokens * D, narrow * tokens * D
    g, logits, weight = narrow * tokens * F, narrow * tokens * V, WIDE * D
    turned = 2 * un + WIDE * context * shape.head_dim, 2 * un
    grad = u + (un if narrow < WIDE else 0)  # the residual's, and a narrow copy for products
    matrices = V * D + L * (block_parameter_count(shape) - 2 * D)

    def add(phase: str, name: str, *moved: int, count: int = 1, part: str = "elementwise") -> None:
        made.append(Kernel(phase, part, name, *moved, 0, count))

    def multiply(phase: str, name: str, n: int, m: int, k: int, count: int, out: int) -> None:
        """(n, k) times (k, m), both narrow, to ``out`` bytes a number."""
        moved = narrow * (n * k + k * m), out * n * m
        made.append(Kernel(phase, "products", name, *moved, matmul_flops(n, m, k), count))

    def linear(name: str, inputs: int, outputs: int, count: int = L) -> None:
        multiply("forward", name, tokens, outputs, inputs, count, narrow)

    def backward(name: str, inputs: int, outputs: int, count: int = L) -> None:
        own = narrow if masters else WIDE
        multiply("backward", f"{name} dw", outputs, inputs, tokens, count, own)
        multiply("backward", f"{name} dx", tokens, inputs, outputs, count, narrow)

    def attend(pass_: str) -> None:
        heads, d = shape.num_heads, shape.head_dim
        kernels = [tiled_kernel(pass_, batch, heads, context, d, True, narrow)]
        if compiled:
            sizes = batch * heads, context, d, narrow
            kernels = attention_kernels("compile", "causal", pass_, *sizes)
        made.extend(replace(one, part="attention", count=L) for one in kernels)

    if narrow < WIDE and not masters:
        add("forward", "cast weights", WIDE * matrices, narrow * matrices)
    add("forward", "embedding and norm", ids + u + weight, u + un + rows)
    linear("q, k, v", D, 3 * D)
    add("forward", "rope", *turned, count=L)
    attend("forward")
    linear("output", D, D)
    linear("w1, w3", D, 2 * F)
    add("forward", "gate", 2 * g, g, count=L)
    linear("w2", F, D)
    # Before the FFN, and before the next block's attention or the head.
    add("forward", "residual and norm", u + un + weight, u + un + rows, count=2 * L)
    linear("lm_head", D, V, 1)
    add("loss", "cross entropy", logits + ids, rows + WIDE, part="loss")
    add("backward", "cross entropy", logits + ids + rows, logits, part="loss")
    backward("lm_head", D, V, 1)
    add("backward", "norm", un + u + rows + weight, grad + weight)
    backward("w2", F, D)
    add("backward", "gate", 3 * g, 2 * g, count=L)
    backward("w1, w3", D, 2 * F)
    backward("output", D, D)
    attend("backward")
    add("backward", "rope", *turned, count=L)
    backward("q, k, v", D, 3 * D)
    moved = un + 2 * u + rows + weight, grad + weight
    add("backward", "norm and residual", *moved, count=2 * L)
    add("backward", "embedding", u + ids, WIDE * V * D)
    if not masters:
        return made + _adamw(shape, adamw_launches(shape) if compiled else 1)
    # Gradients are read and weights written in 16 bits beside masters and moments.
    passes, others = (3 * WIDE + narrow) * matrices, WIDE * (parameter_count(shape) - matrices)
    add("optimizer", "adamw", passes + 4 * others, passes + 3 * others, part="optimizer")
    return made
