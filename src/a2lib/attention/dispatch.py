"""Which kernel computes a pass of attention, with which tiles: one table. Imports no torch.

    case = Case("bf16", batch=1, heads=16, kv_heads=16, n_queries=16384, n_keys=16384, head_dim=64,
                is_causal=True, gpu=HOPPER)
    forward_form(case)          # "hopper": the first entry of FORWARD whose condition holds
    backward_form(case)         # "hopper": the same of BACKWARD
    tiles("backward_dq", case)  # tiles of a plain Triton kernel, the best first: rows of TILES

All numbers were chosen by measurement, on an H200 unless another is named; nothing is searched at
run time. ``passes.py`` carries out what is chosen here.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
HEAD_DIM_MAX = 128
# From the lowest to the highest, which is the library: each adds a technique to those before it.
RUNGS = {
    "every_tile": "plain Triton, a mask in every tile, all tiles visited, tiles of a tutorial",
    "to_diagonal": "no tile above the diagonal",
    "two_loops": "those below it in a loop of their own, unmasked, whose loads are pipelined",
    "tuned_tiles": "tiles chosen by measurement",
    "one_consumer": "forward for Hopper: one warp loads by TMA, one group of warps multiplies",
    "consumers": "two or three groups, one's exponentials beside another's products",
    "one_sweep": "backward for Hopper: five products a tile for seven, dQ added up across programs",
    "heads_in_l2": "of both: as many heads at a time as the L2 cache holds",
    "key_chunks": "forward of few tiles: programs share the keys of a query",
    "query_chunks": "backward of few tiles: programs share the queries of a key: the library",
}
LIBRARY = "query_chunks"
_HEIGHTS = {rung: height for height, rung in enumerate(RUNGS)}


class Gpu(NamedTuple):
    """What the choice asks of a GPU; without one, in Triton's interpreter, nothing is there."""

    multiprocessors: int = 0
    is_hopper: bool = False  # compute capability 9.0, with a Triton that compiles our Gluon
    launches_early: bool = False  # a kernel while the one before runs (griddepcontrol)


HOPPER = Gpu(MULTIPROCESSORS, is_hopper=True, launches_early=True)


class Case(NamedTuple):
    """All that the choice of kernels depends on."""

    dtype: str  # bf16, fp16 or fp32
    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    is_causal: bool
    gpu: Gpu
    is_deterministic: bool = False  # additions are to have one order
    allows_tf32: bool = False
    is_addressable: bool = True  # the copy engine (TMA) can read the tensors
    wants_all: bool = True  # a backward: all three gradients
    rung: str = LIBRARY

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def n_heads(self) -> int:
        return self.batch * self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.batch * self.kv_heads

    @property
    def columns(self) -> int:
        """The power of two, at least 16, that holds head_dim: the width of a plain tile."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def precision(self) -> str:
        """How ``tl.dot`` multiplies; both passes must do it alike, or weights of large scores part.

        fp32 is split into three bf16 terms, six products ("bf16x6"): as exact as fp32
        multiplication and on the tensor cores; or into two fp16 terms, three products ("fp16x3",
        ``terms.py``), whose backward has no fixed order. TF32 keeps 10 bits of the mantissa and is
        for those who ask for it.
        """
        if self.dtype != "fp32":
            return "ieee"
        if self.allows_tf32:
            return "tf32"
        return "fp16x3" if not self.is_deterministic and has_two_terms(self) else "bf16x6"

    @property
    def family(self) -> str:
        """The name under which the table has the tiles of this precision."""
        if self.precision == "fp16x3":
            return "fp16x3"
        return "fp32" if self.dtype == "fp32" else "16bit"

    def uses(self, technique: str) -> bool:
        """Return whether the case's rung of the ladder has a technique."""
        return _HEIGHTS[technique] <= _HEIGHTS[self.rung]


def has_two_terms(case: Case) -> bool:
    """fp32 as two terms of fp16, in both passes: heads of more than 64, but where sums are of so
    few rows that gradients would be further from fp32's."""
    return case.dtype == "fp32" and case.head_dim > 64 and min(case.n_queries, case.n_keys) >= 256


# The forms of each pass: name and condition. The first whose condition holds runs.


def shares_keys(case: Case) -> bool:
    return keys_per_chunk(case) > 0


def is_for_gluon(case: Case) -> bool:
    """16 bits, heads of 40 to 128 in steps of 8, and tensors that the copy engine can address."""
    has_kernel = case.dtype != "fp32" and 32 < case.head_dim <= 128 and case.head_dim % 8 == 0
    return has_kernel and case.gpu.is_hopper and case.is_addressable


def is_fast_in_gluon(case: Case) -> bool:
    is_fast = hopper_consumers(case)[0] > 0 and case.uses("one_consumer")
    return is_fast and is_for_gluon(case)


def fits_one_launch(case: Case) -> bool:
    """So few tokens in 16 bits that launching takes longest, and each program has a multiprocessor
    (programs own 64 queries or keys, with heads above 64 16; measured for one head)."""
    rows = 64 if case.head_dim <= 64 else 16
    most_tokens = 128 if 32 < case.head_dim <= 64 else 256
    n_tiles = _tiles_of(case.n_queries, rows) + _tiles_of(case.n_keys, rows)
    is_short = max(case.n_queries, case.n_keys) <= most_tokens
    fits = is_short and n_tiles * case.n_heads <= MULTIPROCESSORS
    return case.dtype != "fp32" and fits and case.wants_all and case.uses("query_chunks")


def is_in_two_terms(case: Case) -> bool:
    return case.precision == "fp16x3"


def shares_queries(case: Case) -> bool:
    """16 bits: where programs of 128 keys would leave a GPU idle, and long causal rows, whose first
    program takes longest, also where there is a program for each multiprocessor (with heads up to
    32 two). fp32, heads up to 64: few programs too, and long rows."""
    may = case.wants_all and not case.is_deterministic and case.uses("query_chunks")
    if not may or case.n_queries * case.n_heads * case.kv_heads == 0 or case.n_keys < 256:
        return False
    n_programs = _tiles_of(case.n_keys, 128) * case.n_heads
    if case.dtype == "fp32":
        return case.head_dim <= 64 and (n_programs <= 128 or case.n_keys >= 4096)
    if case.head_dim <= 32:
        most = 256 if case.is_causal and case.n_keys > 16384 else 128
    elif case.is_causal and is_long_for_gluon(case):
        most = MULTIPROCESSORS
    else:
        most = 64 if case.head_dim <= 64 or case.is_causal else 32
    return n_programs <= most


def is_long_for_gluon(case: Case) -> bool:
    """Shorter rows in chunks are plain Triton's, whose tiles are smaller."""
    has_kernel = case.dtype != "fp32" and 32 < case.head_dim <= 128 and case.head_dim % 8 == 0
    return has_kernel and case.n_keys >= (8192 if case.head_dim <= 64 else 4096)


def shares_queries_in_gluon(case: Case) -> bool:
    return shares_queries(case) and is_long_for_gluon(case) and is_for_gluon(case)


def is_one_sweep(case: Case) -> bool:
    """Where programs of 128 keys fill the GPU or sequences are long. Grouped keys from
    GROUPED_PROGRAMS on and in no fixed order, in which two sweeps were as fast."""
    if not (case.wants_all and case.uses("one_sweep") and is_for_gluon(case)):
        return False
    n_programs = _tiles_of(case.n_keys, 128) * case.n_kv_heads
    if case.group > 1 and (case.is_deterministic or n_programs < GROUPED_PROGRAMS):
        return False
    if case.is_deterministic and n_programs < ORDERED_PROGRAMS:
        return False
    return case.n_keys >= (128 if n_programs >= 264 else 1024)


def _always(case: Case) -> bool:
    return True


FORWARD: dict[str, Callable[[Case], bool]] = {
    "key_chunks": shares_keys,  # few tiles: key_chunks.chunk_kernel, combine_kernel
    "hopper": is_fast_in_gluon,  # hopper_forward.forward_kernel (Gluon)
    "plain": _always,  # kernels.forward_kernel
}
# All but "one_launch" and "two_sweeps" add in no fixed order, "hopper" where it is not asked to.
BACKWARD: dict[str, Callable[[Case], bool]] = {
    "one_launch": fits_one_launch,  # few tokens: kernels.backward_kernel
    "two_terms": is_in_two_terms,  # fp32, wide heads: wide.backward_wide_kernel, one sweep
    "hopper_chunks": shares_queries_in_gluon,  # hopper_backward.backward_kernel, one sweep
    "chunks": shares_queries,  # few key tiles: chunks.backward_chunks_kernel, one sweep
    "hopper": is_one_sweep,  # hopper_backward.backward_kernel, one sweep
    "two_sweeps": _always,  # kernels.backward_dq_kernel, backward_dkdv_kernel
}


@functools.lru_cache(maxsize=4096)
def forward_form(case: Case) -> str:
    """Return the name in FORWARD of what computes the forward."""
    return next(form for form, applies in FORWARD.items() if applies(case))


@functools.lru_cache(maxsize=4096)
def backward_form(case: Case) -> str:
    """Return the name in BACKWARD of what computes the backward."""
    return next(form for form, applies in BACKWARD.items() if applies(case))


# Tiles of the plain Triton kernels.


class Tile(NamedTuple):
    """Bq queries by Bk keys, the warps that share it, and the depth of the load pipeline.

    Of ``backward`` Bq rows of either side, which a program owns, by Bk of the other.
    """

    Bq: int
    Bk: int
    warps: int
    stages: int


class Row(NamedTuple):
    """A tile for a kernel, of a family of precisions, at some numbers of columns.

    Where it has conditions it goes before the rows without: ``is_causal``, with or without a mask
    alone; ``is_for_few``, where the tile without conditions would leave multiprocessors idle;
    ``up_to_keys``, up to so many keys where each program has a multiprocessor; ``from_keys``, for
    rows (or chunks of keys, of ``forward_chunk``) of so many keys on.
    """

    kernel: str
    family: str
    columns: tuple[int, ...]
    tile: Tile
    is_causal: bool | None = None
    is_for_few: bool = False
    up_to_keys: int = 0
    from_keys: int = 0


# The first row that fits is what a Hopper GPU runs; it compiles there without serialised wgmma, in
# 16 bits all but two without spills (tests/attention/test_compile.py). Some in fp32 spill some
# registers, and are faster than the tiles that do not.
TILES = (
    Row("forward", "16bit", (16, 32), Tile(64, 64, 4, 3)),
    Row("forward", "16bit", (64,), Tile(64, 128, 4, 3), is_for_few=True),
    Row("forward", "16bit", (64,), Tile(64, 64, 4, 3)),
    Row("forward", "16bit", (128,), Tile(16, 128, 4, 1), is_causal=True, up_to_keys=256),
    Row("forward", "16bit", (128,), Tile(64, 64, 4, 3)),
    Row("forward", "fp32", (16,), Tile(64, 128, 4, 2)),
    Row("forward", "fp32", (32,), Tile(64, 64, 4, 3)),
    Row("forward", "fp32", (64,), Tile(64, 32, 4, 3)),
    Row("forward", "fp32", (128,), Tile(64, 32, 4, 2), is_for_few=True),
    Row("forward", "fp32", (128,), Tile(128, 32, 8, 2)),
    Row("forward", "fp16x3", (128,), Tile(64, 32, 4, 2), is_for_few=True),
    Row("forward", "fp16x3", (128,), Tile(128, 64, 8, 2)),
    # Of longer chunks what is read for a tile is read less often.
    Row("forward_chunk", "16bit", (32,), Tile(64, 128, 4, 3), from_keys=1024),
    Row("forward_chunk", "16bit", (64,), Tile(128, 64, 4, 3), from_keys=4096),
    Row("forward_chunk", "16bit", (64,), Tile(64, 128, 4, 3), from_keys=1024),
    Row("forward_chunk", "16bit", (16, 32, 64, 128), Tile(64, 64, 4, 3)),
    Row("forward_chunk", "fp32", (16,), Tile(64, 128, 4, 2)),
    Row("forward_chunk", "fp32", (32,), Tile(64, 64, 4, 3)),
    Row("forward_chunk", "fp32", (64,), Tile(64, 32, 4, 3)),
    Row("forward_chunk", "fp32", (128,), Tile(64, 32, 4, 2)),
    Row("forward_chunk", "fp16x3", (128,), Tile(128, 64, 8, 2), from_keys=4096),
    Row("forward_chunk", "fp16x3", (128,), Tile(64, 32, 4, 2)),
    Row("backward_dq", "16bit", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_dq", "16bit", (128,), Tile(64, 64, 4, 3), is_for_few=True),
    Row("backward_dq", "16bit", (128,), Tile(128, 64, 8, 3)),
    Row("backward_dq", "fp32", (16, 32), Tile(64, 64, 4, 2)),
    Row("backward_dq", "fp32", (64,), Tile(64, 64, 4, 2), is_for_few=True),
    Row("backward_dq", "fp32", (64, 128), Tile(64, 32, 4, 2)),
    Row("backward_dkdv", "16bit", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_dkdv", "16bit", (128,), Tile(32, 64, 4, 3)),
    Row("backward_dkdv", "fp32", (16, 32), Tile(64, 64, 4, 2)),
    Row("backward_dkdv", "fp32", (64,), Tile(32, 64, 4, 2)),
    # At 128 columns the fp32 sums of dK and dV do not fit the registers together: a kernel each.
    Row("backward_dk", "fp32", (128,), Tile(16, 64, 4, 3), is_for_few=True),
    Row("backward_dk", "fp32", (128,), Tile(16, 128, 8, 1)),
    Row("backward_dv", "fp32", (128,), Tile(32, 64, 4, 2), is_for_few=True),
    Row("backward_dv", "fp32", (128,), Tile(16, 64, 4, 2)),
    Row("backward", "16bit", (16, 32, 64), Tile(64, 64, 4, 1)),
    Row("backward", "16bit", (128,), Tile(16, 128, 8, 1)),  # fits_one_launch counts by 16
    Row("backward_chunks", "16bit", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_chunks", "16bit", (128,), Tile(32, 64, 4, 3), from_keys=2048),
    Row("backward_chunks", "16bit", (128,), Tile(64, 32, 4, 3), up_to_keys=640),
    Row("backward_chunks", "16bit", (128,), Tile(64, 64, 8, 3)),
    Row("backward_chunks", "fp32", (16,), Tile(64, 64, 4, 3)),
    Row("backward_chunks", "fp32", (32,), Tile(64, 64, 4, 2)),
    Row("backward_chunks", "fp32", (64,), Tile(32, 64, 4, 2)),
    Row("backward_wide", "fp16x3", (128,), Tile(32, 128, 8, 2)),
)
# For a GPU with less shared memory than the first needs.
SMALLER = Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)
# Below "tuned_tiles": those of Triton 3.6's tutorial 06 (its forward is tuned among several, of
# which this is one), but that its backward's two kernels are one.
TUTORIAL = {
    "forward": Tile(128, 128, 8, 2),
    "backward_dq": Tile(128, 32, 4, 5),
    "backward_dkdv": Tile(32, 128, 4, 5),
}


@functools.lru_cache(maxsize=4096)
def tiles(kernel: str, case: Case) -> tuple[Tile, ...]:
    """Return the tiles of a plain Triton kernel in order of preference; none where it has none."""
    rows = [row for row in TILES if _is_of(row, kernel, case)]
    if not rows:
        return ()
    if kernel in TUTORIAL and not case.uses("tuned_tiles"):
        return TUTORIAL[kernel], *SMALLER
    usual = rows[-1].tile
    chosen = [row.tile for row in rows if _holds(row, case, usual)]
    return *chosen, *SMALLER


def _is_of(row: Row, kernel: str, case: Case) -> bool:
    is_there = row.kernel == kernel and row.family == case.family and case.columns in row.columns
    return is_there and row.is_causal in (None, case.is_causal)


def _holds(row: Row, case: Case, usual: Tile) -> bool:
    many = case.gpu.multiprocessors
    if row.is_for_few:
        return n_programs(row.kernel, case, usual) < many
    if row.up_to_keys:
        is_short = case.n_keys <= row.up_to_keys
        return is_short and n_programs(row.kernel, case, row.tile) <= many
    n_keys = keys_per_chunk(case) if row.kernel == "forward_chunk" else case.n_keys
    return n_keys >= row.from_keys


def n_programs(kernel: str, case: Case, tile: Tile) -> int:
    """Return on how many programs a plain Triton kernel runs with a tile."""
    queries, keys = _tiles_of(case.n_queries, tile.Bq), _tiles_of(case.n_keys, tile.Bk)
    if kernel in ("forward", "backward_dq"):
        return queries * case.n_heads
    if kernel in ("backward_dkdv", "backward_dk", "backward_dv"):
        return keys * case.n_kv_heads
    if kernel == "backward":
        return queries * case.n_heads + _tiles_of(case.n_keys, tile.Bq) * case.n_kv_heads
    if kernel == "forward_chunk":
        chunk_keys = keys_per_chunk(case)
        n_chunks = n_key_chunks(case)
        per_chunk = chunk_keys // tile.Bq if case.is_causal else 0
        return n_chunk_programs(queries, n_chunks, per_chunk) * case.n_heads
    # A program of backward_wide makes dK and dQ, another dV.
    pairs = chunk_programs(tile, queries_per_chunk(tile, case), case) * case.n_heads
    return 2 * pairs if kernel == "backward_wide" else pairs


def _tiles_of(n: int, size: int) -> int:
    return -(-n // size)


# Few tiles of queries: their keys are shared among programs.

KEY_CHUNKS_MAX = 8


@functools.lru_cache(maxsize=4096)
def keys_per_chunk(case: Case) -> int:
    """Return how many keys a program of the forward takes where several share those of a query, a
    multiple of 128; 0 where they do not: where tiles of 64 queries fill the GPU, or rows are short.

    Work is counted in tiles of 64 by 64, which a multiprocessor does at one rate. There are at
    most KEY_CHUNKS_MAX chunks, each of which holds an fp32 output of all queries.
    """
    many = case.gpu.multiprocessors
    n_keys = min(case.n_keys, case.n_queries) if case.is_causal else case.n_keys
    n_tiles, blocks = _tiles_of(case.n_queries, 64) * case.n_heads, _tiles_of(n_keys, 64)
    if not 0 < n_tiles <= 2 * many or not case.uses("key_chunks"):
        return 0
    share = n_tiles * blocks / many / (2 if case.is_causal else 1)
    # The fullest multiprocessor's, unshared: its second tile is then shorter, if causal.
    second = max(0, 1 - many / n_tiles) if case.is_causal else n_tiles > many
    fullest = blocks * (1 + second)
    # What the second kernel takes, and the first more than ours of Hopper, which has from 32 tiles
    # on, for the same work.
    few = 2 if case.dtype == "fp32" else 6
    if fullest <= 1.25 * share + (few if n_tiles < 32 else 10):
        return 0
    # Some four programs for each multiprocessor, two with a causal mask, which leaves half of the
    # pairs.
    wanted = 4 * many / n_tiles
    wanted = max(4, round(wanted)) if case.is_causal else max(2, math.ceil(wanted))
    keys = _tiles_of(n_keys, min(KEY_CHUNKS_MAX, wanted) * 128) * 128
    return keys if keys < n_keys else 0


def n_key_chunks(case: Case) -> int:
    """Return how many chunks of keys some query sees a key of; 0 where keys are not shared."""
    n_keys = min(case.n_queries, case.n_keys) if case.is_causal else case.n_keys
    chunk_keys = keys_per_chunk(case)
    return _tiles_of(n_keys, chunk_keys) if chunk_keys else 0


def n_chunk_programs(n_tiles: int, n_chunks: int, tiles_per_chunk: int) -> int:
    """Return the programs of ``key_chunks.chunk_kernel`` for one head; tiles_per_chunk is 0 without
    a causal mask. With one there are none behind the diagonal; fewer than tiles_per_chunk find no
    tile."""
    whole = (max(n_tiles - (c + 1) * tiles_per_chunk, 0) for c in range(n_chunks))
    return sum(whole) + n_chunks * tiles_per_chunk


# Few tiles of keys: their queries are shared among programs.

# Tiles in one chunk are at most so many, or of all that fraction: dK and dV are added up once for
# them.
CHUNK_TILES = 16
# Up to so many keys, with a causal mask or without, each of its kernels is launched while the one
# before runs, in 16 bits. Without a mask, where programs take equally long, longer rows can lose by
# it: two then share a multiprocessor while another has none, we guess.
CHUNKS_EARLY = {True: 4096, False: 512}


def launches_early(case: Case) -> bool:
    """Return whether a backward in chunks of plain Triton launches its kernels early."""
    is_short = case.n_keys <= CHUNKS_EARLY[case.is_causal]
    return case.gpu.launches_early and case.dtype != "fp32" and is_short


def chunk_loops(case: Case) -> int:
    """Return the loops of a program of ``backward_chunks_kernel``: what the registers allow."""
    return 1 if case.columns == 128 or case.dtype == "fp32" else 2


def queries_per_chunk(tile: Tile, case: Case) -> int:
    """Return the queries of one program's chunk, a power of two and a multiple of the tile's sides:
    as few as have each program run at once, but two tiles where one each fill the GPU."""
    queries, keys = _tiles_of(case.n_queries, tile.Bq), _tiles_of(case.n_keys, tile.Bk)
    many = case.gpu.multiprocessors
    pairs = queries * keys * case.n_heads
    if case.is_causal:
        pairs = (pairs + min(queries, keys) * case.n_heads) // 2
    at_once = max(1, many) * 8 // tile.warps
    share = max(_tiles_of(pairs, at_once), 1 + (pairs > many > 0))
    share = min(share, max(CHUNK_TILES, queries // CHUNK_TILES))
    return max((1 << (share - 1).bit_length()) * tile.Bq, tile.Bk)


def chunk_programs(tile: Tile, chunk: int, case: Case) -> int:
    """Return how many key tiles see how many chunks of queries, in one head: a program a pair."""
    chunks, keys = _tiles_of(case.n_queries, chunk), _tiles_of(case.n_keys, tile.Bk)
    if not case.is_causal:
        return chunks * keys
    return sum(min(keys, chunk // tile.Bk * seen) for seen in range(1, chunks + 1))


def queries_per_gluon_chunk(case: Case) -> int:
    """Return the queries of a program's chunk in Gluon: eight chunks were the fastest of one head,
    and at least 512 queries, four blocks of 128."""
    return max(512, _tiles_of(case.n_queries, 8 * 128) * 128)


# The Gluon kernels.

# Heads that run together have at most so much for all programs to read: it stays in the L2 cache.
# Where programs stay for several tiles, less was faster.
L2_BYTES = 32 * 2**20
L2_BYTES_STAY = 8 * 2**20
# In the backward at least so many, unless programs stay: its longest rows were faster.
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


class HopperForward(NamedTuple):
    """How the Gluon forward runs: ``heads_together`` at a time, as many as the L2 cache holds."""

    consumers: int  # warpgroups, of 64 queries each
    stays: bool  # whether a program stays for several tiles
    Bk: int
    n_programs: int
    heads_together: int


class HopperBackward(NamedTuple):
    """How the Gluon backward runs."""

    Bq: int
    stays: bool
    is_grouped: bool  # a program goes through all query heads that share its keys
    is_ordered: bool  # dQ is added up in the order of the tiles
    n_programs: int
    heads_together: int


def hopper_consumers(case: Case) -> tuple[int, bool]:
    """Return which form of the Gluon forward is the fastest: its consumers, or 0 where plain Triton
    is; and whether programs stay.

    With heads above 64 two consumers, which read keys together, pay from one tile a multiprocessor
    on; up to 64 three do, on long rows without a mask.
    """
    if not case.uses("consumers"):
        return 1, False
    n_tiles = _tiles_of(case.n_queries, 64) * case.n_heads
    if n_tiles < 32:
        return 0, False  # the host takes longer than either, and less for plain Triton
    if case.head_dim <= 64:
        if not case.is_causal and case.n_queries >= 4096 and n_tiles >= 4096:
            return 3, False
        pays = _pairs_pay(case.n_queries, 64, case.n_heads, 2 * MULTIPROCESSORS)
        return 1, not case.is_causal or pays
    if n_tiles <= MULTIPROCESSORS:
        return 1, False
    if case.is_causal:
        return 2, _pairs_pay(case.n_queries, 128, case.n_heads, MULTIPROCESSORS)
    return 2, case.n_queries <= 2048


def _pairs_pay(n_rows: int, rows: int, n_heads: int, at_once: int) -> bool:
    """Whether causal tiles are better done in pairs, one long and one short, by programs that stay.

    To end and begin is taken to cost a program a block and a half of 128 keys, which programs that
    stay save: a guess under which nearly all choices are those that were faster on an H200. Against
    it stands the part of the GPU that is idle in their last round, since all pairs take equally
    long. Pairs are of two heads: never of an odd number.
    """
    pairs = _tiles_of(n_rows, rows) * n_heads // 2
    if n_heads % 2 or 2 * pairs <= at_once:
        return False
    busy = pairs / (_tiles_of(pairs, at_once) * at_once)
    blocks = max(1, n_rows / 256)  # of a tile, on average
    return busy >= blocks / (blocks + 1.5)


@functools.lru_cache(maxsize=4096)
def hopper_forward(case: Case) -> HopperForward:
    """Return how the Gluon forward runs a case."""
    consumers, stays = hopper_consumers(case)
    n_programs = _tiles_of(case.n_queries, 64 * consumers) * case.n_heads
    if stays:  # two programs of one consumer share a multiprocessor
        at_once = (2 if consumers == 1 else 1) * case.gpu.multiprocessors
        n_programs = _staying(n_programs, at_once, case.is_causal)
    together = _heads_together(2 * case.n_keys * case.head_dim * 2, case.n_heads, stays, case)
    Bk = 64 if consumers == 1 and case.head_dim > 64 else 128
    return HopperForward(consumers, stays, Bk, n_programs, together)


def hopper_backward_stays(case: Case) -> bool:
    """Return whether programs of the Gluon backward stay for several tiles of 128 keys. With heads
    above 64 causal ones would spill more."""
    if case.is_deterministic:
        return False
    if not case.is_causal:
        return True
    n_rows = _tiles_of(case.n_keys, 128) * 128
    pays = _pairs_pay(n_rows, 128, case.n_kv_heads, MULTIPROCESSORS)
    return case.head_dim <= 64 and pays


@functools.lru_cache(maxsize=4096)
def hopper_backward(case: Case, chunk: int = 0) -> HopperBackward:
    """Return how the Gluon backward runs a case; with chunk, queries of a program, all gradients
    are added up."""
    Bq = 128 if case.head_dim <= 64 else 64
    is_grouped = not chunk and case.group > 1
    stays = not chunk and hopper_backward_stays(case)
    n_heads = case.n_heads if chunk else case.n_kv_heads
    n_tiles = _tiles_of(case.n_keys, 128)
    if chunk:
        n_tiles = chunk_programs(Tile(Bq, 128, 4, 2), chunk, case)
    n_programs = n_tiles * n_heads
    if stays:
        n_programs = _staying(n_programs, case.gpu.multiprocessors, case.is_causal)
    bytes_per_head = case.n_queries * case.head_dim * (2 + 2 + 2 * 4)  # dQ is read and written
    together = _heads_together(bytes_per_head, n_heads, stays, case)
    if case.is_deterministic:
        columns = 64 if case.head_dim <= 64 else 128
        together = min(ORDERED_HEADS[case.is_causal, columns], n_heads)
    elif is_grouped:
        together = max(1, min(n_heads, L2_BYTES_GROUPED // bytes_per_head))
    elif not stays:
        together = max(together, min(BACKWARD_HEADS, n_heads))
    return HopperBackward(Bq, stays, is_grouped, case.is_deterministic, n_programs, together)


def _staying(n_tiles: int, at_once: int, is_causal: bool) -> int:
    """How many programs do n_tiles tiles: as many as run at once, and no more than there are tiles,
    or pairs of them with a mask."""
    return min(n_tiles // 2 if is_causal else n_tiles, at_once)


def _heads_together(bytes_per_head: int, n_heads: int, stays: bool, case: Case) -> int:
    """How many heads, or pairs of heads where programs stay, run together."""
    if not case.uses("heads_in_l2"):
        return n_heads
    if stays and case.is_causal:
        bytes_per_head, n_heads = 2 * bytes_per_head, n_heads // 2
    return max(1, min(n_heads, (L2_BYTES_STAY if stays else L2_BYTES) // bytes_per_head))


def is_ragged(case: Case, Bk: int) -> bool:
    """Return whether some block of Bk keys goes past the last key where no mask hides it."""
    return case.n_keys % Bk != 0 and not (case.is_causal and case.n_queries <= case.n_keys)
