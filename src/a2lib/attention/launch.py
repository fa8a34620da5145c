"""Launching a Triton kernel that is compiled already, without Triton's handling of its arguments.

For each call ``kernel[grid](...)`` looks at every argument to find the compiled kernel that fits:
for kernels with thirty arguments that takes longer than attention over a short sequence. Here the
caller says what the choice depends on, and the compiled kernel is launched directly.
"""

import contextlib
import functools
import inspect
import operator
from typing import NamedTuple

import torch

# What one process has launched, by the caller's key; emptied when a program of ever-changing
# shapes has filled it.
_compiled: dict[tuple, tuple] = {}
CAPACITY = 4096
# How many addresses of one argument of a launch have their map kept; emptied when full.
MAPS = 128
_UNCHANGED = contextlib.nullcontext()


class Form(NamedTuple):
    """How a kernel of Gluon sees a tensor: as blocks that the copy engine moves.

    ``shape`` and ``strides`` in elements, the block's shape, and its layout in shared memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: object


def launch(kernel, key, n_programs, tensors, numbers, constants, options, forms=()):
    """Run ``kernel`` on ``n_programs`` programs with ``(*tensors, *numbers)`` and ``constants``.

    The first of ``tensors`` go to the kernel as descriptors, in ``forms`` (a ``Form`` each).

    Returns what was launched, compiled, with the constants in the kernel's order; None where that
    is not kept: in the interpreter, and for tensors that are not aligned.

    ``key`` must tell apart all that Triton compiles apart: the kernel, the dtypes, the constants,
    the options, the device, and every number it may specialise on (strides, and sizes that are not
    ``do_not_specialize``). Alignment of the tensors is looked after here.
    """
    device = tensors[0].device
    aligned = is_aligned([x.data_ptr() for x in tensors])
    known = _compiled.get(key) if aligned else None
    with current(device):
        if known is not None:
            compiled, values = known
            compiled[n_programs, 1, 1](*described(tensors, forms), *numbers, *values)
            return known
        compiled = kernel[(n_programs,)](
            *described(tensors, forms), *numbers, **constants, **options
        )
    # The interpreter returns nothing.
    if not aligned or not hasattr(compiled, "packed_metadata"):
        return None
    if len(_compiled) >= CAPACITY:
        _compiled.clear()
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    known = _compiled[key] = compiled, tuple(constants[name] for name in names)
    return known


def described(tensors, forms):
    """``tensors``, the first of them as descriptors of ``forms``."""
    if not forms:
        return tensors
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    made = []
    for x, form in zip(tensors, forms, strict=False):
        # Without the class's own checks, which take the host as long as a launch.
        descriptor = object.__new__(TensorDescriptor)
        descriptor.base, descriptor.padding = x, "zero"
        descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.layout = form
        made.append(descriptor)
    return *made, *tensors[len(made) :]


def shortcut_of(compiled, n_programs, places, rest, forms):
    """``run(addresses, stream)``: ``compiled[n_programs, 1, 1]`` of what lies at ``places`` among
    the addresses, the first of it in ``forms``, and of ``rest``, beneath Triton's own launch.

    That asks each tensor and the driver for an address and fills a map for the copy engine from
    each descriptor, for each call anew. A map says no more than an address and a form, nobody
    writes into it, and a launch copies it: one that was made is right for whatever lies there.

    None but for Triton 3.6, whose launcher takes the arguments as they stand here.
    """
    try:
        from triton.backends.nvidia import driver

        known = driver._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
        launcher, fill = compiled.run, driver.make_tensordesc_arg
        low, metas = launcher.launch, compiled.metadata.tensordesc_meta if forms else ()
        if forms:
            low = inspect.getclosurevars(low).nonlocals["launcher"]
        scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        head = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
        # No scratch, and what the kernel is; no metadata for hooks, and no hooks.
        head = (*head, None, None, compiled.packed_metadata, None, None, None)
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    if not known or scratch or len(metas) != len(forms) or None in metas:
        return None
    seen = [(*each, {}) for each in zip(places, forms, metas, strict=False)]
    chosen = _at(places[len(forms) :])

    def run(addresses, stream):
        low(n_programs, 1, 1, stream, *head, *chosen(addresses), *rest)

    def run_with_maps(addresses, stream):
        args = []
        for place, form, meta, maps in seen:
            address = addresses[place]
            expanded = maps.get(address)
            if expanded is None:
                if len(maps) >= MAPS:
                    maps.clear()
                expanded = maps[address] = fill(*described([_Base(address)], [form]), meta)
            args += expanded
        low(n_programs, 1, 1, stream, *head, *args, *chosen(addresses), *rest)

    return run_with_maps if forms else run


class _Base(int):
    """An address, as Triton asks a tensor for it."""

    def data_ptr(self):
        return self


def _at(places):
    """``chosen(x)``: what x, a list, has at ``places``."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda x: [x[place] for place in places]


def stream_of(gpu):
    """The address of the GPU's current stream, for a shortcut; None where someone, a profiler say,
    has asked Triton to be told of each launch."""
    runtime, stream_at = _triton()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    return stream_at(gpu)


@functools.cache
def _triton():
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver.active.get_current_stream


def is_aligned(addresses):
    """Whether all are where Triton compiles for: at a multiple of 16 bytes."""
    for address in addresses:
        if address & 15:
            return False
    return True


def current(device):
    """Make ``device`` the current one where it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _UNCHANGED
    return torch.cuda.device(device)


@functools.cache
def n_multiprocessors(device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def launches_early(device) -> bool:
    """Whether a kernel can be launched while the one before it runs (``griddepcontrol``)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
