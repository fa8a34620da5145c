"""The sharded optimizer against the plain one in one process."""

import contextlib
import copy
import functools
import io
import itertools
from unittest.mock import patch

import checking
import torch
import torch.distributed as dist
from checking import alone, check, chunks_from, groups_of, raises, same, same_parameters, world
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP, ShardedOptimizer, exchange

OPTIMIZERS = [
    (AdamW, {"lr": 0.1, "weight_decay": 0.1, "foreach": True, "amsgrad": True}),
    (AdamW, {"fused": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
]


class Mixed(nn.Module):
    """Parameters of several dtypes, strides and sizes, one of them a part of other memory."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.randn(30, 10))
        self.second = nn.Parameter(torch.randn(20, 10))
        self.strided = nn.Parameter(torch.randn(9, 40).t())
        self.fp64 = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.randn(7).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0))
        self.unused = nn.Parameter(torch.randn(3))
        self.part = nn.Parameter(torch.randn(8)[2:6])
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)


def give_gradients(step, *modules):
    """The same random ones to each module."""
    for module in modules:
        for n, (name, p) in enumerate(module.named_parameters()):
            if name == "unused" or not p.requires_grad:
                continue
            gradient = torch.randn(p.shape, generator=checking.seeded(100 * step + n))
            # With the parameter's strides, as autograd gives it and a GPU's fused step demands it.
            p.grad = torch.empty_like(p).copy_(gradient)


def step_both(number, sharded, plain, mine, reference, what=""):
    give_gradients(number, mine, reference)
    sharded.step()
    plain.step()
    same_parameters(mine, reference, what)


@check(2, 4)
def sharded_steps_are_those_of_the_plain_optimizer_to_the_bit():
    """Groups, a schedule, parameters without a gradient; in one chunk and in several."""
    first = Mixed()
    for sizes, (cls, options) in itertools.product(((100,), (100, 0), (2**26,)), OPTIMIZERS):
        with chunks_from(*sizes):
            mine, reference = copy.deepcopy(first), copy.deepcopy(first)
            sharded = ShardedOptimizer(groups_of(mine), cls, **options)
            plain = cls(groups_of(reference), **options)
            assert sharded.defaults == plain.defaults
            schedules = [StepLR(sharded, 2, 0.5), StepLR(plain, 2, 0.5)]
            for step in range(4):
                what = f"{cls.__name__} {options} {sizes}, step {step}"
                step_both(step, sharded, plain, mine, reference, what)
                for schedule in schedules:
                    schedule.step()
            sharded.zero_grad()
            assert not checking.gradients(mine)


@contextlib.contextmanager
def gathered_bytes():
    """A list of the bytes of each all-gather within it: all of it, and what this rank sends."""
    sent = []
    gather = exchange.all_gather_single

    def watched(whole, own, **options):
        sent.append((whole.nbytes, own.nbytes))
        return gather(whole, own, **options)

    with patch.object(exchange, "all_gather_single", watched):
        yield sent


@check(2, 4)
def parameters_lie_in_chunks_of_one_gather_each():
    """The calls say how many bytes are sent."""
    _, size = world()
    module = Mixed()
    with chunks_from(400):
        sharded = ShardedOptimizer(module.parameters(), SGD, lr=1.0)
    assert module.strided.stride() == (1, 40)
    give_gradients(0, module)
    with gathered_bytes() as sent:
        sharded.step()
    assert len(sent) > 3  # three dtypes, of which one is cut
    total = 0
    for whole, own in sent:
        assert whole == size * own
        total += whole
    assert total >= sum(p.nbytes for p in module.parameters())
    # A parameter that is elsewhere afterwards would be left as it is, without a word.
    module.large.data = module.large.data.clone()
    with raises(RuntimeError, "a parameter has other memory than this optimizer gave it"):
        sharded.step()
    again = ShardedOptimizer(module.parameters(), SGD, lr=1.0)
    again.step()


@check(2, 4)
def a_parameter_larger_than_the_rest_does_not_pad_the_chunks():
    """Nothing is gathered in its chunk; each parameter there is broadcast from where it is."""
    mine = nn.Sequential(nn.Embedding(800, 64))
    for _ in range(24):
        mine.append(nn.Linear(64, 64, bias=False))
    reference = copy.deepcopy(mine)
    place = mine[0].weight.data_ptr()
    with chunks_from(150_000, padding_bytes=0):
        sharded = ShardedOptimizer(mine.parameters(), AdamW, lr=0.1)
    plain = AdamW(reference.parameters(), lr=0.1)
    assert mine[0].weight.data_ptr() == place
    with gathered_bytes() as sent:
        step_both(0, sharded, plain, mine, reference)
    every = sum(p.nbytes for p in mine.parameters())
    gathered = sum(whole for whole, _ in sent)
    assert gathered <= 5 / 4 * (every - mine[0].weight.nbytes)
    step_both(1, sharded, plain, mine, reference)
    mine[0].weight.data = mine[0].weight.data.clone()
    with raises(RuntimeError, "a parameter has other memory than this optimizer gave it"):
        sharded.step()


@check(2)
def sharded_closure_runs_once_with_gradients():
    module = Mixed()
    sharded = ShardedOptimizer(module.parameters(), SGD, lr=0.5)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = module.large.square().sum()
        loss.backward()
        return loss

    before = module.large.detach().clone()
    loss = sharded.step(closure)
    same(loss.detach(), before.square().sum())
    assert calls == [True]
    same(module.large.detach(), before - 0.5 * (2 * before))


@check(2)
def groups_may_come_later_and_settings_reach_the_ranks():
    mine = Mixed()
    reference = copy.deepcopy(mine)
    sharded = ShardedOptimizer([("large", mine.large)], functools.partial(AdamW, lr=0.1))
    plain = AdamW([("large", reference.large)], lr=0.1)
    step_both(0, sharded, plain, mine, reference)
    for module, optimizer in ((mine, sharded), (reference, plain)):
        _, *others = module.named_parameters()
        optimizer.add_param_group({"params": others, "lr": 0.5})
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    step_both(1, sharded, plain, mine, reference)
    names = plain.param_groups[1]["param_names"]
    assert sharded.param_groups[1]["param_names"] == names


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def called_by_name(state):
    """Return a saved state as that of torch.distributed.checkpoint calls its parameters."""
    groups, states = [], {}
    for group in state["param_groups"]:
        groups.append({**group, "params": [f"p{i}" for i in group["params"]]})
    for i, values in state["state"].items():
        states[f"p{i}"] = values
    return {"state": states, "param_groups": groups}


@check(4)
def states_are_loaded_at_other_sizes():
    """Saved by 4 ranks, loaded by 2 and by 1 and by a plain optimizer, and back, by way of a file;
    half of the ranks of 4 train with 2."""
    rank, _ = world()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    own = alone()
    for cls, options in OPTIMIZERS:
        mine = Mixed()
        reference = copy.deepcopy(mine)
        sharded = ShardedOptimizer(groups_of(mine), cls, **options)
        plain = cls(groups_of(reference), **options)
        for step, group in enumerate([None, pair, "plain", own, None, pair]):
            if step:
                state = through_a_file(sharded.state_dict())
                if group is pair:
                    state = called_by_name(state)
                if group == "plain":
                    sharded = cls(groups_of(mine), **options)
                else:
                    sharded = ShardedOptimizer(groups_of(mine), cls, group=group, **options)
                sharded.load_state_dict(state)
            for optimizer in (sharded, plain):
                optimizer.param_groups[0]["lr"] *= 0.9
            step_both(step, sharded, plain, mine, reference, f"{cls.__name__}, {step}")
        assert sharded.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
        same_states(sharded, plain)


def same_states(sharded, plain):
    mine, theirs = sharded.state_dict()["state"], plain.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for i, values in theirs.items():
        checking.same_by_name(mine[i], checking.on_cpu(values), f"of parameter {i}")


@check(2)
def reading_the_state_of_any_parameter_loses_none():
    """`state` is a defaultdict: what is read there leaves an entry."""
    module = Mixed()
    reference = copy.deepcopy(module)
    sharded, plain = ShardedOptimizer(module.parameters(), AdamW), AdamW(reference.parameters())
    step_both(1, sharded, plain, module, reference)
    for optimizer, of in ((sharded, module), (plain, reference)):
        for p in of.parameters():
            len(optimizer.state[p])
    same_states(sharded, plain)


@check(2)
def sharded_refuses():
    rank, _ = world()
    module = Mixed()
    with raises(ValueError, r"rank 0 has 0: \(2, 2\) float32 trained, rank 1 0: \(2, 3\)"):
        ShardedOptimizer(nn.Linear(2 + rank, 2).parameters(), AdamW)
    for cls in (torch.optim.LBFGS, functools.partial(torch.optim.LBFGS, lr=0.1)):
        with raises(ValueError, "LBFGS works on all parameters"):
            ShardedOptimizer(module.parameters(), cls)
    with raises(ValueError, "MasterAdamW moved a parameter and cannot be sharded"):
        whole = nn.Sequential(nn.Linear(2, 2, False), nn.Linear(2, 2, False))
        ShardedOptimizer(whole.parameters(), MasterAdamW, working_dtype=torch.bfloat16)
    sharded = ShardedOptimizer(module.parameters(), AdamW)
    with raises(TypeError, "use state_dict"):
        copy.deepcopy(sharded)
    # What is refused later leaves the optimizer as it was.
    with raises(ValueError, "two parameters are the same memory"):
        sharded.add_param_group({"params": [nn.Parameter(module.large.data)]})
    with raises(ValueError, "on the device meta"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    give_gradients(0, module)
    sharded.step()
    assert len(sharded.param_groups) == 1
    with raises(ValueError, "a parameter is a shard of FSDP"):
        ShardedOptimizer(FSDP(nn.Linear(4, 4, bias=False)).parameters(), AdamW)
    removed = sharded.param_groups[0]["params"].pop()
    with raises(RuntimeError, "param_groups have other parameters than were given"):
        sharded.step()
    sharded.param_groups[0]["params"].append(removed)
    sharded.step()
