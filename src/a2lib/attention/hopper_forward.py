"""The forward for Hopper in Gluon: a warp that loads, and warpgroups that compute.

What plain Triton (``kernels.py``) cannot say is who does what. Here one warp (``_load_*``) asks the
copy engine (TMA) for tiles, ahead of time, and each consumer, a warpgroup of four warps, owns 64
rows: queries in the forward, keys in the backward. They meet at barriers in shared memory, "full"
when a tile has come and "empty" when all consumers have used it; a barrier's phase flips each time
it completes. Consumers run at their own pace, so that the exponentials of one cover the products of
another.

Legend: as in ``kernels.py``, with ``BD`` columns (64 or 128) that hold the head size ``d``; blocks
of ``Bq`` queries or ``Bk`` keys stream past a program's own tile; ``STAGES`` buffers hold them.
Scores are in base 2: ``scale2 = scale * log2(e)``.

Sources: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; Shah et al., "FlashAttention-3" (2024),
for warp specialisation, products issued ahead of the softmax, and dQ added up by the copy engine.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate  # not public yet; Gluon's own examples use it

LN2 = gl.constexpr(0.6931471805599453)

# Triton 3.6 has these under other names than later versions.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def record(names: str):
    """Return a class whose instances hold values by these names, constants among them, for Gluon's
    functions to hand on whole."""
    names = names.split()

    def __init__(self, *values):
        for name, x in zip(names, values, strict=True):
            setattr(self, name, x)

    fields = {"__init__": __init__, "__annotations__": dict.fromkeys(names, object)}
    kind = _aggregate(type("Record", (), fields))
    kind.hash_attrs = []  # its functions that Triton would read, for its cache: none is Triton's
    return kind


# What the roles of a program of the forward share: tensors and sizes, places in shared memory and
# their barriers, constants.
Forward = record(
    "Q K V O LSE scale2 H n_heads GROUP Nq Nk TOGETHER "
    "q_s k_s v_s q_full q_empty k_full k_empty v_full v_empty "
    "BD CONSUMERS Bq Bk STAGES CAUSAL RAGGED STAY PING_PONG scores sums operand"
)


@gluon.jit
def n_turns(n_tiles, n_heads, CAUSAL: gl.constexpr, STAY: gl.constexpr):
    """Return how many of n_heads * n_tiles tiles this program does: one, or with STAY its share."""
    turns = 1
    if STAY:
        together: gl.constexpr = 2 if CAUSAL else 1
        items = n_tiles * n_heads // together - gl.program_id(0) + gl.num_programs(0) - 1
        turns = items // gl.num_programs(0) * together
    return turns


@gluon.jit
def tile_and_head(
    at, turn, n_tiles, n_heads, TOGETHER, CAUSAL: gl.constexpr, STAY: gl.constexpr
):  # fmt: skip
    """Tile and flat (batch, head) index of a turn of program number ``at``: TOGETHER heads at a
    time, whose tensors the L2 cache holds, and within them tile by tile, so that the longest tiles
    start first and programs side by side read different heads.

    Causal programs that stay do tiles of two heads in turn, whose lengths add up to the same for
    all, and TOGETHER counts such pairs.
    """
    PAIRS: gl.constexpr = STAY and CAUSAL
    if PAIRS:
        n_heads = n_heads // 2
        at += turn // 2 * gl.num_programs(0)
    elif STAY:
        at += turn * gl.num_programs(0)
    group = at // (n_tiles * TOGETHER)
    rest = at % (n_tiles * TOGETHER)
    heads = gl.minimum(TOGETHER, n_heads - group * TOGETHER)
    tile = rest // heads
    bh = group * TOGETHER + rest % heads
    if PAIRS:
        bh = bh * 2 + turn % 2
        tile += turn % 2 * (n_tiles - 1 - 2 * tile)
    return tile, bh


@gluon.jit
def as_matrix(tile, ROWS: gl.constexpr, BD: gl.constexpr):
    """Return a (1, 1, ROWS, BD) tile of shared memory as (ROWS, BD)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], tile.dtype)
    return tile._reinterpret(tile.dtype, [ROWS, BD], layout)


@gluon.jit
def barriers(n: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _there_and_back(turn):
    """Return this program's tile in a round of all programs. Every other round runs backwards: as
    tiles get shorter, no program always has the longest of a round."""
    n_programs = gl.num_programs(0)
    at = gl.program_id(0)
    at += turn % 2 * (n_programs - 1 - 2 * at)
    return turn * n_programs + at


@gluon.jit
def _turns(ours):
    """Return how many tiles this program does."""
    n_tiles = (ours.Nq + ours.Bq - 1) // ours.Bq
    if ours.PING_PONG:
        n_items = n_tiles * ours.n_heads
        turns = n_items // gl.num_programs(0)
        if _there_and_back(turns) < n_items:
            turns += 1
    else:
        turns = n_turns(n_tiles, ours.n_heads, ours.CAUSAL, ours.STAY)
    return turns


@gluon.jit
def _queries_and_blocks(ours, turn):
    """First query of the turn's tile, its head, and how many key blocks any query of it sees."""
    n_tiles = (ours.Nq + ours.Bq - 1) // ours.Bq
    at = gl.program_id(0)
    STAY: gl.constexpr = ours.STAY and not ours.PING_PONG
    if ours.PING_PONG:
        at = _there_and_back(turn)
    tile, bh = tile_and_head(at, turn, n_tiles, ours.n_heads, ours.TOGETHER, ours.CAUSAL, STAY)
    stop = ours.Nk
    if ours.CAUSAL:
        tile = n_tiles - 1 - tile
        stop = gl.minimum((tile + 1) * ours.Bq, ours.Nk)
    return tile * ours.Bq, bh, (stop + ours.Bk - 1) // ours.Bk


@gluon.jit
def load(desc, coord, full, place, stage):
    """Ask the copy engine for a tile; ``full`` tells when it has come."""
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    load_tile(desc, coord, full.index(stage), place.index(stage))


@gluon.jit
def _load_forward(ours):
    """The queries of each of the program's tiles, then key and value blocks from the last down."""
    loaded = 0
    for turn in range(_turns(ours)):
        m0, bh, n_blocks = _queries_and_blocks(ours, turn)
        b = bh // ours.H
        h = bh % ours.H
        place = turn % 2 * ours.CONSUMERS if ours.STAY else 0
        for c in gl.static_range(ours.CONSUMERS):
            mbarrier.wait(ours.q_empty.index(place + c), (turn // 2 & 1) ^ 1)
            load(ours.Q, [b, h, m0 + c * 64, 0], ours.q_full, ours.q_s, place + c)
        n0 = (n_blocks - 1) * ours.Bk
        for _ in range(n_blocks):
            stage = loaded % ours.STAGES
            phase = (loaded // ours.STAGES) & 1
            mbarrier.wait(ours.k_empty.index(stage), phase ^ 1)
            load(ours.K, [b, h // ours.GROUP, n0, 0], ours.k_full, ours.k_s, stage)
            mbarrier.wait(ours.v_empty.index(stage), phase ^ 1)
            load(ours.V, [b, h // ours.GROUP, n0, 0], ours.v_full, ours.v_s, stage)
            n0 -= ours.Bk
            loaded += 1


@gluon.jit
def _hidden_to_minus_inf(s, m0, n0, Nk, CAUSAL: gl.constexpr, RAGGED: gl.constexpr):
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    offs_n = gl.arange(0, s.shape[1], columns)
    if CAUSAL:
        last = m0 + gl.arange(0, s.shape[0], rows)  # key that a row sees
        if RAGGED:
            last = gl.minimum(last, Nk - 1)
        s = gl.where((n0 + offs_n)[None, :] <= last[:, None], s, -float("inf"))
    elif RAGGED:  # n0 + offs_n < Nk would spill registers
        s = gl.where((offs_n < Nk - n0)[None, :], s, -float("inf"))
    return s


@gluon.jit
def _take_baton(c: gl.constexpr, number):
    """Have consumer c, of three, wait until the one before has asked for its products: at a named
    barrier, of which Triton has the first few. Inline assembly wants some number."""
    gl.inline_asm_elementwise(
        f"bar.sync {8 + c}, 256; mov.u32 $0, 0;", "=r,r", [number], gl.int32, False, 1
    )


@gluon.jit
def _pass_baton(c: gl.constexpr, number):
    """Let the consumer after c ask for its products."""
    gl.inline_asm_elementwise(
        f"bar.arrive {8 + (c + 1) % 3}, 256; mov.u32 $0, 0;",
        "=r,r", [number], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _in_pairs(weights, dtype: gl.constexpr):
    """Weights rounded to dtype, two of a row in 32 bits: carried around a loop one by one, each
    would take a register."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
    )


@gluon.jit
def _of_pairs(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(
        gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2]), layout
    )


@gluon.jit
def _sums_of_threads(weights):
    """Row sums in four parts, of what each of the four threads of a row has: no shuffles."""
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    parts = weights.reshape([rows, columns // 8, 4, 2]).permute((0, 2, 1, 3))
    return gl.sum(parts.reshape([rows, 4, columns // 4]), 2)


@gluon.jit
def _forward_block(ours, c: gl.constexpr, q, p, acc, m_i, l_i, i):
    """Scores of block i, of which nothing is hidden, while the weights p of the block before are
    multiplied with its values.

    The tensor cores then have that product to do while this warpgroup computes exponentials. With
    PING_PONG consumers ask for their products one after the other, so that one's exponentials and
    another's products are at the same time; p is in pairs, and l_i in the sums of threads.
    """
    stage = i % ours.STAGES
    before = (i - 1) % ours.STAGES
    mbarrier.wait(ours.k_full.index(stage), (i // ours.STAGES) & 1)
    k = as_matrix(ours.k_s.index(stage), ours.Bk, ours.BD)
    zero = gl.zeros([64, ours.Bk], gl.float32, ours.scores)
    if ours.PING_PONG:
        p = _of_pairs(p, q.dtype, ours.operand)
        mbarrier.wait(ours.v_full.index(before), ((i - 1) // ours.STAGES) & 1)
        _take_baton(c, i)
    s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not ours.PING_PONG:
        mbarrier.wait(ours.v_full.index(before), ((i - 1) // ours.STAGES) & 1)
    v = as_matrix(ours.v_s.index(before), ours.Bk, ours.BD)
    acc_token = warpgroup_mma(p, v, acc, is_async=True)
    if ours.PING_PONG:
        _pass_baton(c, i)
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(ours.k_empty.index(stage), count=1)
    m_new = gl.maximum(m_i, gl.max(s, 1) * ours.scale2)
    weights = gl.exp2(s * ours.scale2 - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    if ours.PING_PONG:
        parts: gl.constexpr = l_i.type.layout
        l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, parts))[:, None]
        l_i += _sums_of_threads(weights)
        # V came long ago. But ptxas moves the wait for a product up, above exponentials that are to
        # cover it, and seldom past a loop, as this one is in PTX.
        mbarrier.wait(ours.v_full.index(before), ((i - 1) // ours.STAGES) & 1)
    else:
        l_i = l_i * alpha + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(ours.v_empty.index(before), count=1)
    if ours.PING_PONG:
        p = _in_pairs(weights, q.dtype)
    else:
        p = gl.convert_layout(weights.to(q.dtype), ours.operand)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ours.sums))[:, None]
    return p, acc, m_new, l_i


@gluon.jit
def _skip_block(ours, c: gl.constexpr, i):
    """Leave block i, of whose keys this consumer sees none, to the others."""
    stage = i % ours.STAGES
    phase = (i // ours.STAGES) & 1
    mbarrier.wait(ours.k_full.index(stage), phase)
    mbarrier.arrive(ours.k_empty.index(stage), count=1)
    mbarrier.wait(ours.v_full.index(stage), phase)
    mbarrier.arrive(ours.v_empty.index(stage), count=1)
    if ours.PING_PONG:
        _take_baton(c, i)
        _pass_baton(c, i)


@gluon.jit
def _forward_tile(ours, c: gl.constexpr, turn, used):
    """64 queries against the key blocks that they see, of which the last, done first, alone has
    hidden keys; used counts the tile's blocks before, and those after are returned."""
    m0, bh, n_blocks = _queries_and_blocks(ours, turn)
    m0 += c * 64
    after = used + n_blocks
    n0 = (n_blocks - 1) * ours.Bk
    if ours.CAUSAL and ours.Bq > ours.Bk:
        is_hidden = n0 >= m0 + 64  # the tile's last block has keys of later consumers alone
        if is_hidden:
            _skip_block(ours, c, used)
        used += is_hidden.to(gl.int32)
        n0 -= is_hidden.to(gl.int32) * ours.Bk

    place = c + turn % 2 * ours.CONSUMERS if ours.STAY else c
    q = as_matrix(ours.q_s.index(place), 64, ours.BD)
    mbarrier.wait(ours.q_full.index(place), turn // 2 & 1)
    stage = used % ours.STAGES
    mbarrier.wait(ours.k_full.index(stage), (used // ours.STAGES) & 1)
    zero = gl.zeros([64, ours.Bk], gl.float32, ours.scores)
    k = as_matrix(ours.k_s.index(stage), ours.Bk, ours.BD)
    token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if ours.STAY:
        if turn > 0:  # the output of the tile before has left its place by now, and Q may come
            tma.store_wait(0)
            mbarrier.arrive(ours.q_empty.index(c + (turn - 1) % 2 * ours.CONSUMERS), count=1)
    s = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(ours.k_empty.index(stage), count=1)
    s = _hidden_to_minus_inf(s, m0, n0, ours.Nk, ours.CAUSAL, ours.RAGGED)
    # Finite: a row may see no key of its first block, and -inf - -inf would be NaN.
    m_i = gl.maximum(gl.max(s, 1) * ours.scale2, -1e30)
    weights = gl.exp2(s * ours.scale2 - m_i[:, None])
    if ours.PING_PONG:
        l_i = _sums_of_threads(weights)
        p = _in_pairs(weights, q.dtype)
    else:
        l_i = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(q.dtype), ours.operand)
    acc = gl.zeros([64, ours.BD], gl.float32, ours.sums)
    for i in range(used + 1, after):
        p, acc, m_i, l_i = _forward_block(ours, c, q, p, acc, m_i, l_i, i)
    last = (after - 1) % ours.STAGES
    mbarrier.wait(ours.v_full.index(last), ((after - 1) // ours.STAGES) & 1)
    if ours.PING_PONG:
        p = _of_pairs(p, q.dtype, ours.operand)
        l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    v = as_matrix(ours.v_s.index(last), ours.Bk, ours.BD)
    token = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(ours.v_empty.index(last), count=1)

    offs_m = m0 + gl.arange(0, 64, gl.SliceLayout(1, ours.scores))
    # A row whose scores are all -inf has l = 0: its output is 0 and its log-sum-exp -inf.
    lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
    share = 1.0 / gl.where(l_i == 0, 1.0, l_i)
    gl.store(ours.LSE + bh.to(gl.int64) * ours.Nq + offs_m, lse, mask=offs_m < ours.Nq)
    # The output leaves by the place of the queries, which nobody else reads.
    q.store((acc * gl.convert_layout(share, gl.SliceLayout(1, ours.sums))[:, None]).to(q.dtype))
    fence_async_shared()
    store_tile(ours.O, [bh // ours.H, bh % ours.H, m0, 0], ours.q_s.index(place))
    return after


@gluon.jit
def _forward_rows(ours, c: gl.constexpr):
    """Consumer c: its 64 queries of each of the program's tiles."""
    used = 0
    if ours.PING_PONG and c == 2:
        _pass_baton(c, used)
    if ours.STAY:
        for turn in range(_turns(ours)):
            used = _forward_tile(ours, c, turn, used)
    else:  # a loop would cost registers
        _forward_tile(ours, c, 0, 0)
    if ours.PING_PONG and c == 0:
        _take_baton(c, used)  # no barrier is left with half of its arrivals
    tma.store_wait(0)


# Sizes that need no kernel of their own.
FORWARD_SIZES = ["H", "n_heads", "GROUP", "Nq", "Nk", "TOGETHER"]


@gluon.jit(do_not_specialize=FORWARD_SIZES)
def forward_kernel(
    Q, K, V, O, LSE, scale2, H, n_heads, GROUP, Nq, Nk, TOGETHER,
    BD: gl.constexpr, CONSUMERS: gl.constexpr, Bk: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, STAY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V and LSE, the natural-log log-sum-exp of each score row.

    Descriptors Q, O: (B, H, Nq, d) in blocks of 64 rows; K, V: (B, H / GROUP, Nk, d) in blocks of
    Bk; LSE: (B, H, Nq) contiguous fp32. One program per tile of 64 CONSUMERS queries of a head, or
    with STAY fewer, each of which then does several tiles; the queries have two places then, and
    the next tile is loaded while this one ends. Three consumers that stay play ping-pong
    (``_forward_block``). RAGGED: some block has keys past Nk that no mask hides.
    """
    dtype: gl.constexpr = Q.dtype
    scale2 = gl.cast(scale2, gl.float32)
    PLACES: gl.constexpr = 2 * CONSUMERS if STAY else CONSUMERS
    q_s = gl.allocate_shared_memory(dtype, [PLACES, 1, 1, 64, BD], Q.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, Bk, BD], K.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, Bk, BD], V.layout)
    q_full = barriers(PLACES, 1)
    q_empty = barriers(PLACES, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, CONSUMERS)
    v_full = barriers(STAGES, 1)
    v_empty = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    PING_PONG: gl.constexpr = CONSUMERS == 3 and STAY
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Bk, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    ours = Forward(
        Q, K, V, O, LSE, scale2, H, n_heads, GROUP, Nq, Nk, TOGETHER,
        q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        BD, CONSUMERS, 64 * CONSUMERS, Bk, STAGES, CAUSAL, RAGGED, STAY, PING_PONG,
        scores, sums, operand,
    )  # fmt: skip
    # Written out, since a list or a tuple in a variable loses its constants. Registers are those of
    # a worker's threads.
    if CONSUMERS == 1:
        gl.warp_specialize([(_forward_rows, (ours, 0)), (_load_forward, (ours,))], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_forward_rows, (ours, 0)), (_forward_rows, (ours, 1)), (_load_forward, (ours,))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_forward_rows, (ours, 0)), (_forward_rows, (ours, 1)), (_forward_rows, (ours, 2)),
             (_load_forward, (ours,))],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
