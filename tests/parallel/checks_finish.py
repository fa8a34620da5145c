"""What every wrapper does, and refuses since it would make other weights on each rank, without an
error."""

import copy
import functools
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
    copies_of,
    loss_on,
    losses_of,
    optimizers_of,
    output_square,
    raises,
    same,
    same_each,
    take_step,
    token_batches,
    world,
)
from checks_ddp import KINDS
from checks_fsdp import Stack, check_freed, mine_of
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, agreement

STILL_OWN = "are still each rank's own: call finish_gradient_synchronization"

EVERY = {**KINDS, "FSDP": FSDP, "FSDP, copied": functools.partial(copied, FSDP)}


def same_whole(wrapper, reference, what):
    """Weights and the buffer."""
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    checking.same_by_name(checking.whole_weights(wrapper), theirs, what)
    same(wrapper.module.scale, reference.scale, what)


def same_gradients(wrapper, reference, what, group=None):
    """Compare gradients; of FSDP those of this rank's rows."""
    part = functools.partial(mine_of, group=group) if isinstance(wrapper, FSDP) else None
    checking.same_gradients(wrapper.module, reference, what, part)


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
    optimizers = optimizers_of((module, reference), AdamW, lr=0.05)
    wrapper = EVERY[kind](module)
    same_whole(wrapper, reference, kind)
    batches = iter(token_batches(4 * size * micros))
    for step in range(4):
        losses = []
        for r in range(size):
            of_rank = []
            for micro in range(micros):
                # An odd step uses `extra` on rank 1 alone, and in one micro-batch alone.
                extra = step % 2 == 1 and r == 1 and micro == micros // 2
                of_rank.append(loss_on(next(batches), extra=extra, checkpointed=step == 2))
            losses.append(of_rank)
        *early, last = losses[rank]
        if early:
            with wrapper.no_sync():
                early[0](wrapper).backward()
                with wrapper.no_sync():
                    early[1](wrapper).backward()
        last(wrapper).backward()
        wrapper.finish_gradient_synchronization()
        checking.mean_gradients(reference, losses)
        same_gradients(wrapper, reference, f"{kind}, step {step}")
        assert module.never.weight.grad is None
        assert (module.extra.weight.grad is not None) == (step % 2 == 1)
        take_step(*optimizers)
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
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    first = Tied()
    losses = list(map(loss_on, token_batches(size)[rank % 2 :: 2]))
    for kind, make in EVERY.items():
        if size == 2 and "copied" in kind:
            continue  # there is nobody to copy to
        wrapper = make(checking.moved(first, rank), group=mine)
        reference = checking.moved(first, rank % 2)
        same_whole(wrapper, reference, kind)
        backward_of_each(wrapper, reference, losses, mine)
        same_gradients(wrapper, reference, kind, mine)
    with raises(RuntimeError, "not in the group"):
        NaiveDDP(Tied(), group=other)


@check(2)
def a_step_before_the_finish_is_refused():
    """By every wrapper, and only where it would read gradients that are this rank's own."""
    rank, size = world()
    loss = loss_on(token_batches(size)[rank])
    for kind, make in EVERY.items():
        wrapper, bystander = make(Tied()), nn.Linear(2, 2)
        both = [*bystander.parameters(), *wrapper.parameters()]
        optimizers = [AdamW(wrapper.parameters()), SGD(both, lr=0.1)]
        if "FSDP" not in kind:
            optimizers.append(ShardedOptimizer(wrapper.parameters(), SGD, lr=0.1))
        other = SGD(bystander.parameters(), lr=0.1)
        for optimizer in optimizers:
            before = copies_of(wrapper.parameters())
            loss(wrapper).backward()
            for _ in range(2):
                with raises(RuntimeError, rf"gradients of this \w+ {STILL_OWN}"):
                    optimizer.step()
            other.step()  # of other parameters
            same_each(wrapper.parameters(), before, kind)
            wrapper.finish_gradient_synchronization()
            with torch.no_grad():
                loss(wrapper)  # which is only looked at
            take_step(optimizer)


@check(2)
def a_finish_is_missed_however_the_gradients_came():
    """In no_sync, in a step's closure, past the wrapper, of a loss that is in no output."""
    rank, size = world()
    loss = loss_on(token_batches(size)[rank])
    for kind, make in EVERY.items():
        wrapper = make(Tied())
        optimizer = AdamW(wrapper.parameters())
        with raises(RuntimeError, STILL_OWN):
            optimizer.step(lambda wrapper=wrapper: loss(wrapper).backward())
        wrapper.finish_gradient_synchronization()
        wrapper.zero_grad()
        loss(wrapper.module).backward()
        with raises(RuntimeError, STILL_OWN):
            optimizer.step()
        wrapper.finish_gradient_synchronization()
        take_step(optimizer)
        if "FSDP" in kind:
            continue
        wrapper.module.head.weight.square().sum().backward()
        with raises(RuntimeError, STILL_OWN):
            optimizer.step()
        wrapper.finish_gradient_synchronization()
        take_step(optimizer)
        with wrapper.no_sync():
            loss(wrapper).backward()
        with raises(RuntimeError, STILL_OWN):
            optimizer.step()
        with wrapper.no_sync():
            optimizer.step()
        loss(wrapper).backward()
        with raises(RuntimeError, STILL_OWN), wrapper.no_sync():
            optimizer.step()
        wrapper.finish_gradient_synchronization()
        take_step(optimizer)


def replace_a_weight(module):
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def append_a_layer(module):
    module.append(nn.Linear(2, 2))


def adapt_a_layer(module):
    module[0].low_rank = nn.Linear(2, 2, bias=False)


@check(2)
def parameters_that_came_later_are_refused():
    """At the finish, by FSDP at the next forward too; a module without parameters may come."""
    x = torch.ones(1, 2)
    for kind, make in EVERY.items():
        for change, name in (
            (replace_a_weight, "0.weight"),
            (append_a_layer, "2.weight"),
            (adapt_a_layer, "0.low_rank.weight"),
        ):
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


def saliency(wrapper, x):
    (gradient,) = torch.autograd.grad(wrapper(x).sum(), x)
    return gradient


def saliency_by_inputs(wrapper, x):
    wrapper(x).sum().backward(inputs=[x])
    gradient, x.grad = x.grad, None
    return gradient


@check(2)
def gradients_of_other_things_leave_the_means():
    """``torch.autograd.grad`` and ``backward(inputs=...)`` between the finish and the step leave no
    ``.grad`` of a parameter: saliency, penalties. The weights are those without."""
    rank, size = world()
    first = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    # Without a gradient, so that a step must not decay it.
    first.append(nn.Sequential(nn.Linear(3, 3)))
    first[-1].forward = lambda x: x
    for kind, make in EVERY.items():
        for other in (saliency, saliency_by_inputs):
            wrapper, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
            optimizers = optimizers_of((wrapper, reference), AdamW, lr=0.1)
            for step in range(2):
                batches = torch.randn(size, 2, 3, generator=checking.seeded(step))
                backward_of_each(wrapper, reference, losses_of(output_square, batches))
                x = batches[rank].clone().requires_grad_()
                same(other(wrapper, x), other(copy.deepcopy(reference), x), kind)
                if "FSDP" in kind:  # which cannot tell this backward from one that accumulates
                    with raises(RuntimeError, STILL_OWN):
                        optimizers[0].step()
                    wrapper.finish_gradient_synchronization()
                take_step(*optimizers)
                theirs = dict(reference.named_parameters())
                checking.same_by_name(checking.whole_weights(wrapper), theirs, f"{kind} {step}")


class Returns(nn.Module):
    """Returns its weight in a form, where autograd's hooks on outputs cannot see it."""

    def __init__(self, form):
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(2, 3)), form

    def forward(self):
        return self.form(self.weight)


def in_dict(weight):
    return {"deep": [weight * 2, 1]}


def in_object(weight):
    return SimpleNamespace(x=weight * 2)


def itself(weight):
    return weight


def tensor_in(output):
    if isinstance(output, dict):
        return output["deep"][0]
    return output.x if isinstance(output, SimpleNamespace) else output


@check(2)
def a_finish_is_missed_whatever_the_module_returns():
    replicas = in_dict, in_object, itself
    for make, forms in (
        (NaiveDDP, replicas),
        (FlatDDP, replicas),
        (DDP, replicas),
        (FSDP, [in_dict]),
    ):
        for form in forms:
            wrapper = make(Returns(form))
            optimizer = SGD(wrapper.parameters(), lr=0.1)
            tensor_in(wrapper()).sum().backward()
            with raises(RuntimeError, STILL_OWN):
                optimizer.step()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
    with raises(RuntimeError, "the module returns an object in which FSDP sees no"):
        FSDP(Returns(in_object))()


@check(2)
def fsdp_refuses_torchs_norm_of_its_rows():
    """By whatever name; of parameters that are whole on each rank, and of one rank, it is right."""
    rank, size = world()
    loss = loss_on(token_batches(size)[rank])
    fsdp, single = FSDP(Stack()), FSDP(Stack(), group=checking.alone())
    for wrapped in (fsdp, single):
        loss(wrapped).backward()
        with raises(RuntimeError, "clip_grad_norm_ comes after finish_gradient_synchronization"):
            wrapped.clip_grad_norm_(0.1)
        wrapped.finish_gradient_synchronization()
    gradients = checking.gradients(fsdp).values()
    before = copies_of(gradients)
    line = "another on each rank: call clip_grad_norm_ of the FSDP"
    for parameters in (list(fsdp.parameters()), [fsdp.module.head.weight]):
        with raises(RuntimeError, line):
            nn.utils.clip_grad_norm_(parameters, 0.1)
        with raises(RuntimeError, line):  # by a name that was imported earlier
            clip_grad_norm_(parameters, 0.1, foreach=False)
        with raises(RuntimeError, line):
            nn.utils.get_total_norm([p.grad for p in parameters])
    same_each(gradients, before)
    nn.utils.clip_grad_norm_([fsdp.module.head.bias], 0.1)
    nn.utils.clip_grad_norm_(single.parameters(), 0.1)
    fsdp.clip_grad_norm_(0.1)


@check(2)
def fsdp_says_of_a_backward_of_a_backward_that_there_is_none():
    loss = loss_on(token_batches(1)[0])
    line = "no backward of a backward.*without create_graph"
    with raises(RuntimeError, line):
        loss(FSDP(Stack())).backward(create_graph=True)
    fsdp = FSDP(Stack())
    with raises(RuntimeError, line):
        torch.autograd.grad(loss(fsdp), list(fsdp.parameters()), create_graph=True)


class Stopped(Exception):
    pass


def stop(*_):
    raise Stopped


def stop_in_the_forward(wrapper, loss):
    handle = wrapper.module.blocks[1].norm.register_forward_pre_hook(stop)
    try:
        loss(wrapper)
    finally:
        handle.remove()


def stop_behind_it(wrapper, loss):
    loss(wrapper)
    raise Stopped


def stop_in_the_backward(wrapper, loss):
    handle = wrapper.module.blocks[1].norm.register_full_backward_hook(stop)
    try:
        loss(wrapper).backward()
    finally:
        handle.remove()


STOPS = stop_in_the_forward, stop_behind_it, stop_in_the_backward


@check(2)
def fsdp_goes_no_further_behind_an_error():
    loss = loss_on(token_batches(1)[0])
    for kind in ("FSDP", "FSDP, copied"):
        for fail in STOPS:
            fsdp = EVERY[kind](Stack())
            with raises(Stopped, ""):
                fail(fsdp, loss)
            if fail is stop_in_the_forward:
                check_freed(fsdp)
            line = "the forward before this one has had no backward: call in no_grad"
            if fail is stop_in_the_backward:
                line = "a backward has not come to its end"
                with raises(RuntimeError, line):
                    fsdp.finish_gradient_synchronization()
            with raises(RuntimeError, line):
                loss(fsdp)


def train_with_a_stop(wrapper, fail):
    """Five steps, of which rank 1 stops the third."""
    optimizer = SGD(wrapper.parameters(), lr=0.1)
    for step, tokens in enumerate(token_batches(5)):
        loss = loss_on(tokens)
        try:
            if step == 2 and wrapper.rank == 1:
                fail(wrapper, loss)
            loss(wrapper).backward()
            wrapper.finish_gradient_synchronization()
        except Stopped:
            pass
        else:
            optimizer.step()
        optimizer.zero_grad()


@check(2)
def a_rank_that_skips_a_step_is_named_on_every_rank():
    """The four DDPs pair by order and would go on. It is named wherever it stopped."""
    skipped = "rank 1 skipped a step, .* it began 2 forwards since the last step and rank 0 began 1"
    for kind, make in KINDS.items():
        for fail in STOPS:
            # One that sends during the backward is told of its second gradient.
            if fail is not stop_in_the_backward or kind in ("NaiveDDP", "FlatDDP"):
                with raises(RuntimeError, skipped):
                    train_with_a_stop(make(Tied()), fail)


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
    loss = loss_on(token_batches(1)[0])
    for kind, make in EVERY.items():
        wrapper = make(Tied())
        optimizer = MasterAdamW(wrapper.parameters())
        before = copies_of(wrapper.parameters())
        with raises(RuntimeError, r"say overlapping\(wrapper\)"):
            with optimizer.overlapping():
                loss(wrapper).backward()
        same_each(wrapper.parameters(), before, kind)
