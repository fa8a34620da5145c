"""What ran before runs again without being worked out again.

    made = run(switches, (q, k, v))     # None: not known, go the long way and call keep()

Which kernels a pass launches, on how many programs, with which numbers, follows from the shapes,
strides, dtypes and devices of its tensors and a few switches. Checking and finding all that takes
the host longer than a GPU needs for a short sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from a2lib.attention.launch import described, is_aligned, shortcut_of, stream_of


class Launch(NamedTuple):
    """A kernel that is compiled; ``tensors`` are places among a pass's inputs and what it makes,
    ``rest`` its other arguments, ``forms`` those of the first tensors (``launch.Form``)."""

    compiled: object
    n_programs: int
    tensors: tuple[int, ...]
    rest: tuple
    forms: tuple = ()


class _Plan(NamedTuple):
    """``shortcuts`` are those of ``launches``; none where one has none. ``empty`` makes what
    ``results`` and ``own``, which is made for the kernels alone, have the shape, strides and dtype
    of; with shortcuts what ``block`` has, in which ``own`` lies at ``offsets``. ``gpu`` is the
    index of the device, None for another than a GPU. ``are_like`` is empty, or has what says
    whether tensors are like those that ran."""

    launches: tuple[Launch, ...]
    shortcuts: tuple[Callable, ...]
    empty: Callable
    results: tuple[tuple | None, ...]
    own: tuple[tuple, ...]
    block: tuple | None
    offsets: tuple[int, ...]
    gpu: int | None
    are_like: list[Callable]


# By ``key_of``, and by the switches alone the one that ran last: whether it is that one PyTorch's
# guards say in one call, where a key takes one for each shape, stride, dtype and device. Emptied
# when a program of ever-changing shapes has filled it.
_plans: dict[tuple, _Plan] = {}
CAPACITY = 1024
# What a pass makes for its kernels alone is one block up to here, where PyTorch's allocator gives
# out what is asked for; a larger one may have more in it.
BLOCK_BYTES = 2**20


def key_of(inputs: Sequence[Tensor], switches: tuple) -> tuple | None:
    """All that a pass over ``inputs`` depends on but their contents; None for what is no tensor
    with strides."""
    for x in inputs:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return None
        switches += (x.shape, x.stride(), x.dtype, x.device)
    return switches


def _find(switches, inputs):
    """The plan that was kept for what is like ``inputs``, or None."""
    latest = _plans.get(switches)
    if latest is not None and latest.are_like[0](*inputs):
        return latest
    plan = _plans.get(key_of(inputs, switches))
    if plan is not None and _guards() is not None:
        # The latest itself: of tensors that want no gradient, where its were to have one, say.
        if plan is latest or not plan.are_like:
            plan.are_like[:] = (_are_like(inputs),)
        _plans[switches] = plan
    return plan


@functools.cache
def _guards():
    of = getattr(torch._C, "_dynamo", None)
    return getattr(of and of.guards, "TensorGuards", None)


def _are_like(inputs):
    sizes, strides = ([list(x.shape) for x in inputs], [list(x.stride()) for x in inputs])
    return _guards()(*inputs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def run(switches: tuple, inputs: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
    """What the pass makes, if one with these switches was kept for inputs like these and they are
    aligned as those were."""
    plan = _find(switches, inputs)
    if plan is None:
        return None
    launches, shortcuts, empty, forms, own, block, offsets, gpu, _ = plan
    if gpu is not None and gpu != torch._C._cuda_getDevice():
        with torch.cuda.device(gpu):
            return run(switches, inputs)
    addresses = [x.data_ptr() for x in inputs]
    if not is_aligned(addresses):
        return None
    results = [form and empty(*form) for form in forms]
    stream = stream_of(gpu) if shortcuts else None
    if stream is None:
        made = *inputs, *results, *(empty(*form) for form in own)
        for launch in launches:
            chosen = described([made[i] for i in launch.tensors], launch.forms)
            launch.compiled[launch.n_programs, 1, 1](*chosen, *launch.rest)
        return results
    for x in results:
        addresses.append(x is not None and x.data_ptr())
    # What lies in `scratch` is held until the last launch.
    if block:
        scratch = empty(*block)
        at = scratch.data_ptr()
        for offset in offsets:
            addresses.append(at + offset)
    elif own:
        scratch = [empty(*form) for form in own]
        for x in scratch:
            addresses.append(x.data_ptr())
    for shortcut in shortcuts:
        shortcut(addresses, stream)
    return results


def keep(
    switches: tuple,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor | None],
    own: Sequence[Tensor],
    launches: Sequence[Launch | None],
) -> None:
    """Remember a pass that has run. Not where a launch was not kept (None), there was none, or the
    inputs are not aligned."""
    key = key_of(inputs, switches)
    if key is None or not launches or None in launches:
        return
    if not is_aligned([x.data_ptr() for x in inputs]):
        return
    if len(_plans) >= CAPACITY:
        _plans.clear()
    shortcuts = tuple(shortcut_of(*launch) for launch in launches)
    device = inputs[0].device
    _plans[key] = _Plan(
        tuple(launches),
        () if None in shortcuts else shortcuts,
        _empty_on(device),
        tuple(x if x is None else _form(x) for x in results),
        tuple(_form(x) for x in own),
        *_block(own),
        device.index if device.type == "cuda" else None,
        [],
    )


def _form(x):
    return tuple(x.shape), x.stride(), x.dtype


def _block(own):
    """One block that holds dense tensors, and where in it each begins."""
    ends = [0]
    for x in own:
        # As far apart as the allocator has them.
        ends.append(ends[-1] + -(-x.numel() * x.element_size() // 512) * 512)
    if len(own) < 2 or ends[-1] > BLOCK_BYTES:
        return None, ()
    return ((ends[-1],), (1,), torch.uint8), tuple(ends[:-1])


def _empty_on(device):
    """``empty(shape, strides, dtype)``, called where ``device`` is the current one."""
    # What torch.compile's code calls: past the dispatcher, in less than half of the host's time.
    of = getattr(torch._C, "_dynamo", None)
    quick = getattr(of and of.guards, f"_empty_strided_{device.type}", None)
    return quick or functools.partial(_empty_strided, device)


def _empty_strided(device, shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
