"""Update one parameter by AdamW: by one kernel, or by PyTorch's operators."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tensors(NamedTuple):
    """A parameter with what its step reads and writes."""

    weight: Tensor
    grad: Tensor
    master: Tensor  # which may be the weight itself
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # the steps before


class Numbers(NamedTuple):
    """The numbers of a step, alike for all parameters of a group."""

    lr: float
    rest1: float  # 1 less beta1
    rest2: float
    log1: float  # the logarithm of beta1
    log2: float
    eps: float
    decay: float  # lr times weight decay


def update(x: Tensors, numbers: Numbers) -> None:
    """Take one parameter's step in place, as ``update_plain``, the slow twin, does.

    The Triton kernel does it on a GPU if all tensors are contiguous, else PyTorch's operators.
    """
    if _by_kernel(x.weight) and x.master.is_contiguous() and x.exp_avg.is_contiguous():
        _by_triton(x, numbers)
    else:
        update_plain(x, numbers)


def update_plain(x: Tensors, numbers: Numbers) -> None:
    """Take one parameter's step in place, by PyTorch's operators. The count of steps stays."""
    weight, grad, master, exp_avg, exp_avg_sq, step = x
    grad = grad.float()
    count = step.double() + 1
    first = 1 - (count * numbers.log1).exp()
    second = 1 - (count * numbers.log2).exp()
    exp_avg.lerp_(grad, numbers.rest1)
    exp_avg_sq.lerp_(grad * grad, numbers.rest2)
    root = (exp_avg_sq.sqrt() / second.sqrt().float()).add_(numbers.eps)
    rate = (numbers.lr / first).float()
    master.mul_(1 - numbers.decay).sub_(rate * exp_avg / root)
    if master is not weight:
        weight.copy_(master)


def _by_kernel(p: Tensor) -> bool:
    if not p.is_contiguous() or p.numel() == 0:
        return False
    try:
        from triton import knobs
    except ImportError:
        return False
    return p.is_cuda or bool(knobs.runtime.interpret)


# Compiled kernels, by all that Triton compiles apart but how addresses are aligned. Triton's own
# look at each argument takes the host longer than a launch.
_compiled: dict[tuple, object] = {}


def _by_triton(x: Tensors, numbers: Numbers) -> None:
    from a2lib.optim.kernels import BLOCK, OPTIONS, adamw

    weight, grad, master, *rest = x
    tensors = (weight, grad.contiguous(), master, *rest)
    n, has_master = weight.numel(), master is not weight
    sizes = (n == 1, n % 16 == 0, n >= 2**31)
    key = (weight.dtype, grad.dtype, has_master, weight.device, *sizes)
    # Triton compiles apart for a whole number, which the key does not tell.
    arguments = (*map(float, numbers), n)
    constants = {"HAS_MASTER": has_master, "BLOCK": BLOCK}
    grid = (-(-n // BLOCK), 1, 1)
    addresses = list(map(Tensor.data_ptr, tensors))
    aligned = all(address % 16 == 0 for address in addresses)
    compiled = _compiled.get(key) if aligned else None
    with torch.cuda.device_of(weight):
        if compiled is not None:
            compiled[grid](*addresses, *arguments, *constants.values())
            return
        compiled = adamw[grid](*tensors, *arguments, **constants, **OPTIONS)
    if aligned and compiled is not None:  # the interpreter returns nothing
        _compiled[key] = compiled
