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

from a2lib.attention import dispatch
from a2lib.attention.forms import (
    Descriptor,
    Pass,
    Step,
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
    _run(key, {"q": q, "k": k, "v": v}, {"o": o, "lse": lse}, is_causal, scale)
    return o, lse


def backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Return dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    inputs = (do, q, k, v, o, lse)
    key = _key_of(("backward", is_causal, scale, *needs), inputs)
    results = _replay(key, inputs)
    if results is not None:
        return results
    needs_dq, needs_dk, needs_dv = needs
    gradients = {
        "dq": empty_output(q) if needs_dq else None,
        "dk": empty_output(k) if needs_dk else None,
        "dv": empty_output(v) if needs_dv else None,
    }
    tensors = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    _run(key, tensors, gradients, is_causal, scale)
    return list(gradients.values())


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


class _Launch(NamedTuple):
    """A compiled kernel bound to its grid, as PyTorch's compiler launches it.

    ``run(stream, *compiled, *addresses, *values)``, with those addresses of a pass that ``choose``
    takes, the first of them made descriptors by the functions in ``describe``.
    """

    run: Callable
    compiled: tuple
    choose: Callable
    describe: tuple[Callable, ...]
    values: tuple


class _Kept(NamedTuple):
    """A pass that ran.

    ``results`` are shapes, strides and dtypes of what it makes, with None for what is not wanted.
    So is ``scratch``, which the kernels alone see, with the bytes at which they see something: all
    is one block where it is small. ``gpu`` is the index of the device, of ``several`` or alone.
    """

    launches: tuple[_Launch, ...]
    results: tuple[tuple | None, ...]
    scratch: tuple[tuple[tuple, tuple[int, ...]], ...]
    gpu: int | None
    several: bool


# Emptied when a program of ever-changing shapes has filled it.
_kept: dict[tuple, _Kept] = {}
CAPACITY = 1024
# Up to here PyTorch's allocator gives out what is asked for; a larger block may have more in it.
BLOCK_BYTES = 2**20


def _key_of(switches: tuple, inputs: Sequence[Tensor]) -> tuple | None:
    """Return all that a pass over ``inputs`` depends on but their contents; None for what has no
    strides."""
    key = (
        dispatch.trial,
        dispatch.without,
        torch.are_deterministic_algorithms_enabled(),
        *switches,
    )
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
    launches, results, scratch, gpu, several = kept
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
    stream = None if gpu is None else _stream_of()(gpu)
    for run, compiled, choose, describe, values in launches:
        chosen = choose(addresses)
        if describe:
            pairs = zip(describe, chosen, strict=False)
            chosen = *[as_descriptor(x) for as_descriptor, x in pairs], *chosen[len(describe) :]
        run(stream, *compiled, *chosen, *values)
    return made


@functools.cache
def _stream_of():
    """Return the function that says a GPU's current stream; launches would ask one by one."""
    # What Triton's own launches ask: PyTorch's public way makes an object of each stream.
    from triton.runtime import driver

    return driver.active.get_current_stream


# A pass that runs for the first time.

# By device, the tiles of the table whose kernels need more shared memory than it has.
_struck: dict[torch.device, set] = {}


def _run(key, inputs: dict, results: dict, is_causal: bool, scale: float | None) -> None:
    """Fill ``results`` the long way, and keep what was launched."""
    tensors = inputs | results
    for name, x in tensors.items():
        if x is not None and name != "lse":
            tensors[name] = as_batched_heads(x)
    device = tensors["q"].device
    call = call_of(tensors, is_causal)
    scale = 1 / math.sqrt(call.head_dim) if scale is None else scale
    struck = _struck.setdefault(device, set())
    compiled = None
    while compiled is None:
        pass_ = Pass(tensors.copy(), call, scale, struck)
        steps = pass_.backward() if "do" in inputs else pass_.forward()
        with _current(device):
            compiled = _launch_steps(steps, pass_.tensors, struck)
    was_copied = any(tensors[name].data_ptr() != x.data_ptr() for name, x in inputs.items())
    if key is None or was_copied or not compiled or None in compiled:
        return
    # A gradient that is not wanted is twice among the names, the last time made as scratch.
    names = [*inputs, *results, *pass_.scratch]
    places = {name: place for place, name in enumerate(names)}
    launches = [_bind(*pair, places) for pair in zip(steps, compiled, strict=True)]
    if len(_kept) >= CAPACITY:
        _kept.clear()
    _kept[key] = _keep(launches, results.values(), pass_.scratch.values(), device)


def call_of(tensors: dict[str, Tensor | None], is_causal: bool) -> dispatch.Call:
    """Return what the choice of kernels for a pass depends on; ``tensors`` as ``Pass`` has them."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, n_queries, head_dim = q.shape
    moved = [tensors[name] for name in ("q", "k", "v", "do" if "do" in tensors else "o")]
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


def _launch_steps(steps: list[Step], tensors, struck: set) -> list | None:
    """Launch each step and return the compiled kernels, as ``compile_and_launch`` does; None where
    a tile does not fit the GPU, which is struck."""
    from triton.runtime.errors import OutOfResources

    compiled = []
    for step in steps:
        try:
            compiled.append(compile_and_launch(step, tensors))
        except OutOfResources:
            if step.tile is None:
                raise
            struck.add(step.tile)
            return None
    return compiled


def compile_and_launch(step: Step, tensors: dict[str, Tensor]):
    """Launch a step by Triton's own way, which compiles, and return the compiled kernel; None in
    the interpreter, and for tensors that are not aligned."""
    compiled = kernel_of(step.kernel)[(step.n_programs,)](
        *arguments_of(step, tensors), **step.constants, **step.options
    )
    aligned = all(tensors[name].data_ptr() % 16 == 0 for name in step.tensors)
    # The interpreter returns nothing.
    return compiled if aligned and hasattr(compiled, "packed_metadata") else None


def arguments_of(step: Step, tensors: dict[str, Tensor]) -> list:
    """Return a step's arguments but for its constants."""
    arguments = [tensors[name] for name in step.tensors]
    if step.descriptors:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        for place, (shape, strides, block, layout) in enumerate(step.descriptors):
            x = arguments[place]
            arguments[place] = TensorDescriptor(x, shape, strides, block, layout)
    return [*arguments, *step.numbers]


def kernel_of(name: str):
    """Return the Triton function that ``dispatch.KERNELS`` names."""
    # Triton is imported when a kernel is wanted: the rest of a2lib.attention works without it.
    module, function = dispatch.KERNELS[name]
    return getattr(importlib.import_module(f"a2lib.attention.{module}"), function)


def _current(device):
    """Make ``device`` the current one where it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _bind(step: Step, compiled, places: dict[str, int]) -> _Launch:
    """Return the launch of a step with addresses of a pass, by name at ``places``."""
    names = kernel_of(step.kernel).arg_names[len(step.tensors) + len(step.numbers) :]
    # Without Triton's hooks, of which ``compiled[grid](...)`` makes a dict at each launch.
    no_hooks = (None, None, None)
    return _Launch(
        run=functools.partial(compiled.run, step.n_programs, 1, 1),
        compiled=(compiled.function, compiled.packed_metadata, *no_hooks),
        choose=operator.itemgetter(*(places[name] for name in step.tensors)),
        describe=tuple(map(_address_descriptor, step.descriptors)),
        values=(*step.numbers, *(step.constants[name] for name in names)),
    )


def _keep(launches, results, scratch, device) -> _Kept:
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
    )


def _layout(x: Tensor):
    return tuple(x.shape), x.stride(), x.dtype


class _Address(int):
    """An address that answers a launch as the base of a descriptor does."""

    def data_ptr(self):
        return self


def _address_descriptor(descriptor: Descriptor) -> Callable:
    """Return a function that makes an address such a descriptor. What is the same at each call is
    of a class: to set it took the host longer than a launch."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    members = {
        "base": property(lambda address: address),
        "shape": descriptor.shape,
        "strides": descriptor.strides,
        "block_shape": descriptor.block,
        "layout": descriptor.layout,
        "padding": "zero",
    }
    kind = type("AddressDescriptor", (_Address, TensorDescriptor), members)
    return functools.partial(int.__new__, kind)
