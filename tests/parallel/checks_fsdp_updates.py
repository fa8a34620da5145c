"""FSDP's units updated beside the backward: the weights and moments of updates behind it."""

import copy
from contextlib import nullcontext
from functools import partial

import checking
import torch
from checking import Tied, check, loss_on, optimizers_of, raises, same, token_batches, world
from checks_fsdp import BOTH, Stack, check_freed, mine_of
from checks_fsdp_random import Net, random_cases
from torch import nn

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP, load_sharded, save_sharded

NUMBERS = {"lr": 0.05, "eps": 1e-3}


def same_state(mine, theirs, what, part=None):
    """Compare the states of two optimizers, or ``part`` of what the second one has."""
    for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            wanted = theirs.state.get(q, {})
            if part is not None:
                wanted = {key: part(x) for key, x in wanted.items()}
            checking.same_by_name(mine.state.get(p, {}), wanted, what)


def shards_changed(fsdp, before):
    changed = set()
    for (name, p), was in zip(fsdp.module.named_parameters(), before, strict=True):
        if not torch.equal(p, was):
            changed.add(name)
    return changed


@check(2)
def fsdp_updates_each_unit_as_one_process_would():
    """To the bit: tied, frozen, unused everywhere, unused on one rank, checkpoints, four steps."""
    rank, size = world()
    for make in BOTH:
        first = Tied()
        fsdp, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        ours, theirs = optimizers_of((fsdp, reference), MasterAdamW, **NUMBERS)
        batches = iter(token_batches(4 * size))
        for step in range(4):
            losses = []
            for r in range(size):
                extra = step % 2 == 1 and r == 1
                losses.append(loss_on(next(batches), extra=extra, checkpointed=step == 2))
            loss = losses[rank](fsdp)
            before = checking.copies_of(fsdp.module.parameters())
            with ours.overlapping(fsdp):
                loss.backward()
            used = set()
            for name, p in fsdp.module.named_parameters():
                asked = "extra" not in name or (step % 2 == 1 and rank == 1)
                if p.dim() == 2 and p.requires_grad and asked and "never" not in name:
                    used.add(name)
            assert shards_changed(fsdp, before) == used, step
            fsdp.finish_gradient_synchronization()
            checking.mean_gradients(reference, [[loss] for loss in losses])
            checking.take_step(ours, theirs)
            theirs_by_name = dict(reference.named_parameters(remove_duplicate=False))
            checking.same_by_name(fsdp.gather_full_params(), theirs_by_name, f"step {step}")
            same_state(ours, theirs, f"step {step}", mine_of)
            check_freed(fsdp)


@check(2, 4)
def fsdp_updates_random_modules_as_it_would_afterwards():
    """To the bit: accumulation, graphs that are kept, blocks used twice, in bf16 too."""
    rank, size = world()
    for number, (make, kinds, uses, draw, what) in enumerate(random_cases()):
        low = torch.bfloat16 if number % 3 == 0 else None
        module = Net(kinds)
        fsdp, twin = (make(copy.deepcopy(module), compute_dtype=low) for _ in range(2))
        ours, theirs = optimizers_of((fsdp, twin), MasterAdamW, **NUMBERS)
        for step, use in enumerate(uses):
            use = copy.copy(use)
            use.left = draw.random() < 0.5 if rank else True
            batches = torch.randn(2, 3, 6, generator=checking.seeded(size * step + rank))
            use.way(fsdp, batches, use, partial(ours.overlapping, fsdp))
            use.way(twin, batches, use)
            for wrapper in (fsdp, twin):
                wrapper.finish_gradient_synchronization()
            checking.same_gradients(fsdp, twin, f"{what} {use}")
            checking.take_step(ours, theirs)
            checking.same_parameters(fsdp, twin, f"{what} {use}")
            same_state(ours, theirs, f"{what} {use}")


class Twice(nn.Module):
    """Computes with its second block twice, so that this sends twice in a backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        for i in (0, 1, 2, 1):
            x = self.blocks[i](x).tanh()
        return x


def passes_units_on(make, module, x, expected):
    fsdp, events, unit_of = make(module), [], {}
    for name, p in module.named_parameters():
        unit_of[p] = name.split(".")[1] if "blocks" in name else "root"
    first = getattr(module.blocks[0], "norm", module.blocks[0])
    first.register_full_backward_hook(lambda *_: events.append("the first block's"))

    def note(shards):
        assert all(p.grad is not None and p.dim() == 2 for p in shards)
        (unit,) = {unit_of[p] for p in shards}
        events.append(unit)

    for _ in range(2):
        events.clear()
        loss = fsdp(x).sum()
        with fsdp.each_mean(note):
            loss.backward()
        assert events == expected, events
        fsdp.finish_gradient_synchronization()
    events.clear()
    fsdp(x).sum().backward()
    assert events == ["the first block's"], events
    fsdp.finish_gradient_synchronization()


@check(2)
def fsdp_passes_units_on_as_soon_as_their_means_are_there():
    """But not one that was called twice."""
    tokens, x = token_batches(1)[0], torch.ones(2, 4, requires_grad=True)
    for make in BOTH:
        passes_units_on(make, Stack(), tokens, ["2", "1", "the first block's", "root", "0"])
        passes_units_on(make, Twice(), x, ["2", "the first block's", "0"])


@check(2)
def fsdp_computes_no_more_with_what_is_updated():
    loss = loss_on(token_batches(1)[0])
    again = "computes again behind a backward within overlapping"
    for make in BOTH:
        fsdp = make(Stack())
        optimizer = MasterAdamW(fsdp.parameters())
        kept = loss(fsdp)
        with optimizer.overlapping(fsdp):
            kept.backward(retain_graph=True)
            with raises(RuntimeError, f"^the module {again}"):
                kept.backward(retain_graph=True)
        with raises(RuntimeError, f"^the module {again}"):
            kept.backward(retain_graph=True)
        with raises(RuntimeError, f"^the module {again}"), torch.no_grad():
            loss(fsdp)
        with raises(RuntimeError, rf"^blocks\.0 {again}"):
            fsdp.module.blocks[0](torch.ones(2, 6))
        with raises(RuntimeError, "are still each rank's own"):
            optimizer.step()
        fsdp.finish_gradient_synchronization()
        with raises(RuntimeError, r"a second backward within overlapping\(\) before step"):
            with optimizer.overlapping(fsdp):
                loss(fsdp).backward()


@check(2)
def overlapping_refuses_a_state_of_other_rows():
    first = Stack()
    plain = MasterAdamW(copy.deepcopy(first).parameters())
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    fsdp = FSDP(first)
    optimizer = MasterAdamW(fsdp.parameters())
    optimizer.load_state_dict(plain.state_dict())
    with raises(ValueError, "not .* as this rank's rows"), optimizer.overlapping(fsdp):
        pass


@check(2)
def checkpoints_go_on_with_updates_beside_the_backward():
    rank, size = world()
    first, batches = Stack(), token_batches(3 * size)[rank::size]

    def step(fsdp, optimizer, tokens, overlap=True):
        loss = loss_on(tokens)(fsdp)
        with optimizer.overlapping(fsdp) if overlap else nullcontext():
            loss.backward()
        fsdp.finish_gradient_synchronization()
        checking.take_step(optimizer)

    made = []
    for _ in range(2):
        fsdp = FSDP(copy.deepcopy(first))
        made.append((fsdp, MasterAdamW(fsdp.parameters(), **NUMBERS)))
    (fsdp, optimizer), (other, its) = made
    for tokens in batches[:2]:
        step(fsdp, optimizer, tokens)
    with checking.shared_folder() as folder:
        save_sharded(folder / "2", fsdp, optimizer)
        load_sharded(folder / "2", other, its)
    step(fsdp, optimizer, batches[2])
    step(other, its, batches[2], overlap=False)
    checking.same_parameters(other, fsdp)
    same_state(its, optimizer, "loaded")
    whole = fsdp.gather_full_params()["head.weight"]
    same(mine_of(whole), fsdp.module.head.weight.detach())
