"""The kernels of a training step: as PyTorch launches them, and as a compiler could.

``eager_step`` lists those that PyTorch launches for the model with eager attention, as a count of
its operators on CUDA gives them; ``fused_step`` those of a step in which everything between two
matrix products is one kernel, attention is tiled, and products that share an input are one;
``compiled_step`` those of a fused step that keeps eager attention's products.
"""

from __future__ import annotations

from dataclasses import replace

from a2lib.theory.compiling import attention_kernels, tiled_kernel
from a2lib.theory.memory.operations import launched
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
    one = Shape(shape.d_model, shape.d_ff, 1, shape.num_heads, shape.vocab_size)
    step = StepMemory(one, batch, context, precision="bf16" if precision == "bf16" else "fp32")
    lists, rest = divmod(9 * shape.num_layers + 3, COUNTERS_LAUNCH)  # of the tensors
    counters = [
        Kernel("optimizer", "optimizer", "step counters", WIDE * n, WIDE * n, 0, count)
        for n, count in ((COUNTERS_LAUNCH, lists), (rest, 1))
        if n and count
    ]
    return [*launched(step, shape.num_layers), *counters, *_adamw(shape, adamw_launches(shape))]


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
    return _Fused(shape, batch, context, precision, compiled=False).step()


def compiled_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """The kernels of ``fused_step`` with attention as torch.compile leaves it where it is written
    by its definition with a mask: products of all scores, and one kernel between two. The optimizer
    is outside of the compiled graph, as in ``eager_step``. Errors as there.
    """
    check_name("precision", precision, PRECISIONS)
    return _Fused(shape, batch, context, precision, compiled=True).step()


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


class _Fused:
    def __init__(self, shape: Shape, batch: int, context: int, precision: str, compiled: bool):
        check_sizes(batch=batch, context=context)
        self.shape, self.batch, self.context, self.compiled = shape, batch, context, compiled
        self.narrow_weights = precision == NARROW
        self.casts = precision in ("bf16", NARROW)
        self.narrow = 2 if self.casts else WIDE
        self.rows = batch * context
        self.kernels: list[Kernel] = []
        self.count, self.phase, self.part = 1, "forward", "elementwise"

    def add(self, name: str, read: int, written: int, times: int = 1) -> None:
        """``read`` and ``written`` in bytes."""
        how = name, read, written, 0, times * self.count
        self.kernels.append(Kernel(self.phase, self.part, *how))

    def product(self, name: str, n: int, m: int, k: int, out_bytes: int | None = None) -> None:
        """(n, k) times (k, m), both narrow."""
        read, written = self.narrow * (n * k + k * m), (out_bytes or self.narrow) * n * m
        how = name, read, written, matmul_flops(n, m, k), self.count
        self.kernels.append(Kernel(self.phase, "products", *how))

    def step(self) -> list[Kernel]:
        shape = self.shape
        D, F, V = shape.d_model, shape.d_ff, shape.vocab_size
        narrow, rows, weight = self.narrow, WIDE * self.rows, WIDE * D
        # The residual stream, also narrow, and the FFN's hidden.
        u, un, g = rows * D, narrow * self.rows * D, narrow * self.rows * F
        table = WIDE * self.context * shape.head_dim  # of cosines and of sines
        grad = u + (un if self.casts else 0)  # the residual's, and a narrow copy for products
        logits = narrow * self.rows * V
        matrices = V * D + shape.num_layers * (block_parameter_count(shape) - 2 * D)
        if self.casts and not self.narrow_weights:
            self.add("cast weights", WIDE * matrices, narrow * matrices)
        self.add("embedding and norm", INDEX * self.rows + u + weight, u + un + rows)
        self.count = shape.num_layers
        self.product("q, k, v", self.rows, 3 * D, D)
        self.add("rope", 2 * un + table, 2 * un)
        self.attend("forward")
        self.product("output", self.rows, D, D)
        self.product("w1, w3", self.rows, 2 * F, D)
        self.add("gate", 2 * g, g)
        self.product("w2", self.rows, D, F)
        # Before the FFN, and before the next block's attention or the head.
        self.add("residual and norm", u + un + weight, u + un + rows, times=2)
        self.count = 1
        self.product("lm_head", self.rows, V, D)
        self.phase = self.part = "loss"
        self.add("cross entropy", logits + INDEX * self.rows, rows + WIDE)
        self.phase = "backward"
        self.add("cross entropy", logits + INDEX * self.rows + rows, logits)
        self.part = "elementwise"
        self.linear_backward("lm_head", D, V)
        self.add("norm", un + u + rows + weight, grad + weight)
        self.count = shape.num_layers
        self.linear_backward("w2", F, D)
        self.add("gate", 3 * g, 2 * g)
        self.linear_backward("w1, w3", D, 2 * F)
        self.linear_backward("output", D, D)
        self.attend("backward")
        self.add("rope", 2 * un + table, 2 * un)
        self.linear_backward("q, k, v", D, 3 * D)
        self.add("norm and residual", un + 2 * u + rows + weight, grad + weight, times=2)
        self.count = 1
        self.add("embedding", u + INDEX * self.rows, WIDE * V * D)
        if not self.narrow_weights:
            return self.kernels + _adamw(shape, adamw_launches(shape) if self.compiled else 1)
        # Gradients are read and weights written in 16 bits beside masters and moments.
        passes = (3 * WIDE + narrow) * matrices
        wide = WIDE * (parameter_count(shape) - matrices)
        self.phase = self.part = "optimizer"
        self.add("adamw", passes + 4 * wide, passes + 3 * wide)
        return self.kernels

    def linear_backward(self, name: str, inputs: int, outputs: int) -> None:
        wide = self.narrow if self.narrow_weights else WIDE
        self.product(f"{name} dw", outputs, inputs, self.rows, out_bytes=wide)
        self.product(f"{name} dx", self.rows, inputs, outputs)

    def attend(self, pass_: str) -> None:
        n, heads, d = self.context, self.shape.num_heads, self.shape.head_dim
        if self.compiled:
            sizes = self.batch * heads, n, d, self.narrow
            kernels = attention_kernels("compile", "causal", pass_, *sizes)
        else:
            kernels = [tiled_kernel(pass_, self.batch, heads, n, n, d, True, self.narrow)]
        self.kernels += [replace(one, part="attention", count=self.count) for one in kernels]
