"""A training whose model is sharded over the ranks, by ours or by PyTorch's ``fully_shard``."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2lib.experiments.data_parallel import configurations
from a2lib.experiments.data_parallel.gradients import Deviation, deviation, worst
from a2lib.experiments.data_parallel.training import Training
from a2lib.parallel import FSDP


class Sharded(Training):
    """The training of ``spec`` in a wrapper; collective. What computes in bf16 does so without
    autocast, from weights that are gathered in bf16."""

    def __init__(
        self, spec: Mapping[str, object], device: str, rank: int, seed: int, wrapper: str
    ) -> None:
        low = torch.bfloat16 if spec["precision"] == "bf16" else None
        wide = {**spec, "precision": "fp32" if low else spec["precision"]}
        super().__init__(wide, device, rank, seed)
        model = self.workload.model
        if wrapper == configurations.FSDP:
            # Parameters are the same objects afterwards, which the optimizer has.
            self.wrapper = self.workload.forward = FSDP(model, low)
        else:
            fully_sharded(model, low, device)
            self.workload.optimizer = torch.optim.AdamW(
                model.parameters(), lr=0.0, fused=True, capturable=device == "cuda"
            )
            self.wrapper = model
        gc.collect()

    def deviation_from(self, plain: Training) -> Deviation:
        """How far this rank's gradients are from the mean over the ranks of what ``plain`` has, the
        worst of some parameters; collective."""
        found: list[Tensor] = []
        expected: list[tuple[Tensor, Tensor]] = []

        def keep() -> None:
            found.extend(local(self.parameters[i].grad).clone() for i in plain.checked)

        def compare() -> None:
            for i, grad in zip(plain.checked, found, strict=True):
                own = plain.parameters[i].grad
                mean = own.clone()
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                expected.append((_part(mean, grad).clone(), _part(own, grad).clone()))

        self.step(send=True, before_optimizer=keep)
        plain.step(send=False, before_optimizer=compare)
        pairs = zip(found, expected, strict=True)
        return worst(deviation(grad, *both) for grad, both in pairs)


def local(x: Tensor) -> Tensor:
    """This rank's part of what may be sharded."""
    return x.to_local() if hasattr(x, "to_local") else x


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of ``whole``, where ``like`` is not of all rows itself."""
    if like.shape == whole.shape:
        return whole
    rows = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * rows :][:rows]


def fully_sharded(model: nn.Module, low: torch.dtype | None, device: str) -> None:
    """PyTorch's FSDP2 on ``model``, in the units that ours has and freed where ours is: blocks
    after their forward but for the last, the rest after backward; collective."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in model.layers:
        again = block is not model.layers[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
