"""Launching a Triton kernel that is compiled already, without Triton's handling of its arguments.

For each call ``kernel[grid](...)`` looks at every argument to find the compiled kernel that fits:
for kernels with thirty arguments that takes longer than attention over a short sequence. Here the
caller says what the choice depends on, and the compiled kernel is launched directly.
"""

import contextlib

import torch

# What one process has launched, by the caller's key; emptied when a program of ever-changing
# shapes has filled it.
_compiled: dict[tuple, tuple] = {}
CAPACITY = 4096


def launch(kernel, key, n_programs, tensors, numbers, constants, options):
    """Run ``kernel`` on ``n_programs`` programs with ``(*tensors, *numbers)`` and ``constants``.

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
            compiled[n_programs, 1, 1](*tensors, *numbers, *values)
            return known
        compiled = kernel[(n_programs,)](*tensors, *numbers, **constants, **options)
    # The interpreter returns nothing.
    if not aligned or not hasattr(compiled, "packed_metadata"):
        return None
    if len(_compiled) >= CAPACITY:
        _compiled.clear()
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    known = _compiled[key] = compiled, tuple(constants[name] for name in names)
    return known


def is_aligned(tensors):
    """Whether all start where Triton compiles for: at a multiple of 16 bytes."""
    return not any(x.data_ptr() & 15 for x in tensors)


def current(device):
    """Make ``device`` the current one where it is a GPU and is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
