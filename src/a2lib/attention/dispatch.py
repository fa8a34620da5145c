"""Choose the kernels of a call of attention, by rules measured on an H200.

A call's **form** says which kernels run. Of each pass the first form whose condition holds is
taken (``forward_form``, ``backward_form``):

    ==========  ================  ======================================  ========================
    pass        form              for                                     kernels
    ==========  ================  ======================================  ========================
    forward     key_chunks        few query tiles: programs share keys    forward_chunk, combine
    forward     hopper            16 bits, heads of 40 to 128, Hopper     hopper_forward
    forward     plain             the rest                                forward
    backward    one_launch        so few tokens that launching is all     backward
    backward    two_terms         fp32 with wide heads, by chunks         backward_wide
    backward    hopper_chunks     query chunks of long rows, Hopper       hopper_backward
    backward    query_chunks      few key tiles: programs share queries   backward_chunks
    backward    one_sweep         the rest in 16 bits, Hopper             hopper_backward
    backward    two_sweeps        the rest, a fixed order of additions    backward_dq, _dkdv
    ==========  ================  ======================================  ========================

Around the backwards of one sweep stand kernels that prepare and finish the sums, and before what
multiplies fp32 in terms of 16 bits one that splits it (``precision_of``).

``tiles.py`` chooses how much a program of plain Triton does at a time, ``forms.py`` makes launches
of a form, ``launches.py`` runs them. This module imports no torch.
"""

import math
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200
HEAD_DIM_MAX = 128

# By name: the module of a2lib.attention, and the function in it.
KERNELS = {
    "forward": ("kernels", "forward_kernel"),
    "forward_chunk": ("key_chunks", "chunk_kernel"),
    "combine": ("key_chunks", "combine_kernel"),
    "hopper_forward": ("hopper_forward", "forward_kernel"),
    "backward": ("kernels", "backward_kernel"),
    "backward_dq": ("kernels", "backward_dq_kernel"),
    "backward_dkdv": ("kernels", "backward_dkdv_kernel"),
    "backward_dk": ("kernels", "backward_dkdv_kernel"),
    "backward_dv": ("kernels", "backward_dkdv_kernel"),
    "backward_chunks": ("chunks", "backward_chunks_kernel"),
    "backward_wide": ("chunks", "backward_wide_kernel"),
    "hopper_backward": ("hopper_backward", "backward_kernel"),
    "prepare": ("kernels", "prepare_kernel"),
    "finish": ("kernels", "finish_kernel"),
    "split": ("kernels", "split_kernel"),
}


class Call(NamedTuple):
    """A call of attention: all that the choice of its kernels depends on.

    ``dtype`` is "bf16", "fp16" or "fp32"; ``hopper`` says whether the kernels for Hopper can run:
    the GPU is one, and its copy engine can address the tensors. ``multiprocessors`` is 0 without a
    GPU. ``fixed_order`` is PyTorch's setting.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    causal: bool
    multiprocessors: int = MULTIPROCESSORS
    hopper: bool = True
    fixed_order: bool = False

    @property
    def n_heads(self) -> int:
        return self.batch * self.heads

    @property
    def n_kv_heads(self) -> int:
        return self.batch * self.kv_heads

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 1


# What the ladder takes away (ladder.RUNGS), for the whole process: a backward of PyTorch runs in a
# thread of its own. Part of what a kept launch is known by.
without: frozenset[str] = frozenset()


def ceil_div(n: int, size: int) -> int:
    """Return how many pieces of ``size`` hold ``n``."""
    return -(-n // size)


def forward_form(call: Call) -> str:
    """Return the form of a forward: the first whose condition holds."""
    if keys_per_chunk(call):
        return "key_chunks"
    if _can_use_hopper(call) and forward_consumers(call)[0] and "one_consumer" not in without:
        return "hopper"
    return "plain"


def backward_form(call: Call) -> str:
    """Return the form of a backward: the first whose condition holds.

    But for one_launch, one_sweep and two_sweeps the order of additions is not fixed.
    """
    if in_one_launch(call) and "query_chunks" not in without:
        return "one_launch"
    if precision_of(call) == "fp16x3":
        return "two_terms"
    can_be_cut = call.n_queries > 0 and call.n_kv_heads > 0 and not call.fixed_order
    if can_be_cut and in_chunks(call) and "query_chunks" not in without:
        return "hopper_chunks" if chunk_queries_of(call) else "query_chunks"
    if in_one_sweep(call) and _can_use_hopper(call) and "one_sweep" not in without:
        return "one_sweep"
    return "two_sweeps"


def _can_use_hopper(call: Call) -> bool:
    has_work = call.n_queries > 0 and call.n_keys > 0 and call.n_heads > 0
    return has_work and call.hopper and _has_hopper_kernels(call)


def _has_hopper_kernels(call: Call) -> bool:
    """Return whether there are kernels for Hopper: heads of 40 to 128, by 8, in 16 bits."""
    return call.dtype != "fp32" and 32 < call.head_dim <= 128 and call.head_dim % 8 == 0


def masks() -> str:
    """Return which tiles of plain Triton are masked: the diagonal and the ends, but on the ladder
    (``kernels.forward_kernel``)."""
    if "to_diagonal" in without:
        return "all"
    return "diagonal" if "two_loops" in without else "edges"


# How products are made.


def precision_of(call: Call) -> str:
    """Return how ``tl.dot`` multiplies operands, in both passes alike: a backward that computes the
    scores of a forward in another way has other weights where scores are large.

    fp32 is split into three bf16 terms, six products (bf16x6): as exact as fp32 multiplication
    and on the tensor cores; or into two fp16 terms, three products (fp16x3, ``terms.py``), whose
    backward adds in no fixed order.
    """
    if call.dtype != "fp32":
        return "ieee"
    return "fp16x3" if in_two_terms(call) and not call.fixed_order else "bf16x6"


def in_two_terms(call: Call) -> bool:
    """Return whether both passes may multiply fp32 as two terms of fp16: with heads above 64, but
    where sums have so few rows that gradients would be further from fp32's."""
    fewest = min(call.n_queries, call.n_keys)
    return call.dtype == "fp32" and call.head_dim > 64 and fewest >= 256


def columns_of(head_dim: int) -> int:
    """Return the columns, a power of two, that hold a head in plain Triton."""
    return max(16, 1 << (head_dim - 1).bit_length())


# The forward.


def forward_consumers(call: Call) -> tuple[int, bool]:
    """Return which form of the forward for Hopper is the fastest: its consumers, of 64 queries
    each, or 0 where plain Triton is; and whether programs stay for several tiles.

    With heads above 64 two consumers, which read keys together, pay from one tile a multiprocessor
    on; up to 64 three do on long rows. Those that stay play ping-pong (``hopper_forward.py``).
    """
    if "consumers" in without:
        return 1, False
    n_queries, n_heads = call.n_queries, call.n_heads
    tiles = ceil_div(n_queries, 64) * n_heads
    if tiles < 32:
        return 0, False  # the host takes longer than either, and less for plain Triton
    if call.head_dim <= 64:
        if call.causal and n_queries >= 4096 and tiles >= 2048:
            return 3, True
        if not call.causal and n_queries >= 1024 and tiles >= 4096:
            return 3, n_queries <= 4096
        return 1, not call.causal or _pairs_pay(n_queries, 64, n_heads, 2 * MULTIPROCESSORS)
    if tiles <= MULTIPROCESSORS:
        return 1, False
    if call.causal:
        return 2, _pairs_pay(n_queries, 128, n_heads, MULTIPROCESSORS)
    return 2, n_queries <= 4096


def _pairs_pay(n_rows: int, tile_rows: int, n_heads: int, at_once: int) -> bool:
    """Return whether causal tiles are better done in pairs, long and short, by programs that stay.

    To end and begin is taken to cost a program a block and a half of 128 keys, which programs that
    stay save: a guess under which nearly all choices are those that were faster on an H200. Against
    it stands the part of the GPU that is idle in their last round, since all pairs take equally
    long. Pairs are of two heads: never of an odd number.
    """
    pairs = ceil_div(n_rows, tile_rows) * n_heads // 2
    if n_heads % 2 or 2 * pairs <= at_once:
        return False
    rounds = ceil_div(pairs, at_once)
    busy = pairs / (rounds * at_once)
    blocks = max(1, n_rows / 256)  # of a tile, on average
    return busy >= blocks / (blocks + 1.5)


# Each chunk of keys holds an fp32 output of all queries.
KEY_CHUNKS_MAX = 8


def keys_per_chunk(call: Call) -> int:
    """Return the keys of a program, a multiple of 128, if the forward splits the keys over several
    programs (split-KV); 0 if it does not, since tiles of 64 queries fill the GPU or rows are short.

    Work is counted in tiles of 64 by 64, which a multiprocessor does at one rate.
    """
    if "key_chunks" in without:
        return 0
    causal, multiprocessors = call.causal, call.multiprocessors
    n_keys = min(call.n_keys, call.n_queries) if causal else call.n_keys
    tiles = ceil_div(call.n_queries, 64) * call.n_heads
    blocks = ceil_div(n_keys, 64)
    if not 0 < tiles <= 2 * multiprocessors:
        return 0
    # Of each multiprocessor if all had as much, and of the one with most if keys are not split: its
    # second tile is shorter if causal.
    share = tiles * blocks / multiprocessors / (2 if causal else 1)
    if causal:
        second = max(0, 1 - multiprocessors / tiles)
    else:
        second = 1 if tiles > multiprocessors else 0
    most = blocks * (1 + second)
    if tiles >= 32:
        cost = 10  # of a second kernel, and of doing without the one for Hopper
    else:
        cost = 2 if call.dtype == "fp32" else 6
    if most <= 1.25 * share + cost:
        return 0
    # Some four programs for each multiprocessor, or two with a causal mask, which leaves half of
    # the pairs.
    chunks = 4 * multiprocessors / tiles
    chunks = max(4, round(chunks)) if causal else max(2, math.ceil(chunks))
    keys = ceil_div(n_keys, min(KEY_CHUNKS_MAX, chunks) * 128) * 128
    return keys if keys < n_keys else 0


def n_key_chunks(call: Call) -> int:
    """Return how many chunks have a key that some query sees."""
    n_seen = min(call.n_queries, call.n_keys) if call.causal else call.n_keys
    return ceil_div(n_seen, keys_per_chunk(call))


def key_chunk_programs(Bq: int, call: Call) -> int:
    """Return the programs of ``key_chunks.chunk_kernel`` for one head: one for each chunk that a
    tile of Bq queries sees, and where the last queries are few some that find no tile."""
    n_tiles, n_chunks = ceil_div(call.n_queries, Bq), n_key_chunks(call)
    if not call.causal:
        return n_tiles * n_chunks
    tiles_per_chunk = keys_per_chunk(call) // Bq
    programs = n_chunks * tiles_per_chunk  # on the diagonal
    for chunk in range(n_chunks):
        programs += max(n_tiles - (chunk + 1) * tiles_per_chunk, 0)
    return programs


# The backward.

# From how many programs on heads of keys that query heads share are one sweep (measured on an
# H100), and from how many dQ that is added up in the order of the tiles (from 512 on measured).
GROUPED_PROGRAMS = 128
ORDERED_PROGRAMS = 264
# Up to so many keys, with a causal mask or without, each kernel of the backward in chunks is
# launched while the one before runs, in 16 bits. Without a mask, where programs take equally long,
# longer rows can lose by it: two then share a multiprocessor while another has none, we guess.
CHUNKS_EARLY = {True: 4096, False: 512}


def in_one_launch(call: Call) -> bool:
    """Return whether the backward is one launch, in which programs of 64 queries (16 with heads
    above 64) make dQ and programs of as many keys make dK and dV: in 16 bits, if each program has
    a multiprocessor and tokens are so few that launching takes longest."""
    most_tokens = 128 if 32 < call.head_dim <= 64 else 256
    if call.dtype == "fp32" or max(call.n_queries, call.n_keys) > most_tokens:
        return False
    rows = 64 if call.head_dim <= 64 else 16
    tiles = ceil_div(call.n_queries, rows) + ceil_div(call.n_keys, rows)
    return tiles * call.n_heads <= MULTIPROCESSORS


def in_chunks(call: Call) -> bool:
    """Return whether the backward is one sweep split by queries, in which all gradients are added
    up.

    In 16 bits it is where programs of 128 keys would leave a GPU idle. In fp32, with heads of up to
    64, it is there and where rows are long. Long causal rows in 16 bits, whose first program takes
    longest, are also split where each multiprocessor has a program, or two with heads up to 32.
    """
    n_keys, head_dim, causal = call.n_keys, call.head_dim, call.causal
    if n_keys < 256:
        return False
    programs = ceil_div(n_keys, 128) * call.n_heads
    if call.dtype == "fp32":
        return head_dim <= 64 and (programs <= 128 or n_keys >= 4096)
    if causal and head_dim <= 32 and n_keys > 16384:
        most = 256
    elif causal and _is_long_for_hopper(call):
        most = MULTIPROCESSORS
    elif head_dim <= 32:
        most = 128
    elif head_dim <= 64 or causal:
        most = 64
    else:
        most = 32
    return programs <= most


def _is_long_for_hopper(call: Call) -> bool:
    """Return whether a backward split by queries uses the Hopper kernel where that can run. Shorter
    rows use the plain Triton kernel, whose tiles are smaller."""
    return _has_hopper_kernels(call) and call.n_keys >= (8192 if call.head_dim <= 64 else 4096)


def in_one_sweep(call: Call) -> bool:
    """Return whether the backward on a Hopper GPU is one sweep over the tiles, in which many
    programs add to dQ, instead of two: if programs of 128 keys fill the GPU, or sequences are
    long."""
    n_programs = ceil_div(call.n_keys, 128) * call.n_kv_heads
    fewest_keys = 128 if n_programs >= 2 * MULTIPROCESSORS else 1024
    if not _has_hopper_kernels(call) or call.n_keys < fewest_keys:
        return False
    if call.group > 1:  # in a fixed order two sweeps were as fast
        return not call.fixed_order and n_programs >= GROUPED_PROGRAMS
    return not call.fixed_order or n_programs >= ORDERED_PROGRAMS


def chunk_queries_of(call: Call) -> int:
    """Return the queries of a program's chunk where the kernel for Hopper runs the backward in
    chunks, or 0: eight chunks were the fastest of one head, of at least 512 queries, four blocks of
    128."""
    if not _is_long_for_hopper(call) or not _can_use_hopper(call):
        return 0
    return max(512, ceil_div(call.n_queries, 8 * 128) * 128)


def query_chunk_programs(chunk: int, Bk: int, call: Call) -> int:
    """Return how many tiles of Bk keys see how many chunks of queries, in one head: a program for
    each pair."""
    n_chunks, n_tiles = ceil_div(call.n_queries, chunk), ceil_div(call.n_keys, Bk)
    if not call.causal:
        return n_chunks * n_tiles
    return sum(min(n_tiles, chunk // Bk * (number + 1)) for number in range(n_chunks))


# How many programs and heads run at a time on Hopper.

# Heads that run together have at most so much for all programs to read: it stays in the L2 cache.
# Where programs stay, less was faster (on an H200), and of heads of keys that query heads share one
# is read at a time (on an H100).
L2_BYTES = 32 * 2**20
L2_BYTES_STAY = 2 * 2**20
L2_BYTES_GROUPED = 24 * 2**20
# In the backward at least so many, unless programs stay: its longest rows were faster.
BACKWARD_HEADS = 4
# Heads that run together where dQ is added up in the order of the tiles, by mask and columns: of
# fewer heads more tiles wait for each other, of more the L2 cache holds less (on an H100).
ORDERED_HEADS = {(True, 64): 16, (True, 128): 16, (False, 64): 8, (False, 128): 4}


# A trial: "", or of the backward for Hopper "whole" or "peeled", programs do whole heads, peeled with
# code of its own for the first tile of a head; or "ring", heads use few places for their sums.
trial = ""


def hopper_backward_whole(call: Call) -> int:
    """Return whether each program of the backward for Hopper does whole heads (1, 2 peeled)."""
    return ("", "whole", "peeled", "ring").index(trial) if call.group == 1 else 0


def ring_slots(call: Call) -> int:
    """Return how many places for the sums of a head there are: of twice the heads that run at a
    time, an even number."""
    stay = hopper_backward_stays(call)
    together = backward_heads_together(call, call.n_kv_heads, stay, False)
    in_pairs = 2 if stay and call.causal else 1
    running = ceil_div(MULTIPROCESSORS * in_pairs, ceil_div(call.n_keys, 128)) + in_pairs
    slots = 2 * max(together * in_pairs, running)
    return min(slots, call.n_heads)


def hopper_backward_stays(call: Call) -> bool:
    """Return whether programs of the backward for Hopper stay for several tiles of 128 keys. With
    heads above 64 causal ones would spill more."""
    if not call.causal:
        return True
    whole_tiles = ceil_div(call.n_keys, 128) * 128
    pays = _pairs_pay(whole_tiles, 128, call.n_kv_heads, MULTIPROCESSORS)
    return call.head_dim <= 64 and pays


def staying(n_tiles: int, at_once: int, in_pairs: bool) -> int:
    """Return how many programs do n_tiles tiles: as many as run at once, and no more than there are
    tiles, or pairs of them."""
    return min(n_tiles // 2 if in_pairs else n_tiles, at_once)


def heads_together(bytes_per_head: int, n_heads: int, stay: bool, causal: bool) -> int:
    """Return how many heads, or pairs of heads where causal programs stay, run together."""
    if "heads_in_l2" in without:
        return n_heads
    if stay and causal:
        bytes_per_head, n_heads = 2 * bytes_per_head, n_heads // 2
    cached = (L2_BYTES_STAY if stay else L2_BYTES) // bytes_per_head
    return max(1, min(n_heads, cached))


def backward_heads_together(call: Call, n_heads: int, stay: bool, in_chunks: bool) -> int:
    """Return ``heads_together`` of a backward, which also reads and writes dQ.

    Of programs that do not stay a power of two: up to 4 % faster than 5, 10, 21 or 42 heads (causal
    heads of 128, measured on an H200; why is not known).
    """
    bytes_per_head = call.n_queries * call.head_dim * (2 + 2 + 2 * 4)
    if call.fixed_order:
        return min(ORDERED_HEADS[call.causal, 64 if call.head_dim <= 64 else 128], n_heads)
    if call.group > 1 and not in_chunks:
        return max(1, min(n_heads, L2_BYTES_GROUPED // bytes_per_head))
    together = heads_together(bytes_per_head, n_heads, stay, call.causal)
    if stay:
        return together
    together = max(together, min(BACKWARD_HEADS, n_heads))
    if together == n_heads:
        return together
    return 1 << (together.bit_length() - 1)
