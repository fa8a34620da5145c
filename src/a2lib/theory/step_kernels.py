"""The kernels of a training step: as PyTorch launches them, and as a compiler could.

``eager_step`` lists those that PyTorch launches for the model with eager attention, as a count of
its operators on CUDA gives them; ``fused_step`` those of a step in which everything between two
matrix products is one kernel, attention is tiled, and products that share an input are one;
``compiled_step`` those of a fused step that keeps eager attention's products.

    u  residual stream, B T D elements        rows  B T             tables, weights: by their sizes
    g  hidden of the FFN, B T F               s     scores, B H T T, all of them in eager
"""

from __future__ import annotations

from dataclasses import replace

from a2lib.theory.compiling import attention_kernels, tiled_kernel
from a2lib.theory.products import INDEX, WIDE, check_name, check_sizes, matmul_flops
from a2lib.theory.roofline import NARROW, PRECISIONS, Kernel
from a2lib.theory.transformer import Shape, adamw_launches, block_parameter_count, parameter_count

# Tensors of one list that PyTorch's foreach operators take in one launch.
COUNTERS_LAUNCH = 110
OF_NARROW = ("output", "w2")  # products whose input autocast has in 16 bits already


def eager_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """Every kernel of an eager train-step with eager attention and fused AdamW.

    ``bf16`` is CUDA's autocast: each product casts its operands, RoPE and the softmax run in
    float32. An operator that launches two kernels is two (a mask copies first, the softmax's
    backward multiplies first, a scattered gradient is cleared first, what is joined along a fifth
    dimension is copied part by part); the embedding's backward counts as for few tokens, where it
    does not sort. What libraries launch to clear their workspaces, or to sum a product's parts, is
    not counted. Raises ValueError for sizes that are not positive integers, and another precision.
    """
    return _Eager(shape, batch, context, precision).step()


def fused_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """The kernels of a perfectly fused train-step: what no compiler goes below on this model
    without keeping a tensor on the chip from one matrix product to the next.

    Weights stay in float32 and under ``bf16`` are cast once; each product writes the dtype that is
    wanted, gradients of weights float32. Under ``bf16_weights`` those of products are in 16 bits,
    and the optimizer, which keeps masters, writes them with its last pass. Attention computes the
    half of its scores that the mask leaves, and its backward's five products. Errors as
    ``eager_step``.
    """
    return _Fused(shape, batch, context, precision).step()


def compiled_step(shape: Shape, batch: int, context: int, precision: str) -> list[Kernel]:
    """The kernels of ``fused_step`` with attention as torch.compile leaves it where it is written
    by its definition with a mask: products of all scores, and one kernel between two. The optimizer
    is outside of the compiled graph, as in ``eager_step``. Errors as there.
    """
    return _Compiled(shape, batch, context, precision).step()


class _Kernels:
    precisions = PRECISIONS

    def __init__(self, shape: Shape, batch: int, context: int, precision: str):
        check_sizes(batch=batch, context=context)
        check_name("precision", precision, self.precisions)
        self.shape, self.batch, self.context = shape, batch, context
        self.narrow_weights = precision == NARROW
        self.casts = precision in ("bf16", NARROW)
        self.narrow = 2 if self.casts else WIDE
        self.rows = batch * context
        self.u = self.rows * shape.d_model
        self.g = self.rows * shape.d_ff
        self.s = batch * shape.num_heads * context**2
        self.score_flops = 2 * self.s * shape.head_dim  # of one of attention's products
        self.table = context * shape.head_dim // 2  # of cosines, or sines
        self.kernels: list[Kernel] = []
        self.count, self.phase, self.part = 1, "forward", "elementwise"

    def add(self, name: str, read: int, written: int, flops: int = 0, times: int = 1) -> None:
        """``read`` and ``written`` in bytes."""
        how = name, read, written, flops, times * self.count
        self.kernels.append(Kernel(self.phase, self.part, *how))

    def product(self, name: str, n: int, m: int, k: int, out_bytes: int | None = None) -> None:
        """(n, k) times (k, m), both narrow."""
        read, written = self.narrow * (n * k + k * m), (out_bytes or self.narrow) * n * m
        how = name, read, written, matmul_flops(n, m, k), self.count
        self.kernels.append(Kernel(self.phase, "products", *how))

    def optimizer(self, launches: int) -> None:
        """AdamW reads weights, gradients and two moments, and writes all but the gradients."""
        self.phase = self.part = "optimizer"
        # One entry for its launches: the bytes of one are those of all over their number.
        share, rest = divmod(WIDE * parameter_count(self.shape), launches)
        self.add("adamw", 4 * share, 3 * share, times=launches - 1)
        self.add("adamw", 4 * (share + rest), 3 * (share + rest))


class _Eager(_Kernels):
    def step(self) -> list[Kernel]:
        shape, u = self.shape, WIDE * self.u
        self.add("embedding", INDEX * self.rows + u, u)
        self.count = shape.num_layers
        self.norm()
        self.attention()
        self.add("residual", u + self.narrow * self.u, u)
        self.norm()
        self.ffn()
        self.add("residual", u + self.narrow * self.u, u)
        self.count = 1
        self.norm()
        self.linear("lm_head", shape.d_model, shape.vocab_size)
        self.loss()
        self.phase, self.part = "backward", "elementwise"
        self.linear_backward("lm_head", shape.d_model, shape.vocab_size)
        self.norm_backward()
        self.count = shape.num_layers
        self.ffn_backward()
        self.norm_backward()
        self.add("residual", 2 * u, u)
        self.attention_backward()
        self.norm_backward()
        self.add("residual", 2 * u, u)
        self.count = 1
        self.add("clear gradient", 0, WIDE * shape.vocab_size * shape.d_model)
        self.add("embedding", u + INDEX * self.rows, u)
        self.phase = self.part = "optimizer"
        lists, rest = divmod(9 * shape.num_layers + 3, COUNTERS_LAUNCH)  # of the tensors
        for counters, times in ((COUNTERS_LAUNCH, lists), (rest, bool(rest))):
            self.add("step counters", WIDE * counters, WIDE * counters, times=times)
        self.optimizer(adamw_launches(shape))
        return [kernel for kernel in self.kernels if kernel.count]

    def cast(self, elements: int, down: bool = True) -> None:
        if self.casts:
            narrow, wide = self.narrow * elements, WIDE * elements
            self.add("cast", *((wide, narrow) if down else (narrow, wide)))

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        self.cast(inputs * outputs)
        if name not in OF_NARROW:
            self.cast(self.rows * inputs)
        self.product(name, self.rows, outputs, inputs)

    def linear_backward(self, name: str, inputs: int, outputs: int) -> None:
        self.product(f"{name} dw", outputs, inputs, self.rows)
        self.product(f"{name} dx", self.rows, inputs, outputs)
        if name not in OF_NARROW:
            self.cast(self.rows * inputs, down=False)
        self.cast(inputs * outputs, down=False)

    def norm(self) -> None:
        u, rows = WIDE * self.u, WIDE * self.rows
        self.add("norm: square", u, u)
        self.add("norm: mean", u, rows)
        self.add("norm: eps, rsqrt", rows, rows, times=2)
        self.add("norm: divide", u + rows, u)
        self.add("norm: weight", u + WIDE * self.shape.d_model, u)

    def norm_backward(self) -> None:
        u, rows, weight = WIDE * self.u, WIDE * self.rows, WIDE * self.shape.d_model
        self.add("norm: of the weight, by element", 2 * u, u)
        self.add("norm: of the weight", u, weight)
        self.add("norm: weight", u + weight, u)
        self.add("norm: of the root, by element", 2 * u, u)
        self.add("norm: of the root", u, rows)
        self.add("norm: divide", u + rows, u)
        self.add("norm: power, half", rows, rows, times=2)
        self.add("norm: of the mean", 2 * rows, rows)
        self.add("norm: mean", rows, u)
        self.add("norm: power, twice", u, u, times=2)
        self.add("norm: square", 2 * u, u)
        self.add("norm: sum", 2 * u, u)

    def rope(self) -> None:
        half = WIDE * self.u // 2
        self.cast(self.u, down=False)
        self.add("rope: times table", half + WIDE * self.table, half, times=4)
        self.add("rope: sum", 2 * half, half, times=2)
        # Joining five dimensions is a copy for each part.
        self.add("rope: interleave", half, half, times=2)
        self.cast(self.u)

    def attention(self) -> None:
        for name in "qkv":
            self.linear(name, self.shape.d_model, self.shape.d_model)
        self.rope()
        self.rope()
        self.part = "attention"
        u, s, wide = self.narrow * self.u, self.narrow * self.s, WIDE * self.s
        self.add("q k^T", 2 * u, s, self.score_flops)
        self.add("times scale", s, s)
        self.add("indices", 0, INDEX * self.context, times=2)
        self.add("compare", 2 * INDEX * self.context, self.context**2)
        self._mask(s)
        self.cast(self.s, down=False)
        self.add("softmax", wide, wide)
        self.cast(self.s)
        self.add("copy v", u, u)
        self.add("p v", s + u, u, self.score_flops)
        self.add("copy o", u, u)
        self.part = "elementwise"
        self.linear("output", self.shape.d_model, self.shape.d_model)

    def attention_backward(self) -> None:
        D = self.shape.d_model
        self.cast(self.u)
        self.linear_backward("output", D, D)
        self.part = "attention"
        u, s, wide = self.narrow * self.u, self.narrow * self.s, WIDE * self.s
        self.add("copy do", u, u)
        self.add("p^T do", s + u, u, self.score_flops)
        self.add("do v^T", 2 * u, s, self.score_flops)
        self.cast(self.s, down=False)
        self.add("dp times p", 2 * wide, wide)
        self.add("softmax backward", 2 * wide, wide)
        self.cast(self.s)
        self._mask(s)
        self.add("times scale", s, s)
        self.add("ds^T q", s + u, u, self.score_flops)
        self.add("ds k", s + u, u, self.score_flops)
        self.part = "elementwise"
        for _ in "qk":
            self.rope()
            self.add("rope: negate", WIDE * self.u // 2, WIDE * self.u // 2)
        self.part = "attention"
        self.add("copy dq, dk, dv", u, u, times=3)
        self.part = "elementwise"
        for name in "qkv":
            self.linear_backward(name, D, D)
        self.add("sum of dx", 2 * WIDE * self.u, WIDE * self.u, times=2)

    def _mask(self, s: int) -> None:
        self.add("copy to mask", s, s)
        self.add("mask", s + self.context**2, s)

    def ffn(self) -> None:
        D, F, g = self.shape.d_model, self.shape.d_ff, self.narrow * self.g
        self.linear("w1", D, F)
        self.linear("w3", D, F)
        self.add("silu", g, g)
        self.add("gate", 2 * g, g)
        self.linear("w2", F, D)

    def ffn_backward(self) -> None:
        D, F, g = self.shape.d_model, self.shape.d_ff, self.narrow * self.g
        self.cast(self.u)
        self.linear_backward("w2", F, D)
        self.add("gate, silu", 2 * g, g, times=3)
        self.linear_backward("w3", D, F)
        self.linear_backward("w1", D, F)
        self.add("sum of dx", 2 * WIDE * self.u, WIDE * self.u)

    def loss(self) -> None:
        logits = self.rows * self.shape.vocab_size
        self.phase = self.part = "loss"
        self.cast(logits, down=False)
        self.add("log softmax", WIDE * logits, WIDE * logits)
        self.add("mean of targets", (WIDE + INDEX) * self.rows, 2 * WIDE)
        self.phase = "backward"
        self.add("one", 0, WIDE)
        self.add("clear gradient", 0, WIDE * logits)
        self.add("of targets", INDEX * self.rows + 2 * WIDE, WIDE * self.rows)
        self.add("log softmax backward", 2 * WIDE * logits, WIDE * logits)
        self.cast(logits)


class _Fused(_Kernels):
    precisions = (*PRECISIONS, NARROW)

    def step(self) -> list[Kernel]:
        shape = self.shape
        D, F, V = shape.d_model, shape.d_ff, shape.vocab_size
        narrow, u, rows, g = self.narrow, WIDE * self.u, WIDE * self.rows, self.narrow * self.g
        un, weight = narrow * self.u, WIDE * D
        grad = u + (un if self.casts else 0)  # the residual's, and a narrow copy for products
        logits = narrow * self.rows * V
        matrices = V * D + shape.num_layers * (block_parameter_count(shape) - 2 * D)
        if self.casts and not self.narrow_weights:
            self.add("cast weights", WIDE * matrices, narrow * matrices)
        self.add("embedding and norm", INDEX * self.rows + u + weight, u + un + rows)
        self.count = shape.num_layers
        self.product("q, k, v", self.rows, 3 * D, D)
        self.add("rope", 2 * un + 2 * WIDE * self.table, 2 * un)
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
        self.add("rope", 2 * un + 2 * WIDE * self.table, 2 * un)
        self.linear_backward("q, k, v", D, 3 * D)
        self.add("norm and residual", un + 2 * u + rows + weight, grad + weight, times=2)
        self.count = 1
        self.add("embedding", u + INDEX * self.rows, WIDE * V * D)
        if self.narrow_weights:
            self.masters(matrices, parameter_count(shape) - matrices)
        else:
            self.optimizer(1)
        return [kernel for kernel in self.kernels if kernel.count]

    def linear_backward(self, name: str, inputs: int, outputs: int) -> None:
        wide = self.narrow if self.narrow_weights else WIDE
        self.product(f"{name} dw", outputs, inputs, self.rows, out_bytes=wide)
        self.product(f"{name} dx", self.rows, inputs, outputs)

    def masters(self, narrow: int, wide: int) -> None:
        """As ``optimizer``; of the narrow ones gradients are read and weights written in 16 bits
        beside masters and moments."""
        self.phase = self.part = "optimizer"
        passes = (3 * WIDE + self.narrow) * narrow
        self.add("adamw", passes + 4 * WIDE * wide, passes + 3 * WIDE * wide)

    def attend(self, pass_: str) -> None:
        kernels = self.attention(pass_)
        self.kernels += [replace(one, part="attention", count=self.count) for one in kernels]

    def attention(self, pass_: str) -> list[Kernel]:
        sizes = self.shape.num_heads, self.context, self.context, self.shape.head_dim
        return [tiled_kernel(pass_, self.batch, *sizes, True, self.narrow)]


class _Compiled(_Fused):
    precisions = PRECISIONS

    def attention(self, pass_: str) -> list[Kernel]:
        sizes = self.batch * self.shape.num_heads, self.context, self.shape.head_dim
        return attention_kernels("compile", "causal", pass_, *sizes, self.narrow)

    def optimizer(self, launches: int) -> None:
        super().optimizer(adamw_launches(self.shape))
