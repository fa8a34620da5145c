"""The wrappers whose ways to average gradients are compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from a2lib.experiments.ddp.configurations import PEERS, UPDATING, Way
from a2lib.parallel import DDP, BucketedDDP, FlatDDP, NaiveDDP


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
