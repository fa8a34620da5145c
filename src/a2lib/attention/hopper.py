"""The Gluon kernels as a pass uses them: when, with which tiles, on what.

They run in 16 bits on GPUs of compute capability 9.0, with heads of 40 to 128 in steps of 8, on
tensors that the copy engine (TMA) can address. Everything else is plain Triton's.
"""

import functools
import math

import torch

from a2lib.attention.launch import Form, launch, n_multiprocessors
from a2lib.attention.plans import Launch
from a2lib.attention.tiles import Tile, chunk_programs, hopper_backward_stays, hopper_forward
from a2lib.theory.attention import for_hopper, in_one_sweep, long_for_hopper

ROWS = 128  # what the rows of prepare_kernel are rounded up to
# Heads that run together have at most so much for all programs to read: it stays in the L2 cache.
# Where programs stay, less was faster (measured on an H200).
L2_BYTES = 32 * 2**20
L2_BYTES_STAY = 8 * 2**20
# In the backward at least so many, unless programs stay: its longest rows were faster (measured on
# an H200).
BACKWARD_HEADS = 4
# Heads of keys that query heads share, one of which is read at a time; and from how many programs
# on they are one sweep (both measured on an H100).
L2_BYTES_GROUPED = 24 * 2**20
GROUPED_PROGRAMS = 128
# Heads that run together where dQ is added up in the order of the tiles, by mask and columns: of
# fewer heads more tiles wait for each other, of more the L2 cache holds less; and from how many
# programs on that is one sweep (measured on an H100, the last from 512 programs on).
ORDERED_HEADS = {(True, 64): 16, (True, 128): 16, (False, 64): 8, (False, 128): 4}
ORDERED_PROGRAMS = 264


def serves_forward(problem) -> bool:
    """Whether the Gluon kernel runs this forward, and plain Triton does not run it faster."""
    names = ("q", "k", "v", "o")
    return _can(problem, names) and _form_of_forward(problem)[0] > 0


def serves_backward(problem) -> bool:
    """As serves_forward. All gradients are computed."""
    p = problem
    n_heads = p.batch * p.kv_heads
    worth = in_one_sweep(p.n_keys, n_heads, p.head_dim, _bytes(p))
    n_programs = -(-p.n_keys // ROWS) * n_heads
    if p.group > 1:  # in a fixed order two sweeps were as fast
        worth = worth and not p.fixed_order and n_programs >= GROUPED_PROGRAMS
    if p.fixed_order:
        worth = worth and n_programs >= ORDERED_PROGRAMS
    return worth and _can(p, ("q", "k", "v", "do"))


def _can(problem, names):
    if not for_hopper(problem.head_dim, _bytes(problem)) or not _is_hopper(problem.device):
        return False
    tensors = [problem.tensors[name] for name in names]
    return all(x.numel() for x in tensors) and all(map(_is_addressable, tensors))


def _bytes(problem):
    return 4 if problem.dtype == "fp32" else 2


@functools.cache
def _is_hopper(device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import a2lib.attention.hopper_backward  # noqa: F401
    except (ImportError, AttributeError):  # a version of Triton whose Gluon is another
        return False
    return True


def _is_addressable(x) -> bool:
    steps = [s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in steps)


def _form_of_forward(problem) -> tuple[int, bool]:
    n_heads = problem.batch * problem.heads
    return hopper_forward(problem.head_dim, problem.n_queries, n_heads, problem.is_causal)


def forward(problem) -> None:
    """Fill o and lse."""
    p = problem
    consumers, stay = _form_of_forward(p)
    ping_pong = stay and consumers == 3
    BD = _columns(p)
    Bk = 64 if consumers == 1 and BD == 128 else 128
    constants = {
        "BD": BD,
        "CONSUMERS": consumers,
        "Bk": Bk,
        "STAGES": 3 if ping_pong else 2,
        "CAUSAL": p.is_causal,
        "RAGGED": _is_ragged(p, Bk),
        "STAY": stay,
        "num_warps": 4,
    }
    options = {"maxnreg": 128} if consumers == 1 else {}
    n_heads = p.batch * p.heads
    n_tiles = -(-p.n_queries // (64 * consumers))
    n_programs = n_tiles * n_heads
    if stay:  # two programs of one consumer share a multiprocessor
        at_once = (2 if consumers == 1 else 1) * n_multiprocessors(p.device)
        n_programs = _staying(n_programs, at_once, p.is_causal and not ping_pong)
    scale2 = p.scale * math.log2(math.e)
    together = _together(2 * p.n_keys * p.head_dim * 2, n_heads, stay, p.is_causal)
    if ping_pong and p.is_causal:
        together = n_heads  # the longest tiles of all heads first
    sizes = (scale2, p.heads, n_heads, p.group, p.n_queries, p.n_keys, together)
    blocks = {"q": 64, "k": Bk, "v": Bk, "o": 64}
    forms = _forms(p, blocks, BD)
    _run(p, "forward_kernel", n_programs, (*blocks, "lse"), (), sizes, constants, forms, options)


def backward(problem) -> None:
    """Fill dq, dk and dv, by way of ``rows`` and ``sums``, both fp32, and in a fixed order of
    ``turns``."""
    p, n_heads, d, BD = problem, problem.batch * problem.heads, problem.head_dim, _columns(problem)
    padded = p.tensors["rows"].shape[-1]
    n_tiles = padded // ROWS * n_heads
    small = {"d": d, "BD": BD, "B": ROWS, "PERMUTED": BD == 128}
    names = ("o", "do", "lse", "rows", "sums", "turns" if p.fixed_order else "rows")
    sizes = (p.heads, p.n_queries, padded)
    prepared = {**small, "PRECISION": p.precision, "ORDERED": p.fixed_order}
    _run(p, "prepare_kernel", n_tiles, names, _strides(p, "o", "do"), sizes, prepared)

    _sweep(p, "sums", ("dk", "dv"), p.scale)

    sizes = (p.scale, p.heads, p.n_queries)
    _run(p, "finish_kernel", n_tiles, ("sums", "dq"), _strides(p, "dq"), sizes, small)


def backward_chunks(problem, chunk) -> None:
    """Add what makes dq, dk and dv to ``dq_sums``, ``dk_sums`` and ``dv_sums``, each program the
    part of chunk queries, a multiple of 128; ``rows`` are made."""
    _sweep(problem, "dq_sums", ("dk_sums", "dv_sums"), 1.0, chunk)


def _sweep(p, sums, gradients, scale, chunk=0):
    """Have the Gluon kernel launched: dQ is added up in ``sums``, dK times ``scale`` and dV are
    stored in ``gradients``; with chunk, queries of a program, they are added up there too."""
    d, BD = p.head_dim, _columns(p)
    grouped, ordered = not chunk and p.group > 1, p.fixed_order
    n_heads = p.batch * (p.heads if chunk else p.kv_heads)
    Bq = 128 if BD == 64 else 64
    n_tiles = -(-p.n_keys // 128)
    stay = not chunk and not ordered and hopper_backward_stays(d, n_tiles, n_heads, p.is_causal)
    constants = {
        "d": d,
        "BD": BD,
        "Bq": Bq,
        "STAGES": 2,
        "CAUSAL": p.is_causal,
        "RAGGED": _is_ragged(p, 128),
        "CHUNKS": chunk > 0,
        "STAY": stay,
        "GROUPED": grouped,
        "ORDERED": ordered,
        "num_warps": 4,
    }
    if chunk:
        n_tiles = chunk_programs(Tile(Bq, 128, 4, 2), chunk, p.n_queries, p.n_keys, p.is_causal)
    n_programs = n_tiles * n_heads
    if stay:
        n_programs = _staying(n_programs, n_multiprocessors(p.device), p.is_causal)
    # dQ is read and written.
    bytes_per_head = p.n_queries * d * (2 + 2 + 2 * 4)
    together = _together(bytes_per_head, n_heads, stay, p.is_causal)
    if ordered:
        together = min(ORDERED_HEADS[p.is_causal, BD], n_heads)
    elif grouped:
        together = max(1, min(n_heads, L2_BYTES_GROUPED // bytes_per_head))
    elif not stay:
        together = max(together, min(BACKWARD_HEADS, n_heads))
    scales = (scale, p.scale * math.log2(math.e))
    sizes = (*scales, p.heads, n_heads, p.group, p.n_queries, p.n_keys, together, chunk)
    blocks = {"q": Bq, "do": Bq, "k": 128, "v": 128, sums: (1, 64, 64), "rows": (1, 2, Bq)}
    names = (*blocks, *gradients, "turns" if ordered else "rows")
    if not chunk:
        blocks |= dict.fromkeys(gradients, 64)
    _run(p, "backward_kernel", n_programs, names, (), sizes, constants, _forms(p, blocks, BD))


def chunk_queries(problem) -> int:
    """Queries of a program's chunk where the Gluon kernel runs the backward in chunks, or 0.

    Eight chunks were the fastest of one head (measured on an H200), and at least 512 queries, four
    blocks of 128.
    """
    p = problem
    if not long_for_hopper(p.n_keys, p.head_dim, _bytes(p)) or not _can(p, ("q", "k", "v", "do")):
        return 0
    return max(512, -(-p.n_queries // (8 * ROWS)) * ROWS)


def scratch(q, gluon=True):
    """``rows`` and ``sums`` of a backward over q, as ``prepare_kernel`` has them: of the Gluon
    kernel, permuted where heads are above 64, or of another in chunks."""
    n_heads, n_queries, d = math.prod(q.shape[:-2]), *q.shape[-2:]
    padded = -(-n_queries // ROWS) * ROWS
    rows = q.new_empty(n_heads, 2, padded, dtype=torch.float32)
    of_head = (padded, 128) if gluon and d > 64 else (n_queries, d)
    return rows, q.new_empty(n_heads, *of_head, dtype=torch.float32)


def turns(rows):
    """Whose turn it is to add to each 64 rows of dQ, and before them the programs begun."""
    n_heads, _, padded = rows.shape
    return rows.new_empty(1 + n_heads * padded // 64, dtype=torch.int32)


def _is_ragged(p, Bk):
    """Whether some block of Bk keys goes past the last key where no causal mask hides it."""
    return p.n_keys % Bk != 0 and not (p.is_causal and p.n_queries <= p.n_keys)


def _columns(problem):
    return 64 if problem.head_dim <= 64 else 128


def _staying(n_tiles, at_once, is_causal):
    """How many programs do n_tiles tiles: as many as run at once, and no more than there are tiles,
    or pairs of them with a mask."""
    return min(n_tiles // 2 if is_causal else n_tiles, at_once)


def _together(bytes_per_head, n_heads, stay, is_causal):
    """How many heads, or pairs of heads where programs stay, run together."""
    if stay and is_causal:
        bytes_per_head, n_heads = 2 * bytes_per_head, n_heads // 2
    return max(1, min(n_heads, (L2_BYTES_STAY if stay else L2_BYTES) // bytes_per_head))


def _strides(problem, *names):
    return tuple(stride for name in names for stride in problem.tensors[name].stride()[:3])


def _run(problem, name, n_programs, names, strides, sizes, constants, forms=(), options=None):
    """Run a kernel on the tensors of ``names`` and remember how: Gluon's with ``forms``, Triton's
    without."""
    if not forms:
        from a2lib.attention import kernels

        options = {"num_warps": 8}
    elif name == "forward_kernel":
        from a2lib.attention import hopper_forward as kernels
    else:
        from a2lib.attention import hopper_backward as kernels
    tensors = tuple(problem.tensors[name] for name in names)
    apart = (name, problem.dtype, problem.device, *strides, *constants.values())
    numbers = (*strides, *sizes)
    kernel = getattr(kernels, name)
    known = launch(kernel, apart, n_programs, tensors, numbers, constants, options or {}, forms)
    places = tuple(problem.names.index(name) for name in names)
    problem.launches.append(
        known and Launch(known[0], n_programs, places, (*numbers, *known[1]), forms)
    )


def _forms(problem, blocks, BD):
    """What the copy engine is to know of tensors: ``blocks`` has, by name, the rows of a block or,
    for a tensor of three dimensions, its shape."""
    return tuple(_form(problem.tensors[name], block, BD) for name, block in blocks.items())


def _form(x, block, BD):
    from triton.experimental.gluon import language as gl

    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    if not isinstance(block, tuple):
        block = (1, 1, block, BD)
    if block[1] == 2:  # numbers of rows, one after the other: nothing to swizzle
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtypes[x.dtype])
    # The stride of a dimension of one is arbitrary, and TMA wants multiples of 16 bytes.
    strides = (s if n > 1 else BD for n, s in zip(x.shape[:-1], x.stride(), strict=False))
    return Form(tuple(x.shape), (*strides, 1), list(block), layout)
