"""One forward and one backward pass on real tensors, by the kernels that ``dispatch`` chooses.

``forward`` and ``backward`` know nothing of autograd, of operators or of torch.compile; ``flash``
and ``operators`` call them. A kernel is launched as Triton has it, ``kernel[grid](...)``. Imports
Triton.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from a2lib.attention import (
    chunks,
    dispatch,
    kernels,
    key_chunks,
    naive_masks,
    operands,
    terms,
    wide,
)
from a2lib.attention.dispatch import Case, Gpu, Tile
from a2lib.attention.shapes import (
    DTYPES,
    as_batched_heads,
    check_device,
    check_inputs,
    check_supported,
    empty_output,
    terms_shape,
)
from a2lib.errors import UnsupportedError

KERNELS = {
    "forward": kernels.forward_kernel,
    "forward_chunk": key_chunks.chunk_kernel,
    "backward_dq": kernels.backward_dq_kernel,
    "backward_dkdv": kernels.backward_dkdv_kernel,
    "backward_dk": kernels.backward_dkdv_kernel,
    "backward_dv": kernels.backward_dkdv_kernel,
    "backward": kernels.backward_kernel,
    "backward_chunks": chunks.backward_chunks_kernel,
    "backward_wide": wide.backward_wide_kernel,
}
INTERPRETED = bool(operands.INTERPRETED.value)
SPLIT_ROWS = {"bf16x6": 64, "fp16x3": terms.SPLIT_ROWS.value}  # of a program
ROWS = kernels.ROWS_TO.value  # what the rows of prepare_kernel are rounded up to
CHUNK_ROWS = 32  # of a program before and after the backward in chunks
COMBINED = 1024  # elements of o that a program of combine_kernel makes


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    rung: str = dispatch.LIBRARY,
) -> tuple[Tensor, Tensor]:
    """Return o, laid out as ``empty_output`` says, and lse, ``q.shape[:-1]`` in fp32.

    ``scale`` is > 0, or None for ``1 / sqrt(d)``. Raises as ``flash_attention`` does.
    """
    check_inputs(q, k, v)
    check_supported(q)
    check_device(q, INTERPRETED)
    o, lse = empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    q, k, v, out = (as_batched_heads(x) for x in (q, k, v, o))
    case = case_of((q, k, v), is_causal, rung)
    run = {"plain": _forward, "hopper": _forward_hopper, "key_chunks": _forward_in_chunks}
    with _current(q.device):
        run[dispatch.forward_form(case)](case, _scale(case, scale), q, k, v, out, lse)
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    needs: Sequence[bool],
    rung: str = dispatch.LIBRARY,
) -> list[Tensor | None]:
    """Return dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    pairs = zip((q, k, v), needs, strict=True)
    gradients = [empty_output(x) if is_needed else None for x, is_needed in pairs]
    tensors = Tensors(
        *(as_batched_heads(x) for x in (do, q, k, v, o)),
        lse,
        *(None if x is None else as_batched_heads(x) for x in gradients),
    )
    read = (tensors.q, tensors.k, tensors.v, tensors.do)
    case = case_of(read, is_causal, rung, wants_all=all(needs))
    run = {
        "one_launch": _backward_in_one_launch,
        "two_terms": _backward_in_chunks,
        "hopper_chunks": _backward_in_chunks,
        "chunks": _backward_in_chunks,
        "hopper": _backward_hopper,
        "two_sweeps": _backward_in_two_sweeps,
    }
    with _current(q.device):
        run[dispatch.backward_form(case)](case, _scale(case, scale), tensors)
    return gradients


@dataclass
class Tensors:
    """What a backward reads and makes, all but lse as (B, H, N, d); None where it is not wanted."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def case_of(
    read: Sequence[Tensor], is_causal: bool, rung: str = dispatch.LIBRARY, wants_all: bool = True
) -> Case:
    """Return what the choice of kernels depends on, of a pass that reads q, k and so on."""
    q, k = read[:2]
    gpu = gpu_of(q.device)
    batch, heads, n_queries, head_dim = q.shape
    return Case(
        dtype=DTYPES[q.dtype],
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        n_queries=n_queries,
        n_keys=k.shape[2],
        head_dim=head_dim,
        is_causal=is_causal,
        gpu=gpu,
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
        allows_tf32=q.dtype is torch.float32 and _allows_tf32(),
        is_addressable=gpu.is_hopper and all([_is_addressable(x) for x in read]),
        wants_all=wants_all,
        rung=rung,
    )


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return what the choice of kernels asks of a device."""
    if device.type != "cuda":
        return Gpu()
    capability = torch.cuda.get_device_capability(device)
    return Gpu(
        torch.cuda.get_device_properties(device).multi_processor_count,
        is_hopper=capability == (9, 0) and _compiles_gluon(),
        launches_early=torch.version.cuda is not None and capability >= (9, 0),
    )


@functools.cache
def _compiles_gluon() -> bool:
    try:
        import a2lib.attention.hopper_backward  # noqa: F401
    except (ImportError, AttributeError):  # a version of Triton whose Gluon is another
        return False
    return True


def _allows_tf32() -> bool:
    """Whether PyTorch's own fp32 products on a GPU may be TF32, by its newer or older setting."""
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":
        precision = torch.backends.fp32_precision
    return precision == "tf32"


def _is_addressable(x: Tensor) -> bool:
    """Whether the copy engine can read x, of 16 bits an element."""
    if x.numel() == 0 or x.data_ptr() % 16:
        return False
    for n, stride in zip(x.shape[:3], x.stride(), strict=False):
        # The stride of a dimension of one is nobody's.
        if n > 1 and (stride <= 0 or stride % 8):
            return False
    return True


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Return the context in which ``device`` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _scale(case: Case, scale: float | None) -> float:
    return 1 / math.sqrt(case.head_dim) if scale is None else scale


# Plain Triton.


def _forward(case, scale, q, k, v, o, lse):
    k, v = _terms(case, k, v)

    def launch(kernel, n_programs, tile, **options):
        kernel[(n_programs,)](
            q, k, v, o, lse,
            *_strides(q, k, v, o),
            scale, case.heads, case.n_heads, case.group, case.n_queries, case.n_keys,
            **options,
        )  # fmt: skip

    _launch_what_fits("forward", case, launch)


def _forward_in_chunks(case, scale, q, k, v, o, lse):
    """By way of ``parts`` and ``part_lse``, those of each chunk of keys."""
    n_chunks, chunk_keys = dispatch.n_key_chunks(case), dispatch.keys_per_chunk(case)
    sizes = n_chunks, case.n_heads, case.n_queries
    parts = o.new_empty(*sizes, case.head_dim, dtype=torch.float32)
    part_lse = o.new_empty(sizes, dtype=torch.float32)
    k, v = _terms(case, k, v)
    early = case.gpu.launches_early

    def launch(kernel, n_programs, tile, **options):
        kernel[(n_programs,)](
            q, k, v, parts, part_lse,
            *_strides(q, k, v),
            scale, case.heads, case.n_heads, case.group, case.n_queries, case.n_keys,
            n_chunks, chunk_keys,
            **options, EARLY=early,
        )  # fmt: skip

    _launch_what_fits("forward_chunk", case, launch)
    B = min(128, COMBINED // case.columns)  # divides a chunk, of a multiple of 128
    key_chunks.combine_kernel[(-(-case.n_queries // B) * case.n_heads,)](
        parts, part_lse, o, lse,
        *_strides(o),
        case.heads, case.n_heads, case.n_queries, n_chunks, chunk_keys,
        d=case.head_dim, BD=case.columns, B=B, CHUNKS=1 << (n_chunks - 1).bit_length(),
        CAUSAL=case.is_causal, EARLY=early, launch_pdl=early,
    )  # fmt: skip


def _backward_in_two_sweeps(case, scale, t):
    """One over the keys of each query, which makes delta and dq, one over the queries of each
    key."""
    delta = torch.empty_like(t.lse)
    k, v = _terms(case, t.k, t.v)
    q, do = _terms(case, t.q, t.do)
    # In place of what is not wanted stands another tensor, which is not written.
    dq = q if t.dq is None else t.dq
    dk = k if t.dk is None else t.dk
    dv = v if t.dv is None else t.dv

    def launch_dq(kernel, n_programs, tile, **options):
        kernel[(n_programs,)](
            q, k, v, t.o, do, dq, t.lse, delta,
            *_strides(q, k, v, t.o, do, dq),
            scale, case.heads, case.n_heads, case.group, case.n_queries, case.n_keys,
            **options, NEEDS_DQ=t.dq is not None,
        )  # fmt: skip

    def launch_dkdv(kernel, n_programs, tile, **options):
        kernel[(n_programs,)](
            q, k, v, do, dk, dv, t.lse, delta,
            *_strides(q, k, v, do, dk, dv),
            scale, case.kv_heads, case.n_kv_heads, case.group, case.n_queries, case.n_keys,
            **options,
        )  # fmt: skip

    def launch_kernel(name, needs_dk, needs_dv):
        if needs_dk or needs_dv:
            needs = {"NEEDS_DK": needs_dk, "NEEDS_DV": needs_dv}
            _launch_what_fits(name, case, functools.partial(launch_dkdv, **needs))

    _launch_what_fits("backward_dq", case, launch_dq)
    if dispatch.tiles("backward_dkdv", case):
        launch_kernel("backward_dkdv", t.dk is not None, t.dv is not None)
    else:
        launch_kernel("backward_dk", t.dk is not None, False)
        launch_kernel("backward_dv", False, t.dv is not None)


def _backward_in_one_launch(case, scale, t):
    delta = torch.empty_like(t.lse)

    def launch(kernel, n_programs, tile, **options):
        kernel[(n_programs,)](
            t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv, t.lse, delta,
            *_strides(t.q, t.k, t.v, t.o, t.do, t.dq, t.dk, t.dv),
            scale, case.heads, case.n_heads, case.group, case.n_queries, case.n_keys,
            case.kv_heads, case.n_kv_heads,
            **options,
        )  # fmt: skip

    _launch_what_fits("backward", case, launch)


def _backward_in_chunks(case, scale, t):
    """One sweep whose programs have a chunk of the queries each, so that all gradients are added
    up, in fp32: by Gluon, by plain Triton, or by that for two terms."""
    form = dispatch.backward_form(case)
    is_gluon = form == "hopper_chunks"
    early = not is_gluon and dispatch.launches_early(case)
    rows, dq_sums = scratch(t.q, is_permuted=is_gluon and case.head_dim > 64)
    wide_options = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
    dk_sums = torch.empty_like(t.k, **wide_options)
    dv_sums = torch.empty_like(t.k, **wide_options)
    is_permuted = is_gluon and case.head_dim > 64
    B = 2 * CHUNK_ROWS if is_permuted else CHUNK_ROWS  # a whole tile
    around = {"d": case.head_dim, "BD": case.columns, "B": B, "PERMUTED": is_permuted}
    key_tiles = -(-case.n_keys // B) * case.n_kv_heads
    padded = rows.shape[-1]
    chunks.prepare_chunks_kernel[(-(-padded // B) * case.n_heads + key_tiles,)](
        t.o, t.do, t.lse, rows, dq_sums, dk_sums, dv_sums,
        *_strides(t.o, t.do),
        case.heads, case.n_heads, case.n_queries, padded, case.n_keys,
        **around, PRECISION=case.precision, EARLY=early, num_warps=4, launch_pdl=False,
    )  # fmt: skip

    if is_gluon:
        chunk = dispatch.queries_per_gluon_chunk(case)
        _sweep_hopper(case, scale, t, (rows, dq_sums, dk_sums, dv_sums), chunk)
    else:
        k, v = _terms(case, t.k, t.v)
        q, do = _terms(case, t.q, t.do)

        def launch(kernel, n_programs, tile, **options):
            kernel[(n_programs,)](
                q, k, v, do, rows, dq_sums, dk_sums, dv_sums,
                *_strides(q, k, v, do),
                scale, case.heads, case.n_heads, case.group, case.n_queries, case.n_keys,
                dispatch.queries_per_chunk(tile, case),
                **options,
            )  # fmt: skip

        if form == "two_terms":
            _launch_what_fits("backward_wide", case, launch)
        else:
            more = {"LOOPS": dispatch.chunk_loops(case), "EARLY": early, "launch_pdl": early}
            _launch_what_fits("backward_chunks", case, functools.partial(launch, **more))

    # What is not wanted is finished where it was added up.
    dq = dq_sums.view(*t.q.shape[:2], *dq_sums.shape[1:]) if t.dq is None else t.dq
    dk = dk_sums if t.dk is None else t.dk
    dv = dv_sums if t.dv is None else t.dv
    chunks.finish_chunks_kernel[(-(-case.n_queries // B) * case.n_heads + key_tiles,)](
        dq_sums, dk_sums, dv_sums, dq, dk, dv,
        *_strides(dq, dk, dv),
        scale, case.heads, case.kv_heads, case.n_heads, case.n_queries, case.n_keys,
        **around, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


def _launch_what_fits(name: str, case: Case, launch: Callable) -> None:
    """Have a kernel launched with the first of its tiles that the GPU has the shared memory for."""
    for tile in dispatch.tiles(name, case):
        n_programs = dispatch.n_programs(name, case, tile)
        if n_programs == 0:
            return
        try:
            launch(_kernel(name, case), n_programs, tile, **_options(case, tile))
        except OutOfResources:
            continue
        return
    raise UnsupportedError(
        f"flash_attention has no {name} tile for head_dim {case.head_dim} in {case.dtype} that "
        "fits the shared memory of this GPU"
    )


def _kernel(name: str, case: Case):
    if case.uses("two_loops"):
        return KERNELS[name]
    return naive_masks.kernel(KERNELS[name], every=not case.uses("to_diagonal"))


def _options(case: Case, tile: Tile) -> dict[str, object]:
    """Return a plain kernel's constants and Triton's options; why fp32 keeps multiply-adds apart:
    see kernels.py."""
    return {
        "d": case.head_dim,
        "BD": case.columns,
        "Bq": tile.Bq,
        "Bk": tile.Bk,
        "CAUSAL": case.is_causal,
        "PRECISION": case.precision,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": case.precision not in SPLIT_ROWS,
    }


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and row of each."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _terms(case: Case, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of one shape as the kernels multiply them: fp32 as terms, split once."""
    if case.precision not in SPLIT_ROWS or x.numel() == 0:
        return x, z
    batch, heads, n_rows, d = x.shape
    B = SPLIT_ROWS[case.precision]
    if case.precision == "fp16x3":
        kernel, sizes, options = terms.split_wide_kernel, terms_shape(n_rows, d), {"num_warps": 8}
        dtype = torch.float16
    else:
        kernel, sizes, options = operands.split_kernel, (n_rows, 3 * d), {}
        dtype = torch.bfloat16
    x_terms = x.new_empty(batch, heads, *sizes, dtype=dtype)
    z_terms = x.new_empty(batch, heads, *sizes, dtype=dtype)
    kernel[(2 * -(-n_rows // B) * batch * heads,)](
        x, z, x_terms, z_terms,
        *_strides(x, z),
        heads, n_rows,
        d=d, BD=case.columns, B=B, **options,
    )  # fmt: skip
    return x_terms, z_terms


# Gluon, on Hopper.


def _forward_hopper(case, scale, q, k, v, o, lse):
    from a2lib.attention.hopper_forward import forward_kernel

    form, BD = dispatch.hopper_forward(case), 64 if case.head_dim <= 64 else 128
    options = {"maxnreg": 128} if form.consumers == 1 else {}
    forward_kernel[(form.n_programs,)](
        _tiled(q, 64, BD), _tiled(k, form.Bk, BD), _tiled(v, form.Bk, BD), _tiled(o, 64, BD), lse,
        scale * math.log2(math.e), case.heads, case.n_heads, case.group,
        case.n_queries, case.n_keys, form.heads_together,
        BD=BD, CONSUMERS=form.consumers, Bk=form.Bk, STAGES=2, CAUSAL=case.is_causal,
        RAGGED=dispatch.is_ragged(case, form.Bk), STAY=form.stays, num_warps=4, **options,
    )  # fmt: skip


def _backward_hopper(case, scale, t):
    """One sweep between what prepares it and what finishes dq; in a fixed order by ``turns``."""
    BD = 64 if case.head_dim <= 64 else 128
    rows, sums = scratch(t.q, is_permuted=BD == 128)
    padded = rows.shape[-1]
    turns = turns_of(rows) if case.is_deterministic else rows
    n_programs = padded // ROWS * case.n_heads
    around = {"d": case.head_dim, "BD": BD, "B": ROWS, "PERMUTED": BD == 128, "num_warps": 8}
    kernels.prepare_kernel[(n_programs,)](
        t.o, t.do, t.lse, rows, sums, turns,
        *_strides(t.o, t.do),
        case.heads, case.n_queries, padded,
        **around, PRECISION=case.precision, ORDERED=case.is_deterministic,
    )  # fmt: skip
    _sweep_hopper(case, scale, t, (rows, sums, t.dk, t.dv), turns=turns)
    kernels.finish_kernel[(n_programs,)](
        sums, t.dq, *_strides(t.dq), scale, case.heads, case.n_queries, **around
    )


def _sweep_hopper(case, scale, t, made, chunk=0, turns=None):
    """Add dQ / scale up in the second of ``made``, rows and three matrices; store dK and dV in the
    last two. With chunk, queries of a program, add up dK / scale and dV there too."""
    from a2lib.attention.hopper_backward import backward_kernel

    rows, sums, dk, dv = made
    form, BD = dispatch.hopper_backward(case, chunk), 64 if case.head_dim <= 64 else 128
    if not chunk:
        dk, dv = _tiled(dk, 64, BD), _tiled(dv, 64, BD)
    backward_kernel[(form.n_programs,)](
        _tiled(t.q, form.Bq, BD), _tiled(t.do, form.Bq, BD), _tiled(t.k, 128, BD),
        _tiled(t.v, 128, BD), _in_blocks(sums, (1, 64, 64)), _in_blocks(rows, (1, 2, form.Bq)),
        dk, dv, rows if turns is None else turns,
        1.0 if chunk else scale, scale * math.log2(math.e), case.heads,
        case.n_heads if chunk else case.n_kv_heads, case.group, case.n_queries, case.n_keys,
        form.heads_together, chunk,
        d=case.head_dim, BD=BD, Bq=form.Bq, STAGES=2, CAUSAL=case.is_causal,
        RAGGED=dispatch.is_ragged(case, 128), CHUNKS=chunk > 0, STAY=form.stays,
        GROUPED=form.is_grouped, ORDERED=form.is_ordered, num_warps=4,
    )  # fmt: skip


def scratch(q: Tensor, is_permuted: bool) -> tuple[Tensor, Tensor]:
    """Return ``rows`` and ``sums`` of a backward over q, as ``prepare_kernel`` has them."""
    n_heads, n_queries, d = math.prod(q.shape[:-2]), *q.shape[-2:]
    padded = -(-n_queries // ROWS) * ROWS
    rows = q.new_empty(n_heads, 2, padded, dtype=torch.float32)
    sizes = (padded, 128) if is_permuted else (n_queries, d)
    return rows, q.new_empty(n_heads, *sizes, dtype=torch.float32)


def turns_of(rows: Tensor) -> Tensor:
    """Return whose turn it is to add to each 64 rows of dQ, and before them the programs begun."""
    n_heads, _, padded = rows.shape
    return rows.new_empty(1 + n_heads * padded // 64, dtype=torch.int32)


def _tiled(x: Tensor, n_rows: int, BD: int):
    """Return x, (B, H, N, d), as the copy engine reads it: blocks of n_rows rows and BD columns."""
    return _in_blocks(x, (1, 1, n_rows, BD))


def _in_blocks(x: Tensor, block: tuple[int, ...]):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The stride of a dimension of one is arbitrary, and TMA wants multiples of 16 bytes.
    pairs = zip(x.shape[:-1], x.stride(), strict=False)
    strides = [stride if n > 1 else block[-1] for n, stride in pairs]
    layout = _layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), layout)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    if block[1] == 2:  # numbers of rows, one after the other: nothing to swizzle
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), dtypes[dtype])
