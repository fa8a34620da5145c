"""FSDP under PyTorch's own names: state dicts, calls and weights are whole, or refused."""

import copy
import itertools

import checking
import torch
from checking import Tied, check, loss_on, raises, same, take_step, token_batches
from checks_fsdp import BOTH, check_freed, check_weights
from torch import nn
from torch.optim import SGD, Adafactor, AdamW

from a2lib.parallel import FSDP


@check(2)
def state_dicts_of_rows_are_refused():
    """Of the module, the wrapper and a part, of an optimizer that has stepped and one that was
    loaded before it did; of one rank, which has all rows, they are whole."""
    first, line = Tied(), "has no state dict, since a rank has rows alone: gather_full_params"
    fsdp, single = FSDP(copy.deepcopy(first)), FSDP(copy.deepcopy(first), group=checking.alone())
    checking.same_by_name(single.module.state_dict(), first.state_dict())
    single.module.load_state_dict(first.state_dict())
    for part in (fsdp, fsdp.module, fsdp.module.blocks[0]):
        with raises(RuntimeError, line):
            part.state_dict()
        with raises(RuntimeError, line):
            part.load_state_dict({})
    tokens = token_batches(1)[0]
    plain = AdamW(first.parameters())
    states = []
    for module, optimizer in ((first, plain), (single, AdamW(single.parameters()))):
        loss_on(tokens)(module).backward()
        if module is single:
            single.finish_gradient_synchronization()
        optimizer.step()
        states.append(optimizer.state_dict()["state"])
    assert states[0].keys() == states[1].keys()
    loss_on(tokens)(fsdp).backward()
    fsdp.finish_gradient_synchronization()
    for cls in (AdamW, torch.optim.Adam):
        loaded, stepped = cls(fsdp.parameters()), cls(fsdp.parameters())
        loaded.load_state_dict(plain.state_dict())
        stepped.step()
        of_rows = r"of embed.weight is \(11, 6\), not \(\d, 6\) as this rank's rows: load_sharded"
        with raises(ValueError, of_rows):
            loaded.step()
        with raises(ValueError, of_rows):
            stepped.load_state_dict(plain.state_dict())
        with raises(RuntimeError, f"this {cls.__name__} has no state dict.*save_sharded"):
            stepped.state_dict()


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


@check(2)
def calls_past_the_forward_are_refused():
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
    line = "past the forward of its FSDP.*weights of its gather_full_params"
    with torch.no_grad():
        for _ in range(2):
            for call in calls.values():
                with raises(RuntimeError, line):
                    call(module)
            check_freed(fsdp)
            # What goes by the hooks gathers for itself.
            same(module(tokens), first(tokens))
            same(module.blocks[1](x), first.blocks[1](x))
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
        whole = fsdp.gather_full_params()["weight"]
        same(whole.view(torch.uint8), first.weight.detach().view(torch.uint8), str(dtype))
        low = FSDP(Scaled(dtype), compute_dtype=torch.bfloat16)
        if dtype in eight_bits:
            assert low._replicated[0].shown.dtype == dtype  # its scale is the module's
        with checking.shared_folder() as folder:
            checking.save_and_load(folder / "saved", fsdp, FSDP(Scaled(dtype)))
