"""Which tile each kernel uses: chosen by measurement on an H200, none by search at run time.

A row of ``TILES`` lists tiles in order of preference. The first is what a Hopper GPU runs (or that
of ``WHEN_SHORT``, ``WHEN_FEW`` or ``WHEN_LONG``), and compiles there without serialised wgmma, in
16 bits all but two without spills (tests/attention/test_compile.py). The later ones need less
shared memory: a GPU where the first does not fit takes the next.
"""

from typing import NamedTuple

from a2lib.theory.attention import MULTIPROCESSORS

# What the table chooses tiles for: a kernel, and what it is asked to compute.
SPECIALISED = {
    "forward": ("forward_kernel", {}),
    "forward_chunk": ("chunk_kernel", {"EARLY": True}),
    "backward_dq": ("backward_dq_kernel", {"NEEDS_DQ": True}),
    "backward_dkdv": ("backward_dkdv_kernel", {"NEEDS_DK": True, "NEEDS_DV": True}),
    "backward_dk": ("backward_dkdv_kernel", {"NEEDS_DK": True, "NEEDS_DV": False}),
    "backward_dv": ("backward_dkdv_kernel", {"NEEDS_DK": False, "NEEDS_DV": True}),
    "backward": ("backward_kernel", {}),
    "backward_chunks": ("backward_chunks_kernel", {"EARLY": True}),
    "backward_wide": ("backward_wide_kernel", {}),
}
HEAD_DIM_MAX = 128


class Tile(NamedTuple):
    """Bq queries by Bk keys, the warps that share it, and the depth of the load pipeline.

    Of ``backward`` Bq rows of either side, which a program owns, by Bk of the other.
    """

    Bq: int
    Bk: int
    warps: int
    stages: int


TILES = {}
_SMALLER = Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)


def _add(kernel, family, BD, causal, full=None):
    TILES[kernel, family, BD, True] = (Tile(*causal), *_SMALLER)
    TILES[kernel, family, BD, False] = (Tile(*(full or causal)), *_SMALLER)


for _kernel in ("forward", "forward_chunk", "backward_dq", "backward_dkdv"):
    for _BD in (16, 32, 64, 128):
        _add(_kernel, "16bit", _BD, (64, 64, 4, 3))
_add("backward_dq", "16bit", 128, (128, 64, 8, 3))
_add("backward_dkdv", "16bit", 128, (32, 64, 4, 3))

for _BD in (16, 32, 64):
    _add("backward", "16bit", _BD, (64, 64, 4, 1))
    _add("backward_chunks", "16bit", _BD, (64, 64, 4, 3))
_add("backward", "16bit", 128, (16, 128, 8, 1))  # theory.attention.in_one_launch counts by 16
_add("backward_chunks", "16bit", 128, (64, 64, 8, 3))

# Some of these spill some registers, and are faster than the tiles that do not.
for _kernel in ("forward", "forward_chunk"):
    _add(_kernel, "fp32", 16, (64, 128, 4, 2))
    _add(_kernel, "fp32", 32, (64, 64, 4, 3))
    _add(_kernel, "fp32", 64, (64, 32, 4, 3))
for _BD in (16, 32):
    _add("backward_dq", "fp32", _BD, (64, 64, 4, 2))
    _add("backward_dkdv", "fp32", _BD, (64, 64, 4, 2))
_add("backward_dq", "fp32", 64, (64, 32, 4, 2))
_add("backward_dkdv", "fp32", 64, (32, 64, 4, 2))
# At 128 columns the fp32 sums of dK and dV do not fit the registers together: a kernel each.
_add("forward", "fp32", 128, (128, 32, 8, 2))
_add("forward_chunk", "fp32", 128, (64, 32, 4, 2))
_add("backward_dq", "fp32", 128, (64, 32, 4, 2))
_add("backward_dk", "fp32", 128, (16, 128, 8, 1))
_add("backward_dv", "fp32", 128, (16, 64, 4, 2))
_add("backward_chunks", "fp32", 16, (64, 64, 4, 3))
_add("backward_chunks", "fp32", 32, (64, 64, 4, 2))
_add("backward_chunks", "fp32", 64, (32, 64, 4, 2))

_add("forward", "fp16x3", 128, (128, 64, 8, 2))
_add("forward_chunk", "fp16x3", 128, (64, 32, 4, 2))
_add("backward_wide", "fp16x3", 128, (32, 128, 8, 2))

# Where the table's tile would leave multiprocessors idle, another can be faster.
WHEN_FEW = {}
for _causal in (True, False):
    WHEN_FEW["forward", "16bit", 64, _causal] = Tile(64, 128, 4, 3)
    WHEN_FEW["backward_dq", "16bit", 128, _causal] = Tile(64, 64, 4, 3)
    WHEN_FEW["backward_dq", "fp32", 64, _causal] = Tile(64, 64, 4, 2)
    WHEN_FEW["forward", "fp32", 128, _causal] = Tile(64, 32, 4, 2)
    WHEN_FEW["forward", "fp16x3", 128, _causal] = Tile(64, 32, 4, 2)
    WHEN_FEW["backward_dk", "fp32", 128, _causal] = Tile(16, 64, 4, 3)
    WHEN_FEW["backward_dv", "fp32", 128, _causal] = Tile(32, 64, 4, 2)

# Up to so many keys, where each program has a multiprocessor.
WHEN_SHORT = {("forward", "16bit", 128, True): {256: Tile(16, 128, 4, 1)}}
for _causal in (True, False):
    WHEN_SHORT["backward_chunks", "16bit", 128, _causal] = {640: Tile(64, 32, 4, 3)}

# The forward's chunks of at least so many keys: what is read for a tile is read less often. The
# backward in chunks by the keys of a row.
WHEN_LONG = {
    ("backward_chunks", "16bit", 128): {2048: Tile(32, 64, 4, 3)},
    ("forward_chunk", "16bit", 32): {1024: Tile(64, 128, 4, 3)},
    ("forward_chunk", "fp16x3", 128): {4096: Tile(128, 64, 8, 2)},
    ("forward_chunk", "16bit", 64): {4096: Tile(128, 64, 4, 3), 1024: Tile(64, 128, 4, 3)},
}

# The Gluon kernels (hopper.py); when the backward is theirs: passes.py.


def hopper_forward(head_dim, n_queries, n_heads, causal):
    """Which form of the Gluon forward is the fastest: its consumers, of 64 queries each, or 0 where
    plain Triton is; and whether programs stay for several tiles (measured on an H200).

    With heads above 64 two consumers, which read keys together, pay from one tile a multiprocessor
    on; up to 64 three do on long rows. Those that stay play ping-pong (``hopper_forward.py``).
    """
    tiles = -(-n_queries // 64) * n_heads
    if tiles < 32:
        return 0, False  # the host takes longer than either, and less for plain Triton
    if head_dim <= 64:
        if causal and n_queries >= 8192 and tiles >= 2048:
            return 3, True
        if not causal and n_queries >= 1024 and tiles >= 4096:
            return 3, n_queries <= 4096
        return 1, not causal or _pairs_pay(n_queries, 64, n_heads, 2 * MULTIPROCESSORS)
    if tiles <= MULTIPROCESSORS:
        return 1, False
    if causal:
        return 2, _pairs_pay(n_queries, 128, n_heads, MULTIPROCESSORS)
    return 2, n_queries <= 2048


def hopper_backward_stays(head_dim, n_tiles, n_heads, causal):
    """Whether programs of the Gluon backward stay for several of the n_tiles tiles of 128 keys that
    each head has (measured on an H200). With heads above 64 causal ones would spill more."""
    if not causal:
        return True
    return head_dim <= 64 and _pairs_pay(n_tiles * 128, 128, n_heads, MULTIPROCESSORS)


def _pairs_pay(n_queries, rows, n_heads, at_once):
    """Whether causal tiles are better done in pairs, one long and one short, by programs that stay.

    To end and begin is taken to cost a program a block and a half of 128 keys, which programs that
    stay save: a guess under which nearly all choices are those that were faster on an H200. Against
    it stands the part of the GPU that is idle in their last round, since all pairs take equally
    long. Pairs are of two heads: never of an odd number.
    """
    pairs = -(-n_queries // rows) * n_heads // 2
    if n_heads % 2 or 2 * pairs <= at_once:
        return False
    busy = pairs / (-(-pairs // at_once) * at_once)
    blocks = max(1, n_queries / 256)  # of a tile, on average
    return busy >= blocks / (blocks + 1.5)


# The backward in chunks (chunks.py); when it is the one: passes.py.
# At most so many in one, or of all that fraction: dK and dV are added up once for them.
CHUNK_TILES = 16
# Up to so many keys, with a causal mask or without, each of its kernels is launched while the one
# before runs, in 16 bits. Without a mask, where programs take equally long, longer rows can lose by
# it: two then share a multiprocessor while another has none, we guess.
CHUNKS_EARLY = {True: 4096, False: 512}


def chunk_loops(BD, dtype):
    """Loops of a program of ``backward_chunks_kernel``: what the registers allow."""
    return 1 if BD == 128 or dtype == "fp32" else 2


def chunk_of(tile, n_queries, n_keys, n_heads, causal, n_multiprocessors):
    """Queries of one program's chunk, a power of two and a multiple of the tile's sides: as few as
    have each program run at once, but two tiles where one each fill the GPU (measured on an
    H200)."""
    queries, keys = -(-n_queries // tile.Bq), -(-n_keys // tile.Bk)
    pairs = queries * keys * n_heads
    if causal:
        pairs = (pairs + min(queries, keys) * n_heads) // 2
    programs = max(1, n_multiprocessors) * 8 // tile.warps  # at once
    each = max(-(-pairs // programs), 1 + (pairs > n_multiprocessors > 0))
    each = min(each, max(CHUNK_TILES, queries // CHUNK_TILES))
    return max((1 << (each - 1).bit_length()) * tile.Bq, tile.Bk)


def chunk_programs(tile, chunk, n_queries, n_keys, causal):
    """How many key tiles see how many chunks of queries, in one head: a program for each pair."""
    chunks, keys = -(-n_queries // chunk), -(-n_keys // tile.Bk)
    if not causal:
        return chunks * keys
    return sum(min(keys, chunk // tile.Bk * seen) for seen in range(1, chunks + 1))


def n_chunk_programs(n_tiles, n_chunks, tiles_per_chunk):
    """Programs of ``key_chunks.chunk_kernel`` for one head; tiles_per_chunk is 0 without a causal
    mask. With one there are none behind the diagonal; fewer than tiles_per_chunk find no tile.
    """
    whole = (max(n_tiles - (c + 1) * tiles_per_chunk, 0) for c in range(n_chunks))
    return sum(whole) + n_chunks * tiles_per_chunk


def precision_of(dtype, allow_tf32, two_terms=False):
    """How ``tl.dot`` multiplies operands of this dtype ("fp32", "bf16", "fp16").

    fp32 is split into three bf16 terms, six products (bf16x6): as exact as fp32 multiplication
    and on the tensor cores; or into two fp16 terms, three products (fp16x3, ``terms.py``). TF32
    keeps 10 bits of the mantissa and is for those who ask for it.
    """
    if dtype != "fp32":
        return "ieee"
    return "tf32" if allow_tf32 else "fp16x3" if two_terms else "bf16x6"


def options_of(tile, precision):
    """Triton's compile options for a tile; why fp32 keeps multiply-adds apart: see kernels.py."""
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": precision not in ("bf16x6", "fp16x3"),
    }
