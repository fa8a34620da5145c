"""FSDP under PyTorch's own names: state dicts, calls and weights are whole, or refused."""

import copy
import itertools

import checking
import torch
from checking import Tied, check, loss_on, raises, same, take_step, token_batches, world
from checks_fsdp import BOTH, Ways, check_freed, check_weights
from torch import nn
from torch.optim import SGD, Adafactor, AdamW

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP


def same_states(mine, theirs, what):
    assert mine["param_groups"] == theirs["param_groups"], what
    assert mine["state"].keys() == theirs["state"].keys(), what
    for i, values in theirs["state"].items():
        pair = []
        for state in (mine["state"][i], values):
            pair.append({key: x.cpu() for key, x in state.items()})
        checking.same_by_name(*pair, f"{what}, of {i}")


def step_both(fsdp, reference, optimizers, number):
    rank, size = world()
    losses = [loss_on(tokens) for tokens in token_batches(size * (number + 1))[-size:]]
    checking.backward_of_each(fsdp, reference, losses)
    take_step(*optimizers)


@check(2, 4)
def state_dicts_of_an_fsdp_are_whole():
    """Those of the module, the wrapper and a part, saved and loaded, at any number of rows."""
    rank, size = world()
    first = Tied(width=5)
    for dtype in (None, torch.bfloat16):
        fsdp = FSDP(checking.moved(first, rank), compute_dtype=dtype)
        checking.same_by_name(fsdp.module.state_dict(), first.state_dict())
        prefixed = {f"module.{name}": x for name, x in first.state_dict().items()}
        checking.same_by_name(fsdp.state_dict(), prefixed)
        checking.same_by_name(fsdp.module.blocks[0].state_dict(), first.blocks[0].state_dict())
        other = FSDP(Tied(width=5), compute_dtype=dtype)
        other.load_state_dict(fsdp.state_dict())
        check_weights(other, first, "loaded")
        second = Tied(width=5)
        other.module.load_state_dict(second.state_dict())
        check_weights(other, second, "loaded from a plain one")
        own = {name: p.detach() for name, p in fsdp.module.named_parameters()}
        if own["embed.weight"].shape != first.embed.weight.shape:
            with raises(ValueError, r"embed.weight is \(11, 5\) as a whole, which load_state_di"):
                other.module.load_state_dict(own, strict=False)


@check(2)
def state_dicts_of_an_optimizer_over_an_fsdp_are_whole():
    """As a plain one's, and loaded by a new optimizer, by one that has stepped, by a plain one."""
    kinds = [
        (AdamW, {"lr": 0.05, "amsgrad": True}),
        (SGD, {"lr": 0.05, "momentum": 0.9}),
        (MasterAdamW, {"lr": 0.05}),
    ]
    for cls, options in kinds:
        first = Ways()
        fsdp, reference = FSDP(copy.deepcopy(first)), copy.deepcopy(first)
        pair = cls(fsdp.parameters(), **options), cls(reference.parameters(), **options)
        for number in range(2):
            step_both(fsdp, reference, pair, number)
        state = pair[0].state_dict()
        same_states(state, pair[1].state_dict(), cls.__name__)
        # A new optimizer of new rows, one that has stepped, and a plain one go on alike.
        other, plain = FSDP(Ways()), copy.deepcopy(reference)
        for stepped in (False, True):
            other.load_state_dict(fsdp.state_dict())
            again = cls(other.parameters(), **options)
            if stepped:
                step_both(other, Ways(), (again,), 5)
                other.load_state_dict(fsdp.state_dict())
            again.load_state_dict(copy.deepcopy(state))
            same_states(again.state_dict(), state, f"{cls.__name__}, loaded")
            follower = copy.deepcopy(reference)
            theirs = cls(follower.parameters(), **options)
            theirs.load_state_dict(copy.deepcopy(state))
            step_both(other, follower, (again, theirs), 3)
            check_weights(other, follower, f"{cls.__name__}, stepped {stepped}")
        theirs = cls(plain.parameters(), **options)
        theirs.load_state_dict(copy.deepcopy(state))
        part = {0: {key: x[:1] if x.dim() else x for key, x in state["state"][0].items()}}
        if cls is AdamW:
            with raises(ValueError, r"of embed.weight is \(11, 6\) as a whole, which load_state_d"):
                again.load_state_dict({**state, "state": part})


@check(2)
def an_optimizer_with_states_of_other_shapes_has_no_state_dict():
    class Summing(SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["sums"] = torch.zeros(2)

    fsdp = FSDP(Ways())
    optimizer = Summing(fsdp.parameters())
    step_both(fsdp, Ways(), (optimizer,), 0)
    with raises(ValueError, "Summing's sums of embed.weight has not its parameter's shape"):
        optimizer.state_dict()


@check(2)
def optimizers_of_whole_matrices_are_refused():
    class Lamb(SGD):
        pass

    tokens = token_batches(1)[0]
    for cls in (torch.optim.Muon, torch.optim.LBFGS, Adafactor, Lamb):
        for group in (None, checking.alone()):
            fsdp = FSDP(
                nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)), group=group
            )
            optimizer = cls(fsdp.parameters(), lr=0.1)
            loss_on(tokens)(fsdp).backward()
            fsdp.finish_gradient_synchronization()
            before = [p.detach().clone() for p in fsdp.parameters()]
            if group is None:
                with raises(ValueError, f"{cls.__name__} looks at whole matrices or at all"):
                    optimizer.step(lambda: torch.zeros(()))
                for p, was in zip(fsdp.parameters(), before, strict=True):
                    same(p.detach(), was)
            else:
                optimizer.step(lambda: torch.zeros(()))


class Generates(nn.Module):
    """Calls its own ``forward``, and a part of itself, past every hook."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.head = nn.Linear(4, 6)
        self.shift = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens):
        x = self.embed(tokens) + self.shift[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def generate(self, tokens):
        for _ in range(2):
            following = self.forward(tokens).argmax(-1)[..., -1:]
            tokens = torch.cat([tokens, following], -1)
        return tokens

    def by_the_head(self, x):
        return x @ self.head.weight.T


@check(2)
def calls_past_the_forward_are_refused_or_whole():
    first = Generates()
    fsdp, tokens = FSDP(copy.deepcopy(first)), torch.tensor([[0, 1]])
    module, x = fsdp.module, torch.randn(3, 4)
    calls = {
        "generate": lambda module: module.generate(tokens),
        "forward": lambda module: module.forward(tokens),
        "embed": lambda module: module.embed(tokens),
        "head": lambda module: module.head(x),
        "a unit's forward": lambda module: module.blocks[0].forward(x),
        "a part of a unit": lambda module: module.last[0][0](x),
    }
    line = "past the forward of its FSDP.*or be within its gathered"
    with torch.no_grad():
        whole = {what: call(first) for what, call in calls.items()}
        for _ in range(2):
            for what, call in calls.items():
                with raises(RuntimeError, line):
                    call(module)
                with fsdp.gathered():
                    same(call(module), whole[what], what)
            with fsdp.gathered():
                same(module.by_the_head(x), first.by_the_head(x))
                same(fsdp(tokens), first(tokens))
            check_freed(fsdp)
            # What goes by the hooks gathers for itself.
            same(module(tokens), first(tokens))
            same(module.blocks[1](x), first.blocks[1](x))
    with raises(RuntimeError, "computes without gradients"), fsdp.gathered(), torch.enable_grad():
        fsdp(tokens)
    with raises(RuntimeError, "changed in place"), fsdp.gathered():
        module.head.weight.zero_()
    check_freed(fsdp)
    check_weights(fsdp, first, "as before")
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (fsdp, first)]
    for number in range(2):
        losses = [lambda m, r=r: m(tokens + r).square().sum() for r in range(2)]
        checking.backward_of_each(fsdp, first, losses)
        take_step(*optimizers)
        check_weights(fsdp, first, f"step {number}")


@check(2)
def changes_of_gathered_weights_are_refused():
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.bias.clamp_(max=0)
            return super().forward(x)

    tokens, x = torch.arange(6), torch.randn(2, 4)
    limited = nn.Embedding(6, 4, max_norm=0.5)
    with torch.no_grad():
        limited.weight.copy_(torch.ones(6, 4))
    line = "a gathered parameter was changed in place.*it is one of "
    for grad in (True, False):
        for wrap in (lambda m: m, lambda m: nn.Sequential(m, nn.Linear(4, 2))):
            fsdp = FSDP(wrap(copy.deepcopy(limited)))
            before = fsdp.gather_full_params()
            with torch.set_grad_enabled(grad), raises(RuntimeError, line + r"\S*weight"):
                fsdp(tokens)
            checking.same_by_name(fsdp.gather_full_params(), before)
            check_freed(fsdp)
    fsdp = FSDP(nn.Sequential(Clamped(4, 4)), compute_dtype=torch.bfloat16)
    with raises(RuntimeError, line + "0.weight, 0.bias"):
        fsdp(x)
    FSDP(nn.Sequential(Clamped(4, 4)))(x)  # whole on each rank, and its own


@check(2)
def fsdp_takes_frozen_weights_of_any_dtype():
    """To the bit, through a forward, a checkpoint of names and numbers, and back."""

    class Scaled(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            weight = (torch.arange(15).view(5, 3) % 2).to(dtype)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.scale = nn.Parameter(torch.ones(5, 3))

        def forward(self, x):
            assert self.weight.shape == (5, 3)
            return x @ (self.weight.float() * self.scale).T

    dtypes = (torch.int16, torch.uint16, torch.uint8, torch.int64, torch.bool, torch.float64)
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype, make in itertools.product((*dtypes, *eight_bits), BOTH):
        first, x = Scaled(dtype), torch.randn(2, 3)
        fsdp, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        checking.backward_of_each(fsdp, reference, [lambda m, x=x: m(x).sum()] * 2)
        same(fsdp(x), reference(x), str(dtype))
        whole = fsdp.module.state_dict()["weight"]
        same(whole.view(torch.uint8), first.weight.detach().view(torch.uint8), str(dtype))
        low = FSDP(Scaled(dtype), compute_dtype=torch.bfloat16)
        if dtype in eight_bits:
            assert low._units[0].sharded[0].shown_dtype == dtype  # its scale is the module's
        with checking.shared_folder() as folder:
            checking.save_and_load(folder / "saved", fsdp, FSDP(Scaled(dtype)))
