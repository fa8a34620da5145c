"""The sharded optimizer against the plain one in one process."""

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
    for n, ps in enumerate(zip(*(m.parameters() for m in modules), strict=True)):
        generator = checking.seeded(100 * step + n)
        gradient = torch.randn(ps[0].shape, generator=generator)
        for module, p in zip(modules, ps, strict=True):
            # With the parameter's strides, as autograd gives it and a GPU's fused step demands it.
            without = p is getattr(module, "unused", None) or not p.requires_grad
            p.grad = None if without else torch.empty_like(p).copy_(gradient)


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
            schedules = [
                torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (sharded, plain)
            ]
            for step in range(4):
                what = f"{cls.__name__} {options} {sizes}, step {step}"
                step_both(step, sharded, plain, mine, reference, what)
                for schedule in schedules:
                    schedule.step()
            sharded.zero_grad()
            assert all(p.grad is None for p in mine.parameters())


@check(2, 4)
def parameters_lie_in_chunks_of_one_gather_each():
    """What moved and what did not; what is sent is counted from the calls."""
    _, size = world()
    module = Mixed()
    places = {name: p.data_ptr() for name, p in module.named_parameters()}
    with chunks_from(400):
        sharded = ShardedOptimizer(module.parameters(), SGD, lr=1.0)
    chunks = [chunk for chunk, _ in sharded._chunks]
    assert len(chunks) > 3  # three dtypes, of which one is cut
    moved = {name for name, p in module.named_parameters() if p.data_ptr() != places[name]}
    assert moved == set(places) - {"empty"}
    assert module.strided.stride() == (1, 40)
    give_gradients(0, module)
    gather = exchange.all_gather_single
    with patch.object(exchange, "all_gather_single", wraps=gather) as gathers:
        sharded.step()
    sent = [(whole.nbytes, own.nbytes) for (whole, own), _ in gathers.call_args_list]
    assert len(sent) == len(chunks)
    assert all(whole == size * own for whole, own in sent)
    assert sum(whole for whole, _ in sent) >= sum(p.nbytes for p in module.parameters())
    # A parameter that is elsewhere afterwards would be left as it is, without a word.
    module.large.data = module.large.data.clone()
    with raises(RuntimeError, "a parameter has other memory than this optimizer gave it"):
        sharded.step()
    again = ShardedOptimizer(module.parameters(), SGD, lr=1.0)
    again.step()


@check(2, 4)
def a_parameter_larger_than_the_rest_does_not_pad_the_chunks():
    """Nothing is gathered in its chunk; each parameter there is broadcast from where it is."""
    mine = nn.Sequential(nn.Embedding(800, 64), *(nn.Linear(64, 64, bias=False) for _ in range(24)))
    reference = copy.deepcopy(mine)
    place = mine[0].weight.data_ptr()
    with chunks_from(150_000, padding_bytes=0):
        sharded = ShardedOptimizer(mine.parameters(), AdamW, lr=0.1)
    plain = AdamW(reference.parameters(), lr=0.1)
    chunks = [chunk for chunk, _ in sharded._chunks]
    assert len(chunks) > 1
    every = sum(p.numel() * 4 for p in mine.parameters())
    assert mine[0].weight.data_ptr() == place
    gather = exchange.all_gather_single
    with patch.object(exchange, "all_gather_single", wraps=gather) as gathers:
        step_both(0, sharded, plain, mine, reference)
    gathered = sum(whole.nbytes for (whole, _), _ in gathers.call_args_list)
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
    optimizers = []
    for module, make in (
        (mine, lambda g: ShardedOptimizer(g, functools.partial(AdamW, lr=0.1))),
        (reference, lambda g: AdamW(g, lr=0.1)),
    ):
        early, late = groups_of(module)
        optimizer = make([("large", p) for p in early["params"]])
        give_gradients(0, module)
        optimizer.step()
        named = [(n, p) for n, p in module.named_parameters() if n != "large"]
        optimizer.add_param_group({"params": named, "lr": 0.5})
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        give_gradients(1, module)
        optimizer.step()
        optimizers.append(optimizer)
    same_parameters(mine, reference)
    assert optimizers[0].param_groups[1]["param_names"] == [n for n, _ in named]
    with raises(ValueError, "some parameters appear in more than one"):
        optimizers[0].add_param_group({"params": [mine.large], "param_names": ["large"]})


@check(4)
def states_are_loaded_at_other_sizes():
    """Saved by 4 ranks, loaded by 2 and by 1 and by a plain optimizer, and back, by way of a file;
    half of the ranks of 4 train with 2. A saved state may call its parameters by name, as that of
    torch.distributed.checkpoint does."""
    rank, _ = world()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    own = alone()
    for cls, options in OPTIMIZERS:
        mine = Mixed()
        reference = copy.deepcopy(mine)

        def make(group, module, cls=cls, options=options):
            return ShardedOptimizer(groups_of(module), cls, group=group, **options)

        sharded, plain = make(None, mine), cls(groups_of(reference), **options)
        for step, group in enumerate([None, pair, "plain", own, None, pair]):
            if step:
                file = io.BytesIO()
                torch.save(sharded.state_dict(), file)
                file.seek(0)
                state = torch.load(file)
                if group is pair:
                    for values in state["param_groups"]:
                        values["params"] = [f"p{i}" for i in values["params"]]
                    state["state"] = {f"p{i}": values for i, values in state["state"].items()}
                if group == "plain":
                    sharded = cls(groups_of(mine), **options)
                else:
                    sharded = make(group, mine)
                sharded.load_state_dict(state)
            for optimizer in (sharded, plain):
                optimizer.param_groups[0]["lr"] *= 0.9
            step_both(step, sharded, plain, mine, reference, f"{cls.__name__}, {step}")
        whole, theirs = sharded.state_dict(), plain.state_dict()
        assert whole["param_groups"] == theirs["param_groups"]
        assert whole["state"].keys() == theirs["state"].keys()
        for i, values in theirs["state"].items():
            on_the_cpu = {key: x.cpu() for key, x in values.items()}
            checking.same_by_name(whole["state"][i], on_the_cpu, f"{cls.__name__}, {i}")


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
    whole, theirs = sharded.state_dict()["state"], plain.state_dict()["state"]
    assert whole.keys() == theirs.keys()
    for i, values in theirs.items():
        checking.same_by_name(whole[i], checking.on_cpu(values), str(i))


@check(2)
def sharded_refuses():
    rank, _ = world()
    module = Mixed()
    with raises(ValueError, r"rank 0 has 0: \(2, 2\) float32 trained, rank 1 0: \(2, 3\)"):
        ShardedOptimizer(nn.Linear(2 + rank, 2).parameters(), AdamW)
    with raises(ValueError, "Invalid learning rate: -1"):
        ShardedOptimizer(module.parameters(), AdamW, lr=-1)
    for cls in (torch.optim.LBFGS, functools.partial(torch.optim.LBFGS, lr=0.1)):
        with raises(ValueError, "LBFGS works on all parameters"):
            ShardedOptimizer(module.parameters(), cls)
    with raises(ValueError, "MasterAdamW moved a parameter and cannot be sharded"):
        whole = nn.Sequential(nn.Linear(2, 2, False), nn.Linear(2, 2, False))
        ShardedOptimizer(whole.parameters(), MasterAdamW, working_dtype=torch.bfloat16)
    sharded = ShardedOptimizer(module.parameters(), AdamW)
    with raises(ValueError, "different number of parameter groups"):
        sharded.load_state_dict(AdamW(groups_of(module)).state_dict())
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
