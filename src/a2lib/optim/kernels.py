"""Update one parameter by AdamW in one pass over its memory, in Triton."""

import triton
import triton.language as tl

# Four elements a thread: with eight, which 16 bytes of bfloat16 are, Triton writes float32 by way
# of shared memory.
BLOCK = 1024
OPTIONS = {"num_warps": 8}


@triton.jit
def adamw(
    weight,
    grad,
    master,
    exp_avg,
    exp_avg_sq,
    step,
    lr,
    rest1,
    rest2,
    log1,
    log2,
    eps,
    decay,
    n,
    HAS_MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update elements from BLOCK * program on, of n, as ``update_plain`` in updates.py does.

    Without HAS_MASTER the weight is its own master.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    # In float64: 1 less a power near 1 has few digits left.
    count = (tl.load(step) + 1).to(tl.float64)
    rate = lr / (1 - tl.exp(count * log1)).to(tl.float32)
    root = tl.sqrt((1 - tl.exp(count * log2)).to(tl.float32))

    # Everything is read before anything is written: a program waits for memory once.
    held = master if HAS_MASTER else weight
    g = tl.load(grad + at, mask=inside).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)
    w = tl.load(held + at, mask=inside)

    m += (g - m) * rest1
    v += (g * g - v) * rest2
    w = w * (1 - decay) - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(held + at, w, mask=inside)
    if HAS_MASTER:
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
