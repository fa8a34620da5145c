"""A training whose model is sharded over the ranks, by ours or by PyTorch's ``fully_shard``."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.experiments.data_parallel import configurations
from a2lib.experiments.data_parallel.gradients import Deviation, deviation, worst
from a2lib.experiments.data_parallel.training import Training
from a2lib.parallel import FSDP
from a2lib.parallel.fsdp.peer import fully_sharded, local


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


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of ``whole``, where ``like`` is not of all rows itself."""
    if like.shape == whole.shape:
        return whole
    rows = -(-whole.shape[0] // dist.get_world_size())
    return whole[dist.get_rank() * rows :][:rows]
