"""Make the launches of each form of a pass: kernels in order, their programs and arguments.

    steps = Pass(tensors, call, scale).forward()      # or backward()

``dispatch.py`` chooses the form. Nothing is launched here: the steps follow from shapes and strides
alone, whatever the tensors hold, on any device (meta too).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from a2lib.attention import dispatch, tiles
from a2lib.attention.dispatch import Call, ceil_div
from a2lib.attention.tiles import Tile

ROWS = 128  # what the rows of prepare_kernel are rounded up to
SPLIT_ROWS = {"bf16x6": 64, "fp16x3": 128}  # of a program; 128: terms.SPLIT_ROWS
CHUNK_ROWS = 32  # of a program before and after the backward in chunks
COMBINED = 1024  # elements of o that a program of combine_kernel makes
LOG2E = math.log2(math.e)


class Tensors(NamedTuple):
    """The tensors of a pass, (B, H, N, d), but lse, (..., N): a forward reads the first three and
    fills two; a backward reads six and fills three, of which one that is not wanted is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    do: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class Step(NamedTuple):
    """One kernel of ``dispatch.KERNELS`` to launch, on so many programs.

    Its arguments are ``descriptors`` (of Gluon: what the copy engine is to know of a tensor),
    ``tensors`` and ``numbers``, in this order; ``options`` are its constants and those of its
    compilation. ``tile`` is what to strike from the table where it does not fit a GPU.
    """

    kernel: str
    n_programs: int
    descriptors: tuple
    tensors: tuple[Tensor, ...]
    numbers: tuple
    options: dict
    tile: tuple[tiles.Key, Tile] | None = None


class Pass:
    """The steps of one pass over ``tensors``.

    ``scratch`` is what the kernels alone see, made here. ``scale`` is > 0.
    """

    def __init__(self, tensors: Tensors, call: Call, scale: float) -> None:
        self.tensors, self.call, self.scale = tensors, call, scale
        self.scratch: list[Tensor] = []
        self.steps: list[Step] = []
        self.early = launches_early(tensors.q.device)
        self.precision = dispatch.precision_of(call)
        self.widths = {"d": call.head_dim, "BD": dispatch.columns_of(call.head_dim)}
        self.sizes = (scale, call.heads, call.n_heads, call.group, call.n_queries, call.n_keys)

    def forward(self) -> list[Step]:
        """Fill o and lse."""
        form = dispatch.forward_form(self.call)
        if form == "key_chunks":
            self._forward_key_chunks()
        elif form == "hopper":
            self._forward_hopper()
        else:
            self._forward_plain()
        return self.steps

    def backward(self) -> list[Step]:
        """Fill dq, dk and dv. The kernels make those that are None, too."""
        q, k, v, *_, dq, dk, dv = self.tensors
        self.tensors = self.tensors._replace(
            dq=self._make(q.shape, q.dtype) if dq is None else dq,
            dk=self._make(k.shape, k.dtype) if dk is None else dk,
            dv=self._make(v.shape, v.dtype) if dv is None else dv,
        )
        form = dispatch.backward_form(self.call)
        if form == "one_launch":
            self._backward_one_launch()
        elif form == "two_sweeps":
            self._backward_two_sweeps()
        else:
            self._backward_sums(form)
        return self.steps

    # The forward.

    def _forward_plain(self):
        q, k, v, o, lse, *_ = self.tensors
        k, v = self._split(k, v)
        self._add_tiled("forward", (q, k, v, o), (lse,), self.sizes, {"MASKS": dispatch.masks()})

    def _forward_key_chunks(self):
        """Let each chunk of keys fill a part of ``parts`` and ``part_lse``; combine them."""
        call = self.call
        q, k, v, o, lse, *_ = self.tensors
        chunk_keys, n_chunks = dispatch.keys_per_chunk(call), dispatch.n_key_chunks(call)
        rows = (n_chunks, call.n_heads, call.n_queries)
        parts = self._make((*rows, call.head_dim), torch.float32)
        part_lse = self._make(rows, torch.float32)

        k, v = self._split(k, v)
        sizes = (*self.sizes, n_chunks, chunk_keys)
        options = {"EARLY": self.early}
        self._add_tiled("forward_chunk", (q, k, v), (parts, part_lse), sizes, options)

        B = min(128, COMBINED // self.widths["BD"])  # divides a chunk, of a multiple of 128
        n_programs = ceil_div(call.n_queries, B) * call.n_heads
        sizes = (call.heads, call.n_heads, call.n_queries, n_chunks, chunk_keys)
        options = {
            **self.widths,
            "B": B,
            "CHUNKS": 1 << (n_chunks - 1).bit_length(),
            "CAUSAL": call.causal,
            "EARLY": self.early,
            "launch_pdl": self.early,
        }
        numbers = (*strides(o), *sizes)
        self._add("combine", n_programs, (parts, part_lse, o, lse), numbers, options)

    def _forward_hopper(self):
        call, BD = self.call, self.widths["BD"]
        q, k, v, o, lse, *_ = self.tensors
        consumers, stay = dispatch.forward_consumers(call)
        ping_pong = stay and consumers == 3
        Bk = 64 if consumers == 1 and BD == 128 else 128
        options = {
            "BD": BD,
            "CONSUMERS": consumers,
            "Bk": Bk,
            "STAGES": 3 if ping_pong else 2,
            "CAUSAL": call.causal,
            "RAGGED": self._is_ragged(Bk),
            "STAY": stay,
            "num_warps": 4,
        }
        if consumers == 1:
            options["maxnreg"] = 128
        n_programs = ceil_div(call.n_queries, 64 * consumers) * call.n_heads
        if stay:  # two programs of one consumer share a multiprocessor
            at_once = (2 if consumers == 1 else 1) * call.multiprocessors
            n_programs = dispatch.staying(n_programs, at_once, call.causal and not ping_pong)
        if ping_pong and call.causal:
            together = call.n_heads  # the longest tiles of all heads first
        else:
            key_bytes = 2 * call.n_keys * call.head_dim * 2
            together = dispatch.heads_together(key_bytes, call.n_heads, stay, call.causal)
        numbers = (self.scale * LOG2E, *self.sizes[1:], together)
        blocks = (rows_of(q, 64, BD), rows_of(k, Bk, BD), rows_of(v, Bk, BD), rows_of(o, 64, BD))
        self._add("hopper_forward", n_programs, (lse,), numbers, options, descriptors=blocks)

    # The backward.

    def _backward_one_launch(self):
        q, k, v, o, lse, do, *gradients = self.tensors
        delta = self._make(lse.shape, torch.float32)
        sizes = (*self.sizes, self.call.kv_heads, self.call.n_kv_heads)
        self._add_tiled("backward", (q, k, v, o, do, *gradients), (lse, delta), sizes)

    def _backward_two_sweeps(self):
        call = self.call
        q, k, v, o, lse, do, dq, dk, dv = self.tensors
        rows = lse, self._make(lse.shape, torch.float32)
        k, v = self._split(k, v)
        q, do = self._split(q, do)
        masks = {"MASKS": dispatch.masks()}
        self._add_tiled("backward_dq", (q, k, v, o, do, dq), rows, self.sizes, masks)

        tensors = (q, k, v, do, dk, dv)
        sizes = (self.scale, call.kv_heads, call.n_kv_heads, *self.sizes[3:])
        if call.dtype == "fp32" and self.widths["BD"] == 128:  # a kernel each: see tiles.ROWS
            only_dk = {"NEEDS_DK": True, "NEEDS_DV": False, **masks}
            only_dv = {"NEEDS_DK": False, "NEEDS_DV": True, **masks}
            self._add_tiled("backward_dk", tensors, rows, sizes, only_dk)
            self._add_tiled("backward_dv", tensors, rows, sizes, only_dv)
        else:
            both = {"NEEDS_DK": True, "NEEDS_DV": True, **masks}
            self._add_tiled("backward_dkdv", tensors, rows, sizes, both)

    def _backward_sums(self, form):
        """Add dQ up in fp32 ``dq_sums``, and in chunks dK and dV too; ``rows`` has two numbers of
        each query. In a fixed order ``turns`` says whose turn it is to add to each 64 rows of dQ,
        and before that how many programs have begun."""
        call = self.call
        _, k, _, o, lse, do, *gradients = self.tensors
        on_hopper = form in ("one_sweep", "hopper_chunks")
        in_chunks = form != "one_sweep"
        permuted = on_hopper and call.head_dim > 64
        padded = ceil_div(call.n_queries, ROWS) * ROWS
        dq_shape = (padded, 128) if permuted else (call.n_queries, call.head_dim)
        rows = self._make((call.n_heads, 2, padded), torch.float32)
        sums = [self._make((call.n_heads, *dq_shape), torch.float32), *gradients[1:]]
        turns = rows  # of which nothing is read as such
        if in_chunks:
            sums[1:] = self._make(k.shape, torch.float32), self._make(k.shape, torch.float32)
        elif call.fixed_order:
            turns = self._make((1 + call.n_heads * padded // 64,), torch.int32)

        # The kernels before and after.
        if not in_chunks:
            B, num_warps = ROWS, 8
        elif permuted:
            B, num_warps = 2 * CHUNK_ROWS, 4  # a whole tile
        else:
            B, num_warps = CHUNK_ROWS, 4
        early = in_chunks and self.early and call.dtype != "fp32" and not on_hopper
        early = early and call.n_keys <= dispatch.CHUNKS_EARLY[call.causal]
        options = {
            **self.widths,
            "B": B,
            "PERMUTED": permuted,
            "CHUNKS": in_chunks,
            "EARLY": early,
            "num_warps": num_warps,
        }
        of_keys = ceil_div(call.n_keys, B) * call.n_kv_heads if in_chunks else 0

        n_programs = padded // B * call.n_heads + of_keys
        sizes = (call.heads, call.n_heads, call.n_queries, padded, call.n_keys)
        more = {"PRECISION": self.precision, "ORDERED": call.fixed_order, "launch_pdl": False}
        tensors = (o, do, lse, rows, *sums, turns)
        self._add("prepare", n_programs, tensors, (*strides(o, do), *sizes), options | more)

        if on_hopper:
            self._sweep_hopper(rows, sums, turns, in_chunks)
        else:
            kernel = "backward_wide" if form == "two_terms" else "backward_chunks"
            self._sweep_chunks(kernel, rows, sums, early)

        n_programs = ceil_div(call.n_queries, B) * call.n_heads + of_keys
        sizes = (self.scale, call.heads, call.kv_heads, call.n_heads, call.n_queries, call.n_keys)
        numbers = (*strides(*gradients), *sizes)
        options["launch_pdl"] = early
        self._add("finish", n_programs, (*sums, *gradients), numbers, options)

    def _sweep_chunks(self, kernel, rows, sums, early):
        """Add the kernel of plain Triton that adds up all gradients."""
        call, t = self.call, self.tensors
        k, v = self._split(t.k, t.v)
        q, do = self._split(t.q, t.do)
        options = {}
        if kernel == "backward_chunks":
            # What the registers allow.
            loops = 1 if self.widths["BD"] == 128 or call.dtype == "fp32" else 2
            options = {"LOOPS": loops, "EARLY": early, "launch_pdl": early}
        sizes = (*self.sizes, tiles.chunk_of(tiles.tile_of(kernel, call), call))
        self._add_tiled(kernel, (q, k, v, do), (rows, *sums), sizes, options)

    def _sweep_hopper(self, rows, sums, turns, in_chunks):
        """Add the kernel for Hopper: dQ is added up in the first of ``sums``, dK times scale and dV
        are stored in the others; in chunks they are added up too."""
        call, t, BD = self.call, self.tensors, self.widths["BD"]
        chunk = dispatch.chunk_queries_of(call) if in_chunks else 0
        n_heads = call.n_heads if chunk else call.n_kv_heads
        Bq = 128 if BD == 64 else 64
        stay = not chunk and not call.fixed_order and dispatch.hopper_backward_stays(call)
        options = {
            **self.widths,
            "Bq": Bq,
            "STAGES": 2,
            "CAUSAL": call.causal,
            "RAGGED": self._is_ragged(128),
            "CHUNKS": chunk > 0,
            "STAY": stay,
            "GROUPED": not chunk and call.group > 1,
            "ORDERED": call.fixed_order,
            "num_warps": 4,
        }
        if chunk:
            n_programs = dispatch.query_chunk_programs(chunk, 128, call) * n_heads
        else:
            n_programs = ceil_div(call.n_keys, 128) * n_heads
        if stay:
            n_programs = dispatch.staying(n_programs, call.multiprocessors, call.causal)
        together = dispatch.backward_heads_together(call, n_heads, stay, chunk > 0)
        scales = (1.0 if chunk else self.scale, self.scale * LOG2E)
        lengths = (call.group, call.n_queries, call.n_keys)
        numbers = (*scales, call.heads, n_heads, *lengths, together, chunk)
        dq_sums, dk_sums, dv_sums = sums
        blocks = [
            rows_of(t.q, Bq, BD),
            rows_of(t.do, Bq, BD),
            rows_of(t.k, 128, BD),
            rows_of(t.v, 128, BD),
            descriptor_of(dq_sums, (1, 64, 64), BD),
            descriptor_of(rows, (1, 2, Bq), BD),
        ]
        if chunk:
            tensors = (dk_sums, dv_sums, turns)
        else:
            blocks += [rows_of(dk_sums, 64, BD), rows_of(dv_sums, 64, BD)]
            tensors = (turns,)
        self._add(
            "hopper_backward", n_programs, tensors, numbers, options, descriptors=tuple(blocks)
        )

    # What they share.

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor that the kernels alone see."""
        x = self.tensors.q.new_empty(shape, dtype=dtype)
        self.scratch.append(x)
        return x

    def _split(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return what kernels read of two tensors of one shape: them or, in fp32, their terms, also
        of no rows."""
        if self.precision == "ieee":
            return x, z
        batch, heads, n_rows, d = x.shape
        B = SPLIT_ROWS[self.precision]
        options = {**self.widths, "B": B, "PRECISION": self.precision}
        if self.precision == "fp16x3":
            dtype, shape = torch.float16, fp16_terms_shape(n_rows, d)
            options["num_warps"] = 8
        else:
            dtype, shape = torch.bfloat16, (n_rows, 3 * d)
        x_terms = self._make((batch, heads, *shape), dtype)
        z_terms = self._make((batch, heads, *shape), dtype)
        n_programs = 2 * ceil_div(n_rows, B) * batch * heads
        numbers = (*strides(x, z), heads, n_rows)
        self._add("split", n_programs, (x, z, x_terms, z_terms), numbers, options)
        return x_terms, z_terms

    def _add_tiled(self, kernel, tensors, rest, sizes, options=None):
        """Add a kernel of plain Triton with its best tile; of ``tensors`` it gets the strides
        too."""
        call, tile = self.call, tiles.tile_of(kernel, self.call)
        options = {
            **self.widths,
            "Bq": tile.Bq,
            "Bk": tile.Bk,
            "CAUSAL": call.causal,
            "PRECISION": self.precision,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            # In fp32 multiply-adds are kept apart: see kernels.py.
            "enable_fp_fusion": self.precision == "ieee",
            **(options or {}),
        }
        n_programs = tiles.n_programs(kernel, tile, call)
        numbers = (*strides(*tensors), *sizes)
        key = tiles.key_of(kernel, call)
        self._add(kernel, n_programs, (*tensors, *rest), numbers, options, tile=(key, tile))

    def _add(self, kernel, n_programs, tensors, numbers, options, descriptors=(), tile=None):
        if n_programs:
            step = Step(kernel, n_programs, descriptors, tensors, numbers, options, tile)
            self.steps.append(step)

    def _is_ragged(self, Bk):
        """Return whether a block of Bk keys passes the last key where no causal mask hides it."""
        call = self.call
        return call.n_keys % Bk != 0 and not (call.causal and call.n_queries <= call.n_keys)


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the strides of each tensor's batch, heads and rows."""
    return tuple(tuple(x.stride()[:3]) for x in tensors)


def fp16_terms_shape(n_rows: int, head_dim: int) -> tuple[int, int]:
    """Return the rows and columns that the two fp16 terms of a head's rows take: blocks of 128 rows
    and, behind them, an exponent for each block. A term's columns are a multiple of 8 (16
    bytes)."""
    blocks, columns = ceil_div(n_rows, 128), 2 * (ceil_div(head_dim, 8) * 8)
    return blocks * 128 + ceil_div(blocks, columns), columns


def rows_of(x: Tensor, n_rows: int, BD: int):
    """Return a descriptor of (B, H, N, d) in blocks of so many rows of a head."""
    return descriptor_of(x, (1, 1, n_rows, BD), BD)


def descriptor_of(x: Tensor, block: tuple[int, ...], BD: int):
    """Return what the copy engine is to know of a tensor in blocks of this shape."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    if block[1] == 2:  # numbers of rows, one after the other: nothing to swizzle
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtypes[x.dtype])
    steps = list(x.stride()[:-1])
    for axis, n in enumerate(x.shape[:-1]):
        if n <= 1:  # any stride is right, and TMA wants multiples of 16 bytes
            steps[axis] = BD
    return TensorDescriptor(x, tuple(x.shape), (*steps, 1), list(block), layout)


def is_addressable(x: Tensor) -> bool:
    """Return whether the copy engine (TMA) can address a tensor (B, H, N, d)."""
    if x.data_ptr() % 16 != 0:
        return False
    steps = [step for n, step in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    return all(step > 0 and step % 8 == 0 for step in steps)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a GPU of compute capability 9.0, and Triton's Gluon known."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import a2lib.attention.hopper_backward  # noqa: F401
    except (ImportError, AttributeError):  # a version of Triton whose Gluon is another
        return False
    return True


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """Return a GPU's multiprocessors, 0 for another device."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Return whether a kernel can be launched while the one before it runs (``griddepcontrol``)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
