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

LN2 = gl.constexpr(0.6931471805599453)

# Triton 3.6 has these under other names than later versions.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
    """A (1, 1, ROWS, BD) tile of shared memory as (ROWS, BD)."""
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
def _n_forward_turns(
    n_tiles, n_heads, CAUSAL: gl.constexpr, STAY: gl.constexpr, PING_PONG: gl.constexpr
):
    if PING_PONG:
        n_items = n_tiles * n_heads
        turns = n_items // gl.num_programs(0)
        if _there_and_back(turns) < n_items:
            turns += 1
    else:
        turns = n_turns(n_tiles, n_heads, CAUSAL, STAY)
    return turns


@gluon.jit
def _queries_and_blocks(
    turn, n_tiles, n_heads, Nk, TOGETHER, Bq: gl.constexpr, Bk: gl.constexpr,
    CAUSAL: gl.constexpr, STAY: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """First query of the turn's tile, its head, and how many key blocks any query of it sees."""
    if PING_PONG:
        at = _there_and_back(turn)
        tile, bh = tile_and_head(at, 0, n_tiles, n_heads, TOGETHER, CAUSAL, False)
    else:
        tile, bh = tile_and_head(gl.program_id(0), turn, n_tiles, n_heads, TOGETHER, CAUSAL, STAY)
    stop = Nk
    if CAUSAL:
        tile = n_tiles - 1 - tile
        stop = gl.minimum((tile + 1) * Bq, Nk)
    return tile * Bq, bh, (stop + Bk - 1) // Bk


@gluon.jit
def _load_forward(
    CONSUMERS: gl.constexpr, Bk: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    STAY: gl.constexpr, Q, K, V, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    H, n_heads, GROUP, Nq, Nk, TOGETHER,
):  # fmt: skip
    """The queries of each of the program's tiles, then key and value blocks from the last down."""
    Bq: gl.constexpr = CONSUMERS * 64
    PING_PONG: gl.constexpr = CONSUMERS == 3 and STAY
    n_tiles = (Nq + Bq - 1) // Bq
    loaded = 0
    for turn in range(_n_forward_turns(n_tiles, n_heads, CAUSAL, STAY, PING_PONG)):
        m0, bh, n_blocks = _queries_and_blocks(
            turn, n_tiles, n_heads, Nk, TOGETHER, Bq, Bk, CAUSAL, STAY, PING_PONG
        )
        b = bh // H
        h = bh % H
        place = turn % 2 * CONSUMERS if STAY else 0
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(place + c), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(place + c), Q.block_type.nbytes)
            load_tile(Q, [b, h, m0 + c * 64, 0], q_full.index(place + c), q_s.index(place + c))
        n0 = (n_blocks - 1) * Bk
        for _ in range(n_blocks):
            stage = loaded % STAGES
            phase = (loaded // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), K.block_type.nbytes)
            load_tile(K, [b, h // GROUP, n0, 0], k_full.index(stage), k_s.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), V.block_type.nbytes)
            load_tile(V, [b, h // GROUP, n0, 0], v_full.index(stage), v_s.index(stage))
            n0 -= Bk
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


@gluon.constexpr_function
def _rescale_assembly(n):
    """Return inline assembly that multiplies n registers by n more, unless no lane of the warp has
    to, and its constraints."""
    lines = ["{", ".reg .pred p, q;"]
    lines += [
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000;",
        f"setp.neu.f32 q, ${2 * n + 2}, 0f3F800000;",
    ]
    lines += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    lines += ["DONE:", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _rescaled(acc, alpha):
    """Rows of acc times alpha. A warp whose rows all have 1 there branches past it."""
    N: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    ASM: gl.constexpr = _rescale_assembly(N)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(N)
    wide, acc = gl.broadcast(alpha[:, None], acc)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, wide], gl.float32, True, N)


# Scores in base 2 may pass the largest so far by this much before sums are rescaled.
SLACK = gl.constexpr(8.0)


@gluon.jit
def _forward_block(
    q, k_s, v_s, k_full, k_empty, v_full, v_empty, p, acc, m_i, l_i, i, m0, n0, Nk, scale2,
    c: gl.constexpr, Bk: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK: gl.constexpr, RAGGED: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Scores of block i while the weights p of the block before are multiplied with its values.

    The tensor cores then have that product to do while this warpgroup computes exponentials. With
    PING_PONG consumers ask for their products one after the other, so that one's exponentials and
    another's products are at the same time; p is in pairs, and l_i in the sums of threads.
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Bk, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    stage = i % STAGES
    before = (i - 1) % STAGES
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    k = as_matrix(k_s.index(stage), Bk, BD)
    zero = gl.zeros([64, Bk], gl.float32, scores)
    if PING_PONG:
        p = _of_pairs(p, q.dtype, operand)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        _take_baton(c, i)
    s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not PING_PONG:
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    v = as_matrix(v_s.index(before), Bk, BD)
    acc_token = warpgroup_mma(p, v, acc, is_async=True)
    if PING_PONG:
        _pass_baton(c, i)
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        s = _hidden_to_minus_inf(s, m0, n0, Nk, CAUSAL, RAGGED)
    m_new = gl.max(s, 1) * scale2
    m_new = gl.where(m_new > m_i + SLACK, m_new, m_i)
    weights = gl.exp2(s * scale2 - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    if PING_PONG:
        parts: gl.constexpr = l_i.type.layout
        l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, parts))[:, None]
        l_i += _sums_of_threads(weights)
        # V came long ago. But ptxas moves the wait for a product up, above exponentials that are to
        # cover it, and seldom past a loop, as this one is in PTX.
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    else:
        l_i = l_i * alpha + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(v_empty.index(before), count=1)
    if PING_PONG:
        p = _in_pairs(weights, q.dtype)
    else:
        p = gl.convert_layout(weights.to(q.dtype), operand)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums))
    acc = _rescaled(acc, alpha)
    return p, acc, m_new, l_i


@gluon.jit
def _forward_tile(
    turn, used, c: gl.constexpr, CONSUMERS: gl.constexpr, Bk: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, STAY: gl.constexpr,
    O, LSE, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    scale2, H, n_heads, Nq, Nk, TOGETHER,
):  # fmt: skip
    """64 queries against all keys that they see, masked blocks first; used counts the key blocks
    before, and those after are returned."""
    Bq: gl.constexpr = CONSUMERS * 64
    N_MASKED: gl.constexpr = (Bq + Bk - 1) // Bk if CAUSAL else 1
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Bk, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    PING_PONG: gl.constexpr = CONSUMERS == 3 and STAY
    n_tiles = (Nq + Bq - 1) // Bq
    m0, bh, n_blocks = _queries_and_blocks(
        turn, n_tiles, n_heads, Nk, TOGETHER, Bq, Bk, CAUSAL, STAY, PING_PONG
    )
    m0 += c * 64
    n0 = (n_blocks - 1) * Bk

    place = c + turn % 2 * CONSUMERS if STAY else c
    q = as_matrix(q_s.index(place), 64, BD)
    mbarrier.wait(q_full.index(place), turn // 2 & 1)
    stage = used % STAGES
    mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
    zero = gl.zeros([64, Bk], gl.float32, scores)
    k = as_matrix(k_s.index(stage), Bk, BD)
    token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if STAY:
        if turn > 0:  # the output of the tile before has left its place by now, and Q may come
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(c + (turn - 1) % 2 * CONSUMERS), count=1)
    s = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _hidden_to_minus_inf(s, m0, n0, Nk, CAUSAL, RAGGED)
    # Finite: a row may see no key of its first block, and -inf - -inf would be NaN.
    m_i = gl.maximum(gl.max(s, 1) * scale2, -1e30)
    weights = gl.exp2(s * scale2 - m_i[:, None])
    if PING_PONG:
        l_i = _sums_of_threads(weights)
        p = _in_pairs(weights, q.dtype)
    else:
        l_i = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(q.dtype), operand)
    acc = gl.zeros([64, BD], gl.float32, sums)
    masked = gl.minimum(n_blocks, N_MASKED)
    for i in range(1, masked):
        n0 -= Bk
        p, acc, m_i, l_i = _forward_block(
            q, k_s, v_s, k_full, k_empty, v_full, v_empty, p, acc, m_i, l_i, used + i,
            m0, n0, Nk, scale2, c, Bk, BD, STAGES, CAUSAL, True, RAGGED, PING_PONG,
        )  # fmt: skip
    for i in range(masked, n_blocks):
        n0 -= Bk
        p, acc, m_i, l_i = _forward_block(
            q, k_s, v_s, k_full, k_empty, v_full, v_empty, p, acc, m_i, l_i, used + i,
            m0, n0, Nk, scale2, c, Bk, BD, STAGES, CAUSAL, False, RAGGED, PING_PONG,
        )  # fmt: skip
    used += n_blocks
    last = (used - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((used - 1) // STAGES) & 1)
    if PING_PONG:
        p = _of_pairs(p, q.dtype, operand)
        l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    token = warpgroup_mma(p, as_matrix(v_s.index(last), Bk, BD), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(v_empty.index(last), count=1)

    offs_m = m0 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    # A row whose scores are all -inf has l = 0: its output is 0 and its log-sum-exp -inf.
    lse = gl.where(l_i == 0, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
    share = 1.0 / gl.where(l_i == 0, 1.0, l_i)
    gl.store(LSE + bh.to(gl.int64) * Nq + offs_m, lse, mask=offs_m < Nq)
    # The output leaves by the place of the queries, which nobody else reads.
    q.store((acc * gl.convert_layout(share, gl.SliceLayout(1, sums))[:, None]).to(q.dtype))
    fence_async_shared()
    store_tile(O, [bh // H, bh % H, m0, 0], q_s.index(place))
    return used


@gluon.jit
def _forward_rows(
    c: gl.constexpr, CONSUMERS: gl.constexpr, Bk: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, STAY: gl.constexpr,
    O, LSE, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    scale2, H, n_heads, Nq, Nk, TOGETHER,
):  # fmt: skip
    """Consumer c: its 64 queries of each of the program's tiles."""
    Bq: gl.constexpr = CONSUMERS * 64
    PING_PONG: gl.constexpr = CONSUMERS == 3 and STAY
    used = 0
    if PING_PONG and c == 2:
        _pass_baton(c, used)
    if STAY:
        for turn in range(_n_forward_turns((Nq + Bq - 1) // Bq, n_heads, CAUSAL, True, PING_PONG)):
            used = _forward_tile(
                turn, used, c, CONSUMERS, Bk, BD, STAGES, CAUSAL, RAGGED, True,
                O, LSE, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                scale2, H, n_heads, Nq, Nk, TOGETHER,
            )  # fmt: skip
    else:  # a loop would cost registers
        _forward_tile(
            0, 0, c, CONSUMERS, Bk, BD, STAGES, CAUSAL, RAGGED, False,
            O, LSE, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            scale2, H, n_heads, Nq, Nk, TOGETHER,
        )  # fmt: skip
    if PING_PONG and c == 0:
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
    ours = (O, LSE, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            scale2, H, n_heads, Nq, Nk, TOGETHER)  # fmt: skip
    loads = (Q, K, V, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
             H, n_heads, GROUP, Nq, Nk, TOGETHER)  # fmt: skip
    # Written out, since a list or a tuple in a variable loses its constants. Registers are those of
    # a worker's threads.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_forward_rows, (0, 1, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_load_forward, (1, Bk, STAGES, CAUSAL, STAY) + loads)],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_forward_rows, (0, 2, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_forward_rows, (1, 2, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_load_forward, (2, Bk, STAGES, CAUSAL, STAY) + loads)],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_forward_rows, (0, 3, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_forward_rows, (1, 3, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_forward_rows, (2, 3, Bk, BD, STAGES, CAUSAL, RAGGED, STAY) + ours),
             (_load_forward, (3, Bk, STAGES, CAUSAL, STAY) + loads)],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
