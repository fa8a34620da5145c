"""Run the two passes on tensors that are there, and keep what was launched.

Which kernels a pass launches, on how many programs, with which numbers, follows from the shapes,
strides, dtypes and devices of its tensors and a few switches. To work that out, and Triton's own
look at every argument of ``kernel[grid](...)``, takes the host longer than a GPU needs for a short
sequence. So the first call of a kind goes the long way (``_run``), and the next ones launch the
same compiled kernels with other addresses (``_replay``).

Nothing here knows of autograd, torch.compile, or anybody who looks on: ``operators.py`` does.
"""

import contextlib
import functools
import importlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from a2lib.attention import dispatch, tiles
from a2lib.attention.forms import (
    Pass,
    Step,
    Tensors,
    is_addressable,
    is_hopper,
    n_multiprocessors,
)
from a2lib.attention.shapes import as_batched_heads, check_inputs, empty_output
from a2lib.errors import UnsupportedError

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """Return o, laid out as ``empty_output`` says, and lse, ``q.shape[:-1]`` in fp32.

    ``scale`` is > 0, or None for ``1 / sqrt(d)``. Raises as ``flash_attention`` does.
    """
    inputs = (q, k, v)
    key = _key_of(("forward", is_causal, scale), inputs)
    results = _replay(key, inputs)
    if results is not None:
        return results
    check_inputs(q, k, v)
    for x in inputs:
        check_runs(x)
    o, lse = empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    _run(key, inputs, (o, lse), is_causal, scale)
    return o, lse


def backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Return dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    inputs = (q, k, v, o, lse, do)
    key = _key_of(("backward", is_causal, scale, *needs), inputs)
    results = _replay(key, inputs)
    if results is not None:
        return results
    gradients = [
        empty_output(x) if needed else None for x, needed in zip((q, k, v), needs, strict=True)
    ]
    _run(key, inputs, gradients, is_causal, scale)
    return gradients


def check_kind(q: Tensor) -> None:
    """Raise UnsupportedError, in one line, where the kernels run no tensors like q anywhere."""
    if q.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UnsupportedError(f"flash_attention runs {names}; got {q.dtype}")
    if not 1 <= q.shape[-1] <= dispatch.HEAD_DIM_MAX:
        raise UnsupportedError(
            f"flash_attention runs head_dim 1 to {dispatch.HEAD_DIM_MAX}; got {q.shape[-1]}"
        )


def check_runs(q: Tensor) -> None:
    """Raise UnsupportedError, in one line, where the kernels cannot run tensors like q here."""
    check_kind(q)
    if q.layout is not torch.strided:
        raise UnsupportedError(f"flash_attention runs dense tensors; got {q.layout}")
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


# A pass that ran before.


class _Kept(NamedTuple):
    """A pass that ran.

    ``launches`` are as ``_bind`` makes them, of the addresses of inputs, results and scratch.
    ``results`` are shapes, strides and dtypes of what it makes, with None for what is not wanted.
    So is ``scratch``, which the kernels alone see, with the bytes at which they see something: all
    is one block where it is small. ``gpu`` is the index of the device, of ``several`` or alone, and
    ``stream_of`` returns its current stream.
    """

    launches: tuple[tuple, ...]
    results: tuple[tuple | None, ...]
    scratch: tuple[tuple[tuple, tuple[int, ...]], ...]
    gpu: int | None
    several: bool
    stream_of: Callable[[int], int] | None


# Emptied when a program of ever-changing shapes has filled it.
_kept: dict[tuple, _Kept] = {}
CAPACITY = 1024
# Up to here PyTorch's allocator gives out what is asked for; a larger block may have more in it.
BLOCK_BYTES = 2**20


def _key_of(switches: tuple, inputs: Sequence[Tensor]) -> tuple | None:
    """Return all that a pass over ``inputs`` depends on but their contents; None for what has no
    strides."""
    key = (dispatch.without, torch.are_deterministic_algorithms_enabled(), *switches)
    try:
        for x in inputs:
            key += (x.shape, x.stride(), x.dtype, x.device)
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one
        return None
    return key


def _replay(key: tuple | None, inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
    """Run a kept pass of this key and return what it makes; None where none was kept, or the inputs
    are not aligned as its were."""
    kept = _kept.get(key)
    if kept is None:
        return None
    launches, results, scratch, gpu, several, stream_of = kept
    addresses = [x.data_ptr() for x in inputs]
    for address in addresses:
        if address % 16:
            return None
    if several and gpu != torch.cuda.current_device():
        with torch.cuda.device(gpu):
            return _replay(key, inputs)
    new = inputs[0].new_empty_strided
    made = []
    for layout in results:
        if layout is None:
            made.append(None)
            addresses.append(0)
        else:
            x = new(layout[0], layout[1], dtype=layout[2])
            made.append(x)
            addresses.append(x.data_ptr())
    held = []  # until the last launch
    for layout, offsets in scratch:
        x = new(layout[0], layout[1], dtype=layout[2])
        held.append(x)
        start = x.data_ptr()
        for offset in offsets:
            addresses.append(start + offset)
    stream = None if stream_of is None else stream_of(gpu)
    for run, compiled, choose, describe, values in launches:
        chosen = choose(addresses)
        if describe:
            pairs = zip(describe, chosen, strict=False)
            chosen = *[as_descriptor(x) for as_descriptor, x in pairs], *chosen[len(describe) :]
        run(stream, *compiled, *chosen, *values)
    return made


# A pass that runs for the first time.


def _run(key, inputs, results, is_causal: bool, scale: float | None) -> None:
    """Fill ``results`` the long way, and keep what was launched."""
    tensors = Tensors(*inputs, *results)
    seen = Tensors(*[x if x is None else as_batched_heads(x) for x in tensors])
    seen = seen._replace(lse=tensors.lse)
    device = seen.q.device
    call = call_of(seen, is_causal)
    scale = 1 / math.sqrt(call.head_dim) if scale is None else scale
    compiled = None
    while compiled is None:
        pass_ = Pass(seen, call, scale)
        steps = pass_.forward() if seen.do is None else pass_.backward()
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            compiled = _launch_steps(steps)
    was_copied = any(x.data_ptr() != y.data_ptr() for x, y in zip(inputs, seen, strict=False))
    if key is None or was_copied or not compiled or None in compiled:
        return
    # By object, of which ``seen`` has one for each argument, also where one tensor is given twice.
    arguments = [*seen[: len(inputs) + len(results)], *pass_.scratch]
    places = {id(x): place for place, x in enumerate(arguments)}
    launches = [_bind(*pair, places) for pair in zip(steps, compiled, strict=True)]
    if len(_kept) >= CAPACITY:
        _kept.clear()
    _kept[key] = _keep(launches, results, pass_.scratch, device)


def call_of(tensors: Tensors, is_causal: bool) -> dispatch.Call:
    """Return what the choice of kernels for a pass depends on."""
    q, k, v, o, _, do, *_ = tensors
    batch, heads, n_queries, head_dim = q.shape
    moved = (q, k, v, o if do is None else do)
    return dispatch.Call(
        dtype=DTYPES[q.dtype],
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        n_queries=n_queries,
        n_keys=k.shape[2],
        head_dim=head_dim,
        causal=is_causal,
        multiprocessors=n_multiprocessors(q.device),
        hopper=is_hopper(q.device) and all(map(is_addressable, moved)),
        fixed_order=torch.are_deterministic_algorithms_enabled(),
    )


def _launch_steps(steps: list[Step]) -> list | None:
    """Launch each step and return the compiled kernels, as ``compile_and_launch`` does; None where
    a tile does not fit the GPU, which is struck."""
    from triton.runtime.errors import OutOfResources

    compiled = []
    for step in steps:
        try:
            compiled.append(compile_and_launch(step))
        except OutOfResources:
            if step.tile is None:
                raise
            tiles.struck.add(step.tile)
            return None
    return compiled


def compile_and_launch(step: Step):
    """Launch a step by Triton's own way, which compiles, and return the compiled kernel; None in
    the interpreter, and for tensors that are not aligned."""
    arguments = (*step.descriptors, *step.tensors, *step.numbers)
    compiled = kernel_of(step.kernel)[(step.n_programs,)](*arguments, **step.options)
    aligned = all(x.data_ptr() % 16 == 0 for x in step.tensors)
    # The interpreter returns nothing.
    return compiled if aligned and hasattr(compiled, "packed_metadata") else None


def kernel_of(name: str):
    """Return the Triton function that ``dispatch.KERNELS`` names."""
    # Triton is imported when a kernel is wanted: the rest of a2lib.attention works without it.
    module, function = dispatch.KERNELS[name]
    return getattr(importlib.import_module(f"a2lib.attention.{module}"), function)


def _bind(step: Step, compiled, places: dict[int, int]) -> tuple:
    """Return (run, compiled, choose, describe, values): ``run(stream, *compiled, *addresses,
    *values)`` launches a step, with those addresses of a pass that ``choose`` takes, by tensor at
    ``places``, the first of them made descriptors by the functions in ``describe``."""
    tensors = [*(x.base for x in step.descriptors), *step.tensors]
    names = kernel_of(step.kernel).arg_names[len(tensors) + len(step.numbers) :]
    # As PyTorch's compiler launches a kernel: without Triton's hooks, of which
    # ``compiled[grid](...)`` makes a dict at each launch.
    return (
        functools.partial(compiled.run, step.n_programs, 1, 1),
        (compiled.function, compiled.packed_metadata, None, None, None),
        operator.itemgetter(*(places[id(x)] for x in tensors)),
        tuple(map(_address_descriptor, step.descriptors)),
        (*step.numbers, *map(step.options.get, names)),
    )


def _keep(launches, results, scratch: list[Tensor], device) -> _Kept:
    stream_of = None
    if device.type == "cuda":
        # Asked once for all launches. PyTorch's public way makes an object of each stream.
        from triton.runtime import driver

        stream_of = driver.active.get_current_stream
    offsets, end = [], 0
    for x in scratch:  # as far apart as the allocator has them
        offsets.append(end)
        end += dispatch.ceil_div(x.nbytes, 512) * 512
    if offsets and end <= BLOCK_BYTES:
        block = (end,), (1,), torch.uint8
        scratch_layouts = [(block, tuple(offsets))]
    else:
        scratch_layouts = [(_layout(x), (0,)) for x in scratch]
    return _Kept(
        launches=tuple(launches),
        results=tuple(None if x is None else _layout(x) for x in results),
        scratch=tuple(scratch_layouts),
        gpu=device.index if device.type == "cuda" else None,
        several=device.type == "cuda" and torch.cuda.device_count() > 1,
        stream_of=stream_of,
    )


def _layout(x: Tensor):
    return tuple(x.shape), x.stride(), x.dtype


class _Address(int):
    """An address that answers a launch as the base of a descriptor does."""

    def data_ptr(self):
        return self


def _address_descriptor(descriptor) -> Callable:
    """Return a function that makes an address such a descriptor. What is the same at each call is
    of a class: to set it took the host longer than a launch."""
    members = {
        "base": property(lambda address: address),
        "shape": descriptor.shape,
        "strides": descriptor.strides,
        "block_shape": descriptor.block_shape,
        "layout": descriptor.layout,
        "padding": descriptor.padding,
    }
    kind = type("AddressDescriptor", (_Address, type(descriptor)), members)
    return functools.partial(int.__new__, kind)
