"""Whether gradients are the mean over the ranks, where roundings move them.

Two ways to compute in bf16 differ by tens of percent, but in no direction of their own. So beside
the distance from the mean two projections are looked at, which such differences hardly change and
each way to average wrongly does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

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

    def exceeds(self, allowed: Deviation) -> bool:
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
