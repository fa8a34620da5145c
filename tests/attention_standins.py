"""Stands in for the kernels, logged and not run, and for what chooses them."""

from typing import NamedTuple

from a2lib.attention import (
    chunks,
    dispatch,
    kernels,
    key_chunks,
    naive_masks,
    operands,
    passes,
    terms,
)

AROUND = (
    (kernels, "prepare_kernel"),
    (kernels, "finish_kernel"),
    (chunks, "prepare_chunks_kernel"),
    (chunks, "finish_chunks_kernel"),
    (key_chunks, "combine_kernel"),
    (operands, "split_kernel"),
    (terms, "split_wide_kernel"),
)
CACHED = ("forward_form", "backward_form", "tiles", "keys_per_chunk", "hopper_forward")


class Launch(NamedTuple):
    """A launch; of two kernels that are one with other constants, by the name of the table."""

    name: str
    n_programs: int
    args: tuple
    options: dict


class Kernel:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *args, **options: self.log.append(Launch(self.name, grid[0], args, options))


def choose(patch, **instead):
    """Replace functions of ``dispatch``; nothing that is worked out is kept."""
    for name in (*CACHED, "hopper_backward"):
        function = getattr(dispatch, name)
        patch.setattr(dispatch, name, getattr(function, "__wrapped__", function))
    for name, function in instead.items():
        patch.setattr(dispatch, name, function)


def choose_forms(patch, forward=None, backward=None):
    """Have every pass be of one form, a backward of one but two sweeps where it wants all."""
    choose(patch)
    if forward:
        patch.setattr(dispatch, "forward_form", lambda case: forward)
    if backward:
        whole = {"one_launch", "chunks", "hopper_chunks", "hopper"}

        def form(case):
            return backward if case.wants_all or backward not in whole else "two_sweeps"

        patch.setattr(dispatch, "backward_form", form)


def log_launches(patch, gpu=None):
    """Return the list of launches, which are not run; ``gpu`` says what GPU there is."""
    log = []
    for name in passes.KERNELS:
        patch.setitem(passes.KERNELS, name, Kernel(name, log))
    for module, name in AROUND:
        patch.setattr(module, name, Kernel(name.removesuffix("_kernel"), log))
    if gpu is not None:
        from a2lib.attention import hopper_backward, hopper_forward

        patch.setattr(passes, "gpu_of", lambda device: gpu)
        patch.setattr(hopper_forward, "forward_kernel", Kernel("hopper_forward", log))
        patch.setattr(hopper_backward, "backward_kernel", Kernel("hopper_backward", log))
    patch.setattr(naive_masks, "kernel", lambda whole, every: Kernel(f"{whole.name}, {every}", log))
    return log


def run(q, k, v, causal=True, scale=None, needs=(True, True, True), **options):
    """Both passes' tensors by name."""
    o, lse = passes.forward(q, k, v, causal, scale, **options)
    dq, dk, dv = passes.backward(o, q, k, v, o, lse, causal, scale, needs, **options)
    return dict(q=q, k=k, v=v, o=o, lse=lse, dq=dq, dk=dk, dv=dv)
