"""MasterAdamW over shards, in two ranks, against the same steps of one process on whole weights."""

import torch
import torch.distributed as dist
from refusals import refused
from torch import nn
from torch.distributed.fsdp import fully_shard

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP

NUMBERS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def built(dtype: torch.dtype) -> nn.Module:
    """Return layers whose rows two ranks do not divide, or of which one has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)).to(dtype)


def train(optimizers: list, models: list[nn.Module], steps: int) -> None:
    """Take steps on the same inputs on every rank, of which the mean is that of each."""
    for _ in range(steps):
        x = torch.randn(4, 3, dtype=next(models[0].parameters()).dtype)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().sum().backward()
            if isinstance(model, FSDP):
                model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()


dist.init_process_group("gloo")
refused("a parameter is a DTensor", MasterAdamW, fully_shard(built(torch.float32)).parameters())
words = "a parameter is a shard of FSDP, which keeps its dtype; allowed is a working_dtype of None"
ours, reference = FSDP(built(torch.float32)), built(torch.float32)
refused(words, MasterAdamW, ours.parameters(), working_dtype=torch.bfloat16)
plain = MasterAdamW(reference.parameters(), **NUMBERS)
rows = MasterAdamW(ours.parameters(), **NUMBERS)
train([rows, plain], [ours, reference], steps=3)
for name, weight in ours.gather_full_params().items():
    assert torch.equal(weight, reference.get_parameter(name)), name
dist.destroy_process_group()
