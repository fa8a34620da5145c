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

from __future__ import annotations

from a2lib.theory.attention import COMPILED, COMPILED_ROWS, EAGER, attention_bytes, attention_flops
from a2lib.theory.products import check_sizes, matmul_flops
from a2lib.theory.roofline import Kernel

WRITTEN = ("plain", "causal", "heads")
IMPLEMENTATIONS = ("eager", "compile")
PASSES = ("forward", "backward")
# Kernels of eager attention that only a mask asks for.
_MASK = ("indices of queries", "indices of keys", "compare", "copy to mask", "mask")
# N x N matrices held at the peak beyond what entered: eager makes a new one at each kernel.
_HELD = {("eager", "forward"): 2, ("eager", "backward"): 3, ("compile", "forward"): 1,
         ("compile", "backward"): 1}  # fmt: skip
# Kernels that PyTorch's TensorIterator launches, and the most bytes that it indexes by 32 bits.
_ELEMENTWISE, INDEXED = ("times scale", "dp times p", "mask"), 2**31
_COPY = "copy to mask"  # by the driver, which counts as no kernel


def attention_kernels(
    implementation: str, written: str, pass_: str, batch: int, n: int, d: int, element_bytes: int
) -> list[Kernel]:
    """The kernels of one pass, for ``roofline.floor``: operations, and bytes with each operand
    passing once.

    The backward is that of a graph that holds the probabilities. Where attention is recognised it
    is one kernel, without its matrices. Raises ValueError for unknown names and for sizes that are
    not positive integers.
    """
    _check(implementation, written, pass_)
    check_sizes(batch=batch, n=n, d=d, element_bytes=element_bytes)
    row, matrix = batch * n * d * element_bytes, batch * n * n * element_bytes
    if implementation == "compile" and written == "heads":
        moved = attention_bytes(batch, 1, n, n, d, element_bytes, pass_)
        written_bytes = row + 4 * batch * n if pass_ == "forward" else 3 * row
        flops = attention_flops(batch, 1, n, n, d, False, pass_)
        return [_kernel(pass_, "tiled", moved - written_bytes, written_bytes, flops)]
    made = []
    for name, reads, writes, masks in _table(implementation, written, pass_):
        rows_read, rows_written = COMPILED_ROWS.get(name, (0, 0))
        mask = masks * n * n
        read = reads * matrix + rows_read * row + (mask if name == "mask" else 0)
        wrote = writes * matrix + rows_written * row + (mask if name == "compare" else 0)
        flops = batch * matmul_flops(n, n, d) if name in COMPILED_ROWS else 0
        made.append(_kernel(pass_, name, read, wrote, flops))
    return made


def moves(implementation: str, written: str, pass_: str) -> int:
    """N x N matrices of the batch that a pass reads and writes; those of the mask, one byte an
    element and none of the batch, not counted. 0 where attention is recognised."""
    _check(implementation, written, pass_)
    if implementation == "compile" and written == "heads":
        return 0
    return sum(reads + writes for _, reads, writes, _ in _table(implementation, written, pass_))


def launches(
    implementation: str, written: str, pass_: str, batch: int, n: int, element_bytes: int
) -> int:
    """Launches of a pass: its kernels, copies left out, and where a matrix of the batch has more
    than 2 GiB one for each piece of an element-wise operator of PyTorch, which halves its operands
    until 32 bits index them. Raises ValueError as attention_kernels."""
    kernels = attention_kernels(implementation, written, pass_, batch, n, 1, element_bytes)
    pieces, matrix = 1, batch * n * n * element_bytes
    while matrix > pieces * INDEXED:
        pieces *= 2
    names = [kernel.name for kernel in kernels if kernel.name != _COPY]
    return sum(pieces if name in _ELEMENTWISE else 1 for name in names)


def held(implementation: str, written: str, pass_: str) -> int:
    """N x N matrices of the batch that a pass holds at its peak, beyond what was there before."""
    _check(implementation, written, pass_)
    return 0 if (implementation, written) == ("compile", "heads") else _HELD[implementation, pass_]


def break_even(extra: float, eager: float, compiled: float) -> float | None:
    """Calls after which compiling, which took ``extra`` ms, has paid, where a call takes so many ms
    eager and ``compiled``; None where it never does."""
    return extra / (eager - compiled) if compiled < eager else None


def _table(implementation: str, written: str, pass_: str) -> tuple:
    if implementation == "compile":
        return COMPILED[pass_]
    return tuple(k for k in EAGER[pass_] if written == "causal" or k[0] not in _MASK)


def _kernel(pass_: str, name: str, read: int, written: int, flops: int) -> Kernel:
    return Kernel(pass_, "attention", name, read, written, flops)


def _check(implementation: str, written: str, pass_: str) -> None:
    for name, value, allowed in (
        ("implementation", implementation, IMPLEMENTATIONS),
        ("written", written, WRITTEN),
        ("pass", pass_, PASSES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r}: allowed are {', '.join(allowed)}")
