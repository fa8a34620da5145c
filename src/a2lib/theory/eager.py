"""Memory and kernels of eager attention, written as its definition, by closed forms.

It is ``a2lib.attention.attention_reference`` on ``(B, N, d)`` inputs, as PyTorch runs it on CUDA:
q k^T, scale, mask, softmax, p v. All sizes are in bytes.

    M  B N N scores       T  B N d, the size of q       mask  N N of one byte, shared by the batch

The forward holds two matrices at a time: each kernel reads one and writes the next. The last of
them, the weights p, are saved for the backward. The backward adds three: the gradient of p, its
product with p, which CUDA's kernel of the softmax's gradient writes first, and the gradient of the
scores.

``torch.compile`` leaves the matmuls to a library and fuses all kernels between two of them into
one, in place. Compiled attention still has its matrices, but fewer accesses to them. (Where it
recognizes its pattern, in tensors of four dimensions without a mask, it calls PyTorch's tiled
attention instead.)
"""

import bisect
from dataclasses import dataclass

from a2lib.checks import check_sizes
from a2lib.theory import attention
from a2lib.theory.products import INDEX, matmul_flops
from a2lib.theory.roofline import Kernel

PASSES = ("forward", "backward")
STEP = 512  # PyTorch's allocator rounds up to multiples of it
OWN_BLOCK = 10 * 2**20  # smaller tensors take no part of a large block
# Matrices of scores that the kernels between matmuls read and write, by implementation and whether
# there is a mask. Eager without a mask: scale
# and softmax; in the backward the softmax's two kernels (3 and 3) and scale. With a mask the scores
# are copied first and then filled in.
BETWEEN = {
    ("eager", False): {"forward": 4, "backward": 8},
    ("eager", True): {"forward": 8, "backward": 12},
    ("compile", False): {"forward": 2, "backward": 3},
    ("compile", True): {"forward": 2, "backward": 3},
}
# Matmuls of a pass; each reads or writes one matrix, and two tensors of q's size.
PRODUCTS = {"forward": 2, "backward": 4}
# How often eager attention reads or writes the mask.
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
        """Return the bytes of every tensor that autograd saves, by name."""
        sizes = {"q": self.tensor, "k": self.tensor, "v": self.tensor, "p": self.matrix}
        if self.causal:
            sizes["mask"] = self.mask
        return sizes

    def held(self, pass_: str) -> int:
        """Return the bytes of the tensors that are there before a pass: q, k and v; for the
        backward also do, o and what the forward has saved."""
        if pass_ == "forward":
            return 3 * self.tensor
        return sum(self.saved().values()) + 2 * self.tensor

    def peak(self, pass_: str) -> int:
        """Return the bytes that a pass holds at its peak beyond ``held(pass_)``: in the backward
        dv, and at the softmax's gradient dp, its product with p, and ds; in the forward, at p v,
        the scores, p, o and where there is a mask the mask and its queries' indices."""
        if pass_ == "backward":
            return self.tensor + 3 * self.matrix
        indices = rounded(INDEX * self.n) if self.causal else 0
        return self.tensor + 2 * self.matrix + self.mask + indices

    def total(self, pass_: str) -> int:
        """Return the bytes of all tensors at the peak of a pass."""
        return self.held(pass_) + self.peak(pass_)

    def blocks(self, pass_: str) -> int:
        """Return the bytes that PyTorch's allocator takes for a pass and its forward, in blocks.

        It serves a tensor from the smallest free block that holds it, and keeps the rest of that
        block. As the backward begins, the free block is that of the scores, and dv takes its front
        (unless dv is small and has a block of its own). No matrix fits the rest, so with three new
        blocks there are five matrices. In the forward a mask does the same, and there are three.
        """
        tensors = 5 if pass_ == "backward" else 4
        if pass_ == "forward":
            matrices = 3 if self.causal else 2
        else:
            matrices = 5 if self.tensor >= OWN_BLOCK or self.causal else 4
        return tensors * self.tensor + matrices * self.matrix


def longest(
    batch: int,
    d: int,
    causal: bool,
    room: int,
    pass_: str,
    *,
    step: int = 1,
    in_blocks: bool = False,
) -> int:
    """Return the longest sequence, a multiple of ``step``, whose pass in fp32 fits ``room`` bytes,
    or 0 where none does.

    pass_: "forward", or "backward", which includes its forward
    in_blocks: whether the blocks that PyTorch's allocator takes are counted, and not tensors
    """

    def needed(steps: int) -> int:
        shape = Eager(batch, steps * step, d, causal)
        return shape.blocks(pass_) if in_blocks else shape.total(pass_)

    return step * bisect.bisect_right(range(1, 2**24), room, key=needed)


def attention_kernels(
    implementation: str, causal: bool, pass_: str, batch: int, n: int, d: int, element_bytes: int
) -> list[Kernel]:
    """Return the kernels of one pass, for ``roofline.floor``: the matmuls, and all elementwise
    kernels as one.

    The backward is that of a graph that saved the probabilities; indices are left out.
    """
    matrix, tensor = batch * n * n * element_bytes, batch * n * d * element_bytes
    flops = batch * matmul_flops(n, n, d)
    between = BETWEEN[implementation, causal][pass_] * matrix
    if implementation == "eager" and causal:
        between += MASKS[pass_] * n * n
    return [
        Kernel(pass_, "products", "multiply", 2 * tensor + matrix, flops, PRODUCTS[pass_]),
        Kernel(pass_, "elementwise", "between", between),
    ]


def tiled_kernel(
    pass_: str, batch: int, heads: int, n: int, d: int, causal: bool, element_bytes: int
) -> Kernel:
    """Return a pass of tiled attention as one kernel that reads or writes each tensor once."""
    sizes = batch, heads, n, n, d
    moved = attention.attention_bytes(*sizes, element_bytes, pass_)
    flops = attention.attention_flops(*sizes, causal, pass_)
    return Kernel(pass_, "attention", f"tiled {pass_}", moved, flops)
