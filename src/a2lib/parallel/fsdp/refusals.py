"""Refuse what would be of this rank's rows alone, and look like any other: state dicts of an FSDP's
modules and of optimizers over its parameters, and PyTorch's norm of their gradients.

``gather_full_params`` has whole weights, ``save_sharded`` keeps a training and ``load_sharded``
goes on with it; ``clip_grad_norm_`` of the FSDP takes the norm over all ranks. An optimizer that
looks at whole matrices, or at all parameters at once, would be wrong without an error too: its step
is refused.
"""

import functools
import weakref

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from a2lib.parallel.agreement import parameters_of
from a2lib.parallel.fsdp.shards import Sharded

_shards: weakref.WeakSet[Sharded] = weakref.WeakSet()  # whose gradients have no norm of torch's

# By the names of their classes, whoever wrote them.
LOOK_AT_THE_WHOLE = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"}


def refuse_state_dicts(sharded: list[Sharded]) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of the modules raise RuntimeError."""
    modules = set()
    for p in sharded:
        for module, _ in p.places:
            modules.add(module)
    for module in modules:
        module.register_state_dict_pre_hook(_refuse_module)
        module.register_load_state_dict_pre_hook(_refuse_module)


def _refuse_module(module: nn.Module, *_: object) -> None:
    raise RuntimeError(
        f"a {type(module).__name__} in an FSDP has no state dict, since a rank has rows alone: "
        "gather_full_params() has whole weights, save_sharded and load_sharded keep them, and what "
        "is loaded whole is loaded before the module is wrapped"
    )


def refuse_norms_of(shards: list[Sharded]) -> None:
    """Have torch's norm of gradients raise RuntimeError for those of ``shards``.

    What is replaced is the function within ``clip_grad_norm_``, which it looks up at each call:
    callers may have the outer one by name, and PyTorch has no hook for it.
    """
    _shards.update(shards)
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _norm_of_whole_gradients


_norm = clip_grad._get_total_norm


@functools.wraps(_norm)
def _norm_of_whole_gradients(tensors, *args, **kwargs) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not torch.compiler.is_compiling():
        parts = {id(p.master.grad) for p in _shards if p.master.grad is not None}
        if not parts.isdisjoint(map(id, tensors)):
            raise RuntimeError(
                "torch.nn.utils.clip_grad_norm_ would take the norm of this rank's rows alone, "
                "another on each rank: call clip_grad_norm_ of the FSDP"
            )
    return _norm(tensors, *args, **kwargs)


class Optimizers:
    """Knows the optimizers that have parameters of ``sharded``."""

    def __init__(self, sharded: list[Sharded]) -> None:
        self._sharded = {p.master: p for p in sharded}
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def meet(self, optimizer: Optimizer) -> None:
        """Refuse the state dict of ``optimizer`` from now on, if it has parameters of these. Raises
        ValueError where it needs whole matrices, and where it was given a state of other rows."""
        if optimizer in self._met:
            return
        if self._sharded.keys().isdisjoint(parameters_of(optimizer.param_groups)):
            return
        for cls in type(optimizer).__mro__:
            if cls.__name__.lower() in LOOK_AT_THE_WHOLE:
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole matrices or at all parameters, and "
                    "FSDP's are rows: use an optimizer that works element by element, or DDP with "
                    "ShardedOptimizer"
                )
        self._check(optimizer)
        self._met.add(optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_optimizer)
        optimizer.register_load_state_dict_post_hook(self._check)

    def _check(self, optimizer: Optimizer) -> None:
        for master, p in self._sharded.items():
            check_rows(optimizer, p, optimizer.state.get(master, {}))


def _refuse_optimizer(optimizer: Optimizer) -> None:
    raise RuntimeError(
        f"this {type(optimizer).__name__} has no state dict, since a rank has its state of rows "
        "alone: save_sharded and load_sharded keep it"
    )


def check_rows(optimizer: Optimizer, p: Sharded, values: dict) -> None:
    """Raise ValueError for a state of a parameter that is not of this rank's rows of it."""
    for key, x in values.items():
        if isinstance(x, Tensor) and x.dim() and x.shape != p.master.shape:
            raise ValueError(
                f"{type(optimizer).__name__}'s {key} of {p.names[0]} is {tuple(x.shape)}, not "
                f"{tuple(p.master.shape)} as this rank's rows: load_sharded reads what save_sharded"
                " wrote, and what has no row for each row of its parameter cannot be kept"
            )
