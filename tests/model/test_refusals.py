"""What cannot be stops at once, in one line that says the rule."""

import torch
from refusals import refused

from a2lib import model


def test_sizes(make_model):
    for name in ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff"):
        refused(f"^{name} is 0; allowed are positive integers$", make_model, **{name: 0})
    refused("^d_ff is 1.5; allowed are positive integers$", make_model, d_ff=1.5)


def test_what_does_not_fit(make_model):
    refused("num_heads 5 does not divide d_model 24", make_model, num_heads=5)
    refused("RoPE turns pairs, so head_dim must be even", make_model, num_heads=8)
    refused("it must be a positive finite number", make_model, rope_theta=0.0)
    refused("size 'huge': allowed are small, medium", model.TransformerLM.from_size, "huge", 16)


def test_token_ids(make_model, batch):
    made = make_model()
    assert torch.equal(made(batch[0].int()), made(batch[0]))
    for length in (0, 13):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        refused(f"a sequence of {length} tokens; allowed are 1 to 12", made, tokens)
    refused("must be int64 or int32; got", made, torch.zeros(2, 3))
    tokens = torch.zeros(3, dtype=torch.int64)
    refused(r"token ids must be \(batch, tokens\)", made, tokens)


def test_targets_of_another_shape():
    line = r"logits must be \(..., vocabulary\) and targets \(...\)"
    for logits, targets in (((2, 3, 5), (2, 4)), ((2, 3), (2, 3)), ((0, 5), (0,))):
        targets = torch.zeros(targets, dtype=torch.int64)
        refused(line, model.cross_entropy, torch.zeros(logits), targets)
