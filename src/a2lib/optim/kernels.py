"""AdamW's update of one parameter, in one pass over its memory."""

import triton
import triton.language as tl

# Four elements a thread: with eight, which 16 bytes of bfloat16 are, Triton writes float32 by way
# of shared memory.
BLOCK = 1024
OPTIONS = {"num_warps": 8}

# What a multiprocessor moves a second is what it has underway over the time that memory takes to
# answer: few of them need much underway each. Three blocks ahead of four float32 tensors are 96 KB
# of shared memory, which the smallest GPUs of compute capability 8.0 on have (99).
TURN = {"BLOCK": 2048, "STAGES": 4}
TURN_OPTIONS = {"num_warps": 16}


@triton.jit
def adamw(
    weight, grad, master, exp_avg, exp_avg_sq, normaliser,
    lr, rest1, rest2, eps, decay, n,
    HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements from BLOCK * program on, of n; ``update_plain`` in updates.py says what it computes.

    Without HAS_MASTER the weight is its own master.
    """
    rate, root = _rate(normaliser, lr, rest1, rest2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _block(
        weight, grad, master, exp_avg, exp_avg_sq,
        at, at < n, rate, root, rest1, rest2, eps, decay, HAS_MASTER, "",
    )  # fmt: skip


@triton.jit
def adamw_in_turns(
    weight, grad, master, exp_avg, exp_avg_sq, normaliser,
    lr, rest1, rest2, eps, decay, n,
    HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``adamw``, of any number of programs: each takes a block and then the one that is as many
    on as there are programs, and reads ahead while it computes."""
    rate, root = _rate(normaliser, lr, rest1, rest2)
    step = tl.num_programs(0)
    for turn in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), step, num_stages=STAGES):
        at = (tl.zeros([BLOCK], tl.int64) + turn) * BLOCK + tl.arange(0, BLOCK)
        # Beside products: what they read again is to stay in the cache, and nothing of this is.
        _block(
            weight, grad, master, exp_avg, exp_avg_sq,
            at, at < n, rate, root, rest1, rest2, eps, decay, HAS_MASTER, "evict_first",
        )  # fmt: skip


@triton.jit
def _rate(normaliser, lr, rest1, rest2):
    first, second = tl.load(normaliser), tl.load(normaliser + 1)
    first += (1 - first) * rest1
    second += (1 - second) * rest2
    return (lr / first).to(tl.float32), tl.sqrt(second).to(tl.float32)


@triton.jit
def _block(
    weight, grad, master, exp_avg, exp_avg_sq,
    at, inside, rate, root, rest1, rest2, eps, decay,
    HAS_MASTER: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    # Everything is read before anything is written: a program waits for memory once.
    held = master if HAS_MASTER else weight
    g = tl.load(grad + at, mask=inside, eviction_policy=CACHE).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, eviction_policy=CACHE)
    v = tl.load(exp_avg_sq + at, mask=inside, eviction_policy=CACHE)
    w = tl.load(held + at, mask=inside, eviction_policy=CACHE)

    m += (g - m) * rest1
    v += (g * g - v) * rest2
    w = w * (1 - decay) - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(exp_avg + at, m, mask=inside, eviction_policy=CACHE)
    tl.store(exp_avg_sq + at, v, mask=inside, eviction_policy=CACHE)
    tl.store(held + at, w, mask=inside, eviction_policy=CACHE)
    if HAS_MASTER:
        rounded = w.to(weight.dtype.element_ty)
        tl.store(weight + at, rounded, mask=inside, eviction_policy=CACHE)
