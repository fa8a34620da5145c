"""What compiling attention saves: the kernels of eager attention and of what Inductor makes of it.

Attention as the definition has it, ``softmax(scale * q @ k.T) @ v``, moves N x N matrices between
its kernels. Inductor leaves the products to a library and fuses all between two of them into one
kernel, in place: ``compiled`` attention still has its matrices, and fewer passes over them. Where
its pattern is recognised (tensors of four dimensions, no mask) the whole is replaced by PyTorch's
tiled attention; on a GPU in float32 only where products may use TF32, as that attention does.

    written      plain   q, k, v (batch, N, d), no mask
                 causal  the same with a mask, masked_fill
                 heads   plain with a dimension of heads, (batch, 1, N, d): the recognised one
"""

from a2lib.theory import attention
from a2lib.theory.attention import EAGER, OF_MASK, VECTORS
from a2lib.theory.products import check_name, check_sizes, matmul_flops
from a2lib.theory.roofline import Kernel

WRITTEN = ("plain", "causal", "heads")
IMPLEMENTATIONS = ("eager", "compile")
PASSES = ("forward", "backward")
# Kernels of eager attention that only a mask asks for.
_MASK = ("indices of queries", "indices of keys", "compare", "copy to mask", "mask")


def attention_kernels(
    implementation: str, written: str, pass_: str, batch: int, n: int, d: int, element_bytes: int
) -> list[Kernel]:
    """The kernels of one pass, for ``roofline.floor``: operations, and bytes with each operand
    passing once.

    The backward is that of a graph that holds the probabilities; indices count as nothing. Where
    attention is recognised it is one kernel, without its matrices. Raises ValueError for unknown
    names and for sizes that are not positive integers.
    """
    _check(implementation, written, pass_)
    check_sizes(batch=batch, n=n, d=d, element_bytes=element_bytes)
    if implementation == "compile" and written == "heads":
        return [tiled_kernel(pass_, batch, 1, n, d, False, element_bytes)]
    sizes = dict.fromkeys(VECTORS, batch * n * d * element_bytes)
    sizes |= {"mask": n * n, "queries": 0, "keys": 0, "": 0}

    def moved(names: str) -> int:
        return sum(sizes.get(name, batch * n * n * element_bytes) for name in names.split(","))

    made = []
    for name, reads, makes, _ in eager_kernels(implementation, written, pass_):
        part = "products" if (product := _multiplies(reads)) else "elementwise"
        flops = batch * matmul_flops(n, n, d) if product else 0
        made.append(Kernel(pass_, part, name, moved(reads), moved(makes), flops))
    return made


def tiled_kernel(
    pass_: str, batch: int, heads: int, n: int, d: int, causal: bool, element_bytes: int
) -> Kernel:
    """A pass of tiled attention as one kernel that moves each tensor once."""
    sizes = batch, heads, n, n, d
    query, key, lse = attention.tensor_bytes(*sizes, element_bytes)
    written = query + lse if pass_ == "forward" else query + 2 * key
    read = attention.attention_bytes(*sizes, element_bytes, pass_) - written
    flops = attention.attention_flops(*sizes, causal, pass_)
    return Kernel(pass_, "attention", f"tiled {pass_}", read, written, flops)


def moves(implementation: str, written: str, pass_: str) -> int:
    """N x N matrices of the batch that a pass reads and writes; those of the mask, one byte an
    element and none of the batch, not counted. 0 where attention is recognised."""
    _check(implementation, written, pass_)
    if implementation == "compile" and written == "heads":
        return 0
    kernels = eager_kernels(implementation, written, pass_)
    names = [name for _, *moved, _ in kernels for name in ",".join(moved).split(",") if name]
    return sum(name not in (*VECTORS, *OF_MASK) for name in names)


def eager_kernels(implementation: str, written: str, pass_: str) -> list[tuple[str, ...]]:
    """Those of ``EAGER`` that there are."""
    if implementation == "compile":  # between two products one, which computes the mask itself
        return [k for k in EAGER[pass_] if _multiplies(k[1]) or "softmax" in k[0]]
    return [k for k in EAGER[pass_] if written == "causal" or k[0] not in _MASK]


def _multiplies(reads: str) -> bool:
    return any(name in VECTORS for name in reads.split(","))


def _check(implementation: str, written: str, pass_: str) -> None:
    check_name("implementation", implementation, IMPLEMENTATIONS)
    check_name("written", written, WRITTEN)
    check_name("pass", pass_, PASSES)
