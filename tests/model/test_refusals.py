"""What cannot be stops at once, in one line that says the rule."""

import pytest
import torch
from refusals import refused

from a2lib import model
from a2lib.model import CausalMultiHeadSelfAttention as Attention

SIZES = ["vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("wrong", [0, -3, 1.5, "8", None, True])
def test_sizes(make_model, name, wrong):
    refused(f"^{name} is .*; allowed are positive integers$", make_model, **{name: wrong})


WRONG = {
    "num_heads 5 does not divide d_model 24": lambda make: make(num_heads=5),
    "head_dim is 3 .*; RoPE turns pairs, so head_dim must be even": lambda make: make(num_heads=8),
    "rope turns d_k = 6; head_dim is 12": lambda _: Attention(24, 2, rope(4)),
    "d_k is 3; RoPE turns pairs": lambda _: model.RotaryPositionalEmbedding(10.0, 3, 4),
    "x has 8 features; RoPE was made for d_k = 6": lambda _: rope()(torch.zeros(3, 8)),
    "size 'huge': allowed are small, medium": lambda _: model.TransformerLM.from_size("huge", 16),
    "in_features is 0; allowed are positive integers": lambda _: model.Linear(0, 2),
    "num_embeddings is 0; allowed are positive integers": lambda _: model.Embedding(0, 2),
    "d_model is 0; allowed are positive integers": lambda _: model.RMSNorm(0),
}


def rope(length=12):
    return model.RotaryPositionalEmbedding(10.0, 6, length)


@pytest.mark.parametrize("line", WRONG)
def test_what_does_not_fit(make_model, line):
    refused(line, WRONG[line], make_model)


@pytest.mark.parametrize("theta", [0.0, -1.0, float("nan"), float("inf")])
def test_angles_of_no_base(make_model, theta):
    refused("it must be a positive finite number", make_model, rope_theta=theta)


@pytest.mark.parametrize("length", [0, 13, 1000])
def test_lengths(make_model, length):
    for call in (make_model(), lambda tokens: rope()(tokens[..., None].expand(-1, -1, 6))):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        refused(f"a sequence of {length} tokens; allowed are 1 to 12", call, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_dtypes(make_model, dtype):
    line = f"must be int64 or int32; got {dtype}"
    refused(f"token ids {line}", make_model(), torch.zeros(2, 3, dtype=dtype))
    refused(f"positions {line}", rope(), torch.zeros(2, 3, 6), torch.zeros(3, dtype=dtype))


def test_int32_token_ids_are_as_good(make_model, batch):
    made = make_model()
    assert torch.equal(made(batch[0].int()), made(batch[0]))


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)])
def test_ranks_of_token_ids(make_model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    refused(r"token ids must be \(batch, tokens\)", make_model(), tokens)


@pytest.mark.parametrize("positions", [[-1, 0, 1], [0, 1, 12]])
def test_positions_outside_the_table(positions):
    refused("allowed are 0 to 11", rope(), torch.zeros(3, 6), torch.tensor(positions))


def test_targets_of_another_shape():
    line = r"logits must be \(..., vocabulary\) and targets \(...\)"
    for logits, targets in (((2, 3, 5), (2, 4)), ((2, 3), (2, 3)), ((0, 5), (0,)), ((), ())):
        targets = torch.zeros(targets, dtype=torch.int64)
        refused(line, model.cross_entropy, torch.zeros(logits), targets)
