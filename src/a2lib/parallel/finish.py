"""A step without ``finish_gradient_synchronization`` is refused.

What backward writes into ``.grad`` is this rank's own, and weights that then differ between ranks
look like any others. PyTorch's hooks before and after every optimizer's step ask each wrapper, once
a step. After it too: the backward of a step's closure comes within the step.
"""

import functools
import weakref

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_wrappers: weakref.WeakSet = weakref.WeakSet()


def watch_steps(wrapper) -> None:
    """Have a step of any torch.optim optimizer raise RuntimeError while it would read a gradient of
    ``wrapper.unfinished()``, parameters whose gradients are this rank's own, or once its closure
    has read such. Before each step ``wrapper.meet(optimizer)`` is called.

    A step that is compiled itself is not watched: it has no hooks.
    """
    _wrappers.add(wrapper)
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_refuse)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _refuse(optimizer)
    if not torch.compiler.is_compiling():
        for wrapper in _wrappers:
            wrapper.meet(optimizer)


def _refuse(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    for wrapper in _wrappers:
        waiting = {id(p) for p in wrapper.unfinished() if p.grad is not None}
        if waiting and not waiting.isdisjoint(map(id, parameters_of(optimizer.param_groups))):
            raise RuntimeError(
                f"the gradients of this {type(wrapper).__name__} are still each rank's own: call "
                "finish_gradient_synchronization() between backward and the optimizer's step"
            )


def parameters_of(groups: list[dict]) -> list:
    """Return the parameters of an optimizer's groups, in order; of saved groups their names."""
    parameters = []
    for group in groups:
        parameters.extend(group["params"])
    return parameters
