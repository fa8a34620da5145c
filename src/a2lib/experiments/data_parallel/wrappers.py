"""The wrappers and optimizers that are compared, and whether what they exchange arrives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from a2lib.experiments.data_parallel.configurations import PEERS, UPDATING, Way
from a2lib.experiments.data_parallel.training import Training, still
from a2lib.parallel import DDP, BucketedDDP, FlatDDP, NaiveDDP, ShardedOptimizer
from a2lib.parallel.copy_engines import why_not


def unsupported(training: Training, way: Way) -> str | None:
    """Why ``way`` cannot be taken here."""
    engines = way.carrier == "copy_engines"
    return why_not(None, training.parameters[0].device) if engines else None


def wrap(model: nn.Module, way: Way) -> nn.Module:
    """``model`` in the wrapper of ``way``; collective. Raises ValueError where that cannot be."""
    low = torch.bfloat16 if way.sent_dtype == "bf16" else None
    if way.wrapper in PEERS:
        on_gpu = next(model.parameters()).is_cuda
        peer = DistributedDataParallel(
            model,
            device_ids=[torch.cuda.current_device()] if on_gpu else None,
            bucket_cap_mb=way.bucket_mb,
            gradient_as_bucket_view=way.wrapper == "torch_ddp_view",
        )
        if low is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            peer.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return peer
    if way.wrapper in ("bucketed", UPDATING):
        return BucketedDDP(model, way.bucket_mb, communication=way.carrier, communication_dtype=low)
    return {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": DDP}[way.wrapper](model)


def make_optimizer(name: str, training: Training) -> Optimizer:
    """The training's own for "plain", else another over its parameters; collective."""
    if name == "plain":
        return training.workload.optimizer
    options = {"lr": 0.0, "fused": True, "capturable": training.device == "cuda"}
    params = training.workload.model.parameters()
    if name == "sharded":
        return ShardedOptimizer(params, torch.optim.AdamW, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return still(ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options))


def own_state(optimizer: Optimizer) -> dict[nn.Parameter, dict]:
    """What this rank keeps: parameter -> its state; PyTorch's has it in an optimizer within."""
    inner = getattr(optimizer, "optim", optimizer)
    return {p: inner.state[p] for p in inner.state if "exp_avg" in inner.state[p]}


def state_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
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
