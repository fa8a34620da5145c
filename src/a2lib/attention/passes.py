"""One forward and one backward pass on real tensors: which kernels run, with which tiles.

``forward`` and ``backward`` know nothing of autograd or torch.compile; ``a2lib.attention.flash``
and ``a2lib.attention.operators`` call them.
"""

import functools
import math

import torch
from torch import Tensor

from a2lib.attention.launch import launch
from a2lib.attention.shapes import as_batched_heads, check_inputs, empty_output
from a2lib.attention.tiles import (
    HEAD_DIM_MAX,
    SPECIALISED,
    TILES,
    WHEN_FEW,
    options_of,
    precision_of,
)
from a2lib.errors import UnsupportedError

_NOTHING = {}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """Returns o, laid out as ``empty_output`` says, and lse, ``q.shape[:-1]`` in fp32.

    ``scale`` is > 0, or None for ``1 / sqrt(d)``. Raises as ``flash_attention`` does.
    """
    check_inputs(q, k, v)
    check_supported(q)
    o = empty_output(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    q4, k4, v4, o4 = (as_batched_heads(x) for x in (q, k, v, o))
    _Problem(q4, k4, is_causal, scale).forward(q4, k4, v4, o4, lse)
    return o, lse


def backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Returns dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    gradients = [
        empty_output(x) if needed else None for x, needed in zip((q, k, v), needs, strict=True)
    ]
    q4, k4, v4, o4, do4 = (as_batched_heads(x) for x in (q, k, v, o, do))
    out = (None if x is None else as_batched_heads(x) for x in gradients)
    _Problem(q4, k4, is_causal, scale).backward(q4, k4, v4, o4, do4, lse, *out)
    return gradients


def _allow_tf32() -> bool:
    """Whether PyTorch's own fp32 products on a GPU may be TF32, by its newer or older setting."""
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":
        precision = torch.backends.fp32_precision
    return precision == "tf32"


def check_supported(q: Tensor) -> None:
    """Raise UnsupportedError, in one line, where the kernels cannot run tensors like q."""
    if q.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UnsupportedError(f"flash_attention runs {names}; got {q.dtype}")
    if not 1 <= q.shape[-1] <= HEAD_DIM_MAX:
        raise UnsupportedError(
            f"flash_attention runs head_dim 1 to {HEAD_DIM_MAX}; got {q.shape[-1]}"
        )
    interpreted = _interpreted()  # raises where there is no Triton, also for a tensor on a GPU
    if not q.is_cuda and not interpreted:
        raise UnsupportedError(
            f"flash_attention's Triton kernels need a CUDA GPU, and q is on {q.device}; on the CPU "
            "use FlashAttentionPyTorch or attention_reference (TRITON_INTERPRET=1 runs the "
            "kernels there, for tests)"
        )


@functools.cache
def _interpreted() -> bool:
    try:
        from a2lib.attention.kernels import INTERPRETED
    except ImportError as error:
        raise UnsupportedError(f"flash_attention needs Triton, which is missing: {error}") from None
    return bool(INTERPRETED.value)


class _Problem:
    """One call's sizes and the launches that serve it; tensors are (B, H, N, d)."""

    def __init__(self, q, k, is_causal, scale):
        self.dtype = DTYPES[q.dtype]
        self.batch, self.heads, self.n_queries, self.head_dim = q.shape
        self.kv_heads, self.n_keys = k.shape[1:3]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        self.is_causal = is_causal
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.precision = precision_of(self.dtype, self.dtype == "fp32" and _allow_tf32())
        self.device = q.device

    def forward(self, q, k, v, o, lse):
        """Fill o and lse."""
        n_heads = self.batch * self.heads
        sizes = (self.scale, self.heads, n_heads, self.group, self.n_queries, self.n_keys)
        self._launch("forward", self.n_queries, n_heads, (q, k, v, o), (lse,), sizes)

    def backward(self, q, k, v, o, do, lse, dq, dk, dv):
        """Fill dq, dk and dv, each unless None."""
        n_heads = self.batch * self.heads
        rows = (lse, torch.empty_like(lse))
        tensors = (q, k, v, o, do, q if dq is None else dq)
        sizes = (self.scale, self.heads, n_heads, self.group, self.n_queries, self.n_keys)
        needs = {"NEEDS_DQ": dq is not None}
        self._launch("backward_dq", self.n_queries, n_heads, tensors, rows, sizes, needs)

        if dk is None and dv is None:
            return
        n_heads = self.batch * self.kv_heads
        tensors = (q, k, v, do, k if dk is None else dk, v if dv is None else dv)
        sizes = (self.scale, self.kv_heads, n_heads, self.group, self.n_queries, self.n_keys)
        both = {"NEEDS_DK": dk is not None, "NEEDS_DV": dv is not None}
        if self._key("backward_dkdv") in TILES:
            self._launch("backward_dkdv", self.n_keys, n_heads, tensors, rows, sizes, both)
            return
        for name in ("backward_dk", "backward_dv"):
            needs = {flag: both[flag] and on for flag, on in SPECIALISED[name][1].items()}
            if any(needs.values()):
                self._launch(name, self.n_keys, n_heads, tensors, rows, sizes, needs)

    def _key(self, name):
        """Where the table has this problem's tiles for a kernel."""
        family = "fp32" if self.dtype == "fp32" else "16bit"
        return name, family, max(16, 1 << (self.head_dim - 1).bit_length()), self.is_causal

    def _launch(self, name, length, n_heads, tensors, rows, sizes, needs=_NOTHING):
        """Run one kernel with the first tile of the table that fits this GPU."""
        if length == 0 or n_heads == 0:
            return
        key = self._key(name)
        over_queries = name in ("forward", "backward_dq")

        def n_programs(tile):
            return -(-length // (tile.Bq if over_queries else tile.Bk)) * n_heads

        tiles = TILES[key]
        if key in WHEN_FEW and n_programs(tiles[0]) < _n_multiprocessors(self.device):
            tiles = WHEN_FEW[key], *tiles
        strides = [stride for x in tensors for stride in x.stride()[:3]]
        for tile in tiles:
            if (key, tile, self.device) in _does_not_fit:
                continue
            constants = {
                "d": self.head_dim,
                "BD": key[2],
                "Bq": tile.Bq,
                "Bk": tile.Bk,
                "CAUSAL": self.is_causal,
                "PRECISION": self.precision,
                "STAGES": tile.stages,
                **needs,
            }
            apart = (name, self.dtype, self.device, self.group, *strides, *constants.values(), tile)
            try:
                launch(
                    _kernel(name),
                    apart,
                    n_programs(tile),
                    (*tensors, *rows),
                    (*strides, *sizes),
                    constants,
                    options_of(tile, self.precision),
                )
                return
            except _out_of_resources():
                _does_not_fit.add((key, tile, self.device))
        raise UnsupportedError(
            f"flash_attention has no {name} tile for head_dim {self.head_dim} in {self.dtype} that "
            f"fits the shared memory of {self.device}"
        )


_does_not_fit: set[tuple] = set()


# Triton is imported when a kernel is wanted: the rest of a2lib.attention works without it.
@functools.cache
def _kernel(name):
    from a2lib.attention import kernels

    return getattr(kernels, SPECIALISED[name][0])


@functools.cache
def _out_of_resources():
    from triton.runtime.errors import OutOfResources

    return OutOfResources


@functools.cache
def _n_multiprocessors(device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
