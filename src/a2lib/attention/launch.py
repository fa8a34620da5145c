"""Launching a Triton kernel that is compiled already, without Triton's handling of its arguments.

For each call ``kernel[grid](...)`` looks at every argument to find the compiled kernel that fits:
for kernels with thirty arguments that takes longer than attention over a short sequence. Here the
caller says what the choice depends on, and the compiled kernel is launched directly.
"""

import contextlib
import functools
from typing import NamedTuple

import torch

# What one process has launched, by the caller's key; emptied when a program of ever-changing
# shapes has filled it.
_compiled: dict[tuple, tuple] = {}
CAPACITY = 4096


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
    aligned = is_aligned(tensors)
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


def is_aligned(tensors):
    """Whether all start where Triton compiles for: at a multiple of 16 bytes."""
    return not any(x.data_ptr() & 15 for x in tensors)


def current(device):
    """Make ``device`` the current one where it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def n_multiprocessors(device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
