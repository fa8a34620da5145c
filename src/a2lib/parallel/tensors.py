"""Operations on many tensors at once.

``torch._foreach_*`` are one kernel for a list of tensors on a GPU, where a loop would be one a
tensor. They have no public name; PyTorch's own optimizers are made of them.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy and cast each source into its target."""
    if targets:
        torch._foreach_copy_(targets, sources)


def group_by(items: Iterable, key: Callable) -> list[list]:
    """Return groups of one key each, a dtype for example, in order of first appearance."""
    groups: dict[object, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def round_up(count: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``count``."""
    return -(-count // unit) * unit


def shares(count: int, most: int, ranks: int) -> list[int]:
    """Return how many of ``count`` elements each rank has, ``most`` each while there are as
    many."""
    return [min(most, max(0, count - rank * most)) for rank in range(ranks)]
