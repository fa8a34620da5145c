"""The backward for Hopper in Gluon, in one pass; the legend is that of ``hopper_forward.py``.

A tile is 128 keys of a head, each of two consumers has half of them, and query blocks stream past.
dQ gets a part from every tile, added up in fp32 by the copy engine, so that the order of additions,
and with it the last bits, differ from run to run; but where it is ORDERED. Where tiles are few a
program has a chunk of the queries, and all gradients are added up. Heads of keys that several query
heads share have all of them streamed past one tile, head by head.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from a2lib.attention.hopper_forward import (
    as_matrix,
    barriers,
    load,
    load_tile,
    n_turns,
    record,
    store_tile,
    tile_and_head,
)

KEYS = gl.constexpr(128)
# What the roles of a program share: tensors and sizes, places in shared memory and their barriers,
# constants.
Backward = record(
    "Q DO K V DQ ROWS DK DV DQ_OUT TURNS COUNTS scale scale2 H n_heads GROUP Nq Nk TOGETHER chunk at "
    "q_s do_s k_s v_s rows_s ds_s dq_s q_full q_empty do_full do_empty kv_full kv_empty "
    "ds_full dq_full dq_empty turn_come "
    "d BD Bq STAGES CAUSAL RAGGED CHUNKS STAY GROUPED ORDERED WHOLE FIRST scores sums"
)


@builtin
def _add_to_global(desc, coord, source, _semantic=None):
    """Add a tile of shared memory to global memory, elements outside of it dropped."""
    # Gluon has no public name for the copy engine's addition (Triton 3.6).
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


# Triton 3.6 has it under no name, and the other under an older one.
_add = getattr(tma, "async_atomic_add", None) or _add_to_global
_meet = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _turns(ours):
    """Return how many tiles this program does."""
    n_tiles = (ours.Nk + KEYS - 1) // KEYS
    if ours.WHOLE == 1 or ours.WHOLE == 2:
        heads = (ours.n_heads - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
        turns = heads * n_tiles
    else:
        turns = n_turns(n_tiles, ours.n_heads, ours.CAUSAL, ours.STAY)
    return turns


@gluon.jit
def _keys_and_blocks(ours, turn):
    """First key of the turn's tile, its head of keys, the first query that sees it, and how many
    query blocks follow. A causal tile has at least as many blocks as lie on the diagonal.

    With CHUNKS there are programs for each (tile, chunk of queries that sees it, query head): the
    chunks that most tiles see come first.
    """
    n_tiles = (ours.Nk + KEYS - 1) // KEYS
    stop = ours.Nq
    if ours.CHUNKS:
        item = ours.at // ours.n_heads
        bh = ours.at % ours.n_heads
        which = (ours.Nq + ours.chunk - 1) // ours.chunk - 1
        seen = n_tiles
        if ours.CAUSAL:
            seen = gl.minimum(n_tiles, (which + 1) * (ours.chunk // KEYS))
        while item >= seen:
            item -= seen
            which -= 1
            if ours.CAUSAL:
                seen = gl.minimum(n_tiles, (which + 1) * (ours.chunk // KEYS))
        n0 = item * KEYS
        m0 = which * ours.chunk
        stop = gl.minimum(m0 + ours.chunk, ours.Nq)
        if ours.CAUSAL:
            m0 = gl.maximum(m0, n0)
    else:
        if ours.WHOLE == 1 or ours.WHOLE == 2:
            tile = turn % n_tiles
            bh = gl.program_id(0) + turn // n_tiles * gl.num_programs(0)
        else:
            tile, bh = tile_and_head(
                ours.at, turn, n_tiles, ours.n_heads, ours.TOGETHER, ours.CAUSAL, ours.STAY
            )
        n0 = tile * KEYS
        m0 = 0
        if ours.CAUSAL:
            m0 = n0
    n_blocks = (stop - m0 + ours.Bq - 1) // ours.Bq
    if ours.CAUSAL:
        n_blocks = gl.maximum(n_blocks, KEYS // ours.Bq)
    return n0, bh, m0, n_blocks


@gluon.jit
def _await(number):
    """Wait until the number there is not 0."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred none; .reg .b32 found;
        again:
        ld.acquire.gpu.global.u32 found, [$1];
        redux.sync.and.b32 found, found, 0xffffffff;
        setp.eq.u32 none, found, 0;
        @none bra again;
        mov.u32 $0, 0;
        }""",
        "=r,l", [number], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _load_backward(ours):
    """Blocks of queries with what belongs to them, and after the first the tile's keys and values,
    whose place the tile before leaves last."""
    loaded = 0
    heads = 1
    if ours.GROUPED:
        heads = ours.GROUP
    for turn in range(_turns(ours)):
        n0, bh_kv, m0, n_blocks = _keys_and_blocks(ours, turn)
        for i in range(n_blocks * heads):
            bh = bh_kv * heads + i // n_blocks
            m = m0 + i % n_blocks * ours.Bq
            if ours.ORDERED:
                m = m0 + (n_blocks - 1 - i) * ours.Bq
            b = bh // ours.H
            h = bh % ours.H
            stage = loaded % ours.STAGES
            phase = (loaded // ours.STAGES) & 1
            q_full = ours.q_full.index(stage)
            mbarrier.wait(ours.q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full, ours.Q.block_type.nbytes + ours.ROWS.block_type.nbytes)
            load_tile(ours.Q, [b, h, m, 0], q_full, ours.q_s.index(stage))
            load_tile(ours.ROWS, [bh, 0, m], q_full, ours.rows_s.index(stage))
            mbarrier.wait(ours.do_empty.index(stage), phase ^ 1)
            load(ours.DO, [b, h, m, 0], ours.do_full, ours.do_s, stage)
            if i == 0:
                kv_full = ours.kv_full.index(0)
                mbarrier.wait(ours.kv_empty.index(0), (turn & 1) ^ 1)
                if ours.WHOLE == 3:
                    if bh >= ours.chunk:  # the slot's last head has been finished
                        before = ours.COUNTS + (bh - ours.chunk).to(gl.int64) * 4 + 1
                        _await(before.to(gl.int64))
                        _await((before + 2).to(gl.int64))
                mbarrier.expect(kv_full, ours.K.block_type.nbytes + ours.V.block_type.nbytes)
                load_tile(ours.K, [b, h // ours.GROUP, n0, 0], kv_full, ours.k_s.index(0))
                load_tile(ours.V, [b, h // ours.GROUP, n0, 0], kv_full, ours.v_s.index(0))
            loaded += 1


@gluon.jit
def _turn_of(ours, bh, m):
    """Return where the number of tiles that have added to the 64 rows of dQ from m on stands."""
    return ours.TURNS + 1 + bh * ((ours.Nq + 127) // 128 * 2) + m // 64


@gluon.jit
def _await_turns(ours):
    """Tell ``_add_backward`` of each block that all lower tiles of the head have added to it.

    Those tiles began before, since tiles are given out in that order as programs begin
    (``backward_kernel``), and the first of all that are not done waits for nobody: whatever else
    the GPU runs, there is always one that goes on.
    """
    n0, bh, m0, n_blocks = _keys_and_blocks(ours, 0)
    for i in range(n_blocks):
        m = m0 + (n_blocks - 1 - i) * ours.Bq
        mbarrier.wait(ours.dq_empty.index(i % 2 * 2), (i // 2 & 1) ^ 1)
        if m < ours.Nq:
            turn = _turn_of(ours, bh, m)
            while gl.atomic_add(turn, 0, sem="acquire", scope="gpu") < n0 // KEYS:
                pass
        mbarrier.arrive(ours.turn_come.index(i % 2), count=1)


@gluon.jit
def _add_backward(ours):
    """Both consumers' parts of dQ, block by block, in the order of the tiles: the first tile's
    stored, the others added."""
    n0, bh, m0, n_blocks = _keys_and_blocks(ours, 0)
    for i in range(n_blocks):
        m = m0 + (n_blocks - 1 - i) * ours.Bq
        place = i % 2
        mbarrier.wait(ours.turn_come.index(place), i // 2 & 1)
        gl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [m], gl.int32, False, 1
        )
        for c in gl.static_range(2):
            mbarrier.wait(ours.dq_full.index(place * 2 + c), i // 2 & 1)
            row = m + c * 64 if ours.Bq == 128 else m
            column = 0 if ours.Bq == 128 else c * 64
            if n0 == 0:
                store_tile(ours.DQ, [bh, row, column], ours.dq_s.index(place * 2 + c))
            else:
                _add(ours.DQ, [bh, row, column], ours.dq_s.index(place * 2 + c))
        tma.store_wait(0)
        for c in gl.static_range(2):
            mbarrier.arrive(ours.dq_empty.index(place * 2 + c), count=1)
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
            "=r,r", [m], gl.int32, False, 1,
        )  # fmt: skip
        _meet()
        if m < ours.Nq:
            gl.atomic_add(_turn_of(ours, bh, m), 1, sem="release", scope="gpu")


@gluon.jit
def _dq_product(ours, c: gl.constexpr, k, buffer):
    """This consumer's (64, 64) part of dS K over the program's keys: 64 of 128 queries, or of a
    block of 64 queries 64 of the 128 columns."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zero = gl.zeros([64, 64], gl.float32, sums)
    if ours.Bq == 128:
        ds = ours.ds_s.index(buffer * 2 + c)
    else:
        ds = ours.ds_s.index(buffer)
        k = k.slice(c * 64, 64, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _dq_add(ours, c: gl.constexpr, dq, some, i, bh, m0, STORED):
    """Add a part of dQ, if there is some: rows before the first are no place for the copy engine.
    ORDERED: in block i, leave it to ``_add_backward``.

    With blocks of 64 queries a tile's elements lie permuted, which ``kernels.finish_kernel``
    undoes: four of a thread are together, and the fours of a warp, 16-byte stores without a bank
    conflict. The pairs that a product leaves a thread are twice as many stores, and each conflicts
    twofold in the 128-byte swizzle; and shared memory is busier than the tensor cores (by count).
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    if ours.Bq == 64:
        dq = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, upper or lower, row, columns by 8, pair, which
        dq = dq.permute((3, 0, 2, 4, 1, 5)).reshape([64, 64])
    place = c
    if ours.ORDERED:
        post = gl.maximum(i - 1, 0)
        place += post % 2 * 2
        mbarrier.wait(ours.dq_empty.index(place), (post // 2 & 1) ^ 1)
    else:
        tma.store_wait(0)
    ours.dq_s.index(place)._reinterpret(gl.float32, [64, 64], layout).store(dq)
    fence_async_shared()
    if some:  # a branch keeps ptxas from moving products up, for which there are no registers
        if ours.ORDERED:
            mbarrier.arrive(ours.dq_full.index(place), count=1)
        else:
            row = m0 + c * 64 if ours.Bq == 128 else m0
            column = 0 if ours.Bq == 128 else c * 64
            if ours.WHOLE == 1 or ours.WHOLE == 2:
                if STORED:
                    store_tile(ours.DQ, [gl.program_id(0), row, column], ours.dq_s.index(c))
                else:
                    _add(ours.DQ, [gl.program_id(0), row, column], ours.dq_s.index(c))
            else:
                _add(ours.DQ, [bh, row, column], ours.dq_s.index(c))


@gluon.jit
def _backward_block(
    ours, c: gl.constexpr, k_mine, v_mine, k, dk, dv, i, left, bh, n0, m0,
    MASK: gl.constexpr, FIRST: gl.constexpr, STORED,
):  # fmt: skip
    """One block of queries: this consumer's keys get their dK and dV, the block before its dQ.

    Scores are transposed, (64 keys, 64 queries), which makes weights and dS operands that stay in
    registers. dQ needs all keys of the program, hence both consumers' dS, by shared memory. Its
    product is left to the next block, when the other consumer has surely written: nobody waits, and
    the exponentials are made meanwhile. With heads of 128 registers have room for dP once dQ has
    gone. Where none is ``left``, in a tile's first block, a product of what lies there is dropped.
    With FIRST none is made: a block apart, for which heads of 128 lack registers but in chunks.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, ours.sums, 2)
    queries: gl.constexpr = gl.SliceLayout(0, ours.scores)
    keys: gl.constexpr = gl.SliceLayout(1, ours.scores)
    HALVES: gl.constexpr = ours.Bq // 64
    stage = i % ours.STAGES
    phase = (i // ours.STAGES) & 1
    buffer = i & 1
    zero = gl.zeros([64, 64], gl.float32, ours.scores)
    rows = ours.rows_s.index(stage)._reinterpret(
        gl.float32, [2 * HALVES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    dk_token, dv_token = dk, dv
    mbarrier.wait(ours.q_full.index(stage), phase)
    for half in gl.static_range(HALVES):
        q = as_matrix(ours.q_s.index(stage), ours.Bq, ours.BD).slice(half * 64, 64, 0)
        do = as_matrix(ours.do_s.index(stage), ours.Bq, ours.BD).slice(half * 64, 64, 0)
        s_token = warpgroup_mma(k_mine, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = rows.index(half).load(queries)
        if HALVES == 2 or FIRST:
            if half == 0:
                mbarrier.wait(ours.do_full.index(stage), phase)
            dp_token = warpgroup_mma(v_mine, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        if half == 0 and not FIRST:
            mbarrier.wait(ours.ds_full.index(buffer ^ 1), ((i - 1) >> 1) & 1)
            dq_token = _dq_product(ours, c, k, buffer ^ 1)
            s = warpgroup_mma_wait(HALVES, deps=[s_token])  # dQ goes on, of two halves dP too
        elif half == 1:
            dv, dk, s = warpgroup_mma_wait(1, deps=[dv_token, dk_token, s_token])
        else:
            s = warpgroup_mma_wait(1, deps=[s_token])
        p = gl.exp2(s * ours.scale2 - lse[None, :])
        if ours.ORDERED and MASK and not ours.RAGGED:
            if m0 < n0 + KEYS:
                offs_n = n0 + c * 64 + gl.arange(0, 64, keys)
                offs_m = m0 + half * 64 + gl.arange(0, 64, queries)
                p = gl.where(offs_n[:, None] <= offs_m[None, :], p, 0.0)
        elif MASK or ours.RAGGED:
            offs_n = n0 + c * 64 + gl.arange(0, 64, keys)
            visible = (offs_n < ours.Nk)[:, None]
            if ours.CAUSAL and MASK:
                offs_m = m0 + half * 64 + gl.arange(0, 64, queries)
                visible = visible & (offs_n[:, None] <= offs_m[None, :])
            p = gl.where(visible, p, 0.0)
        weights = gl.convert_layout(p.to(q.dtype), operand)
        if HALVES == 2 and not FIRST and (half == 0 or (ours.CAUSAL and not ours.ORDERED)):
            # Q came long ago. But ptxas moves the wait for a product up, above exponentials that
            # are to cover it, and seldom past a loop, as this one is in PTX. Without a mask, and
            # in a fixed order, the second half's was slower (measured on an H200).
            mbarrier.wait(ours.q_full.index(stage), phase)
        if HALVES == 2 and half == 0 and not FIRST:
            dp = warpgroup_mma_wait(1, deps=[dp_token])
            delta = rows.index(HALVES + half).load(queries)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dq = warpgroup_mma_wait(0, deps=[dq_token])
            dv_token = warpgroup_mma(weights, do, dv, is_async=True)
            _dq_add(ours, c, dq, left, i, bh, m0 - ours.Bq, STORED)
        else:
            if HALVES == 1 and not FIRST:
                # Not before: past a wait ptxas seldom moves exponentials, which dQ would wait for.
                mbarrier.wait(ours.do_full.index(stage), phase)
                dq = warpgroup_mma_wait(0, deps=[dq_token])
                _dq_add(ours, c, dq, left, i, bh, m0 - ours.Bq, STORED)
                dp_token = warpgroup_mma(
                    v_mine, do.permute((1, 0)), zero, use_acc=False, is_async=True
                )
            dv_token = warpgroup_mma(weights, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp_token])
            delta = rows.index(HALVES + half).load(queries)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk_token = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        ours.ds_s.index(buffer * HALVES + half).slice(c * 64, 64, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ours.ds_full.index(buffer), count=1)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    mbarrier.arrive(ours.do_empty.index(stage), count=1)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    mbarrier.arrive(ours.q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _add_rows(ptr, x, n_rows, d: gl.constexpr):
    """Add the first n_rows rows and d columns of x to a contiguous matrix at ptr."""
    offs_r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    offs_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    keep = (offs_r < n_rows)[:, None] & (offs_d < d)[None, :]
    gl.atomic_add(ptr + offs_r[:, None] * d + offs_d[None, :], x, mask=keep, sem="relaxed")


@gluon.jit
def _store_rows(desc, x, place, b, h, row, BD: gl.constexpr):
    """Store a tile of dK or dV by way of a place of dQ, once what was there has been read."""
    tile = place._reinterpret(desc.dtype, [128 // BD, 1, 1, 64, BD], desc.layout).index(0)
    tma.store_wait(0)
    as_matrix(tile, 64, BD).store(x.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, [b, h, row, 0], tile)


@gluon.jit
def _await_adds(LATER: gl.constexpr, number):
    """Wait until all that this thread asked the copy engine to write has been written, but for the
    last LATER requests. Inline assembly wants some number."""
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {LATER}; mov.u32 $0, 0;",
        "=r,r", [number], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _again(number):
    """Return the number, as one of which the compiler knows nothing: what follows from it is made
    anew, in place of kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def _fence_global(number):
    """Order what the copy engine and this thread do in global memory."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [number], gl.int32, False, 1
    )


@gluon.jit
def _count(number, most, BARRIER: gl.constexpr):
    """Add 1 to the number there, and tell the warpgroup whether it was so many before. A result by
    way of shared memory, as Triton has it, makes consumers spill."""
    return gl.inline_asm_elementwise(
        f"""{{
        .reg .pred first, last; .reg .b32 old;
        elect.sync old|first, 0xffffffff;
        mov.b32 old, 0;
        @first atom.acq_rel.gpu.global.add.u32 old, [$1], 1;
        setp.eq.and.s32 last, old, $2, first;
        bar.red.or.pred last, {BARRIER}, 128, last;
        selp.b32 old, 1, 0, last;
        redux.sync.or.b32 $0, old, 0xffffffff;
        }}""",
        "=r,l,r", [number, most], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _release(number):
    """Set the number there to 1, behind all that the warpgroup has written before it met."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 at;
        elect.sync at|first, 0xffffffff;
        mov.u32 at, 1;
        @first fence.acq_rel.gpu;
        @first st.release.gpu.global.u32 [$1], at;
        mov.u32 $0, 0;
        }""",
        "=r,l", [number], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _sums_of(ours, c: gl.constexpr, slot, part):
    """Where this consumer's part number ``part``, (64, 64), of the sums of a head is."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    n_rows = (ours.Nq + 127) // 128 * 128
    first = slot.to(gl.int64) * n_rows
    if ours.Bq == 128:
        first += part * 128 + c * 64
        first *= ours.BD
    else:
        first += part * 64
        first = first * ours.BD + c * 64
    return ours.TURNS + first + rows[:, None] * ours.BD + columns[None, :]


@gluon.jit
def _finish_part(ours, c: gl.constexpr, sums, part, bh, HALF: gl.constexpr):
    """Write a part of the sums to dQ, by half of this consumer's place in shared memory."""
    if ours.Bq == 64:
        sums = sums.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64])
        sums = gl.convert_layout(sums, ours.scores)
        row = part * 64
        column = c * 64
    else:
        row = part * 128 + c * 64
        column = 0
    place = ours.dq_s.index(c)._reinterpret(
        ours.DQ_OUT.dtype, [2, 1, 1, 64, 64], ours.DQ_OUT.layout
    )
    tile = place.index(HALF)
    as_matrix(tile, 64, 64).store((sums * ours.scale).to(ours.DQ_OUT.dtype))
    fence_async_shared()
    store_tile(ours.DQ_OUT, [bh // ours.H, bh % ours.H, row, column], tile)


@gluon.jit
def _finish_head(ours, c: gl.constexpr, bh, slot, zeroed):
    """Write this consumer's sums of a head, all of which this program has added, to dQ."""
    _fence_global(bh)
    _meet()
    n_parts = (ours.Nq + 127) // 128 * (128 // ours.Bq)
    for part in range(0, n_parts, 4):
        # Those behind the last are the last once more.
        second = gl.minimum(part + 1, n_parts - 1)
        third = gl.minimum(part + 2, n_parts - 1)
        fourth = gl.minimum(part + 3, n_parts - 1)
        a = gl.load(_sums_of(ours, c, slot, part), cache_modifier=".cg")
        b = gl.load(_sums_of(ours, c, slot, second), cache_modifier=".cg")
        x = gl.load(_sums_of(ours, c, slot, third), cache_modifier=".cg")
        y = gl.load(_sums_of(ours, c, slot, fourth), cache_modifier=".cg")
        if ours.WHOLE == 3:
            if zeroed:
                layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
                zero = gl.zeros([64, 64], gl.float32, layout)
                gl.store(_sums_of(ours, c, slot, part), zero)
                gl.store(_sums_of(ours, c, slot, second), zero)
                gl.store(_sums_of(ours, c, slot, third), zero)
                gl.store(_sums_of(ours, c, slot, fourth), zero)
        tma.store_wait(0)
        _finish_part(ours, c, a, part, bh, 0)
        _finish_part(ours, c, b, second, bh, 1)
        tma.store_wait(0)
        _finish_part(ours, c, x, third, bh, 0)
        _finish_part(ours, c, y, fourth, bh, 1)
    _fence_global(bh)
    _meet()


@gluon.jit
def _backward_head(
    ours, c: gl.constexpr, k_mine, v_mine, k, dk, dv, used, bh, n0, m0, n_blocks, STORED,
):  # fmt: skip
    """The query blocks of one head, the masked ones first; ORDERED from the last one down."""
    N_MASKED: gl.constexpr = KEYS // ours.Bq if ours.CAUSAL else 0
    first = m0
    if ours.ORDERED:
        first = m0 + (n_blocks - 1) * ours.Bq
    if ours.FIRST:
        dk, dv = _backward_block(
            ours,
            c,
            k_mine,
            v_mine,
            k,
            dk,
            dv,
            used,
            False,
            bh,
            n0,
            first,
            ours.CAUSAL,
            True,
            STORED,
        )
    if ours.ORDERED:
        # One loop, which asks of each block whether it is masked: of two, with the masked one
        # last, registers spill.
        for i in range(ours.FIRST, n_blocks):
            m = first - i * ours.Bq
            dk, dv = _backward_block(
                ours,
                c,
                k_mine,
                v_mine,
                k,
                dk,
                dv,
                used + i,
                i > 0,
                bh,
                n0,
                m,
                ours.CAUSAL,
                False,
                STORED,
            )
        last_m = m0
    else:
        for i in range(ours.FIRST, N_MASKED):
            m = m0 + i * ours.Bq
            dk, dv = _backward_block(
                ours, c, k_mine, v_mine, k, dk, dv, used + i, i > 0, bh, n0, m, True, False, STORED
            )
        for i in range(N_MASKED if N_MASKED > ours.FIRST else ours.FIRST, n_blocks):
            m = m0 + i * ours.Bq
            dk, dv = _backward_block(
                ours, c, k_mine, v_mine, k, dk, dv, used + i, i > 0, bh, n0, m, False, False, STORED
            )
        last_m = m0 + (n_blocks - 1) * ours.Bq
    used += n_blocks
    last = used - 1
    mbarrier.wait(ours.ds_full.index(last & 1), (last >> 1) & 1)
    token = _dq_product(ours, c, k, last & 1)
    dq = warpgroup_mma_wait(0, deps=[token])
    _dq_add(ours, c, dq, True, used, bh, last_m, STORED)
    return dk, dv


@gluon.jit
def _backward_tile(ours, c: gl.constexpr, turn, used, STORED):
    """dK and dV of 64 keys over all queries that see them, of each head of the group; used counts
    the query blocks before, and those after are returned."""
    n0, bh, m0, n_blocks = _keys_and_blocks(ours, turn)
    dk = gl.zeros([64, ours.BD], gl.float32, ours.sums)
    dv = gl.zeros([64, ours.BD], gl.float32, ours.sums)
    mbarrier.wait(ours.kv_full.index(0), turn & 1)
    if ours.WHOLE == 3:
        _fence_global(bh)
        bh = bh % ours.chunk
    k = as_matrix(ours.k_s.index(0), KEYS, ours.BD)
    k_mine = k.slice(c * 64, 64, 0)
    v_mine = as_matrix(ours.v_s.index(0), KEYS, ours.BD).slice(c * 64, 64, 0)
    if ours.BD == 64:
        # From registers, since reads of shared memory are what binds products this small.
        k_mine = k_mine.load(gl.DotOperandLayout(0, ours.scores, 2))
        v_mine = v_mine.load(gl.DotOperandLayout(0, ours.scores, 2))
    if ours.GROUPED:
        for g in range(ours.GROUP):
            dk, dv = _backward_head(
                ours, c, k_mine, v_mine, k, dk, dv,
                used + g * n_blocks, bh * ours.GROUP + g, n0, m0, n_blocks, STORED,
            )  # fmt: skip
        used += n_blocks * ours.GROUP
    else:
        dk, dv = _backward_head(
            ours, c, k_mine, v_mine, k, dk, dv, used, bh, n0, m0, n_blocks, STORED
        )
        used += n_blocks
    mbarrier.arrive(ours.kv_empty.index(0), count=1)
    if ours.WHOLE:
        turn = _again(turn + n0 * 0)
        n0, bh, m0, n_blocks = _keys_and_blocks(ours, turn)
        if ours.WHOLE == 3:
            slot = bh % ours.chunk
    row = n0 + c * 64
    if ours.CHUNKS:
        bh_kv = bh // ours.H * (ours.H // ours.GROUP) + bh % ours.H // ours.GROUP
        first = (bh_kv.to(gl.int64) * ours.Nk + row) * ours.d
        _add_rows(ours.DK + first, dk * ours.scale, ours.Nk - row, ours.d)
        _add_rows(ours.DV + first, dv, ours.Nk - row, ours.d)
    else:
        place = c
        if ours.ORDERED:
            mbarrier.wait(ours.dq_empty.index(c + used % 2 * 2), (used // 2 & 1) ^ 1)
            place += used % 2 * 2
        kv_heads = ours.H
        if ours.GROUPED:
            kv_heads = ours.H // ours.GROUP
        place = ours.dq_s.index(place)
        _store_rows(ours.DV, dv, place, bh // kv_heads, bh % kv_heads, row, ours.BD)
        _store_rows(ours.DK, dk * ours.scale, place, bh // kv_heads, bh % kv_heads, row, ours.BD)
        if ours.WHOLE:
            # What was added before the two stores: the next tile adds in order, behind it.
            _await_adds(2, used)
            if ours.WHOLE == 3:
                _fence_global(bh)
                _meet()
                counts = ours.COUNTS + bh.to(gl.int64) * 4 + c * 2
                n_tiles = (ours.Nk + KEYS - 1) // KEYS
                last = _count(counts.to(gl.int64), n_tiles * 4 - 1, 14 + c)
                if last != 0:
                    zeroed = bh + ours.chunk < ours.n_heads
                    _finish_head(ours, c, bh, slot, zeroed)
                    if zeroed:
                        _release((counts + 1).to(gl.int64))
    return used


@gluon.jit
def _backward_rows(ours, c: gl.constexpr):
    """Consumer c: its 64 keys of each of the program's tiles."""
    used = 0
    if ours.WHOLE == 1:
        n_tiles = (ours.Nk + KEYS - 1) // KEYS
        for turn in range(_turns(ours)):
            used = _backward_tile(ours, c, turn, used, turn % n_tiles == 0)
            if turn % n_tiles == n_tiles - 1:
                bh = gl.program_id(0) + turn // n_tiles * gl.num_programs(0)
                _finish_head(ours, c, bh, gl.program_id(0), False)
    elif ours.WHOLE == 2:
        n_tiles = (ours.Nk + KEYS - 1) // KEYS
        turn = 0
        for bh in range(gl.program_id(0), ours.n_heads, gl.num_programs(0)):
            used = _backward_tile(ours, c, turn, used, True)
            turn += 1
            for _ in range(1, n_tiles):
                used = _backward_tile(ours, c, turn, used, False)
                turn += 1
            _finish_head(ours, c, bh, gl.program_id(0), False)
    elif ours.STAY:
        for turn in range(_turns(ours)):
            used = _backward_tile(ours, c, turn, used, False)
    else:  # a loop would cost registers
        _backward_tile(ours, c, 0, 0, False)
    tma.store_wait(0)


BACKWARD_SIZES = ["H", "n_heads", "GROUP", "Nq", "Nk", "TOGETHER", "chunk"]


@gluon.jit(do_not_specialize=BACKWARD_SIZES)
def backward_kernel(
    Q, DO, K, V, DQ, ROWS, DK, DV, DQ_OUT, TURNS, COUNTS,
    scale, scale2, H, n_heads, GROUP, Nq, Nk, TOGETHER, chunk,
    d: gl.constexpr, BD: gl.constexpr, Bq: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, CHUNKS: gl.constexpr, STAY: gl.constexpr,
    GROUPED: gl.constexpr, ORDERED: gl.constexpr, WHOLE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """DK, DV, and what adds up to dQ / scale in DQ, in one pass: one program per (128 keys, head),
    or with STAY fewer, each of which then does several such tiles.

    Descriptors Q, DO: (B, H, Nq, d) in blocks of Bq rows; K, V: (B, H, Nk, d) in blocks of 128; DK,
    DV: the same in blocks of 64; DQ: (B H, Nq, d) fp32 zeros in blocks of (64, 64), with BD 128 (B
    H, Nq rounded up to 128, 128), each block permuted, of which what is past Nq or d is nobody's;
    ROWS: (B H, 2, Nq rounded up to 128) fp32, as ``kernels.prepare_kernel`` makes it. Bq is 128
    with BD 64, and 64 with BD 128. RAGGED: some block has keys past Nk that no mask hides.
    K, V, DK and DV have H / GROUP heads, and n_heads counts those of the batch; GROUPED if GROUP is
    above 1. The order in which programs add to DQ is not fixed.

    With ORDERED, without STAY and GROUPED, it is: that of the tiles. DQ need not be zeros. TURNS is
    int32 zeros: the number of programs begun, and for each head and 64 rows of DQ, rounded up to
    128, the number of tiles that have added to them. A program takes its tile by the first.

    With WHOLE, which has STAY too and neither GROUPED nor ORDERED, a program does all tiles of a
    head in turn, and then of another. DQ is (programs, Nq rounded up to 128, BD), whatever it
    holds: a program's first tile stores, the others add, and behind the last the program writes
    scale times the sums to descriptor DQ_OUT, (B, H, Nq, d) in blocks of (64, 64). TURNS points to
    DQ. The order of additions is fixed.

    With WHOLE 3, "ring": DQ has only chunk slots, zeros at first, of Nq rounded up to 128 by BD,
    and head bh adds to slot bh % chunk once the slot's last head has been finished. COUNTS: int32
    zeros, four a head, for each consumer the warps that have added, and whether the slot has been
    given back. The consumer who adds last writes dQ, and zeros to the slot if somebody needs it.

    With CHUNKS, without all of these, a program has chunk queries, a multiple of 128, of one of
    n_heads query heads; and it adds to DK and DV too, contiguous fp32 zeros like K.
    """
    dtype: gl.constexpr = Q.dtype
    HALVES: gl.constexpr = Bq // 64
    FIRST: gl.constexpr = 1 if Bq == 128 or CHUNKS else 0
    scale = gl.cast(scale, gl.float32)
    scale2 = gl.cast(scale2, gl.float32)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], dtype)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, Bq, BD], Q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, Bq, BD], DO.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, BD], K.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, BD], V.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, Bq], ROWS.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2 * HALVES, KEYS, 64], ds_layout)
    PLACES: gl.constexpr = 4 if ORDERED else 2
    dq_s = gl.allocate_shared_memory(gl.float32, [PLACES, 1, 64, 64], DQ.layout)
    q_full = barriers(STAGES, 1)
    q_empty = barriers(STAGES, 2)
    do_full = barriers(STAGES, 1)
    do_empty = barriers(STAGES, 2)
    kv_full = barriers(1, 1)
    kv_empty = barriers(1, 2)
    ds_full = barriers(2, 2)
    dq_full = barriers(PLACES, 1)
    dq_empty = barriers(PLACES, 1)
    turn_come = barriers(2, 1)
    fence_async_shared()
    at = gl.program_id(0)
    if ORDERED:
        at = gl.atomic_add(TURNS, 1, sem="relaxed", scope="gpu")
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    ours = Backward(
        Q, DO, K, V, DQ, ROWS, DK, DV, DQ_OUT, TURNS, COUNTS,
        scale, scale2, H, n_heads, GROUP, Nq, Nk, TOGETHER, chunk, at,
        q_s, do_s, k_s, v_s, rows_s, ds_s, dq_s, q_full, q_empty, do_full, do_empty, kv_full,
        kv_empty, ds_full, dq_full, dq_empty, turn_come,
        d, BD, Bq, STAGES, CAUSAL, RAGGED, CHUNKS, STAY, GROUPED, ORDERED, WHOLE, FIRST, scores,
        sums,
    )  # fmt: skip
    if ORDERED:
        gl.warp_specialize(
            [(_backward_rows, (ours, 0)), (_backward_rows, (ours, 1)), (_load_backward, (ours,)),
             (_add_backward, (ours,)), (_await_turns, (ours,))],
            [4, 1, 1, 1], [240, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_backward_rows, (ours, 0)), (_backward_rows, (ours, 1)), (_load_backward, (ours,))],
            [4, 1], [240, 24],
        )  # fmt: skip
