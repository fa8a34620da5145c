"""The optimizers that are held against each other, and whether what they exchange arrives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from a2lib.experiments.data_parallel.training import Training, still
from a2lib.experiments.ddp import configurations as ddp
from a2lib.experiments.ddp.wrappers import wrap
from a2lib.experiments.sharded_optimizer.configurations import Way
from a2lib.parallel import ShardedOptimizer


def make(name: str, training: Training) -> Optimizer:
    """The training's own for "plain", else another over its parameters; collective."""
    if name == "plain":
        return training.workload.optimizer
    options = {"lr": 0.0, "fused": True, "capturable": training.device == "cuda"}
    params = training.workload.model.parameters()
    if name == "sharded":
        return ShardedOptimizer(params, torch.optim.AdamW, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return still(ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options))


def wrapped(model: nn.Module, way: Way) -> nn.Module:
    """``model`` in the wrapper of ``way``; collective."""
    return wrap(model, ddp.Way(way.wrapper, way.bucket_mb, way.carrier))


def own_state(optimizer: Optimizer) -> dict[nn.Parameter, dict]:
    """What this rank keeps: parameter -> its state; PyTorch's has it in an optimizer within."""
    inner = getattr(optimizer, "optim", optimizer)
    return {p: inner.state[p] for p in inner.state if "exp_avg" in inner.state[p]}


def state_tensors(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for values in own_state(optimizer).values():
        yield from (x for x in values.values() if isinstance(x, torch.Tensor))


def unlike(training: Training, optimizer: Optimizer) -> int:
    """Of some parameters, how many differ after a step from what their owner had; collective.

    The others' are made wrong before the update, whose learning rate is 0: the exchange has to put
    them right.
    """
    some = [training.parameters[i] for i in training.checked]
    kept = [p.detach().clone() for p in some]
    owned = own_state(optimizer)

    def spoil() -> None:
        with torch.no_grad():
            for p in some:
                if p not in owned:
                    p.add_(1)

    training.step(send=True, before_optimizer=spoil)
    wrong = 0
    with torch.no_grad():
        for p, right in zip(some, kept, strict=True):
            wrong += not torch.equal(p, right)
            p.copy_(right)
    return wrong
