"""Make the launches of each form of a pass: kernels in order, their programs and arguments.

    steps = Pass(tensors, call, scale).forward()      # or backward()

``dispatch.py`` chooses the form. Nothing is launched here: the steps follow from shapes and strides
alone, whatever the tensors hold, on any device (meta too).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from a2lib.attention import dispatch
from a2lib.attention.dispatch import Call, Tile, chunk_programs
from a2lib.errors import UnsupportedError

ROWS = 128  # what the rows of prepare_kernel are rounded up to
SPLIT_ROWS = {"bf16x6": 64, "fp16x3": 128}  # of a program; 128: terms.SPLIT_ROWS
CHUNK_ROWS = 32  # of a program before and after the backward in chunks
COMBINED = 1024  # elements of o that a program of combine_kernel makes


class Form(NamedTuple):
    """A tensor as a kernel of Gluon sees it: blocks that the copy engine moves.

    ``shape`` and ``strides`` in elements, the block's shape, and its layout in shared memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: list[int]
    layout: object


class Step(NamedTuple):
    """One kernel of ``dispatch.KERNELS`` to launch, on so many programs.

    ``tensors`` are names, the first of which it sees in ``forms``; ``numbers`` and ``constants``
    are its other arguments, ``options`` those of its compilation. ``tile`` is what to strike from
    the table where it does not fit a GPU.
    """

    kernel: str
    n_programs: int
    tensors: tuple[str, ...]
    numbers: tuple
    constants: dict
    options: dict
    forms: tuple[Form, ...] = ()
    tile: tuple[dispatch.Key, Tile] | None = None


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
                self._make(**{name: x.new_empty(x.shape)})
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

        def programs(tile):
            return (-(-self.call.n_queries // tile.Bq) * self.call.n_heads,)

        needs = {"MASKS": dispatch.masks()}
        self._tiled("forward", ("q", "k", "v", "o"), ("lse",), self.sizes, programs, needs)

    def _forward_key_chunks(self):
        """Let each chunk of keys fill a part of ``parts`` and ``part_lse``; combine them."""
        call, o = self.call, self.tensors["o"]
        chunk_keys = dispatch.keys_per_chunk(call)
        n_chunks = dispatch.n_chunks_of(chunk_keys, call)
        rows = n_chunks, call.n_heads, call.n_queries
        self._make(
            parts=o.new_empty(*rows, call.head_dim, dtype=torch.float32),
            part_lse=o.new_empty(rows, dtype=torch.float32),
        )
        self._split("k", "v")

        def programs(tile):
            per_chunk = chunk_keys // tile.Bq if call.causal else 0
            n_tiles = -(-call.n_queries // tile.Bq)
            return (dispatch.n_chunk_programs(n_tiles, n_chunks, per_chunk) * call.n_heads,)

        sizes = (*self.sizes, n_chunks, chunk_keys)
        parts, needs = ("parts", "part_lse"), {"EARLY": self.early}
        self._tiled("forward_chunk", ("q", "k", "v"), parts, sizes, programs, needs, chunk_keys)

        constants = {
            **self.widths,
            "B": min(128, COMBINED // self.widths["BD"]),  # divides a chunk, of a multiple of 128
            "CHUNKS": 1 << (n_chunks - 1).bit_length(),
            "CAUSAL": call.causal,
            "EARLY": self.early,
        }
        sizes = (call.heads, call.n_heads, call.n_queries, n_chunks, chunk_keys)
        numbers = (*self._strides("o"), *sizes)
        n_programs = -(-call.n_queries // constants["B"]) * call.n_heads
        options = {"launch_pdl": self.early}
        self._add("combine", n_programs, (*parts, "o", "lse"), numbers, constants, options)

    def _forward_hopper(self):
        call = self.call
        consumers, stay = dispatch.forward_consumers(call)
        ping_pong = stay and consumers == 3
        BD = self.widths["BD"]
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
        n_programs = -(-call.n_queries // (64 * consumers)) * call.n_heads
        if stay:  # two programs of one consumer share a multiprocessor
            at_once = (2 if consumers == 1 else 1) * call.multiprocessors
            n_programs = dispatch.staying(n_programs, at_once, call.causal and not ping_pong)
        key_bytes = 2 * call.n_keys * call.head_dim * 2
        together = dispatch.heads_together(key_bytes, call.n_heads, stay, call.causal)
        if ping_pong and call.causal:
            together = call.n_heads  # the longest tiles of all heads first
        scale2 = self.scale * math.log2(math.e)
        sizes = (scale2, *self.sizes[1:], together)
        blocks = {"q": 64, "k": Bk, "v": Bk, "o": 64}
        options = {"maxnreg": 128} if consumers == 1 else {}
        self._add_hopper("hopper_forward", n_programs, blocks, ("lse",), sizes, constants, options)

    # The backward.

    def _backward_one_launch(self):
        call = self.call
        self._make(delta=torch.empty_like(self.tensors["lse"]))

        def programs(tile):
            queries = -(-call.n_queries // tile.Bq) * call.n_heads
            return (queries + -(-call.n_keys // tile.Bq) * call.n_kv_heads,)

        tensors = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        sizes = (*self.sizes, call.kv_heads, call.n_kv_heads)
        self._tiled("backward", tensors, ("lse", "delta"), sizes, programs)

    def _backward_two_sweeps(self):
        call, rows, masks = self.call, ("lse", "delta"), {"MASKS": dispatch.masks()}
        self._make(delta=torch.empty_like(self.tensors["lse"]))
        self._split("k", "v")
        self._split("q", "do")

        def programs_of_queries(tile):
            return (-(-call.n_queries // tile.Bq) * call.n_heads,)

        def programs_of_keys(tile):
            return (-(-call.n_keys // tile.Bk) * call.n_kv_heads,)

        tensors = ("q", "k", "v", "o", "do", "dq")
        self._tiled("backward_dq", tensors, rows, self.sizes, programs_of_queries, masks)

        tensors = ("q", "k", "v", "do", "dk", "dv")
        sizes = (self.scale, call.kv_heads, call.n_kv_heads, *self.sizes[3:])
        makes = {"backward_dkdv": (True, True)}
        if dispatch.key_of("backward_dkdv", call) not in dispatch.TILES:
            makes = {"backward_dk": (True, False), "backward_dv": (False, True)}
        for kernel, (dk, dv) in makes.items():
            needs = {"NEEDS_DK": dk, "NEEDS_DV": dv, **masks}
            self._tiled(kernel, tensors, rows, sizes, programs_of_keys, needs)

    def _backward_sums(self, form):
        """Add dQ up in fp32 ``dq_sums``, and in chunks dK and dV too; ``rows`` has two numbers of
        each query. In a fixed order ``turns`` says whose turn it is to add to each 64 rows of dQ,
        and before that how many programs have begun."""
        call, k = self.call, self.tensors["k"]
        chunks, wide = form != "one_sweep", form == "two_terms"
        on_hopper = form in ("one_sweep", "hopper_chunks")
        permuted = on_hopper and call.head_dim > 64
        padded = -(-call.n_queries // ROWS) * ROWS
        of_head = (padded, 128) if permuted else (call.n_queries, call.head_dim)
        self._make(
            rows=k.new_empty(call.n_heads, 2, padded, dtype=torch.float32),
            dq_sums=k.new_empty(call.n_heads, *of_head, dtype=torch.float32),
        )
        sums, gradients, unused = ["dq_sums", "dk", "dv"], ("dq", "dk", "dv"), ["rows"]
        B, n_warps, early = ROWS, 8, False
        if chunks:
            dense = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
            self._make(dk_sums=torch.empty_like(k, **dense), dv_sums=torch.empty_like(k, **dense))
            sums = ["dq_sums", "dk_sums", "dv_sums"]
            B, n_warps = 2 * CHUNK_ROWS if permuted else CHUNK_ROWS, 4  # a whole tile
            early = self.early and call.dtype != "fp32" and not on_hopper
            early = early and call.n_keys <= dispatch.CHUNKS_EARLY[call.causal]
        elif call.fixed_order:
            n_turns = 1 + call.n_heads * padded // 64
            self._make(turns=k.new_empty(n_turns, dtype=torch.int32))
            unused = ["turns"]

        def around(kernel, n_rows, tensors, numbers, more, launch_pdl=False):
            n_programs = -(-n_rows // B) * call.n_heads
            if chunks:
                n_programs += -(-call.n_keys // B) * call.n_kv_heads
            constants = {"B": B, "PERMUTED": permuted, "CHUNKS": chunks, "EARLY": early}
            options = {"num_warps": n_warps, "launch_pdl": launch_pdl}
            constants = {**self.widths, **constants, **more}
            self._add(kernel, n_programs, tensors, numbers, constants, options)

        sizes = (call.heads, call.n_heads, call.n_queries, padded, call.n_keys)
        tensors, numbers = ("o", "do", "lse", "rows", *sums), (*self._strides("o", "do"), *sizes)
        more = {"PRECISION": self.precision, "ORDERED": call.fixed_order}
        around("prepare", padded, (*tensors, *unused), numbers, more)

        if on_hopper:
            self._sweep(sums, dispatch.chunk_queries_of(call) if chunks else 0)
        else:
            self._split("k", "v")
            self._split("q", "do")

            def programs(tile):
                chunk = dispatch.chunk_of(tile, call)
                n = chunk_programs(tile, chunk, call) * call.n_heads
                return n * (1 + wide), chunk

            # What the registers allow.
            loops = 1 if self.widths["BD"] == 128 or call.dtype == "fp32" else 2
            needs = {} if wide else {"LOOPS": loops, "EARLY": early}
            kernel = "backward_wide" if wide else "backward_chunks"
            tensors, rest = ("q", "k", "v", "do"), ("rows", *sums)
            self._tiled(kernel, tensors, rest, self.sizes, programs, needs, call.n_keys)

        sizes = (self.scale, call.heads, call.kv_heads, call.n_heads, call.n_queries, call.n_keys)
        numbers = (*self._strides(*gradients), *sizes)
        around("finish", call.n_queries, (*sums, *gradients), numbers, {}, launch_pdl=early)

    def _sweep(self, gradients, chunk=0):
        """Add the kernel for Hopper: dQ is added up in the first of ``gradients``, dK times scale
        and dV are stored in the others; with chunk, queries of a program, they are added up too."""
        call, BD = self.call, self.widths["BD"]
        sums, *gradients = gradients
        n_heads = call.n_heads if chunk else call.n_kv_heads
        Bq, n_tiles = 128 if BD == 64 else 64, -(-call.n_keys // 128)
        stay = not chunk and not call.fixed_order and dispatch.hopper_backward_stays(call)
        constants = {
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
            n_tiles = chunk_programs(Tile(Bq, 128, 4, 2), chunk, call)
        n_programs = n_tiles * n_heads
        if stay:
            n_programs = dispatch.staying(n_programs, call.multiprocessors, call.causal)
        together = dispatch.backward_heads_together(call, n_heads, stay, chunk)
        scales = (1.0 if chunk else self.scale, self.scale * math.log2(math.e))
        lengths = (call.group, call.n_queries, call.n_keys)
        sizes = (*scales, call.heads, n_heads, *lengths, together, chunk)
        blocks = {"q": Bq, "do": Bq, "k": 128, "v": 128, sums: (1, 64, 64), "rows": (1, 2, Bq)}
        rest = ["turns" if call.fixed_order else "rows"]
        if chunk:
            rest = [*gradients, *rest]
        else:
            blocks |= dict.fromkeys(gradients, 64)
        self._add_hopper("hopper_backward", n_programs, blocks, rest, sizes, constants, {})

    # What they share.

    def _make(self, **tensors):
        self.scratch |= tensors
        self.tensors |= tensors

    def _strides(self, *names):
        return tuple(tuple(self.tensors[name].stride()[:3]) for name in names)

    def _split(self, *names):
        """Make the terms of two tensors of one shape, which bf16x6 and fp16x3 multiply."""
        call = self.call
        x = self.tensors[names[0]]
        if self.precision not in SPLIT_ROWS or not x.numel():
            return
        dtype, options = torch.bfloat16, {}
        n_rows, width = x.shape[2], 3 * call.head_dim
        if self.precision == "fp16x3":
            dtype, options = torch.float16, {"num_warps": 8}
            n_rows, width = dispatch.terms_shape(n_rows, call.head_dim)
        for name in names:
            terms = x.new_empty(*x.shape[:2], n_rows, width, dtype=dtype)
            self._make(**{f"{name}_terms": terms})
        B = SPLIT_ROWS[self.precision]
        n_programs = 2 * -(-x.shape[2] // B) * math.prod(x.shape[:2])
        constants = {**self.widths, "B": B, "PRECISION": self.precision}
        tensors = (*names, *(f"{name}_terms" for name in names))
        numbers = (*self._strides(*names), *x.shape[1:3])
        self._add("split", n_programs, tensors, numbers, constants, options)

    def _tiled(self, kernel, tensors, rest, sizes, programs, needs=None, keys=0):
        """Add a kernel with the best tile for ``keys`` that is not struck; ``programs(tile)``
        returns how many there are, and what more they are to know."""
        call = self.call
        tensors = [f"{x}_terms" if f"{x}_terms" in self.scratch else x for x in tensors]
        key = dispatch.key_of(kernel, call)
        tiles = dispatch.tiles_of(kernel, call, lambda tile: programs(tile)[0], keys)
        tile = next((tile for tile in tiles if (key, tile) not in self.struck), None)
        if tile is None:
            raise UnsupportedError(
                f"flash_attention has no {kernel} tile for head_dim {call.head_dim} in {call.dtype}"
                f" that fits the shared memory of {self.tensors['q'].device}"
            )
        constants = {
            **self.widths,
            "Bq": tile.Bq,
            "Bk": tile.Bk,
            "CAUSAL": call.causal,
            "PRECISION": self.precision,
            "STAGES": tile.stages,
            **(needs or {}),
        }
        options = dispatch.options_of(tile, self.precision)
        if kernel == "backward_chunks":
            options["launch_pdl"] = constants["EARLY"]
        n_programs, *more = programs(tile)
        numbers = (*self._strides(*tensors), *sizes, *more)
        names = (*tensors, *rest)
        self._add(kernel, n_programs, names, numbers, constants, options, tile=(key, tile))

    def _add_hopper(self, kernel, n_programs, blocks, rest, sizes, constants, options):
        """Add a kernel of Gluon; ``blocks`` has, by name, the rows of a block that the copy engine
        moves or, for a tensor of three dimensions, its shape."""
        BD = self.widths["BD"]
        forms = tuple(form_of(self.tensors[name], block, BD) for name, block in blocks.items())
        self._add(kernel, n_programs, (*blocks, *rest), sizes, constants, options, forms)

    def _add(self, kernel, n_programs, tensors, numbers, constants, options, forms=(), tile=None):
        if n_programs:
            names = tuple(tensors)
            step = Step(kernel, n_programs, names, numbers, constants, options, forms, tile)
            self.steps.append(step)

    def _is_ragged(self, Bk):
        """Return whether a block of Bk keys passes the last key where no causal mask hides it."""
        call = self.call
        return call.n_keys % Bk != 0 and not (call.causal and call.n_queries <= call.n_keys)


def form_of(x: Tensor, block, BD: int) -> Form:
    """Return what the copy engine is to know of a tensor in blocks as ``_add_hopper`` has them."""
    from triton.experimental.gluon import language as gl

    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    if not isinstance(block, tuple):
        block = (1, 1, block, BD)
    if block[1] == 2:  # numbers of rows, one after the other: nothing to swizzle
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtypes[x.dtype])
    strides = list(x.stride()[:-1])
    for axis, n in enumerate(x.shape[:-1]):
        if n <= 1:  # any stride is right, and TMA wants multiples of 16 bytes
            strides[axis] = BD
    return Form(tuple(x.shape), (*strides, 1), list(block), layout)


def is_addressable(x: Tensor) -> bool:
    """Return whether the copy engine (TMA) can address a tensor (B, H, N, d)."""
    steps = [s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in steps)


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
