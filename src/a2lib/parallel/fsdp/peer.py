"""PyTorch's FSDP2 in the units that ours has: what ours is compared with."""

import torch
import torch.distributed as dist
from torch import nn


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
