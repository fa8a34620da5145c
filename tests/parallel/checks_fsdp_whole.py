"""FSDP under PyTorch's own names: state dicts, calls and weights are whole, or refused."""

import copy
import itertools
import warnings

import checking
import torch
from checking import Tied, check, loss_on, raises, same, take_step, token_batches, world
from checks_fsdp import BOTH, check_freed, check_weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adafactor, AdamW

from a2lib.optim import MasterAdamW
from a2lib.parallel import FSDP


@check(2)
def state_dicts_of_rows_are_refused():
    """The module, the wrapper and a part refuse, an optimizer that has stepped, and one that was
    loaded before it did. One rank alone has all rows, and whole state dicts."""
    first, line = Tied(), "has no state dict, since a rank has rows alone: gather_full_params"
    fsdp, single = FSDP(copy.deepcopy(first)), FSDP(copy.deepcopy(first), group=checking.alone())
    checking.same_by_name(single.module.state_dict(), first.state_dict())
    single.module.load_state_dict(first.state_dict())
    for part in (fsdp, fsdp.module, fsdp.module.blocks[0]):
        with raises(RuntimeError, line):
            part.state_dict()
        with raises(RuntimeError, line):
            part.load_state_dict({})
    loss = loss_on(token_batches(1)[0])
    plain, of_single = AdamW(first.parameters()), AdamW(single.parameters())
    loss(first).backward()
    plain.step()
    loss(single).backward()
    single.finish_gradient_synchronization()
    of_single.step()
    assert of_single.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    loss(fsdp).backward()
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


class Lamb(SGD):
    """One that nobody has looked at."""


@check(2)
def optimizers_of_whole_matrices_are_refused():
    """They step where a rank is alone, which has all rows."""
    loss = loss_on(token_batches(1)[0])
    for cls in (torch.optim.Muon, torch.optim.LBFGS, Adafactor, Lamb):
        for group in (None, checking.alone()):
            model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
            fsdp = FSDP(model, group=group)
            optimizer = cls(fsdp.parameters(), lr=0.1)
            loss(fsdp).backward()
            fsdp.finish_gradient_synchronization()
            before = checking.copies_of(fsdp.parameters())
            if group is not None:
                optimizer.step(lambda: torch.zeros(()))
                continue
            with raises(ValueError, f"{cls.__name__} looks at whole matrices or at all"):
                optimizer.step(lambda: torch.zeros(()))
            checking.same_each(fsdp.parameters(), before)


@check(2)
def masters_of_rows_step_as_those_of_whole_matrices():
    """To the bit, of rows that two ranks do not divide, or of which one has none."""
    _, size = world()
    first = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own
        of_pytorch = fully_shard(copy.deepcopy(first))
    with raises(ValueError, "a parameter is a DTensor"):
        MasterAdamW(of_pytorch.parameters())
    fsdp, reference = FSDP(copy.deepcopy(first)), copy.deepcopy(first)
    with raises(ValueError, "a parameter is a shard of FSDP, which keeps its dtype; allowed is"):
        MasterAdamW(fsdp.parameters(), working_dtype=torch.bfloat16)
    optimizers = checking.optimizers_of((fsdp, reference), MasterAdamW, lr=3e-3, weight_decay=0.1)
    for step in range(3):
        batches = torch.randn(size, 4, 3)
        losses = checking.losses_of(checking.output_square, batches)
        checking.backward_of_each(fsdp, reference, losses)
        take_step(*optimizers)
        check_weights(fsdp, reference, f"step {step}")


class Generates(nn.Module):
    """Calls its own ``forward``, and a part of itself, past every hook."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
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
    with torch.no_grad():
        for _ in range(2):
            for call in calls.values():
                with raises(RuntimeError, "past the forward of its FSDP.*gather_full_params"):
                    call(module)
            check_freed(fsdp)
            # What goes by the hooks gathers for itself.
            same(module(tokens), first(tokens))
            same(module.blocks[1](x), first.blocks[1](x))


def shifted_square(module, batch):
    return module(torch.tensor([[0, 1]]) + batch).square().sum()


@check(2)
def parameters_beside_a_module_are_trained():
    first = Generates()
    fsdp = FSDP(copy.deepcopy(first))
    optimizers = checking.optimizers_of((fsdp, first), SGD, lr=0.1)
    for step in range(2):
        checking.backward_of_each(fsdp, first, checking.losses_of(shifted_square, (0, 1)))
        take_step(*optimizers)
        check_weights(fsdp, first, f"step {step}")


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.bias.clamp_(max=0)
        return super().forward(x)


@check(2)
def changes_of_gathered_weights_are_refused():
    tokens, x = torch.arange(6), torch.randn(2, 4)
    limited = nn.Embedding(6, 4, max_norm=0.5)
    with torch.no_grad():
        limited.weight.copy_(torch.ones(6, 4))
    line = "a gathered parameter was changed in place.*it is one of "
    for grad in (True, False):
        for others in ([], [nn.Linear(4, 2)]):
            fsdp = FSDP(nn.Sequential(copy.deepcopy(limited), *others))
            before = fsdp.gather_full_params()
            with torch.set_grad_enabled(grad), raises(RuntimeError, line + "0.weight"):
                fsdp(tokens)
            checking.same_by_name(fsdp.gather_full_params(), before)
            check_freed(fsdp)
    fsdp = FSDP(nn.Sequential(Clamped(4, 4)), compute_dtype=torch.bfloat16)
    with raises(RuntimeError, line + "0.weight, 0.bias"):
        fsdp(x)
    FSDP(nn.Sequential(Clamped(4, 4)))(x)  # whole on each rank, and its own


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        weight = (torch.arange(15).view(5, 3) % 2).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(5, 3))

    def forward(self, batch):
        assert self.weight.shape == (5, 3)
        self.seen = self.weight.dtype
        return batch @ (self.weight.float() * self.scale).to(batch.dtype).T


EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = torch.int16, torch.uint16, torch.int64, torch.bool, torch.float64, *EIGHT_BITS


@check(2)
def fsdp_takes_frozen_weights_of_any_dtype():
    """To the bit, through a forward, a checkpoint of names and numbers, and back."""
    x = torch.randn(2, 3)
    for dtype, make in itertools.product(DTYPES, BOTH):
        first = Scaled(dtype)
        fsdp, reference = make(copy.deepcopy(first)), copy.deepcopy(first)
        losses = checking.losses_of(checking.output_sum, (x, x))
        checking.backward_of_each(fsdp, reference, losses)
        same(fsdp(x), reference(x), str(dtype))
        whole = fsdp.gather_full_params()["weight"]
        same(whole.view(torch.uint8), first.weight.detach().view(torch.uint8), str(dtype))
        with checking.shared_folder() as folder:
            checking.save_and_load(folder / "saved", fsdp, FSDP(Scaled(dtype)))
        if dtype in EIGHT_BITS:  # whose scale is the module's: they are not cast
            low = FSDP(Scaled(dtype), compute_dtype=torch.bfloat16)
            assert low(x).dtype == torch.bfloat16 and low.module.seen == dtype
