"""One forward and one backward pass on real tensors: which kernels run, with which tiles.

Of the backward the first form that may run does. ``theory.attention`` has the conditions; but for
the second and the last all want every gradient, and but for the first and the last two the order of
additions is not fixed: ``torch.use_deterministic_algorithms`` rules them out.

    ===============  =================  =========================================================
    condition        for                form
    ===============  =================  =========================================================
    in_one_launch    few tokens         ``kernels.backward_kernel``, one launch
    in_two_terms     fp32, wide heads   ``wide.backward_wide_kernel``, one sweep; and the forward
    long_for_hopper  in chunks, long    ``hopper.backward_chunks``, one sweep (Gluon)
    in_chunks        few key tiles      ``chunks.backward_chunks_kernel``, one sweep
    serves_backward  the rest, Hopper   ``hopper.backward``, one sweep (Gluon)
    else                                ``kernels.backward_dq_kernel``, ``backward_dkdv_kernel``
    ===============  =================  =========================================================

Both passes multiply fp32 in the same way, by ``_Problem.precision``: a backward that computes the
scores of a forward in another way has other weights where scores are large.

``forward`` and ``backward`` know nothing of autograd or torch.compile; ``a2lib.attention.flash``
and ``a2lib.attention.operators`` call them.
"""

import functools
import math

import torch
from torch import Tensor

from a2lib.attention import hopper, plans
from a2lib.attention.launch import launch, launches_early, n_multiprocessors
from a2lib.attention.plans import Launch
from a2lib.attention.shapes import as_batched_heads, check_inputs, empty_output
from a2lib.attention.tiles import (
    CHUNKS_EARLY,
    HEAD_DIM_MAX,
    SPECIALISED,
    TILES,
    WHEN_FEW,
    WHEN_LONG,
    WHEN_SHORT,
    chunk_loops,
    chunk_of,
    chunk_programs,
    n_chunk_programs,
    options_of,
    precision_of,
)
from a2lib.errors import UnsupportedError
from a2lib.theory.attention import (
    in_chunks,
    in_one_launch,
    in_two_terms,
    keys_per_chunk,
    n_chunks_of,
    terms_shape,
)

_NOTHING = {}
SPLIT_ROWS = {"bf16x6": 64, "fp16x3": 128}  # of a program; 128: terms.SPLIT_ROWS
CHUNK_ROWS = 32  # of a program before and after the backward in chunks
COMBINED = 1024  # elements of o that a program of combine_kernel makes
# Seen by the kernels as they are; all else as (B, H, N, d).
_AS_THEY_ARE = ("lse", "delta", "rows", "sums", "turns")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """Returns o, laid out as ``empty_output`` says, and lse, ``q.shape[:-1]`` in fp32.

    ``scale`` is > 0, or None for ``1 / sqrt(d)``. Raises as ``flash_attention`` does.
    """
    inputs = (q, k, v)
    switches = "forward", is_causal, scale, _settings(q)
    made = plans.run(switches, inputs)
    if made is not None:
        return made
    check_inputs(q, k, v)
    check_supported(q)
    made = empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    problem = _Problem(inputs, made, ("q", "k", "v", "o", "lse"), is_causal, scale)
    problem.forward()
    problem.keep(switches)
    return made


def backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Returns dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    inputs = (do, q, k, v, o, lse)
    fixed_order = torch.are_deterministic_algorithms_enabled()
    switches = "backward", is_causal, scale, _settings(q), fixed_order, *needs
    made = plans.run(switches, inputs)
    if made is not None:
        return made
    made = [empty_output(x) if needed else None for x, needed in zip((q, k, v), needs, strict=True)]
    names = ["do", "q", "k", "v", "o", "lse", "dq", "dk", "dv"]
    problem = _Problem(inputs, made, names, is_causal, scale)
    added_up = all(needs) and not fixed_order
    if all(needs) and problem.fits_one_launch():
        problem.add(delta=torch.empty_like(lse))
        problem.backward_in_one_launch()
    elif problem.precision == "fp16x3" or (added_up and problem.fits_chunks()):
        problem.backward_in_chunks()
    elif all(needs) and hopper.serves_backward(problem):
        problem.add(**dict(zip(("rows", "sums"), hopper.scratch(q), strict=True)))
        if fixed_order:
            problem.add(turns=hopper.turns(problem.tensors["rows"]))
        hopper.backward(problem)
    else:
        problem.add(delta=torch.empty_like(lse))
        problem.backward()
    problem.keep(switches)
    return made


def _settings(q: Tensor) -> tuple[bool, bool] | None:
    """PyTorch's settings by which fp32 is multiplied, TF32 and a fixed order of additions; both
    passes read them. None for other dtypes."""
    # Asked before the inputs are checked.
    if isinstance(q, Tensor) and q.dtype is torch.float32:
        return _allow_tf32(), torch.are_deterministic_algorithms_enabled()
    return None


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
        from a2lib.attention.operands import INTERPRETED
    except ImportError as error:
        raise UnsupportedError(
            f"flash_attention needs Triton, which is missing: {error}; FlashAttentionPyTorch and "
            "attention_reference need none"
        ) from None
    return bool(INTERPRETED.value)


class _Problem:
    """One call's sizes and the launches that serve it.

    ``inputs`` and ``made``, under ``names``, are its tensors; what is not wanted is None. The
    kernels see them as (B, H, N, d), but for ``_AS_THEY_ARE``.
    """

    def __init__(self, inputs, made, names, is_causal, scale):
        self.inputs, self.made, self.names = inputs, made, names
        self.n_results = len(made)
        self.tensors = {
            name: x if x is None or name in _AS_THEY_ARE else as_batched_heads(x)
            for name, x in zip(names, (*inputs, *made), strict=True)
        }
        q, k = self.tensors["q"], self.tensors["k"]
        self.dtype = DTYPES[q.dtype]
        self.batch, self.heads, self.n_queries, self.head_dim = q.shape
        self.kv_heads, self.n_keys = k.shape[1:3]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        self.is_causal = is_causal
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.fixed_order = torch.are_deterministic_algorithms_enabled()
        tf32, fixed_order = _settings(q) or (False, False)
        lengths = self.n_queries, self.n_keys
        two_terms = not fixed_order and in_two_terms(*lengths, self.head_dim, q.element_size())
        self.precision = precision_of(self.dtype, tf32, two_terms)
        self.device = q.device
        self.launches = []
        self.terms = {}

    def add(self, **tensors):
        """Have more tensors made by this pass, which nobody else sees."""
        self.tensors |= tensors
        self.names = (*self.names, *tensors)
        self.made = (*self.made, *tensors.values())

    def forward(self):
        """Fill o and lse."""
        n_heads = self.batch * self.heads
        chunk_keys = keys_per_chunk(
            self.n_queries,
            self.n_keys,
            n_heads,
            self.is_causal,
            self.inputs[0].element_size(),
            n_multiprocessors(self.device),
        )
        if chunk_keys:
            self._forward_in_chunks(chunk_keys)
            return
        if hopper.serves_forward(self):
            hopper.forward(self)
            return
        sizes = (self.scale, self.heads, n_heads, self.group, self.n_queries, self.n_keys)
        names = ("q", "k", "v", "o"), ("lse",)
        self._split("k", "v")
        self._launch("forward", self.n_queries, n_heads, *names, sizes)

    def _forward_in_chunks(self, chunk_keys):
        """Fill o and lse by way of ``parts`` and ``part_lse``, those of each chunk of keys."""
        n_heads, n_queries, d = self.batch * self.heads, self.n_queries, self.head_dim
        n_chunks = n_chunks_of(chunk_keys, n_queries, self.n_keys, self.is_causal)
        sizes, o = (n_chunks, n_heads, n_queries), self.tensors["o"]
        parts = o.new_empty(*sizes, d, dtype=torch.float32)
        self.add(parts=parts, part_lse=o.new_empty(sizes, dtype=torch.float32))
        self._split("k", "v")
        early = launches_early(self.device)

        def cut(tile):
            per_chunk = chunk_keys // tile.Bq if self.is_causal else 0
            return (n_chunk_programs(-(-n_queries // tile.Bq), n_chunks, per_chunk) * n_heads,)

        of_chunks = n_chunks, chunk_keys
        sizes = (self.scale, self.heads, n_heads, self.group, n_queries, self.n_keys, *of_chunks)
        names, rows = ("q", "k", "v"), ("parts", "part_lse")
        needs = {"EARLY": early}
        chosen = names, rows, sizes, needs, cut, chunk_keys
        self._launch("forward_chunk", n_queries, n_heads, *chosen)

        BD = self._key("forward_chunk")[2]
        constants = {
            "d": d,
            "BD": BD,
            "B": min(128, COMBINED // BD),  # divides a chunk, of a multiple of 128
            "CHUNKS": 1 << (n_chunks - 1).bit_length(),
            "CAUSAL": self.is_causal,
            "EARLY": early,
        }
        strides = o.stride()[:3]
        numbers = (*strides, self.heads, n_heads, n_queries, *of_chunks)
        apart = ("combine", self.dtype, self.device, *strides, *constants.values())
        n_programs = -(-n_queries // constants["B"]) * n_heads
        names = (*rows, "o", "lse")
        options = {"launch_pdl": early}
        self._run(_kernel("combine"), apart, n_programs, names, numbers, constants, options)

    def backward(self):
        """Fill dq, dk and dv, each unless None."""
        n_heads = self.batch * self.heads
        rows = ("lse", "delta")
        dq, dk, dv = (self.tensors[name] is not None for name in ("dq", "dk", "dv"))
        names = ("q", "k", "v", "o", "do", "dq" if dq else "q")
        sizes = (self.scale, self.heads, n_heads, self.group, self.n_queries, self.n_keys)
        needs = {"NEEDS_DQ": dq}
        self._split("k", "v")
        self._split("q", "do")
        self._launch("backward_dq", self.n_queries, n_heads, names, rows, sizes, needs)

        if not (dk or dv):
            return
        n_heads = self.batch * self.kv_heads
        names = ("q", "k", "v", "do", "dk" if dk else "k", "dv" if dv else "v")
        sizes = (self.scale, self.kv_heads, n_heads, self.group, self.n_queries, self.n_keys)
        both = {"NEEDS_DK": dk, "NEEDS_DV": dv}
        if self._key("backward_dkdv") in TILES:
            self._launch("backward_dkdv", self.n_keys, n_heads, names, rows, sizes, both)
            return
        for name in ("backward_dk", "backward_dv"):
            needs = {flag: both[flag] and on for flag, on in SPECIALISED[name][1].items()}
            if any(needs.values()):
                self._launch(name, self.n_keys, n_heads, names, rows, sizes, needs)

    def fits_one_launch(self) -> bool:
        """Whether the backward is to be one launch."""
        n_heads, size = self.batch * self.heads, self.inputs[0].element_size()
        return in_one_launch(self.n_queries, self.n_keys, n_heads, self.head_dim, size)

    def backward_in_one_launch(self):
        """Fill dq, dk and dv."""
        n_heads, n_kv_heads = self.batch * self.heads, self.batch * self.kv_heads
        n_queries, n_keys = self.n_queries, self.n_keys

        def cut(tile):
            return (-(-n_queries // tile.Bq) * n_heads + -(-n_keys // tile.Bq) * n_kv_heads,)

        names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        sizes = (self.scale, self.heads, n_heads, self.group, n_queries, n_keys)
        sizes = (*sizes, self.kv_heads, n_kv_heads)
        chosen = names, ("lse", "delta"), sizes
        self._launch("backward", n_queries + n_keys, n_heads, *chosen, cut=cut)

    def fits_chunks(self) -> bool:
        """Whether the backward is to be cut into chunks of queries."""
        n_heads = self.batch * self.heads
        size = 4 if self.dtype == "fp32" else 2
        some = self.n_queries and n_heads and self.kv_heads
        return bool(some) and in_chunks(self.n_keys, n_heads, self.head_dim, self.is_causal, size)

    def backward_in_chunks(self):
        """Fill dq, dk and dv, by way of ``rows`` and of sums in fp32."""
        q, k = self.tensors["q"], self.tensors["k"]
        gluon_chunk = hopper.chunk_queries(self)
        rows, sums = hopper.scratch(q, gluon_chunk > 0)
        wide = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        self.add(rows=rows, dq_sums=sums)
        self.add(dk_sums=torch.empty_like(k, **wide), dv_sums=torch.empty_like(k, **wide))
        gradients, sums = ("dq", "dk", "dv"), ("dq_sums", "dk_sums", "dv_sums")
        n_heads, n_kv_heads = self.batch * self.heads, self.batch * self.kv_heads
        n_queries, n_keys, padded = self.n_queries, self.n_keys, rows.shape[-1]
        early = self.dtype != "fp32" and not gluon_chunk and launches_early(self.device)
        early = early and n_keys <= CHUNKS_EARLY[self.is_causal]
        BD = self._key("backward_chunks")[2]
        permuted = gluon_chunk > 0 and self.head_dim > 64
        B = 2 * CHUNK_ROWS if permuted else CHUNK_ROWS  # a whole tile

        def around(name, n_rows, names, strided, sizes):
            constants = {"d": self.head_dim, "BD": BD, "B": B, "PERMUTED": permuted, "EARLY": early}
            if name == "prepare_chunks":
                constants["PRECISION"] = self.precision
            strides = [s for name in strided for s in self.tensors[name].stride()[:3]]
            apart = (name, self.dtype, self.device, *strides, *constants.values())
            numbers = (*strides, *sizes)
            tiles = -(-n_rows // B) * n_heads + -(-n_keys // B) * n_kv_heads
            options = {"num_warps": 4, "launch_pdl": early and name == "finish_chunks"}
            self._run(_kernel(name), apart, tiles, names, numbers, constants, options)

        names = ("o", "do", "lse", "rows", *sums)
        sizes = (self.heads, n_heads, n_queries, padded, n_keys)
        around("prepare_chunks", padded, names, ("o", "do"), sizes)

        wide = self.precision == "fp16x3"

        def cut(tile):
            many = n_multiprocessors(self.device)
            chunk = chunk_of(tile, n_queries, n_keys, n_heads, self.is_causal, many)
            programs = chunk_programs(tile, chunk, n_queries, n_keys, self.is_causal) * n_heads
            return programs * (1 + wide), chunk

        if gluon_chunk:
            hopper.backward_chunks(self, gluon_chunk)
        else:
            self._split("k", "v")
            self._split("q", "do")
            sizes = (self.scale, self.heads, n_heads, self.group, n_queries, n_keys)
            names = ("q", "k", "v", "do"), ("rows", *sums), sizes
            name, needs = "backward_chunks", {"LOOPS": chunk_loops(BD, self.dtype), "EARLY": early}
            if wide:
                name, needs = "backward_wide", _NOTHING
            self._launch(name, n_keys, n_heads, *names, needs, cut, n_keys)

        sizes = (self.scale, self.heads, self.kv_heads, n_heads, n_queries, n_keys)
        # What is not wanted is finished where it was added up.
        pairs = zip(gradients, sums, strict=True)
        gradients = [x if self.tensors[x] is not None else added for x, added in pairs]
        around("finish_chunks", n_queries, (*sums, *gradients), gradients, sizes)

    def keep(self, switches):
        """Have the next call of this form run at once, unless the kernels were given copies."""
        for name, x in zip(self.names, self.inputs, strict=False):
            if self.tensors[name].data_ptr() != x.data_ptr():
                return
        results, own = self.made[: self.n_results], self.made[self.n_results :]
        plans.keep(switches, self.inputs, results, own, self.launches)

    def _split(self, *names):
        """Have the terms of two tensors of one shape made, which bf16x6 and fp16x3 multiply."""
        x, z = (self.tensors[name] for name in names)
        if self.precision not in SPLIT_ROWS or not x.numel():
            return
        kernel, dtype, n_rows, width = "split", torch.bfloat16, x.shape[2], 3 * self.head_dim
        options = {}
        if self.precision == "fp16x3":
            kernel, dtype, options = "split_wide", torch.float16, {"num_warps": 8}
            n_rows, width = terms_shape(n_rows, self.head_dim)
        for name in names:
            self.terms[name] = f"{name}_terms"
            terms = x.new_empty(*x.shape[:2], n_rows, width, dtype=dtype)
            self.add(**{self.terms[name]: terms})
        B = SPLIT_ROWS[self.precision]
        n_programs = 2 * -(-x.shape[2] // B) * math.prod(x.shape[:2])
        strides = (*x.stride()[:3], *z.stride()[:3])
        constants = {"d": self.head_dim, "BD": self._key("split")[2], "B": B}
        apart = (kernel, self.device, *strides, *constants.values())
        chosen = (*names, *(self.terms[name] for name in names))
        numbers = (*strides, *x.shape[1:3])
        self._run(_kernel(kernel), apart, n_programs, chosen, numbers, constants, options)

    def _key(self, name):
        """Where the table has this problem's tiles for a kernel."""
        family = "fp32" if self.dtype == "fp32" else "16bit"
        family = "fp16x3" if self.precision == "fp16x3" else family
        return name, family, max(16, 1 << (self.head_dim - 1).bit_length()), self.is_causal

    def _launch(
        self, name, length, n_heads, names, row_names, sizes, needs=_NOTHING, cut=None, keys=0
    ):
        """Run one kernel with the first tile of the table that fits this GPU, for ``keys``.

        ``cut(tile)`` says how many programs there are, if not one a tile, and what more they are to
        know.
        """
        if length == 0 or n_heads == 0:
            return
        key = self._key(name)
        names = [self.terms.get(name, name) for name in names]
        over_queries = name in ("forward", "backward_dq")

        def programs(tile):
            if cut:
                return cut(tile)
            return (-(-length // (tile.Bq if over_queries else tile.Bk)) * n_heads,)

        tiles = TILES[key]
        many = n_multiprocessors(self.device)
        if key in WHEN_FEW and programs(tiles[0])[0] < many:
            tiles = WHEN_FEW[key], *tiles
        for most, tile in WHEN_SHORT.get(key, {}).items():
            if self.n_keys <= most and programs(tile)[0] <= many:
                tiles = tile, *tiles
        tiles = *(t for least, t in WHEN_LONG.get(key[:3], {}).items() if keys >= least), *tiles
        strides = [stride for name in names for stride in self.tensors[name].stride()[:3]]
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
            n_programs, *more = programs(tile)
            numbers = (*strides, *sizes, *more)
            options = options_of(tile, self.precision)
            if name == "backward_chunks":
                options["launch_pdl"] = needs["EARLY"]
            chosen = (*names, *row_names)
            try:
                self._run(_kernel(name), apart, n_programs, chosen, numbers, constants, options)
            except _out_of_resources():
                _does_not_fit.add((key, tile, self.device))
                continue
            return
        raise UnsupportedError(
            f"flash_attention has no {name} tile for head_dim {self.head_dim} in {self.dtype} that "
            f"fits the shared memory of {self.device}"
        )

    def _run(self, kernel, apart, n_programs, names, numbers, constants, options):
        """Run a kernel on the tensors of ``names`` and remember how."""
        tensors = tuple(self.tensors[name] for name in names)
        known = launch(kernel, apart, n_programs, tensors, numbers, constants, options)
        places = tuple(self.names.index(name) for name in names)
        self.launches.append(known and Launch(known[0], n_programs, places, (*numbers, *known[1])))


_does_not_fit: set[tuple] = set()


# Triton is imported when a kernel is wanted: the rest of a2lib.attention works without it.
@functools.cache
def _kernel(name):
    from a2lib.attention import chunks, kernels, key_chunks, operands, terms, wide

    name = SPECIALISED[name][0] if name in SPECIALISED else f"{name}_kernel"
    modules = (operands, kernels, chunks, key_chunks, terms, wide)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


@functools.cache
def _out_of_resources():
    from triton.runtime.errors import OutOfResources

    return OutOfResources
