"""Run the two passes on tensors that are there, and keep what was launched.

Which kernels a pass launches, on how many programs, with which numbers, follows from the shapes,
strides, dtypes and devices of its tensors and a few switches. To work that out, and Triton's own
look at every argument of ``kernel[grid](...)``, takes the host longer than a GPU needs for a short
sequence. So the first call of a kind goes the long way, and the next ones launch the same compiled
kernels, ``compiled[grid](...)``, with other addresses.

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
from a2lib.attention.forms import Pass, Step, is_addressable, is_hopper, n_multiprocessors
from a2lib.attention.shapes import as_batched_heads, check_inputs, empty_output
from a2lib.errors import UnsupportedError

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """Return o, laid out as ``empty_output`` says, and lse, ``q.shape[:-1]`` in fp32.

    ``scale`` is > 0, or None for ``1 / sqrt(d)``. Raises as ``flash_attention`` does.
    """
    inputs = (q, k, v)
    key = _key_of(("forward", is_causal, scale, _settings(q)), inputs)
    results = _replay(key, inputs)
    if results is not None:
        return results
    check_inputs(q, k, v)
    for x in inputs:
        check_runs(x)
    results = empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    _run(key, dict(q=q, k=k, v=v), dict(o=results[0], lse=results[1]), is_causal, scale)
    return results


def backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Return dq, dk, dv, laid out as ``empty_output`` says; None where ``needs`` is false."""
    inputs = (do, q, k, v, o, lse)
    fixed_order = torch.are_deterministic_algorithms_enabled()
    key = _key_of(("backward", is_causal, scale, _settings(q), fixed_order, *needs), inputs)
    results = _replay(key, inputs)
    if results is not None:
        return results
    dq, dk, dv = (
        empty_output(x) if needed else None for x, needed in zip((q, k, v), needs, strict=True)
    )
    tensors = dict(do=do, q=q, k=k, v=v, o=o, lse=lse)
    _run(key, tensors, dict(dq=dq, dk=dk, dv=dv), is_causal, scale)
    return [dq, dk, dv]


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


def _settings(q: Tensor) -> tuple[bool, bool] | None:
    """Return PyTorch's settings by which fp32 is multiplied, TF32 and a fixed order of additions;
    both passes read them. None for other dtypes."""
    # Asked before the inputs are checked.
    if getattr(q, "dtype", None) is torch.float32:
        return _allow_tf32(), torch.are_deterministic_algorithms_enabled()
    return None


def _allow_tf32() -> bool:
    """Return whether PyTorch's own fp32 products on a GPU may be TF32, by its newer or older
    setting."""
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":
        precision = torch.backends.fp32_precision
    return precision == "tf32"


# What was launched.


class _Launch(NamedTuple):
    """A compiled kernel bound to its grid, as PyTorch's compiler launches it, without Triton's
    hooks: ``run(stream, *head, *chosen, *rest)`` with what ``choose`` takes of a pass's addresses,
    the first of them made descriptors by ``describe``.
    """

    run: Callable
    head: tuple
    choose: Callable
    describe: tuple[Callable, ...]
    rest: tuple


class _Kept(NamedTuple):
    """A pass that ran.

    ``results`` and ``scratch``, which the kernels alone see, are shapes, strides and dtypes of what
    it makes, with None for what is not wanted. Small scratch is one ``block`` of so many bytes, in
    which it lies at ``offsets``. ``gpu`` is the index of the device, of ``several`` or alone.
    """

    launches: tuple[_Launch, ...]
    results: tuple[tuple | None, ...]
    scratch: tuple[tuple, ...]
    block: int
    offsets: tuple[int, ...]
    gpu: int | None
    several: bool


# Emptied when a program of ever-changing shapes has filled it.
_kept: dict[tuple, _Kept] = {}
CAPACITY = 1024
# Up to here PyTorch's allocator gives out what is asked for; a larger block may have more in it.
BLOCK_BYTES = 2**20
# By device, the tiles of the table whose kernels need more shared memory than it has.
_struck: dict[torch.device, set] = {}


def _key_of(switches: tuple, inputs: Sequence[Tensor]) -> tuple | None:
    """Return all that a pass over ``inputs`` depends on but their contents; None for what has no
    strides."""
    try:
        for x in inputs:
            switches += (x.shape, x.stride(), x.dtype, x.device)
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one
        return None
    return (dispatch.without, *switches)


def _replay(key: tuple | None, inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
    """Run a kept pass of this key and return what it makes; None where none was kept, the inputs
    are not aligned as its were, or a profiler of Triton's is to hear of each launch."""
    kept = _kept.get(key)
    if kept is None:
        return None
    hooks = _hooks()
    if _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook):
        return None
    launches, results, scratch, block, offsets, gpu, several = kept
    addresses = [x.data_ptr() for x in inputs]
    for address in addresses:
        if address & 15:
            return None
    if several and gpu != torch.cuda.current_device():
        with torch.cuda.device(gpu):
            return _replay(key, inputs)
    new = inputs[0].new_empty_strided
    filled = [form and new(form[0], form[1], dtype=form[2]) for form in results]
    for x in filled:
        addresses.append(0 if x is None else x.data_ptr())
    # Scratch is held until the last launch.
    if block:
        held = new((block,), (1,), dtype=torch.uint8)
        at = held.data_ptr()
        for offset in offsets:
            addresses.append(at + offset)
    elif scratch:
        held = [new(form[0], form[1], dtype=form[2]) for form in scratch]
        for x in held:
            addresses.append(x.data_ptr())
    stream = None if gpu is None else _stream_of()(gpu)
    for run, head, choose, describe, rest in launches:
        chosen = choose(addresses)
        if describe:
            pairs = zip(describe, chosen, strict=False)
            chosen = *[make(x) for make, x in pairs], *chosen[len(describe) :]
        run(stream, *head, *chosen, *rest)
    return filled


@functools.cache
def _stream_of():
    """Return the function that says a GPU's current stream; launches would ask one by one."""
    # What Triton's own launches ask: PyTorch's public way makes an object of each stream.
    from triton.runtime import driver

    return driver.active.get_current_stream


@functools.cache
def _hooks():
    """Return the object with the hooks that a profiler of Triton sets."""
    from triton import knobs

    return knobs.runtime


def _is_set(hook) -> bool:
    """Return whether a hook of Triton, a chain of calls or one call, has any."""
    return bool(getattr(hook, "calls", hook))


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
    launched = None
    while launched is None:
        pass_ = Pass(tensors.copy(), call, scale, struck)
        steps = pass_.backward() if "do" in inputs else pass_.forward()
        with _current(device):
            launched = _launch_steps(steps, pass_.tensors, struck)
    if key is None or not launched or None in launched:
        return
    if any(tensors[name].data_ptr() != x.data_ptr() for name, x in inputs.items()):
        return  # the kernels were given copies
    if len(_kept) >= CAPACITY:
        _kept.clear()
    # A gradient that is not wanted is twice among the names, the last time made as scratch.
    names = [*inputs, *results, *pass_.scratch]
    places = {name: place for place, name in enumerate(names)}
    launches = tuple(_bound(places, *pair) for pair in zip(steps, launched, strict=True))
    _kept[key] = _kept_pass(launches, results.values(), list(pass_.scratch.values()), device)


def call_of(tensors: dict[str, Tensor | None], is_causal: bool) -> dispatch.Call:
    """Return what the choice of kernels for a pass depends on; ``tensors`` as ``Pass`` has them."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, n_queries, head_dim = q.shape
    moved = [tensors[name] for name in ("q", "k", "v", "do" if "do" in tensors else "o")]
    tf32, _ = _settings(q) or (False, False)
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
        tf32=tf32,
    )


def _launch_steps(steps: list[Step], tensors, struck: set) -> list[tuple | None] | None:
    """Launch each step and return its compiled kernel and constants, None where it has none; None
    of all where a tile does not fit the GPU, which is struck."""
    from triton.runtime.errors import OutOfResources

    launched = []
    for step in steps:
        chosen = [tensors[name] for name in step.tensors]
        kernel = kernel_of(step.kernel)
        try:
            launched.append(_compile_and_run(kernel, step.n_programs, chosen, *step[3:7]))
        except OutOfResources:
            if step.tile is None:
                raise
            struck.add(step.tile)
            return None
    return launched


def _compile_and_run(kernel, n_programs, tensors, numbers, constants, options, forms=()):
    """Launch by Triton's own way, which compiles, and return the compiled kernel and ``constants``
    in its order; None in the interpreter, and for tensors that are not aligned."""
    arguments = (*described(tensors, forms), *numbers)
    compiled = kernel[(n_programs,)](*arguments, **constants, **options)
    if not hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing
        return None
    if not all(x.data_ptr() % 16 == 0 for x in tensors):
        return None
    return compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _bound(places: dict[str, int], step: Step, launched: tuple) -> _Launch:
    compiled, values = launched
    return _Launch(
        run=functools.partial(compiled.run, step.n_programs, 1, 1),
        head=(compiled.function, compiled.packed_metadata, None, None, None),
        choose=operator.itemgetter(*(places[name] for name in step.tensors)),
        describe=tuple(_descriptor_of(form) for form in step.forms),
        rest=(*step.numbers, *values),
    )


def _kept_pass(launches, results, scratch, device) -> _Kept:
    ends = [0]
    for x in scratch:  # as far apart as the allocator has them
        ends.append(ends[-1] + -(-x.numel() * x.element_size() // 512) * 512)
    in_block = len(scratch) > 1 and ends[-1] <= BLOCK_BYTES
    return _Kept(
        launches,
        results=tuple(x if x is None else _form(x) for x in results),
        scratch=tuple(_form(x) for x in scratch),
        block=ends[-1] if in_block else 0,
        offsets=tuple(ends[:-1]) if in_block else (),
        gpu=device.index if device.type == "cuda" else None,
        several=device.type == "cuda" and torch.cuda.device_count() > 1,
    )


def _form(x):
    return tuple(x.shape), x.stride(), x.dtype


def kernel_of(name: str):
    """Return the Triton function that ``dispatch.KERNELS`` names."""
    # Triton is imported when a kernel is wanted: the rest of a2lib.attention works without it.
    module, function = dispatch.KERNELS[name]
    return getattr(importlib.import_module(f"a2lib.attention.{module}"), function)


class _Address(int):
    """An address that answers a launch as the base of a descriptor does."""

    def data_ptr(self):
        return self


def _descriptor_of(form):
    """Return a function that makes an address a descriptor of this form. What a form says is of the
    class: to set it at each call took the host longer than a launch."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    members = {
        "base": property(lambda address: address),
        "shape": form.shape,
        "strides": form.strides,
        "block_shape": form.block,
        "layout": form.layout,
        "padding": "zero",
    }
    kind = type("AddressDescriptor", (_Address, TensorDescriptor), members)
    return functools.partial(int.__new__, kind)


def described(tensors, forms):
    """Return ``tensors``, the first of them as descriptors of ``forms``."""
    if not forms:
        return tensors
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptors = [
        TensorDescriptor(x, form.shape, form.strides, form.block, form.layout)
        for x, form in zip(tensors, forms, strict=False)
    ]
    return *descriptors, *tensors[len(descriptors) :]


def _current(device):
    """Make ``device`` the current one where it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# One kernel alone, by its caller's key.
_compiled: dict[tuple, tuple] = {}


def launch(kernel, key, n_programs, tensors, numbers, constants, options) -> None:
    """Run ``kernel`` on ``n_programs`` programs with ``(*tensors, *numbers)`` and ``constants``.

    ``key`` must tell apart all that Triton compiles apart: the kernel, the dtypes, the constants,
    the options, the device, and every number it may specialise on. Alignment is looked after here.
    """
    addresses = [x.data_ptr() for x in tensors]
    kept = _compiled.get(key)
    with _current(tensors[0].device):
        if kept is not None and not any(address & 15 for address in addresses):
            compiled, values = kept
            compiled[n_programs, 1, 1](*addresses, *numbers, *values)
            return
        kept = _compile_and_run(kernel, n_programs, tensors, numbers, constants, options)
    if kept is not None:
        if len(_compiled) >= CAPACITY:
            _compiled.clear()
        _compiled[key] = kept
