"""Choose a tile for each kernel of plain Triton, by a table measured on an H200.

A tile is how much a program does at a time. The first row of ``ROWS`` that fits a call is taken;
nothing is searched at run time. This module imports no torch.
"""

from typing import NamedTuple

from a2lib.attention import dispatch
from a2lib.attention.dispatch import Call, ceil_div
from a2lib.errors import UnsupportedError


class Tile(NamedTuple):
    """Bq queries by Bk keys, the warps that share it, and the depth of the load pipeline.

    Of ``backward`` Bq rows of either side, which a program owns, by Bk of the other.
    """

    Bq: int
    Bk: int
    warps: int
    stages: int


class Row(NamedTuple):
    """A tile, for which kernel and what it computes, and when.

    ``precision`` is that of ``dispatch.precision_of``, ``columns`` the power of two that holds the
    head. ``when`` is

    - "always";
    - "few": programs of the "always" tile would leave multiprocessors idle;
    - "short": at most ``keys`` keys, and each program has a multiprocessor; "short_causal": with a
      causal mask, too;
    - "long": at least ``keys`` keys, in the forward of a chunk.
    """

    kernel: str
    precision: str
    columns: tuple[int, ...]
    tile: Tile
    when: str = "always"
    keys: int = 0


ANY = (16, 32, 64, 128)
# The first row that fits is what a Hopper GPU runs, and it compiles there without serialised wgmma,
# in 16 bits all but two without spills (tests/attention/test_compile.py). In fp32 some spill some
# registers, and are faster than the tiles that do not.
ROWS = (
    # kernel, precision, columns, (Bq, Bk, warps, stages), when, keys
    Row("forward", "ieee", (64,), Tile(64, 128, 4, 3), "few"),
    Row("forward", "ieee", (128,), Tile(16, 128, 4, 1), "short_causal", 256),
    Row("forward", "ieee", ANY, Tile(64, 64, 4, 3)),
    Row("forward", "bf16x6", (16,), Tile(64, 128, 4, 2)),
    Row("forward", "bf16x6", (32,), Tile(64, 64, 4, 3)),
    Row("forward", "bf16x6", (64,), Tile(64, 32, 4, 3)),
    Row("forward", "bf16x6", (128,), Tile(64, 32, 4, 2), "few"),
    Row("forward", "bf16x6", (128,), Tile(128, 32, 8, 2)),
    Row("forward", "fp16x3", (128,), Tile(64, 32, 4, 2), "few"),
    Row("forward", "fp16x3", (128,), Tile(128, 64, 8, 2)),
    # What is read for a tile is read less often in a larger one.
    Row("forward_chunk", "ieee", (32,), Tile(64, 128, 4, 3), "long", 1024),
    Row("forward_chunk", "ieee", (64,), Tile(128, 64, 4, 3), "long", 4096),
    Row("forward_chunk", "ieee", (64,), Tile(64, 128, 4, 3), "long", 1024),
    Row("forward_chunk", "ieee", ANY, Tile(64, 64, 4, 3)),
    Row("forward_chunk", "bf16x6", (16,), Tile(64, 128, 4, 2)),
    Row("forward_chunk", "bf16x6", (32,), Tile(64, 64, 4, 3)),
    Row("forward_chunk", "bf16x6", (64,), Tile(64, 32, 4, 3)),
    Row("forward_chunk", "bf16x6", (128,), Tile(64, 32, 4, 2)),
    Row("forward_chunk", "fp16x3", (128,), Tile(128, 64, 8, 2), "long", 4096),
    Row("forward_chunk", "fp16x3", (128,), Tile(64, 32, 4, 2)),
    Row("backward", "ieee", (16, 32, 64), Tile(64, 64, 4, 1)),
    Row("backward", "ieee", (128,), Tile(16, 128, 8, 1)),  # in_one_launch's 16
    Row("backward_dq", "ieee", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_dq", "ieee", (128,), Tile(64, 64, 4, 3), "few"),
    Row("backward_dq", "ieee", (128,), Tile(128, 64, 8, 3)),
    Row("backward_dq", "bf16x6", (16, 32), Tile(64, 64, 4, 2)),
    Row("backward_dq", "bf16x6", (64,), Tile(64, 64, 4, 2), "few"),
    Row("backward_dq", "bf16x6", (64, 128), Tile(64, 32, 4, 2)),
    Row("backward_dkdv", "ieee", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_dkdv", "ieee", (128,), Tile(32, 64, 4, 3)),
    Row("backward_dkdv", "bf16x6", (16, 32), Tile(64, 64, 4, 2)),
    Row("backward_dkdv", "bf16x6", (64,), Tile(32, 64, 4, 2)),
    # At 128 columns the fp32 sums of dK and dV do not fit the registers together: a kernel each.
    Row("backward_dk", "bf16x6", (128,), Tile(16, 64, 4, 3), "few"),
    Row("backward_dk", "bf16x6", (128,), Tile(16, 128, 8, 1)),
    Row("backward_dv", "bf16x6", (128,), Tile(32, 64, 4, 2), "few"),
    Row("backward_dv", "bf16x6", (128,), Tile(16, 64, 4, 2)),
    Row("backward_chunks", "ieee", (16, 32, 64), Tile(64, 64, 4, 3)),
    Row("backward_chunks", "ieee", (128,), Tile(32, 64, 4, 3), "long", 2048),
    Row("backward_chunks", "ieee", (128,), Tile(64, 32, 4, 3), "short", 640),
    Row("backward_chunks", "ieee", (128,), Tile(64, 64, 8, 3)),
    Row("backward_chunks", "bf16x6", (16,), Tile(64, 64, 4, 3)),
    Row("backward_chunks", "bf16x6", (32,), Tile(64, 64, 4, 2)),
    Row("backward_chunks", "bf16x6", (64,), Tile(32, 64, 4, 2)),
    Row("backward_wide", "fp16x3", (128,), Tile(32, 128, 8, 2)),
)
# Where shared memory is too small for those of the table: another GPU.
SMALLER = (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))
# The ladder's, of Triton 3.6's tutorial 06: its forward is tuned among several, of which this is
# one, and its backward's two kernels are one.
TUTORIAL = {
    "forward": Tile(128, 128, 8, 2),
    "backward_dq": Tile(128, 32, 4, 5),
    "backward_dkdv": Tile(32, 128, 4, 5),
}
# At most so many tiles in a chunk of the backward, or of all that fraction: dK and dV are added up
# once for them.
CHUNK_TILES = 16

# Kernel, precision, columns.
Key = tuple[str, str, int]

TILES: dict[Key, list[Row]] = {}
for _row in ROWS:
    for _columns in _row.columns:
        TILES.setdefault((_row.kernel, _row.precision, _columns), []).append(_row)

# Those that did not fit a GPU of this process.
struck: set[tuple[Key, Tile]] = set()


def key_of(kernel: str, call: Call) -> Key:
    """Return where ``TILES`` has the rows of a kernel for a call."""
    return kernel, dispatch.precision_of(call), dispatch.columns_of(call.head_dim)


def tile_of(kernel: str, call: Call) -> Tile:
    """Return the best tile of a kernel for a call that is not struck."""
    key = key_of(kernel, call)
    for tile in (*_tiles_of(key, call), *SMALLER):
        if (key, tile) not in struck:
            return tile
    raise UnsupportedError(
        f"flash_attention has no {kernel} tile for head_dim {call.head_dim} in {call.dtype} that "
        "fits the GPU's shared memory"
    )


def _tiles_of(key: Key, call: Call) -> list[Tile]:
    kernel, *_ = key
    if "tuned_tiles" in dispatch.without and kernel in TUTORIAL:
        return [TUTORIAL[kernel]]
    rows = TILES[key]
    few = n_programs(kernel, rows[-1].tile, call) < call.multiprocessors
    return [row.tile for row in rows if _fits(row, call, few)]


def _fits(row: Row, call: Call, few: bool) -> bool:
    if row.when == "few":
        return few
    if row.when == "long":
        chunked = row.kernel == "forward_chunk"
        return (dispatch.keys_per_chunk(call) if chunked else call.n_keys) >= row.keys
    if row.when == "always":
        return True
    if row.when == "short_causal" and not call.causal:
        return False
    each_has_one = n_programs(row.kernel, row.tile, call) <= call.multiprocessors
    return call.n_keys <= row.keys and each_has_one


def n_programs(kernel: str, tile: Tile, call: Call) -> int:
    """Return how many programs of a kernel there are with a tile."""
    queries = ceil_div(call.n_queries, tile.Bq) * call.n_heads
    if kernel in ("forward", "backward_dq"):
        return queries
    if kernel == "forward_chunk":
        return dispatch.key_chunk_programs(tile.Bq, call) * call.n_heads
    if kernel == "backward":
        return queries + ceil_div(call.n_keys, tile.Bq) * call.n_kv_heads
    if kernel in ("backward_chunks", "backward_wide"):
        chunk = chunk_of(tile, call)
        programs = dispatch.query_chunk_programs(chunk, tile.Bk, call) * call.n_heads
        return 2 * programs if kernel == "backward_wide" else programs
    return ceil_div(call.n_keys, tile.Bk) * call.n_kv_heads


def chunk_of(tile: Tile, call: Call) -> int:
    """Return the queries of one program's chunk, a power of two and a multiple of the tile's sides:
    as few as have each program run at once, but two tiles where one each fill the GPU."""
    queries = ceil_div(call.n_queries, tile.Bq)
    keys = ceil_div(call.n_keys, tile.Bk)
    pairs = queries * keys * call.n_heads
    if call.causal:
        pairs = (pairs + min(queries, keys) * call.n_heads) // 2
    at_once = max(1, call.multiprocessors) * 8 // tile.warps
    fills_the_gpu = pairs > call.multiprocessors > 0
    tiles = max(ceil_div(pairs, at_once), 2 if fills_the_gpu else 1)
    tiles = min(tiles, max(CHUNK_TILES, queries // CHUNK_TILES))
    power_of_two = 1 << (tiles - 1).bit_length()
    return max(power_of_two * tile.Bq, tile.Bk)
