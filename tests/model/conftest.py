"""Small models, and their loss and gradients by name."""

import pytest
import torch

from a2lib.model import TransformerLM, cross_entropy

TINY = {
    "vocab_size": 19, "context_length": 12, "d_model": 24, "num_layers": 3, "num_heads": 2,
    "d_ff": 40,
}  # fmt: skip


@pytest.fixture
def make_model():
    """A tiny model with seed 0; options by name replace its own."""
    return lambda **options: TransformerLM(**{**TINY, "seed": 0, **options})


@pytest.fixture
def batch():
    """Token ids and targets, (2, 11) each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY["vocab_size"], (2, 12), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def loss_and_gradients():
    def compute(model, batch):
        model.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    return compute
