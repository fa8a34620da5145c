"""PyTorch's norm of gradients is refused where each rank has rows: it would be of one rank's.

With torch.nn.utils.clip_grad_norm_ each rank would scale by a norm of its own, and nothing would
look wrong. What is replaced is the function within it, which it looks up at each call: callers may
have the outer one by name, and PyTorch has no hook for it.
"""

import functools
import weakref

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from a2lib.parallel.fsdp.shards import Sharded

_shards: weakref.WeakSet[Sharded] = weakref.WeakSet()


def refuse_norms_of(shards: list[Sharded]) -> None:
    """Have torch's norm of gradients raise RuntimeError for those of ``shards``."""
    _shards.update(shards)
    _replace()


@functools.cache
def _replace() -> None:
    norm = clip_grad._get_total_norm

    @functools.wraps(norm)
    def of_whole_gradients(tensors, *args, **kwargs) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not torch.compiler.is_compiling():
            parts = {id(p.master.grad) for p in _shards if p.master.grad is not None}
            if not parts.isdisjoint(map(id, tensors)):
                raise RuntimeError(
                    "torch.nn.utils.clip_grad_norm_ would take the norm of this rank's rows alone, "
                    "another on each rank: call clip_grad_norm_ of the FSDP"
                )
        return norm(tensors, *args, **kwargs)

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = of_whole_gradients
