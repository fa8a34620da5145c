"""FlashAttention-2 in plain Triton: one forward kernel, two backward kernels, and one of both.

On Hopper ``hopper_forward.py`` and ``hopper_backward.py`` have faster ones for many shapes in 16
bits; ``key_chunks.py`` has the forward of few query tiles. ``dispatch.py`` says which runs.

Legend, with the handout's names: a program owns a tile of ``Bq`` queries or ``Bk`` keys of one
head; ``Nq`` and ``Nk`` are the sequence lengths, ``d`` the head size and ``BD`` the power of two
that holds it. The strides of a tensor are a tuple: of the batch, the heads and the rows.

In 16 bits scores live in base 2, so that an exponential is one multiply-add and the
hardware's ``ex2``. In fp32 (``PRECISION`` bf16x6, or fp16x3: ``terms.py``) they stay natural, as
they are saved: a log-sum-exp carried to base 2 and back is rounded twice, which the gradients of
large scores show. Multiply-adds are kept apart there (``enable_fp_fusion=False``), so that forward
and backward scale and shift the same score alike.

Every loop over tiles is written twice, once without any mask for the tiles that all rows see
whole, once masked for those on the diagonal or at the ragged end. No length has to be a multiple
of a tile. The masked loop has few turns and is not pipelined: with both loops pipelined, ptxas
serialises the wgmma instructions of both (its note C7515).

Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2. The backward pass here runs as two
kernels (three where the sums of dK and dV do not fit the registers together), over query tiles and
over key tiles: each recomputes the scores, neither needs atomics: the same bits every run.
For few tokens, which take less time than a launch, ``backward_kernel`` has the programs of both.

Where ``EARLY`` (``griddepcontrol``, from compute capability 9.0 on) a kernel is launched while the
one before runs, and waits within for what it reads; before the wait only inputs are read.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from a2lib.attention import operands, terms
from a2lib.attention.operands import dot, float32, in_float32, load, load_rows, operand, store_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ROWS_TO = tl.constexpr(128)  # as forms.ROWS


@triton.jit
def _exp(s, shift, scale, PRECISION: tl.constexpr):
    """``exp(scale * s - shift)`` of scores s; shift is natural in fp32 and in base 2 otherwise."""
    if PRECISION == "bf16x6" or PRECISION == "fp16x3":
        return tl.math.exp2((s * scale - shift) * LOG2E)
    else:
        return tl.math.exp2(s * (scale * LOG2E) - shift)


@triton.jit
def _tile_and_head(pid, n_tiles, n_heads_total, LONGEST_FIRST: tl.constexpr, REVERSE: tl.constexpr):
    """Return the pid-th program's tile and flat (batch, head) index.

    With a causal mask tiles differ in work: the longest of every head start first, so that no
    long tile is left alone at the end. Otherwise neighbours share a head and its cached keys.
    """
    if LONGEST_FIRST:
        tile = pid // n_heads_total
        if REVERSE:
            tile = n_tiles - 1 - tile
        head = pid % n_heads_total
    else:
        tile = pid % n_tiles
        head = pid // n_tiles
    return tile, head


@triton.jit
def visible_keys(
    m0, Nk, Bq: tl.constexpr, Bk: tl.constexpr, CAUSAL: tl.constexpr, MASKS: tl.constexpr
):  # fmt: skip
    """Ends of the keys that all queries of tile m0 see whole, and of those that any sees. MASKS: as
    ``forward_kernel`` has it."""
    if CAUSAL and MASKS != "all":
        stop = tl.minimum(m0 + Bq, Nk)
        whole = tl.minimum(m0 + 1, Nk) // Bk * Bk
    else:
        stop = Nk
        whole = Nk // Bk * Bk
    if MASKS != "edges":
        whole = 0
    return whole, stop


@triton.jit
def _forward_tiles(
    acc, m_i, l_i, q, K, V, stride_kn, stride_vn, m0, start, stop, Nk, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles in [start, stop)."""
    # Without a pipeline values come late unless they are asked for before the scores. Of fp32 they
    # are three terms, for which registers do not suffice.
    VALUES_FIRST: tl.constexpr = MASK and STAGES == 1 and PRECISION == "ieee"
    for n0 in tl.range(start, stop, Bk, num_stages=1 if MASK else STAGES):
        by = scale
        if PRECISION == "fp16x3":
            k, unit = terms.load(K, n0, Nk, Bk, d, BD)
            s = terms.dot(q, k, True)
            by *= unit
        else:
            k = load(K, n0, Nk, stride_kn, Bk, d, BD, MASK, PRECISION)
            if VALUES_FIRST:
                v = load(V, n0, Nk, stride_vn, Bk, d, BD, MASK, PRECISION)
            s = dot(q, k, PRECISION, True)
        if MASK:
            offs_n = n0 + tl.arange(0, Bk)
            visible = (offs_n < Nk)[None, :]
            if CAUSAL:
                visible = visible & (offs_n[None, :] <= (m0 + tl.arange(0, Bq))[:, None])
            s = tl.where(visible, s, float("-inf"))
        if PRECISION == "bf16x6" or PRECISION == "fp16x3":
            m_new = tl.maximum(m_i, tl.max(s, 1) * by)
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * (by * LOG2E))
        # A row that has seen only -inf so far: -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = _exp(s, m_safe[:, None], by, PRECISION)
        if PRECISION == "bf16x6" or PRECISION == "fp16x3":
            alpha = tl.math.exp2((m_i - m_safe) * LOG2E)
        else:
            alpha = tl.math.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        if PRECISION == "fp16x3":
            v, unit = terms.load(V, n0, Nk, Bk, d, BD)
            acc = acc * alpha[:, None] + terms.weigh(p, v, unit)
        else:
            if not VALUES_FIRST:
                v = load(V, n0, Nk, stride_vn, Bk, d, BD, MASK, PRECISION)
            p = operand(p, V.dtype.element_ty, PRECISION)
            acc = dot(p, v, PRECISION, False, acc * alpha[:, None])
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def forward_rows(
    Q, K, V, O, LSE, stride_qn, stride_kn, stride_vn, stride_on,
    m0, first, whole, stop, Nq, Nk, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of queries over its keys in [first, stop), of which all queries see
    those before whole; first and whole are multiples of Bk. The pointers are the head's."""
    # Few programs read these rows, each once: their terms are made here.
    q = load_rows(Q, m0, Nq, stride_qn, Bq, d, BD, True)
    if PRECISION == "fp16x3":
        q, unit = terms.operand(q)
        scale *= unit
    else:
        q = operand(q, Q.dtype.element_ty, PRECISION)
    m_i = tl.full([Bq], float("-inf"), tl.float32)
    l_i = tl.zeros([Bq], tl.float32)
    acc = tl.zeros([Bq, BD], tl.float32)
    acc, m_i, l_i = _forward_tiles(
        acc, m_i, l_i, q, K, V, stride_kn, stride_vn, m0, first, whole, Nk, scale,
        Bq, Bk, d, BD, CAUSAL, False, PRECISION, STAGES,
    )  # fmt: skip
    acc, m_i, l_i = _forward_tiles(
        acc, m_i, l_i, q, K, V, stride_kn, stride_vn, m0, whole, stop, Nk, scale,
        Bq, Bk, d, BD, CAUSAL, True, PRECISION, STAGES,
    )  # fmt: skip

    # A row without a visible key has l = 0: its output is 0 and its log-sum-exp -inf.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(O, acc / l_safe[:, None], m0, Nq, stride_on, Bq, d, BD)
    offs_m = m0 + tl.arange(0, Bq)
    if PRECISION == "bf16x6" or PRECISION == "fp16x3":
        lse = m_i + tl.math.log2(l_safe) * LN2
    else:
        lse = (m_i + tl.math.log2(l_safe)) * LN2
    tl.store(LSE + offs_m, lse, mask=offs_m < Nq)


# Sizes that need no kernel of their own: 1 and multiples of 16 compile to the same code.
SIZES = ["H", "n_heads_total", "Nq", "Nk"]


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, O, LSE, stride_q, stride_k, stride_v, stride_o, scale, H, n_heads_total, GROUP, Nq, Nk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V and LSE, the natural-log log-sum-exp of each score row.

    Q, O: (B, H, Nq, d); K, V: (B, H / GROUP, Nk, d); LSE: (B, H, Nq) contiguous fp32.
    FlashAttention-2, algorithm 1: one program per (query tile, head), keys streamed. MASKS: of the
    "edges" alone or, as the ladder has them, in each tile up to the "diagonal", or in "all".
    """
    tile, bh = _tile_and_head(tl.program_id(0), tl.cdiv(Nq, Bq), n_heads_total, CAUSAL, True)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    m0 = tile * Bq
    Q += b * stride_q[0] + h * stride_q[1]
    K += b * stride_k[0] + (h // GROUP) * stride_k[1]
    V += b * stride_v[0] + (h // GROUP) * stride_v[1]
    O += b * stride_o[0] + h * stride_o[1]
    LSE += bh.to(tl.int64) * Nq
    whole, stop = visible_keys(m0, Nk, Bq, Bk, CAUSAL, MASKS)
    forward_rows(
        Q, K, V, O, LSE, stride_q[2], stride_k[2], stride_v[2], stride_o[2],
        m0, 0, whole, stop, Nq, Nk, float32(scale), Bq, Bk, d, BD, CAUSAL, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def _load_lse(LSE, offs, n, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """The log-sum-exp as ``_exp`` wants it; +inf for rows with no score: their weights are 0."""
    if MASK:
        lse = tl.load(LSE + offs, mask=offs < n, other=float("inf"))
    else:
        lse = tl.load(LSE + offs)
    if PRECISION != "bf16x6" and PRECISION != "fp16x3":
        lse *= LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def _dq_tiles(
    dq, q, do, lse, delta, K, V, stride_kn, stride_vn, m0, start, stop, Nk, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ / scale of one query tile over the key tiles in [start, stop)."""
    for n0 in tl.range(start, stop, Bk, num_stages=1 if MASK else STAGES):
        k = load(K, n0, Nk, stride_kn, Bk, d, BD, MASK, PRECISION)
        v = load(V, n0, Nk, stride_vn, Bk, d, BD, MASK, PRECISION)
        s = dot(q, k, PRECISION, True)
        dp = dot(do, v, PRECISION, True)
        p = _exp(s, lse[:, None], scale, PRECISION)
        if MASK:
            offs_n = n0 + tl.arange(0, Bk)
            visible = (offs_n < Nk)[None, :]
            if CAUSAL:
                visible = visible & (offs_n[None, :] <= (m0 + tl.arange(0, Bq))[:, None])
            p = tl.where(visible, p, 0.0)
        ds = operand(p * (dp - delta[:, None]), K.dtype.element_ty, PRECISION)
        dq = dot(ds, k, PRECISION, False, dq)
    return dq


@triton.jit(do_not_specialize=SIZES)
def backward_dq_kernel(
    Q, K, V, O, DO, DQ, LSE, DELTA, stride_q, stride_k, stride_v, stride_o, stride_do, stride_dq,
    scale, H, n_heads_total, GROUP, Nq, Nk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MASKS: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(dO * O), then dQ: one program per (query tile, head), keys streamed.

    DELTA: (B, H, Nq) contiguous fp32, read by ``backward_dkdv_kernel``, which must run after.
    """
    scale = float32(scale)
    tile, bh = _tile_and_head(tl.program_id(0), tl.cdiv(Nq, Bq), n_heads_total, CAUSAL, True)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    m0 = tile * Bq
    O += b * stride_o[0] + h * stride_o[1]
    DO += b * stride_do[0] + h * stride_do[1]
    offs_m = m0 + tl.arange(0, Bq)
    do = load(DO, m0, Nq, stride_do[2], Bq, d, BD, True, PRECISION)
    o = load_rows(O, m0, Nq, stride_o[2], Bq, d, BD, True)
    delta = tl.sum(in_float32(do, PRECISION) * o.to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * Nq + offs_m, delta, mask=offs_m < Nq)
    Q += b * stride_q[0] + h * stride_q[1]
    K += b * stride_k[0] + (h // GROUP) * stride_k[1]
    V += b * stride_v[0] + (h // GROUP) * stride_v[1]
    DQ += b * stride_dq[0] + h * stride_dq[1]
    q = load(Q, m0, Nq, stride_q[2], Bq, d, BD, True, PRECISION)
    lse = _load_lse(LSE + bh.to(tl.int64) * Nq, offs_m, Nq, True, PRECISION)
    dq = tl.zeros([Bq, BD], tl.float32)
    whole, stop = visible_keys(m0, Nk, Bq, Bk, CAUSAL, MASKS)
    dq = _dq_tiles(
        dq, q, do, lse, delta, K, V, stride_k[2], stride_v[2], m0, 0, whole, Nk, scale,
        Bq, Bk, d, BD, CAUSAL, False, PRECISION, STAGES,
    )  # fmt: skip
    dq = _dq_tiles(
        dq, q, do, lse, delta, K, V, stride_k[2], stride_v[2], m0, whole, stop, Nk, scale,
        Bq, Bk, d, BD, CAUSAL, True, PRECISION, STAGES,
    )  # fmt: skip
    store_rows(DQ, dq * scale, m0, Nq, stride_dq[2], Bq, d, BD)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, Q, O, DO, LSE, DELTA, stride_qn, stride_on, stride_don,
    n0, start, stop, jump, skip, Nq, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV of one key tile over query tiles, with transposed scores. DELTA is computed
    where O is given.

    The tiles start at start, start + Bq, ... below stop; with MASK those from jump on lie skip
    further, so that one loop serves the diagonal and the ragged end. Keys past Nk need no mask:
    row j of dK and dV depends on key j alone, and is not stored.
    """
    for at in tl.range(start, stop, Bq, num_stages=1 if MASK else STAGES):
        if MASK:
            m0 = at + tl.where(at >= jump, skip, 0)
        else:
            m0 = at
        offs_m = m0 + tl.arange(0, Bq)
        q = load(Q, m0, Nq, stride_qn, Bq, d, BD, MASK, PRECISION)
        do = load(DO, m0, Nq, stride_don, Bq, d, BD, MASK, PRECISION)
        lse = _load_lse(LSE, offs_m, Nq, MASK, PRECISION)
        if O is not None:
            o = load_rows(O, m0, Nq, stride_on, Bq, d, BD, MASK)
        st = dot(k, q, PRECISION, True)
        if NEEDS_DK:
            if O is None:
                delta = tl.load(DELTA + offs_m, mask=offs_m < Nq, other=0.0)
            else:
                delta = tl.sum(in_float32(do, PRECISION) * o.to(tl.float32), 1)
            dpt = dot(v, do, PRECISION, True)
        pt = _exp(st, lse[None, :], scale, PRECISION)
        if MASK and CAUSAL:
            pt = tl.where((n0 + tl.arange(0, Bk))[:, None] <= offs_m[None, :], pt, 0.0)
        if NEEDS_DV:
            dv = dot(operand(pt, Q.dtype.element_ty, PRECISION), do, PRECISION, False, dv)
        if NEEDS_DK:
            dst = operand(pt * (dpt - delta[None, :]), Q.dtype.element_ty, PRECISION)
            dk = dot(dst, q, PRECISION, False, dk)
    return dk, dv


@triton.jit
def _dkdv(
    pid, Q, K, V, O, DO, DK, DV, LSE, DELTA,
    stride_q, stride_k, stride_v, stride_o, stride_do, stride_dk, stride_dv,
    scale, H, n_heads_total, GROUP, Nq, Nk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """The pid-th program of ``backward_dkdv_kernel``; as ``_dkdv_tiles`` with O."""
    scale = float32(scale)
    tile, bh = _tile_and_head(pid, tl.cdiv(Nk, Bk), n_heads_total, CAUSAL, False)
    b = (bh // H).to(tl.int64)
    h_kv = (bh % H).to(tl.int64)
    n0 = tile * Bk
    K += b * stride_k[0] + h_kv * stride_k[1]
    V += b * stride_v[0] + h_kv * stride_v[1]
    DK += b * stride_dk[0] + h_kv * stride_dk[1]
    DV += b * stride_dv[0] + h_kv * stride_dv[1]
    k = load(K, n0, Nk, stride_k[2], Bk, d, BD, True, PRECISION)
    v = load(V, n0, Nk, stride_v[2], Bk, d, BD, True, PRECISION)
    dk = tl.zeros([Bk, BD], tl.float32)
    dv = tl.zeros([Bk, BD], tl.float32)

    if CAUSAL and MASKS != "all":
        first = n0 // Bq * Bq
        # From here on every query sees every key of the tile.
        diagonal_end = tl.cdiv(n0 + Bk - 1, Bq) * Bq
    else:
        first = 0
        diagonal_end = 0
    whole_end = Nq // Bq * Bq
    diagonal_end = tl.maximum(tl.minimum(diagonal_end, whole_end), first)
    tail_start = tl.maximum(diagonal_end, whole_end)
    tail = tl.maximum(Nq - tail_start, 0)
    for g in range(GROUP):
        h = h_kv * GROUP + g
        Q_h = Q + b * stride_q[0] + h * stride_q[1]
        DO_h = DO + b * stride_do[0] + h * stride_do[1]
        row = (b * H * GROUP + h) * Nq
        O_h = O
        stride_on = None
        if O is not None:
            O_h = O + b * stride_o[0] + h * stride_o[1]
            stride_on = stride_o[2]
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Q_h, O_h, DO_h, LSE + row, DELTA + row,
            stride_q[2], stride_on, stride_do[2], n0, diagonal_end, whole_end, 0, 0, Nq, scale,
            Bq, Bk, d, BD, CAUSAL, MASKS != "edges", NEEDS_DK, NEEDS_DV, PRECISION, STAGES,
        )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Q_h, O_h, DO_h, LSE + row, DELTA + row,
            stride_q[2], stride_on, stride_do[2],
            n0, first, diagonal_end + tail, diagonal_end, tail_start - diagonal_end, Nq, scale,
            Bq, Bk, d, BD, CAUSAL, True, NEEDS_DK, NEEDS_DV, PRECISION, STAGES,
        )  # fmt: skip
    if NEEDS_DK:
        store_rows(DK, dk * scale, n0, Nk, stride_dk[2], Bk, d, BD)
    if NEEDS_DV:
        store_rows(DV, dv, n0, Nk, stride_dv[2], Bk, d, BD)


@triton.jit(do_not_specialize=SIZES)
def backward_dkdv_kernel(
    Q, K, V, DO, DK, DV, LSE, DELTA,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    scale, H, n_heads_total, GROUP, Nq, Nk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """dK, dV or both: one program per (key tile, key head), which sums its group's query heads.

    H and n_heads_total count heads of K and V; query heads are GROUP times as many.
    """
    _dkdv(
        tl.program_id(0), Q, K, V, None, DO, DK, DV, LSE, DELTA,
        stride_q, stride_k, stride_v, None, stride_do, stride_dk, stride_dv,
        scale, H, n_heads_total, GROUP, Nq, Nk, d, BD, Bq, Bk, CAUSAL, NEEDS_DK, NEEDS_DV,
        PRECISION, STAGES, MASKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*SIZES, "H_kv", "n_kv_heads_total"])
def backward_kernel(
    Q, K, V, O, DO, DQ, DK, DV, LSE, DELTA, stride_q, stride_k, stride_v, stride_o,
    stride_do, stride_dq, stride_dk, stride_dv,
    scale, H, n_heads_total, GROUP, Nq, Nk, H_kv, n_kv_heads_total,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV in one launch: the programs of ``backward_dq_kernel``, then those of
    ``backward_dkdv_kernel``, which cannot wait for DELTA and compute it themselves. All own Bq
    rows, of queries or of keys, and stream the other side in tiles of Bk.

    H and n_heads_total count heads of Q, H_kv and n_kv_heads_total those of K and V.
    """
    pid = tl.program_id(0) - tl.cdiv(Nq, Bq) * n_heads_total
    if pid < 0:
        backward_dq_kernel(
            Q, K, V, O, DO, DQ, LSE, DELTA, stride_q, stride_k, stride_v, stride_o,
            stride_do, stride_dq, scale, H, n_heads_total, GROUP, Nq, Nk,
            d, BD, Bq, Bk, CAUSAL, PRECISION, STAGES, "edges",
        )  # fmt: skip
    else:
        _dkdv(
            pid, Q, K, V, O, DO, DK, DV, LSE, DELTA, stride_q, stride_k, stride_v, stride_o,
            stride_do, stride_dk, stride_dv, scale, H_kv, n_kv_heads_total, GROUP, Nq, Nk,
            d, BD, Bk, Bq, CAUSAL, True, True, PRECISION, STAGES, "edges",
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "N"])
def split_kernel(
    X, Z, X_TERMS, Z_TERMS, stride_x, stride_z, H, N,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X_TERMS and Z_TERMS: the terms of the rows of X and of Z, both (B, H, N, d) fp32: three of
    bf16, (B, H, N, 3 d), or as ``terms.split_rows`` has them. Two at once, each by half of the
    programs: to launch takes longer than to split a short sequence."""
    tile, half = tl.program_id(0), tl.num_programs(0) // 2
    split: tl.constexpr = operands.split_rows if PRECISION == "bf16x6" else terms.split_rows
    if tile < half:
        split(X, X_TERMS, stride_x, tile, H, N, d, BD, B)
    else:
        split(Z, Z_TERMS, stride_z, tile - half, H, N, d, BD, B)


@triton.jit(do_not_specialize=["H", "n_heads_total", "Nq", "n_rows", "Nk"])
def prepare_kernel(
    O, DO, LSE, ROWS, DQ, DK, DV, TURNS, stride_o, stride_do, H, n_heads_total, Nq, n_rows, Nk,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PERMUTED: tl.constexpr,
    PRECISION: tl.constexpr, ORDERED: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """ROWS: (B H, 2, n_rows) fp32, the log-sum-exp of each query, to the base that PRECISION has,
    and rowsum(dO * O); DQ: (B H, Nq, d) fp32 zeros, to which dQ is added, or PERMUTED (B H, n_rows,
    BD). n_rows is Nq rounded up to a multiple of B, or more; rows past Nq get +inf, which makes
    their weights 0. ORDERED: TURNS becomes int32 zeros, and DQ stays as it is. CHUNKS: behind those
    of queries come programs that make DK and DV zeros, (heads, Nk, d) fp32."""
    if EARLY:
        gdc_launch_dependents()
    n_tiles = n_rows // B
    if CHUNKS:
        item = tl.program_id(0) - n_tiles * n_heads_total
        if item >= 0:
            n_key_tiles = tl.cdiv(Nk, B)
            first = (item // n_key_tiles).to(tl.int64) * Nk * d
            n0 = item % n_key_tiles * B
            store_rows(DK + first, tl.zeros([B, BD], tl.float32), n0, Nk, d, B, d, BD)
            store_rows(DV + first, tl.zeros([B, BD], tl.float32), n0, Nk, d, B, d, BD)
            return
    bh = (tl.program_id(0) // n_tiles).to(tl.int64)
    m0 = tl.program_id(0) % n_tiles * B
    O += (bh // H) * stride_o[0] + (bh % H) * stride_o[1]
    DO += (bh // H) * stride_do[0] + (bh % H) * stride_do[1]
    o = load_rows(O, m0, Nq, stride_o[2], B, d, BD, True)
    do = load_rows(DO, m0, Nq, stride_do[2], B, d, BD, True)
    offs_m = m0 + tl.arange(0, B)
    lse = _load_lse(LSE + bh * Nq, offs_m, Nq, True, PRECISION)
    tl.store(ROWS + bh * 2 * n_rows + offs_m, lse)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(ROWS + (bh * 2 + 1) * n_rows + offs_m, delta)
    if ORDERED:
        if tl.program_id(0) == 0:
            tl.store(TURNS, 0)
        tl.store(TURNS + 1 + tl.program_id(0) * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    elif WHOLE == 3:
        if m0 == 0:
            tl.store(TURNS + bh * 4 + tl.arange(0, 4), tl.zeros([4], tl.int32))
        if bh < Nk:  # slots
            zeros = tl.zeros([B, BD], tl.float32)
            store_rows(DQ + bh * n_rows * BD, zeros, m0, n_rows, BD, B, BD, BD)
    elif WHOLE == 0:
        n = n_rows if PERMUTED else Nq
        width: tl.constexpr = BD if PERMUTED else d
        zeros = tl.zeros([B, BD], tl.float32)
        store_rows(DQ + bh * n * width, zeros, m0, n, width, B, width, BD)


@triton.jit(do_not_specialize=["H", "H_kv", "n_heads_total", "Nq", "Nk"])
def finish_kernel(
    DQ_SUMS, DK_SUMS, DV_SUMS, DQ, DK, DV, stride_dq, stride_dk,
    stride_dv, scale, H, H_kv, n_heads_total, Nq, Nk,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, PERMUTED: tl.constexpr,
    CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """DQ = scale * DQ_SUMS, which is (B H, Nq, d) contiguous fp32, or PERMUTED (B H, Nq rounded up
    to ROWS_TO, 128) as ``hopper_backward.backward_kernel`` adds it up. CHUNKS: behind those come
    programs that write DK = scale * DK_SUMS and DV."""
    if EARLY:
        gdc_wait()
    n_tiles = tl.cdiv(Nq, B)
    if CHUNKS:
        item = tl.program_id(0) - n_tiles * n_heads_total
        if item >= 0:
            n_key_tiles = tl.cdiv(Nk, B)
            bh = (item // n_key_tiles).to(tl.int64)
            n0 = item % n_key_tiles * B
            dk = load_rows(DK_SUMS + bh * Nk * d, n0, Nk, d, B, d, BD, True)
            dv = load_rows(DV_SUMS + bh * Nk * d, n0, Nk, d, B, d, BD, True)
            DK += (bh // H_kv) * stride_dk[0] + (bh % H_kv) * stride_dk[1]
            DV += (bh // H_kv) * stride_dv[0] + (bh % H_kv) * stride_dv[1]
            store_rows(DK, dk * float32(scale), n0, Nk, stride_dk[2], B, d, BD)
            store_rows(DV, dv, n0, Nk, stride_dv[2], B, d, BD)
            return
    bh = (tl.program_id(0) // n_tiles).to(tl.int64)
    m0 = tl.program_id(0) % n_tiles * B
    n = tl.cdiv(Nq, ROWS_TO) * ROWS_TO if PERMUTED else Nq
    width: tl.constexpr = BD if PERMUTED else d
    sums = load_rows(DQ_SUMS + bh * n * width, m0, n, width, B, width, BD, True)
    if PERMUTED:
        sums = operands.in_order(sums, B)
    DQ += (bh // H) * stride_dq[0] + (bh % H) * stride_dq[1]
    store_rows(DQ, sums * float32(scale), m0, Nq, stride_dq[2], B, d, BD)
