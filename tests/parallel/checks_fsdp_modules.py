"""FSDP of modules that others wrote and of uses that are easily forgotten, against one process."""

import warnings

import torch
from checking import (
    check,
    losses_of,
    mean_gradients,
    optimizers_of,
    raises,
    seeded,
    take_step,
    world,
)
from checks_fsdp import BOTH, mine_of
from torch import nn

from a2lib.parallel import DDP, NaiveDDP

WIDTH = 6


class Listed(nn.Module):
    """Layers are lists and dicts of modules, which are never called themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            pair = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
            self.layers.append(nn.ModuleList(pair))
        self.mixes = nn.ModuleList([nn.ParameterList([torch.randn(WIDTH, WIDTH)])])
        self.last = nn.Sequential(nn.ModuleDict({"head": nn.Linear(WIDTH, 3)}))

    def forward(self, x):
        for mix, into in self.layers:
            x = x + into(torch.tanh(mix(x)))
        return self.last[0]["head"](x @ self.mixes[0][0])


class Recurrent(nn.Module):
    """Keeps a list of its parameters beside the parameters."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Complex(nn.Module):
    """Turns what it is given by frozen complex numbers, behind a layer that is trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        weight = torch.randn(3, 3, dtype=torch.complex64)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return ((self.layer(x).to(torch.complex64) @ self.weight) * self.phase).abs()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, WIDTH, sparse=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.embed((x[..., 0] * 3).long() % 7))


def normed():
    # Not torch's deprecated function, but the hook that it makes: a weight out of two parameters.
    linear = nn.Linear(WIDTH, 5)
    weight = linear.weight
    del linear._parameters["weight"]
    linear.g, linear.v = nn.Parameter(weight.norm(dim=1, keepdim=True)), weight

    def compute(module, args):
        object.__setattr__(module, "weight", module.g * module.v / module.v.norm(dim=1)[:, None])

    linear.register_forward_pre_hook(compute)
    return nn.Sequential(linear, nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 10, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def repeated():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)).eval()
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)).eval()
    other[0].weight = block[0].weight
    return nn.Sequential(block, other, block, nn.Linear(WIDTH, 3))


def convolutions():
    image = nn.Unflatten(-1, (2, 3)), nn.Conv2d(4, 5, 2), nn.GroupNorm(1, 5), nn.ReLU()
    return nn.Sequential(*image, nn.Flatten(), nn.Linear(10, 3))


class Skipped(nn.Linear):
    def forward(self, x):
        return x


def skipped():
    """A skipped unit's output is that of the unit before it, and the last one's the root's."""
    return nn.Sequential(nn.Linear(WIDTH, 4), Skipped(4, 4), nn.Linear(4, 2))


def skipped_at_the_end():
    return nn.Sequential(*skipped(), Skipped(2, 2))


def skipped_before_the_end():
    return nn.Sequential(*skipped(), Skipped(2, 2), nn.ReLU())


class Viewed(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(x.shape)


class InPlace(nn.Module):
    """Changes in place what a unit returned, a view, which then has another history."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Viewed(WIDTH, WIDTH), Viewed(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.head(x)


def vectors():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))


MAKES = (
    Listed, Recurrent, Complex, Sparse, InPlace, normed, encoder, repeated, convolutions,
    skipped, skipped_at_the_end, skipped_before_the_end, vectors,
)  # fmt: skip


def numbered(number):
    """Return a batch, the same on every rank."""
    return torch.randn(2, 4, WIDTH, generator=seeded(number))


def square(module, batch):
    return module(numbered(batch)).abs().square().mean()


def alike(a, b, what):
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a.shape, b.shape)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"{what}: {(a - b).abs().max().item()}"


def check_alike(fsdp, reference, what):
    mine = dict(fsdp.module.named_parameters(remove_duplicate=False))
    whole = fsdp.gather_full_params()
    assert whole.keys() == dict(reference.named_parameters(remove_duplicate=False)).keys(), what
    for name, q in reference.named_parameters():
        alike(whole[name], q.detach(), f"{what} {name}")
        grad = mine[name].grad
        if q.grad is None or grad is None:
            assert grad is q.grad is None, f"{what} {name}"
        else:
            alike(grad, mine_of(q.grad.to_dense()), f"{what} {name}")


@check(2)
def fsdp_trains_other_peoples_modules():
    # cuDNN's, of sharded weights: it copies them at each call.
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
    for make in MAKES:
        for wrap in BOTH:
            train_two_steps(make, wrap)


def train_two_steps(make, wrap):
    """Two steps of two backwards, with a forward without gradients between."""
    rank, size = world()
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    fsdp = wrap(make())
    steps = optimizers_of((fsdp, reference), torch.optim.SGD, lr=0.1)
    for step in range(2):
        losses = []
        for r in range(size):
            first = 100 * step + 10 * r
            losses.append(losses_of(square, (first, first + 1)))
        for loss in losses[rank]:
            loss(fsdp).backward()
        fsdp.finish_gradient_synchronization()
        mean_gradients(reference, losses)
        check_alike(fsdp, reference, make.__name__)
        norm = fsdp.clip_grad_norm_(float("inf"))
        alike(norm, norm_of(reference), f"{make.__name__} norm")
        take_step(*steps)
        for quiet in (torch.no_grad, torch.inference_mode):
            with quiet():
                alike(fsdp(numbered(7)), reference(numbered(7)), make.__name__)
        check_alike(fsdp, reference, make.__name__)


def norm_of(module):
    """Return the norm of all gradients, complex and sparse ones too."""
    total = 0
    for p in module.parameters():
        if p.grad is not None:
            total = total + p.grad.to_dense().abs().square().sum()
    return total.sqrt()


@check(2)
def complex_parameters_that_are_trained_are_refused():
    for wrap in (*BOTH, DDP, NaiveDDP):
        module = Complex().requires_grad_(True)
        with raises(ValueError, "^weight is complex; keep it as pairs of real numbers"):
            wrap(module)
