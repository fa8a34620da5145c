"""What every wrapper does, and refuses since it would make other weights on each rank, without an
error."""

import copy
import functools
import itertools
from types import SimpleNamespace
from unittest.mock import patch

import checking
import torch
import torch.distributed as dist
from checking import (
    Tied,
    backward_of_each,
    check,
    copied,
    loss_on,
    raises,
    same,
    token_batches,
    world,
)
from checks_ddp import KINDS
from checks_fsdp import Stack, check_freed, mine_of
from torch import nn
from torch.nn.utils import clip_grad_norm_

from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, agreement

STILL_OWN = "are still each rank's own: call finish_gradient_synchronization"

EVERY = {**KINDS, "FSDP": FSDP, "FSDP, copied": functools.partial(copied, FSDP)}


def same_whole(wrapper, reference, what):
    """Weights and the buffer."""
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    checking.same_by_name(checking.whole_weights(wrapper), theirs, what)
    same(wrapper.module.scale, reference.scale, what)


def part_of(kind, group=None):
    """What a rank has of a gradient."""
    return (lambda whole: mine_of(whole, group)) if "FSDP" in kind else lambda whole: whole


@check(2)
def wrappers_train_as_one_process_to_the_bit():
    for kind in EVERY:
        trains_as_one_process(kind)


def trains_as_one_process(kind):
    """Tied, frozen, unused everywhere, unused on one rank, AdamW that was made before, four steps,
    one of them with checkpoints; but for FSDP, which has no no_sync, accumulation."""
    rank, size = world()
    first, tokens = Tied(width=5), token_batches(1)[0]
    micros = 1 if "FSDP" in kind else 3
    module, reference = checking.moved(first, rank), copy.deepcopy(first)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (module, reference)]
    wrapper = EVERY[kind](module)
    same_whole(wrapper, reference, kind)
    batches = iter(token_batches(4 * size * micros))
    for step in range(4):
        losses = [[] for _ in range(size)]
        for r, micro in itertools.product(range(size), range(micros)):
            # An odd step uses `extra` on rank 1 alone, and in one micro-batch alone.
            extra = step % 2 == 1 and r == 1 and micro == micros // 2
            losses[r].append(loss_on(next(batches), extra=extra, checkpointed=step == 2))
        *early, last = losses[rank]
        if early:
            with wrapper.no_sync():
                early[0](wrapper).backward()
                with wrapper.no_sync():
                    early[1](wrapper).backward()
        last(wrapper).backward()
        wrapper.finish_gradient_synchronization()
        checking.mean_gradients(reference, losses)
        checking.same_gradients(module, reference, f"{kind}, step {step}", part_of(kind))
        assert module.never.weight.grad is None
        assert (module.extra.weight.grad is not None) == (step % 2 == 1)
        checking.take_step(*optimizers)
        same_whole(wrapper, reference, f"{kind}, step {step}")
        with torch.no_grad():
            same(wrapper(tokens), reference(tokens))
            same(module(tokens, extra=True), reference(tokens, extra=True))
        if "FSDP" in kind:
            check_freed(wrapper)


@check(2, 4)
def wrappers_in_groups_that_are_not_the_world():
    """Ranks 1 and 3 train together, 0 and 2 apart from them; rank 0 of a group is not rank 0. Of a
    world of two each rank is one process, with nothing to average."""
    rank, size = world()
    groups = [dist.new_group([*range(first, size, 2)]) for first in range(2)]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    first, losses = Tied(), [*map(loss_on, token_batches(size)[rank % 2 :: 2])]
    for kind, make in EVERY.items():
        if size == 2 and "copied" in kind:
            continue  # there is nobody to copy to
        wrapper = make(checking.moved(first, rank), group=mine)
        reference = checking.moved(first, rank % 2)
        same_whole(wrapper, reference, kind)
        backward_of_each(wrapper, reference, losses, mine)
        checking.same_gradients(wrapper.module, reference, kind, part_of(kind, mine))
    with raises(RuntimeError, "not in the group"):
        NaiveDDP(Tied(), group=other)


@check(2)
def a_step_before_the_finish_is_refused():
    """By every wrapper, and only where it would read gradients that are this rank's own."""
    rank, size = world()
    tokens = token_batches(size)[rank]
    for kind, make in EVERY.items():
        wrapper, bystander = make(Tied()), nn.Linear(2, 2)
        optimizers = [
            torch.optim.AdamW(wrapper.parameters()),
            torch.optim.SGD([*bystander.parameters(), *wrapper.parameters()], lr=0.1),
        ]
        if "FSDP" not in kind:
            optimizers.append(ShardedOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1))
        other = torch.optim.SGD(bystander.parameters(), lr=0.1)
        for optimizer in optimizers:
            before = [p.detach().clone() for p in wrapper.parameters()]
            loss_on(tokens)(wrapper).backward()
            for _ in range(2):
                with raises(RuntimeError, rf"gradients of this \w+ {STILL_OWN}"):
                    optimizer.step()
            other.step()  # of other parameters
            for p, was in zip(wrapper.parameters(), before, strict=True):
                same(p.detach(), was, kind)
            wrapper.finish_gradient_synchronization()
            with torch.no_grad():
                loss_on(tokens)(wrapper)
            checking.take_step(optimizer)
        if "FSDP" not in kind:
            with wrapper.no_sync():
                loss_on(tokens)(wrapper).backward()
            with raises(RuntimeError, STILL_OWN):
                optimizers[0].step()
            with wrapper.no_sync():
                optimizers[0].step()
            optimizers[0].zero_grad()
        # Of a closure's backward too, which comes within the step.
        with raises(RuntimeError, STILL_OWN):
            optimizers[0].step(lambda wrapper=wrapper: loss_on(tokens)(wrapper).backward())
        wrapper.finish_gradient_synchronization()
        # Of one past the wrapper, and of a loss that is in no output.
        wrapper.zero_grad()
        loss_on(tokens)(wrapper.module).backward()
        with raises(RuntimeError, STILL_OWN):
            optimizers[0].step()
        wrapper.finish_gradient_synchronization()
        checking.take_step(optimizers[0])
        if "FSDP" not in kind:
            wrapper.module.head.weight.square().sum().backward()
            with raises(RuntimeError, STILL_OWN):
                optimizers[0].step()
            wrapper.finish_gradient_synchronization()
            optimizers[0].step()


@check(2)
def parameters_that_came_later_are_refused():
    """At the finish, by FSDP at the next forward too; a module without parameters may come."""

    def replaced(module):
        module[0].weight = nn.Parameter(module[0].weight.detach().clone())

    def added(module):
        module.append(nn.Linear(2, 2))

    def adapted(module):
        module[0].low_rank = nn.Linear(2, 2, bias=False)

    def headed(module):
        module[1] = nn.Linear(2, 2)

    changes = {
        replaced: "0.weight",
        added: "2.weight",
        adapted: "0.low_rank.weight",
        headed: "1.weight",
    }
    x = torch.ones(1, 2)
    cast = functools.partial(FSDP, compute_dtype=torch.bfloat16)
    for kind, make in {**EVERY, "FSDP that casts": cast}.items():
        for change, name in changes.items():
            wrapper = make(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
            change(wrapper.module)
            line = f"^{name} came or was replaced after the module was wrapped"
            if "FSDP" in kind:
                with raises(RuntimeError, line):
                    wrapper(x)
            else:
                wrapper(x).sum().backward()
            with raises(RuntimeError, line):
                wrapper.finish_gradient_synchronization()
        wrapper = make(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        wrapper.module[1] = nn.Tanh()
        wrapper(x).float().sum().backward()
        wrapper.finish_gradient_synchronization()


@check(2)
def gradients_of_other_things_leave_the_means():
    """``torch.autograd.grad`` and ``backward(inputs=...)`` between the finish and the step leave no
    ``.grad`` of a parameter: saliency, penalties. The weights are those without."""

    def saliency(wrapper, x):
        (gradient,) = torch.autograd.grad(wrapper(x).sum(), x)
        return gradient

    def by_inputs(wrapper, x):
        wrapper(x).sum().backward(inputs=[x])
        gradient, x.grad = x.grad, None
        return gradient

    rank, _ = world()
    first = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    # Without a gradient, so that a step must not decay it.
    first.append(nn.Sequential(nn.Linear(3, 3)))
    first[-1].forward = lambda x: x
    for kind, make in EVERY.items():
        for other in (saliency, by_inputs):
            wrapper, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
            pair = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (wrapper, reference)]
            for step in range(2):
                xs = [torch.randn(2, 3, generator=checking.seeded(10 * step + r)) for r in (0, 1)]
                losses = [lambda m, x=x: m(x).square().sum() for x in xs]
                backward_of_each(wrapper, reference, losses)
                x = xs[rank].requires_grad_()
                same(other(wrapper, x), other(copy.deepcopy(reference), x), kind)
                if "FSDP" in kind:  # which cannot tell this backward from one that accumulates
                    with raises(RuntimeError, STILL_OWN):
                        pair[0].step()
                    wrapper.finish_gradient_synchronization()
                checking.take_step(*pair)
                theirs = dict(reference.named_parameters())
                checking.same_by_name(checking.whole_weights(wrapper), theirs, f"{kind} {step}")


@check(2)
def a_finish_is_missed_whatever_the_module_returns():
    """What autograd's hooks cannot see, or must not be given at each forward, counts too."""

    class Returns(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.weight, self.form = nn.Parameter(torch.ones(2, 3)), form

        def forward(self):
            return self.form(self.weight)

    forms = {
        "a dict": (lambda w: {"deep": [w * 2, 1]}, lambda output: output["deep"][0]),
        "an object": (lambda w: SimpleNamespace(x=w * 2), lambda output: output.x),
        "the parameter": (lambda w: w, lambda output: output),
    }
    for make in (NaiveDDP, FlatDDP, DDP, FSDP):
        for what, (form, of) in forms.items():
            if make is FSDP and what == "the parameter":
                continue  # which is not there any more behind the forward
            wrapper = make(Returns(form))
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
            if make is FSDP and what == "an object":
                with raises(RuntimeError, "the module returns an object in which FSDP sees no"):
                    wrapper()
                continue
            of(wrapper()).sum().backward()
            with raises(RuntimeError, STILL_OWN):
                optimizer.step()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
            hooks = wrapper.module.weight._backward_hooks
            assert not hooks, "no forward leaves one on the parameter"


@check(2)
def fsdp_refuses_torchs_norm_of_its_rows():
    """By whatever name; of parameters that are whole on each rank, and of one rank, it is right."""
    rank, size = world()
    tokens = token_batches(size)[rank]
    fsdp, single = FSDP(Stack()), FSDP(Stack(), group=checking.alone())
    for wrapped in (fsdp, single):
        loss_on(tokens)(wrapped).backward()
        with raises(RuntimeError, "clip_grad_norm_ comes after finish_gradient_synchronization"):
            wrapped.clip_grad_norm_(0.1)
        wrapped.finish_gradient_synchronization()
    before = [p.grad.clone() for p in fsdp.parameters()]
    ways = {
        "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        "imported earlier": lambda parameters: clip_grad_norm_(parameters, 0.1, foreach=False),
        "get_total_norm": lambda parameters: nn.utils.get_total_norm(p.grad for p in parameters),
    }
    for what, norm in ways.items():
        for parameters in (fsdp.parameters(), [fsdp.module.head.weight]):
            with raises(RuntimeError, "another on each rank: call clip_grad_norm_ of the FSDP"):
                norm(parameters)
        for p, was in zip(fsdp.parameters(), before, strict=True):
            same(p.grad, was, what)
        norm([fsdp.module.head.bias])
        before = [p.grad.clone() for p in fsdp.parameters()]
        norm(single.parameters())
    fsdp.clip_grad_norm_(0.1)


@check(2)
def fsdp_says_of_a_backward_of_a_backward_that_there_is_none():
    tokens = token_batches(1)[0]
    line = "no backward of a backward.*without create_graph"
    for first in (
        lambda fsdp, loss: loss.backward(create_graph=True),
        lambda fsdp, loss: torch.autograd.grad(loss, [*fsdp.parameters()], create_graph=True),
    ):
        fsdp = FSDP(Stack())
        with raises(RuntimeError, line):
            first(fsdp, loss_on(tokens)(fsdp))


@check(2)
def a_rank_that_skips_a_step_is_named_on_every_rank():
    """Whatever raised there; of the four DDPs, which pair by order and would go on."""
    rank, _ = world()
    batches = token_batches(5)

    class Raises(Exception):
        pass

    def raising(*_):
        raise Raises

    def in_the_forward(wrapper, tokens):
        handle = wrapper.module.blocks[1].register_forward_pre_hook(raising)
        try:
            wrapper(tokens)
        finally:
            handle.remove()

    def behind_it(wrapper, tokens):
        wrapper(tokens)
        raise Raises

    def in_the_backward(wrapper, tokens):
        handle = wrapper.module.blocks[1].norm.register_full_backward_hook(raising)
        try:
            loss_on(tokens)(wrapper).backward()
        finally:
            handle.remove()

    def train(wrapper, fail):
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        for step, tokens in enumerate(batches):
            try:
                if step == 2 and rank == 1:
                    fail(wrapper, tokens)
                loss_on(tokens)(wrapper).backward()
                wrapper.finish_gradient_synchronization()
            except Raises:
                pass
            else:
                optimizer.step()
            optimizer.zero_grad()

    skipped = "rank 1 skipped a step, .* it began 2 forwards since the last step and rank 0 began 1"
    for kind, make in KINDS.items():
        for fail in (in_the_forward, behind_it, in_the_backward):
            half_way = fail is in_the_backward and kind not in ("NaiveDDP", "FlatDDP")
            if not half_way:  # that one is told of its second gradient
                with raises(RuntimeError, skipped):
                    train(make(Tied()), fail)


@check(2)
def a_captured_step_has_the_gradients_of_the_one_before():
    """A graph cannot ask the other ranks which parameters have none."""
    tokens = token_batches(1)[0]
    for make in EVERY.values():
        wrapper = make(Tied())
        loss_on(tokens)(wrapper).backward()
        wrapper.finish_gradient_synchronization()
        with patch.object(agreement, "capturing", lambda _: True):
            loss_on(tokens, extra=True)(wrapper).backward()
            with raises(RuntimeError, "^extra.weight has a gradient in the captured step or in"):
                wrapper.finish_gradient_synchronization()


@check(2)
def overlapping_without_its_wrapper_is_refused():
    """By whatever averages or divides: the updates would be by gradients that are not the means."""
    tokens = token_batches(1)[0]
    for kind, make in EVERY.items():
        wrapper = make(Tied())
        optimizer = MasterAdamW(wrapper.parameters())
        before = [p.detach().clone() for p in wrapper.parameters()]
        with raises(RuntimeError, r"say overlapping\(wrapper\)|has no overlapping\(\)"):
            with optimizer.overlapping():
                loss_on(tokens)(wrapper).backward()
        for p, was in zip(wrapper.parameters(), before, strict=True):
            same(p.detach(), was, kind)
