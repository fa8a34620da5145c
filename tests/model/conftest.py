"""Small models, their loss and gradients by name, and the operations that run."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from a2lib.model import TransformerLM, cross_entropy

TINY = {"vocab_size": 19, "context_length": 12, "num_layers": 3}
TINY |= {"d_model": 24, "num_heads": 2, "d_ff": 40}


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def make_model():
    """Return a tiny model with seed 0; options by name replace its own."""
    return lambda **options: TransformerLM(**{**TINY, "seed": 0, **options})


@pytest.fixture
def batch():
    """Token ids and targets, (2, 11) each."""
    tokens = torch.randint(TINY["vocab_size"], (2, 12))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def loss_and_gradients():
    def compute(model, batch):
        model.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss.detach(), gradients_of(model)

    return compute


@pytest.fixture
def is_the_plain_one(make_model, batch, loss_and_gradients):
    """Asserts that a model's loss and gradients are, to the bit, those of one of these options."""

    def check(model, **options):
        plain_loss, plain = loss_and_gradients(make_model(**options), batch)
        loss, gradients = loss_and_gradients(model, batch)
        assert torch.equal(loss, plain_loss)
        assert gradients.keys() == plain.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, plain[name]), name

    return check


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name, and products by the shape of the transposed weight
    too; one whose kept result is taken does not run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition("::")[2].partition(".")[0]
        self.counts[name] += 1
        if name == "mm":
            self.counts[tuple(args[1].shape)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def operations():
    return Operations
