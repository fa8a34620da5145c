"""Memory and kernels of attention written down as its definition, by closed forms.

The code meant is ``a2lib.attention.attention_reference`` on ``(B, N, d)`` inputs, as PyTorch runs
it on CUDA: q k^T, scale, mask, softmax, p v. All sizes are in bytes.

    M  B N N scores       T  B N d, the size of q       mask  N N of one byte, shared by the batch

Forward holds two matrices at a time: each kernel reads one and writes the next, and the last of
them, the weights p, waits for the backward. That adds three: the gradient of p, its product with p,
which CUDA's kernel of the softmax's gradient writes first, and the gradient of the scores.

``torch.compile`` leaves the products to a library and fuses all between two of them into one
kernel, in place: compiled attention still has its matrices, and fewer passes over them. Where its
pattern is recognised (tensors of four dimensions, no mask) the whole is replaced by PyTorch's tiled
attention; on a GPU in float32 only where products may use TF32, as that attention does.

    written      plain   q, k, v (batch, N, d), no mask
                 causal  the same with a mask, masked_fill
                 heads   plain with a dimension of heads, (batch, 1, N, d): the recognised one
"""

import math
from dataclasses import dataclass

from a2lib.theory import attention
from a2lib.theory.attention import tiled_memory
from a2lib.theory.products import INDEX, WIDE, check_name, check_sizes, largest, matmul_flops
from a2lib.theory.roofline import Kernel

WRITTEN = ("plain", "causal", "heads")
IMPLEMENTATIONS = ("eager", "compile")
PASSES = ("forward", "backward")
HOW = ("tensors", "blocks", "tiled")
STEP = 512  # PyTorch's allocator counts in multiples
OWN_BLOCK = 10 * 2**20  # smaller tensors take no part of a large block
# Matrices of scores that pass between the products, read and written: forward, backward. Eager
# without a mask: scale and softmax; backward the softmax's two kernels (3 and 3) and scale. A mask
# is copied first and then filled in.
BETWEEN = {
    ("eager", "plain"): {"forward": 4, "backward": 8},
    ("eager", "causal"): {"forward": 8, "backward": 12},
    ("compile", "plain"): {"forward": 2, "backward": 3},
    ("compile", "causal"): {"forward": 2, "backward": 3},
}
# Products of a pass; each reads or writes one matrix, and two tensors of q's size.
PRODUCTS = {"forward": 2, "backward": 4}
# How often the mask passes, in eager attention.
MASKS = {"forward": 2, "backward": 1}


def rounded(size: int) -> int:
    """Return bytes as PyTorch's allocator counts them."""
    return -(-size // STEP) * STEP


@dataclass(frozen=True)
class Eager:
    """Eager attention on ``batch`` sequences of ``n`` tokens and vectors of ``d``.

    Raises ValueError for a size that is not a positive integer.
    """

    batch: int
    n: int
    d: int
    causal: bool
    element_bytes: int = 4

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, n=self.n, d=self.d, element_bytes=self.element_bytes)

    @property
    def matrix(self) -> int:
        """Bytes of the scores of all sequences, and of every tensor of their shape."""
        return rounded(self.batch * self.n**2 * self.element_bytes)

    @property
    def tensor(self) -> int:
        """Bytes of q, and of every tensor of its shape."""
        return rounded(self.batch * self.n * self.d * self.element_bytes)

    @property
    def mask(self) -> int:
        """Bytes of the mask, 0 where there is none."""
        return rounded(self.n**2) if self.causal else 0

    def saved(self) -> dict[str, int]:
        """Every tensor that autograd saves, by name."""
        kept = {"q": self.tensor, "k": self.tensor, "v": self.tensor, "p": self.matrix}
        if self.causal:
            kept["mask"] = self.mask
        return kept

    def inputs(self, pass_: str) -> dict[str, int]:
        """What is there before a pass, by name: backward includes what forward has left."""
        check_name("pass", pass_, PASSES)
        if pass_ == "forward":
            return {"q": self.tensor, "k": self.tensor, "v": self.tensor}
        return self.saved() | {"do": self.tensor, "o": self.tensor}

    def added(self, pass_: str) -> dict[str, int]:
        """What a pass holds beyond ``inputs(pass_)`` at its peak, by name: in forward while p v is
        computed, in backward at the softmax's gradient."""
        check_name("pass", pass_, PASSES)
        if pass_ == "backward":
            matrices = dict.fromkeys(("dp", "dp p", "ds"), self.matrix)
            return {"dv": self.tensor} | matrices
        tensors = {"scores": self.matrix, "p": self.matrix, "o": self.tensor}
        if self.causal:
            tensors |= {"mask": self.mask, "queries": rounded(INDEX * self.n)}
        return tensors

    def peak(self, pass_: str) -> int:
        """The most a pass allocates beyond what is there on entry."""
        return sum(self.added(pass_).values())

    def total(self, pass_: str) -> int:
        """All that its tensors take at the peak of a pass, inputs included."""
        return sum(self.inputs(pass_).values()) + self.peak(pass_)

    def blocks(self, pass_: str) -> int:
        """All that PyTorch's allocator takes for a pass and its forward, where it takes blocks.

        It serves a tensor from the smallest free block that holds it, and keeps what is left of
        that block. As backward begins, the free block is the one that the scores left, and dv takes
        its front (unless it is small, and has a block of its own): no matrix fits the rest, and
        three new blocks make five matrices. In forward a mask does the same, and makes three.
        """
        check_name("pass", pass_, PASSES)
        tensors = 5 if pass_ == "backward" else 4
        if pass_ == "forward":
            matrices = 3 if self.causal else 2
        else:
            matrices = 5 if self.tensor >= OWN_BLOCK or self.causal else 4
        return tensors * self.tensor + matrices * self.matrix


def longest(
    batch: int, d: int, causal: bool, room: int, pass_: str, *, step: int = 1, how: str = "tensors"
) -> int:
    """Return the longest sequence, a multiple of ``step``, whose pass in fp32 fits ``room`` bytes;
    0 for none.

    ``pass_`` is "forward" or "backward", which needs its forward too. By ``how`` what fits are the
    "tensors" of eager attention, the "blocks" that PyTorch's allocator takes for them, or the
    tensors of "tiled" attention. Raises ValueError as ``Eager``, or for another ``how``.
    """
    check_sizes(room=room, step=step)
    check_name("how", how, HOW)

    def needed(n: int) -> int:
        if how == "tiled":
            return tiled_total(batch, n, d, pass_)
        shape = Eager(batch, n, d, causal)
        return shape.blocks(pass_) if how == "blocks" else shape.total(pass_)

    return step * largest(lambda n: needed(n * step) <= room)


def tiled_total(batch: int, n: int, d: int, pass_: str) -> int:
    """Return what the tensors of tiled attention in fp32 take at the peak of a pass, inputs
    included."""
    inputs = (3 if pass_ == "forward" else 4) * batch * n * d * WIDE
    whole = "forward" if pass_ == "forward" else "end_to_end"
    return inputs + sum(tiled_memory(1, batch, n, n, d, WIDE, whole).values())


def attention_kernels(
    implementation: str, written: str, pass_: str, batch: int, n: int, d: int, element_bytes: int
) -> list[Kernel]:
    """Return the kernels of one pass, for ``roofline.floor``: the products, and all that passes
    between them as one.

    The backward is that of a graph that holds the probabilities; indices count as nothing. Where
    attention is recognised it is one kernel, without its matrices. Raises ValueError for unknown
    names and for sizes that are not positive integers.
    """
    check_sizes(batch=batch, n=n, d=d, element_bytes=element_bytes)
    if _recognised(implementation, written, pass_):
        return [tiled_kernel(pass_, batch, 1, n, d, False, element_bytes)]
    matrix, tensor = batch * n * n * element_bytes, batch * n * d * element_bytes
    flops = batch * matmul_flops(n, n, d)
    products = PRODUCTS[pass_]
    between = _between(implementation, written, pass_) * matrix
    if (implementation, written) == ("eager", "causal"):
        between += MASKS[pass_] * n * n
    return [
        Kernel(pass_, "products", "multiply", 2 * tensor, matrix, flops, products),
        Kernel(pass_, "elementwise", "between", math.ceil(between / 2), between // 2),
    ]


def moves(implementation: str, written: str, pass_: str) -> int:
    """Return the N x N matrices of the batch that a pass reads and writes; those of the mask, one
    byte an element and none of the batch, not counted. 0 where attention is recognised."""
    if _recognised(implementation, written, pass_):
        return 0
    return PRODUCTS[pass_] + _between(implementation, written, pass_)


def tiled_kernel(
    pass_: str, batch: int, heads: int, n: int, d: int, causal: bool, element_bytes: int
) -> Kernel:
    """Return a pass of tiled attention as one kernel that moves each tensor once."""
    sizes = batch, heads, n, n, d
    query, key, lse = attention.tensor_bytes(*sizes, element_bytes)
    written = query + lse if pass_ == "forward" else query + 2 * key
    read = attention.attention_bytes(*sizes, element_bytes, pass_) - written
    flops = attention.attention_flops(*sizes, causal, pass_)
    return Kernel(pass_, "attention", f"tiled {pass_}", read, written, flops)


def _recognised(implementation: str, written: str, pass_: str) -> bool:
    check_name("implementation", implementation, IMPLEMENTATIONS)
    check_name("written", written, WRITTEN)
    check_name("pass", pass_, PASSES)
    return (implementation, written) == ("compile", "heads")


def _between(implementation: str, written: str, pass_: str) -> int:
    return BETWEEN[implementation, "causal" if written == "causal" else "plain"][pass_]
