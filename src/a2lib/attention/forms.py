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
from a2lib.errors import UnsupportedError

ROWS = 128  # what the rows of prepare_kernel are rounded up to
SPLIT_ROWS = {"bf16x6": 64, "fp16x3": 128}  # of a program; 128: terms.SPLIT_ROWS
CHUNK_ROWS = 32  # of a program before and after the backward in chunks
COMBINED = 1024  # elements of o that a program of combine_kernel makes
LOG2E = math.log2(math.e)


class Descriptor(NamedTuple):
    """A tensor as a kernel of Gluon sees it: blocks that the copy engine moves.

    ``shape`` and ``strides`` in elements, the block's shape, and its layout in shared memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: list[int]
    layout: object


class Step(NamedTuple):
    """One kernel of ``dispatch.KERNELS`` to launch, on so many programs.

    ``tensors`` are names, the first of which it sees by ``descriptors``; ``numbers`` and
    ``constants`` are its other arguments, ``options`` those of its compilation. ``tile`` is what to
    strike from the table where it does not fit a GPU.
    """

    kernel: str
    n_programs: int
    tensors: tuple[str, ...]
    numbers: tuple
    constants: dict
    options: dict
    descriptors: tuple[Descriptor, ...] = ()
    tile: tuple[tiles.Key, Tile] | None = None


class Pass:
    """The steps of one pass over ``tensors``, by name: q, k, v, o, lse and, backward, do, dq, dk,
    dv, of which a gradient that is not wanted is None.

    They are (B, H, N, d), but lse, (..., N). ``scratch`` has what the kernels alone see, made here.
    Tiles of ``struck`` are passed over. ``scale`` is > 0.
    """

    def __init__(self, tensors: dict[str, Tensor | None], call: Call, scale: float, struck=()):
        self.tensors, self.call, self.scale, self.struck = tensors, call, scale, struck
        self.scratch: dict[str, Tensor] = {}
        self.steps: list[Step] = []
        self.early = launches_early(tensors["q"].device)
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
        """Fill dq, dk and dv, each unless None."""
        for name in ("dq", "dk", "dv"):
            if self.tensors[name] is None:  # but the kernels make it
                x = self.tensors[name[1]]
                self._make(name, x.shape, x.dtype)
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
        self._split("k", "v")
        constants = {"MASKS": dispatch.masks()}
        self._add_tiled("forward", ("q", "k", "v", "o"), ("lse",), self.sizes, constants)

    def _forward_key_chunks(self):
        """Let each chunk of keys fill a part of ``parts`` and ``part_lse``; combine them."""
        call = self.call
        chunk_keys, n_chunks = dispatch.keys_per_chunk(call), dispatch.n_key_chunks(call)
        rows = (n_chunks, call.n_heads, call.n_queries)
        self._make("parts", (*rows, call.head_dim), torch.float32)
        self._make("part_lse", rows, torch.float32)
        parts = ("parts", "part_lse")

        self._split("k", "v")
        sizes = (*self.sizes, n_chunks, chunk_keys)
        constants = {"EARLY": self.early}
        self._add_tiled("forward_chunk", ("q", "k", "v"), parts, sizes, constants)

        B = min(128, COMBINED // self.widths["BD"])  # divides a chunk, of a multiple of 128
        constants = {
            **self.widths,
            "B": B,
            "CHUNKS": 1 << (n_chunks - 1).bit_length(),
            "CAUSAL": call.causal,
            "EARLY": self.early,
        }
        sizes = (call.heads, call.n_heads, call.n_queries, n_chunks, chunk_keys)
        numbers = (*self._strides("o"), *sizes)
        n_programs = ceil_div(call.n_queries, B) * call.n_heads
        options = {"launch_pdl": self.early}
        names = (*parts, "o", "lse")
        self._add(Step("combine", n_programs, names, numbers, constants, options))

    def _forward_hopper(self):
        call, BD = self.call, self.widths["BD"]
        consumers, stay = dispatch.forward_consumers(call)
        ping_pong = stay and consumers == 3
        Bk = 64 if consumers == 1 and BD == 128 else 128
        constants = {
            "BD": BD,
            "CONSUMERS": consumers,
            "Bk": Bk,
            "STAGES": 3 if ping_pong else 2,
            "CAUSAL": call.causal,
            "RAGGED": self._is_ragged(Bk),
            "STAY": stay,
            "num_warps": 4,
        }
        n_programs = ceil_div(call.n_queries, 64 * consumers) * call.n_heads
        if stay:  # two programs of one consumer share a multiprocessor
            at_once = (2 if consumers == 1 else 1) * call.multiprocessors
            n_programs = dispatch.staying(n_programs, at_once, call.causal and not ping_pong)
        if ping_pong and call.causal:
            together = call.n_heads  # the longest tiles of all heads first
        else:
            key_bytes = 2 * call.n_keys * call.head_dim * 2
            together = dispatch.heads_together(key_bytes, call.n_heads, stay, call.causal)
        sizes = (self.scale * LOG2E, *self.sizes[1:], together)
        blocks = {"q": 64, "k": Bk, "v": Bk, "o": 64}
        options = {"maxnreg": 128} if consumers == 1 else {}
        self._add_hopper("hopper_forward", n_programs, blocks, ("lse",), sizes, constants, options)

    # The backward.

    def _backward_one_launch(self):
        call, lse = self.call, self.tensors["lse"]
        self._make("delta", lse.shape, torch.float32)
        tensors = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        sizes = (*self.sizes, call.kv_heads, call.n_kv_heads)
        self._add_tiled("backward", tensors, ("lse", "delta"), sizes)

    def _backward_two_sweeps(self):
        call, lse = self.call, self.tensors["lse"]
        self._make("delta", lse.shape, torch.float32)
        self._split("k", "v")
        self._split("q", "do")
        rows, masks = ("lse", "delta"), {"MASKS": dispatch.masks()}

        tensors = ("q", "k", "v", "o", "do", "dq")
        self._add_tiled("backward_dq", tensors, rows, self.sizes, masks)

        tensors = ("q", "k", "v", "do", "dk", "dv")
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
        on_hopper = form in ("one_sweep", "hopper_chunks")
        in_chunks = form != "one_sweep"
        permuted = on_hopper and call.head_dim > 64
        padded = ceil_div(call.n_queries, ROWS) * ROWS
        dq_shape = (padded, 128) if permuted else (call.n_queries, call.head_dim)
        whole = dispatch.hopper_backward_whole(call) if form == "one_sweep" else 0
        n_sums = call.n_heads
        if whole:
            n_sums = dispatch.staying(call.n_heads, call.multiprocessors, False)
            dq_shape = (padded, self.widths["BD"])
        if whole == 3:
            n_sums = dispatch.ring_slots(call)
        self._make("rows", (call.n_heads, 2, padded), torch.float32)
        self._make("dq_sums", (n_sums, *dq_shape), torch.float32)
        sums, unused = ("dq_sums", "dk", "dv"), "rows"
        if in_chunks:
            shape = self.tensors["k"].shape
            self._make("dk_sums", shape, torch.float32)
            self._make("dv_sums", shape, torch.float32)
            sums = ("dq_sums", "dk_sums", "dv_sums")
        elif call.fixed_order:
            self._make("turns", (1 + call.n_heads * padded // 64,), torch.int32)
            unused = "turns"

        if whole == 3:
            self._make("turns", (call.n_heads, 4), torch.int32)
            unused = "turns"

        # The kernels before and after.
        if not in_chunks:
            B, num_warps = ROWS, 8
        elif permuted:
            B, num_warps = 2 * CHUNK_ROWS, 4  # a whole tile
        else:
            B, num_warps = CHUNK_ROWS, 4
        early = in_chunks and self.early and call.dtype != "fp32" and not on_hopper
        early = early and call.n_keys <= dispatch.CHUNKS_EARLY[call.causal]
        constants = {
            **self.widths, "B": B, "PERMUTED": permuted, "CHUNKS": in_chunks, "EARLY": early,
        }  # fmt: skip
        of_keys = ceil_div(call.n_keys, B) * call.n_kv_heads if in_chunks else 0

        n_programs = padded // B * call.n_heads + of_keys
        tensors = ("o", "do", "lse", "rows", *sums, unused)
        sizes = (call.heads, call.n_heads, call.n_queries, padded, n_sums if whole else call.n_keys)
        numbers = (*self._strides("o", "do"), *sizes)
        prepared = {**constants, "PRECISION": self.precision, "ORDERED": call.fixed_order}
        prepared["WHOLE"] = max(1, whole) if whole != 2 else 1
        prepared["WHOLE"] = 0 if not whole else prepared["WHOLE"]
        options = {"num_warps": num_warps, "launch_pdl": False}
        self._add(Step("prepare", n_programs, tensors, numbers, prepared, options))

        if on_hopper:
            self._sweep_hopper(sums, dispatch.chunk_queries_of(call) if in_chunks else 0, whole)
        else:
            self._sweep_chunks(form, sums, early)

        if whole:
            return
        n_programs = ceil_div(call.n_queries, B) * call.n_heads + of_keys
        gradients = ("dq", "dk", "dv")
        sizes = (self.scale, call.heads, call.kv_heads, call.n_heads, call.n_queries, call.n_keys)
        numbers = (*self._strides(*gradients), *sizes)
        options = {"num_warps": num_warps, "launch_pdl": early}
        self._add(Step("finish", n_programs, (*sums, *gradients), numbers, constants, options))

    def _sweep_chunks(self, form, sums, early):
        """Add the kernel of plain Triton that adds up all gradients."""
        call = self.call
        self._split("k", "v")
        self._split("q", "do")
        kernel = "backward_wide" if form == "two_terms" else "backward_chunks"
        tile = self._tile(kernel)
        constants, options = {}, {}
        if kernel == "backward_chunks":
            # What the registers allow.
            loops = 1 if self.widths["BD"] == 128 or call.dtype == "fp32" else 2
            constants = {"LOOPS": loops, "EARLY": early}
            options = {"launch_pdl": early}
        sizes = (*self.sizes, tiles.chunk_of(tile, call))
        tensors, rest = ("q", "k", "v", "do"), ("rows", *sums)
        self._add_tiled(kernel, tensors, rest, sizes, constants, options)

    def _sweep_hopper(self, sums, chunk, whole=0):
        """Add the kernel for Hopper: dQ is added up in the first of ``sums``, dK times scale and dV
        are stored in the others; with chunk, queries of a program, they are added up too."""
        call, BD = self.call, self.widths["BD"]
        dq_sums, *gradients = sums
        n_heads = call.n_heads if chunk else call.n_kv_heads
        Bq = 128 if BD == 64 else 64
        stay = not chunk and not call.fixed_order and dispatch.hopper_backward_stays(call)
        stay = stay or whole in (1, 2)
        constants = {
            **self.widths,
            "Bq": Bq,
            "STAGES": 2,
            "CAUSAL": call.causal,
            "RAGGED": self._is_ragged(128),
            "CHUNKS": chunk > 0,
            "STAY": stay,
            "GROUPED": not chunk and call.group > 1,
            "ORDERED": call.fixed_order and whole == 0,
            "WHOLE": whole,
            "num_warps": 4,
        }
        if chunk:
            n_programs = dispatch.query_chunk_programs(chunk, 128, call) * n_heads
        else:
            n_programs = ceil_div(call.n_keys, 128) * n_heads
        if whole in (1, 2):
            n_programs = self.tensors[dq_sums].shape[0]
        elif stay:
            n_programs = dispatch.staying(n_programs, call.multiprocessors, call.causal)
        together = dispatch.backward_heads_together(call, n_heads, stay, chunk > 0)
        scales = (1.0 if chunk else self.scale, self.scale * LOG2E)
        n_slots = self.tensors[dq_sums].shape[0] if whole == 3 else chunk
        lengths = (call.group, call.n_queries, call.n_keys)
        sizes = (*scales, call.heads, n_heads, *lengths, together, n_slots)
        blocks = {"q": Bq, "do": Bq, "k": 128, "v": 128, dq_sums: (1, 64, 64), "rows": (1, 2, Bq)}
        turns = "turns" if call.fixed_order else "rows"
        if chunk:
            rest = (*gradients, "dq", turns, "rows")
        elif whole:
            blocks |= {"dk": 64, "dv": 64, "dq": (1, 1, 64, 64)}
            rest = (dq_sums, "turns" if whole == 3 else "rows")
        else:
            blocks |= {"dk": 64, "dv": 64}
            rest = ("dq", turns, "rows")
        self._add_hopper("hopper_backward", n_programs, blocks, rest, sizes, constants, {})

    # What they share.

    def _make(self, name: str, shape: Sequence[int], dtype: torch.dtype):
        """Make a tensor that the kernels alone see."""
        self.scratch[name] = self.tensors[name] = self.tensors["q"].new_empty(shape, dtype=dtype)

    def _strides(self, *names):
        return tuple(tuple(self.tensors[name].stride()[:3]) for name in names)

    def _split(self, *names):
        """Make the terms of two tensors of one shape, which bf16x6 and fp16x3 multiply."""
        x = self.tensors[names[0]]
        if self.precision not in SPLIT_ROWS or x.numel() == 0:
            return
        batch, heads, n_rows, d = x.shape
        if self.precision == "fp16x3":
            dtype, shape, options = torch.float16, fp16_terms_shape(n_rows, d), {"num_warps": 8}
        else:
            dtype, shape, options = torch.bfloat16, (n_rows, 3 * d), {}
        terms = [f"{name}_terms" for name in names]
        for name in terms:
            self._make(name, (batch, heads, *shape), dtype)
        B = SPLIT_ROWS[self.precision]
        n_programs = 2 * ceil_div(n_rows, B) * batch * heads
        constants = {**self.widths, "B": B, "PRECISION": self.precision}
        numbers = (*self._strides(*names), heads, n_rows)
        self._add(Step("split", n_programs, (*names, *terms), numbers, constants, options))

    def _tile(self, kernel: str) -> Tile:
        """Return the best tile of a kernel that is not struck."""
        key = tiles.key_of(kernel, self.call)
        for tile in tiles.tiles_of(kernel, self.call):
            if (key, tile) not in self.struck:
                return tile
        raise UnsupportedError(
            f"flash_attention has no {kernel} tile for head_dim {self.call.head_dim} in "
            f"{self.call.dtype} that fits the shared memory of {self.tensors['q'].device}"
        )

    def _add_tiled(self, kernel, tensors, rest, sizes, constants=None, options=None):
        """Add a kernel of plain Triton with its best tile; of ``tensors`` it gets the strides too,
        and where they were split their terms."""
        call, tile = self.call, self._tile(kernel)
        tensors = [f"{name}_terms" if f"{name}_terms" in self.scratch else name for name in tensors]
        constants = {
            **self.widths,
            "Bq": tile.Bq,
            "Bk": tile.Bk,
            "CAUSAL": call.causal,
            "PRECISION": self.precision,
            "STAGES": tile.stages,
            **(constants or {}),
        }
        options = {**tiles.options_of(tile, self.precision), **(options or {})}
        n_programs = tiles.n_programs(kernel, tile, call)
        numbers = (*self._strides(*tensors), *sizes)
        step = Step(kernel, n_programs, (*tensors, *rest), numbers, constants, options)
        self._add(step._replace(tile=(tiles.key_of(kernel, call), tile)))

    def _add_hopper(self, kernel, n_programs, blocks, rest, sizes, constants, options):
        """Add a kernel of Gluon; ``blocks`` has, by name, the rows of a block that the copy engine
        moves or, for a tensor of three dimensions, its shape."""
        BD, descriptors = self.widths["BD"], []
        for name, block in blocks.items():
            shape = block if isinstance(block, tuple) else (1, 1, block, BD)
            descriptors.append(descriptor_of(self.tensors[name], shape, BD))
        step = Step(kernel, n_programs, (*blocks, *rest), sizes, constants, options)
        self._add(step._replace(descriptors=tuple(descriptors)))

    def _add(self, step: Step):
        if step.n_programs:
            self.steps.append(step)

    def _is_ragged(self, Bk):
        """Return whether a block of Bk keys passes the last key where no causal mask hides it."""
        call = self.call
        return call.n_keys % Bk != 0 and not (call.causal and call.n_queries <= call.n_keys)


def fp16_terms_shape(n_rows: int, head_dim: int) -> tuple[int, int]:
    """Return the rows and columns that the two fp16 terms of a head's rows take: blocks of 128 rows
    and, behind them, an exponent for each block. A term's columns are a multiple of 8 (16
    bytes)."""
    blocks, columns = ceil_div(n_rows, 128), 2 * (ceil_div(head_dim, 8) * 8)
    return blocks * 128 + ceil_div(blocks, columns), columns


def descriptor_of(x: Tensor, block: tuple[int, ...], BD: int) -> Descriptor:
    """Return what the copy engine is to know of a tensor in blocks of this shape."""
    from triton.experimental.gluon import language as gl

    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    if block[1] == 2:  # numbers of rows, one after the other: nothing to swizzle
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtypes[x.dtype])
    strides = list(x.stride()[:-1])
    for axis, n in enumerate(x.shape[:-1]):
        if n <= 1:  # any stride is right, and TMA wants multiples of 16 bytes
            strides[axis] = BD
    return Descriptor(tuple(x.shape), (*strides, 1), list(block), layout)


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
