"""A training whose model is sharded over the ranks, by ours or by PyTorch's ``fully_shard``, and
whether its gradients are the mean over the ranks, where roundings move them.

Two ways to compute in bf16 differ by tens of percent, but in no direction of their own. So beside
the distance from the mean two projections are looked at, which such differences hardly change and
each way to average wrongly does.
"""

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.experiments.data_parallel import configurations
from a2lib.experiments.data_parallel.training import Training
from a2lib.parallel import FSDP
from a2lib.parallel.fsdp.peer import fully_sharded
from a2lib.parallel.fsdp.shards import local

# Of the mean's size, what ranks have to differ by for that to be told from a rounding.
APART = 0.1


class Deviation(NamedTuple):
    """``error``, the distance from the mean over its norm. ``scale``, how far the part along the
    mean is from 1: world size - 1 where a sum was not divided, 1 - 1 / world size where it was
    twice, about 1 where rows are another rank's. ``own``, the part of what sets this rank's
    gradient apart from the mean: 1 where nothing was reduced."""

    error: float
    scale: float
    own: float

    def exceeds(self, allowed: Self) -> bool:
        """Also where it is no number."""
        return not all(mine <= most for mine, most in zip(self, allowed, strict=True))

    def __str__(self) -> str:
        return f"{self.error:.2g} (scale {self.scale:.2g}, own part {self.own:.2g})"


# By precision. Sharded, the stream between blocks is bf16 as well, which autocast leaves in fp32.
TOLERANCE = {
    "fp32": Deviation(0.01, 0.01, 0.01),
    "tf32": Deviation(0.1, 0.05, 0.05),
    "bf16": Deviation(0.5, 0.2, 0.2),
}


def deviation(found: Tensor, mean: Tensor, own: Tensor) -> Deviation:
    """Of a gradient ``found`` where ``mean`` is right and this rank's was ``own``; one shape."""
    found, mean, own = (x.flatten().float() for x in (found, mean, own))
    off, apart = found - mean, own - mean
    size = mean.square().sum().clamp(min=1e-30)
    return Deviation(
        (off.square().sum() / size).sqrt().item(),
        (off.dot(mean) / size).abs().item(),
        (off.dot(apart) / (apart.square().sum() + APART**2 * size)).abs().item(),
    )


def worst(deviations: Iterable[Sequence[float]]) -> Deviation:
    """Of each number the largest; what is no number is the largest."""
    columns = zip(*deviations, strict=True)
    return Deviation(*(max(math.inf if math.isnan(x) else x for x in one) for one in columns))


class Sharded(Training):
    """The training of ``spec`` in a wrapper; collective. What computes in bf16 does so without
    autocast, from weights that are gathered in bf16."""

    def __init__(self, spec: Mapping, device: str, rank: int, seed: int, wrapper: str) -> None:
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
