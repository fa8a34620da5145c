"""What ran before runs again without being worked out again.

    key = key_of((q, k, v), switches)
    made = run(key, (q, k, v))          # None: not known, go the long way and call keep()

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

from a2lib.attention.launch import current, described, is_aligned, shortcut_of, stream_of


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
    ``made`` has the shape, strides and dtype of."""

    launches: tuple[Launch, ...]
    shortcuts: tuple[Callable, ...]
    empty: Callable
    made: tuple[tuple | None, ...]


# Emptied when a program of ever-changing shapes has filled it.
_plans: dict[tuple, _Plan] = {}
CAPACITY = 1024


def key_of(inputs: Sequence[Tensor], switches: tuple) -> tuple | None:
    """All that a pass over ``inputs`` depends on but their contents; None for what is no tensor
    with strides."""
    key = [*switches]
    for x in inputs:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return None
        key += x.shape, x.stride(), x.dtype, x.device
    return tuple(key)


def run(key: tuple | None, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...] | None:
    """What the pass makes, if one with this key was kept and ``inputs`` are aligned as its were."""
    plan = _plans.get(key)
    if plan is None:
        return None
    addresses = [x.data_ptr() for x in inputs]
    if not is_aligned(addresses):
        return None
    made, device = [], inputs[0].device
    with current(device):
        for form in plan.made:
            x = form and plan.empty(*form)
            made.append(x)
            addresses.append(x is not None and x.data_ptr())
        tensors = (*inputs, *made)
        stream = stream_of(device) if plan.shortcuts else None
        if stream is not None:
            for shortcut in plan.shortcuts:
                shortcut(tensors, addresses, stream)
        else:
            for launch in plan.launches:
                chosen = described([tensors[i] for i in launch.tensors], launch.forms)
                launch.compiled[launch.n_programs, 1, 1](*chosen, *launch.rest)
    return tuple(made)


def keep(
    key: tuple | None,
    inputs: Sequence[Tensor],
    made: Sequence[Tensor | None],
    launches: Sequence[Launch | None],
) -> None:
    """Remember a pass that has run. Not where a launch was not kept (None), there was none, or the
    inputs are not aligned."""
    if key is None or not launches or None in launches:
        return
    if not is_aligned([x.data_ptr() for x in inputs]):
        return
    if len(_plans) >= CAPACITY:
        _plans.clear()
    forms = tuple(None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in made)
    empty = _empty_on(inputs[0].device)
    shortcuts = tuple(shortcut_of(*launch) for launch in launches)
    _plans[key] = _Plan(tuple(launches), () if None in shortcuts else shortcuts, empty, forms)


def _empty_on(device):
    """``empty(shape, strides, dtype)``, called where ``device`` is the current one."""
    # What torch.compile's code calls: past the dispatcher, in less than half of the host's time.
    of = getattr(torch._C, "_dynamo", None)
    quick = getattr(of and of.guards, f"_empty_strided_{device.type}", None)
    return quick or functools.partial(_empty_strided, device)


def _empty_strided(device, shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
