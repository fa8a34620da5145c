"""FSDP of random modules in random uses, against one process: no gradient is lost."""

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from checking import check, optimizers_of, seeded, take_step, world
from checks_fsdp import BOTH
from checks_fsdp_modules import check_alike
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, CASES, STEPS = 6, 25, 3


# Blocks. Each is called with x and what is said of the step.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use):
        return x + torch.tanh(self.layer(self.norm(x)))


class Branches(nn.Module):
    """Uses one layer of three, another on each rank."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use):
        return x + (self.left(x) if use.left else self.right(x))


class Passes(nn.Linear):
    """Returns what came in, as a layer does that is dropped."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, use):
        return x if use.drops else super().forward(x)


class Views(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, use):
        return super().forward(x).view(-1, 2, WIDTH // 2).view(x.shape)


class Wraps(nn.Linear):
    """Returns its result in a dict."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, use):
        return {"x": torch.sin(super().forward(x))}


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x, use):
        return x + self.layer(x)


class Adapted(Frozen):
    """Frozen, with a trained part of low rank."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x, use):
        return super().forward(x, use) + self.up(self.down(x))


class Checkpointed(Residual):
    """Has a checkpoint inside, of a part of it."""

    def forward(self, x, use):
        return x + checkpoint(self.layer, self.norm(x), use_reentrant=False)


class Shares(nn.Module):
    """Has a layer of another module besides its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, use):
        return x + self.last(torch.tanh(self.layer(x)))


BLOCKS = (Residual, Branches, Passes, Views, Wraps, Frozen, Adapted, Checkpointed, Shares)


class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList()
        for kind in kinds:
            self.blocks.append(kind(self.first) if kind is Shares else kind())

    def forward(self, x, use):
        x = self.first(x)
        length = 2 if use.checkpoints == "pairs" else 1
        for begin in range(0, len(use.order), length):
            part = use.order[begin : begin + length]
            if use.checkpoints == "none" or not torch.is_grad_enabled():
                x = self.run(x, part, use)
            else:
                again = use.checkpoints == "reentrant"
                x = checkpoint(self.run, x, part, use, use_reentrant=again)
        return self.last(x).square().mean()

    def run(self, x, part, use):
        for i in part:
            output = self.blocks[i](x, use)
            x = output["x"] if isinstance(output, dict) else output
            x = x.view(-1, WIDTH)  # another view than a block returned
        return x


# Uses: each adds to the gradients of a module, by two batches; the last backward is in a context.


def once(module, batches, use, last=nullcontext):
    loss = module(batches[0], use)
    with last():
        loss.backward()


def accumulated(module, batches, use, last=nullcontext):
    module(batches[1], use).backward()
    once(module, batches, use, last)


def repeated(module, batches, use, last=nullcontext):
    loss = module(batches[0], use)
    loss.backward(retain_graph=True)
    with last():
        loss.backward()


def behind_a_gradient_of_the_input(module, batches, use, last=nullcontext):
    if use.checkpoints != "reentrant":  # which PyTorch refuses
        x = batches[1].clone().requires_grad_()
        torch.autograd.grad(module(x, use), x)
    once(module, batches, use, last)


WAYS = once, accumulated, repeated, behind_a_gradient_of_the_input


@dataclass
class Use:
    """A rank's use of a module in a step; ``left`` alone may differ between ranks."""

    way: object = once
    order: list = field(default_factory=list)
    checkpoints: str = "none"
    drops: bool = True
    left: bool = True


def random_use(draw, blocks):
    order = draw.choices(range(blocks), k=draw.randint(0, blocks + 1))
    if draw.random() < 0.5:
        order = list(range(blocks))
    checkpoints = draw.choice(["none", "none", "each", "pairs", "reentrant"])
    return Use(draw.choice(WAYS), order, checkpoints, draw.random() < 0.5)


def steps_are_those_of_one_process(make, kinds, uses, draw, what):
    rank, size = world()
    torch.manual_seed(0)
    module = Net(kinds)
    reference, fsdp = copy.deepcopy(module), make(module)
    optimizers = optimizers_of((reference, fsdp), torch.optim.AdamW, eps=1e-3)
    for number, use in enumerate(uses):
        totals = {}
        for r in range(size):
            of_rank = copy.copy(use)
            of_rank.left = draw.random() < 0.5
            batches = torch.randn(2, 3, WIDTH, generator=seeded(10 * number + r))
            reference.zero_grad()
            use.way(reference, batches, of_rank)
            for p in reference.parameters():
                if p.grad is not None:
                    totals[p] = totals.get(p, 0) + p.grad
            if r == rank:
                use.way(fsdp, batches, of_rank)
        fsdp.finish_gradient_synchronization()
        reference.zero_grad()
        for p, total in totals.items():
            p.grad = total / size
        check_alike(fsdp, reference, f"{what} {use}")
        held = fsdp.held_bytes()
        assert held["gathered"] == held["travelling"] == 0, (what, use, held)
        take_step(*optimizers)


def random_cases():
    """Yield for each case a wrapper, kinds of blocks, uses, the source of what is drawn, and what
    it is called."""
    for case in range(CASES):
        draw = random.Random(case)
        kinds = draw.choices(BLOCKS, k=draw.randint(1, 4))
        uses = [random_use(draw, len(kinds)) for _ in range(STEPS)]
        names = " ".join(kind.__name__ for kind in kinds)
        yield BOTH[case % 2], kinds, uses, draw, f"case {case}: {names},"


@check(2, 4)
def fsdp_trains_random_modules_as_one_process():
    for case in random_cases():
        steps_are_those_of_one_process(*case)


@check(2)
def fsdp_sends_every_gradient_once():
    cases = {
        "trained before frozen, reentrant": ((Frozen, Residual), Use(checkpoints="reentrant")),
        "nothing trained but in reentrant": ((Adapted, Frozen), Use(checkpoints="reentrant")),
        "in a dict, called twice": ((Wraps, Residual), Use(order=[0, 1, 0])),
        "a view that is passed on": ((Views, Passes), Use()),
        "a layer of the root": ((Shares,), Use()),
    }
    for what, (kinds, use) in cases.items():
        use.order = use.order or list(range(len(kinds)))
        for make in BOTH:
            steps_are_those_of_one_process(make, kinds, [use], random.Random(0), what)
