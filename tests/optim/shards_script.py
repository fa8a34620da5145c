"""MasterAdamW over shards, in two ranks, against the same steps of one process on whole weights."""

import copy

import torch
import torch.distributed as dist
from refusals import refused
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_same(sharded: MasterAdamW, plain: MasterAdamW) -> None:
    pairs = zip(sharded.masters().items(), plain.masters().items(), strict=True)
    for (p, master), (q, right) in pairs:
        assert torch.equal(whole(master), right) and torch.equal(whole(p), q)
        for name, value in plain.state[q].items():
            assert torch.equal(whole(sharded.state[p][name]), value), name


dist.init_process_group("gloo")
for dtype in (torch.float32, torch.bfloat16):
    reference, model = built(dtype), fully_shard(built(dtype))
    plain = MasterAdamW(reference.parameters(), **NUMBERS)
    sharded = MasterAdamW(model.parameters(), **NUMBERS)
    train([sharded, plain], [model, reference], steps=3)
    check_same(sharded, plain)
    # Its state goes on in another of its kind; and by PyTorch's checkpoints, over other rows.
    again = MasterAdamW(model.parameters(), **NUMBERS)
    again.load_state_dict(copy.deepcopy(sharded.state_dict()))
    train([again, plain], [model, reference], steps=2)
    check_same(again, plain)
    other = fully_shard(built(dtype))
    last = MasterAdamW(other.parameters(), **NUMBERS)
    weights, state = get_state_dict(model, again)
    set_state_dict(other, last, model_state_dict=weights, optim_state_dict=state)
    train([last, plain], [other, reference], steps=2)
    check_same(last, plain)

model = fully_shard(built(torch.float32))
words = "a parameter is a shard of FSDP, which keeps its dtype; allowed is a working_dtype of None"
refused(words, MasterAdamW, model.parameters(), working_dtype=torch.bfloat16)
ours, reference = FSDP(built(torch.float32)), built(torch.float32)
refused(words, MasterAdamW, ours.parameters(), working_dtype=torch.bfloat16)
plain = MasterAdamW(reference.parameters(), **NUMBERS)
rows = MasterAdamW(ours.parameters(), **NUMBERS)
train([rows, plain], [ours, reference], steps=3)
for name, weight in ours.gather_full_params().items():
    assert torch.equal(weight, reference.get_parameter(name)), name
dist.destroy_process_group()
