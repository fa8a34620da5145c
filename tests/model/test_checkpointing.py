"""Checkpointing changes what is kept, never what is computed."""

from collections import Counter

import pytest
import torch
from refusals import refused

SELECTIVE = ["selective:linear", "selective:products", "selective:attention"]
SPECS = ["half", "block", "recursive", "chain", *SELECTIVE]
SPECS += ["segments:2", "segments:3", "nested:2", "nested:3"]


@pytest.mark.parametrize("attention", ["eager", "sdpa_flash"])
@pytest.mark.parametrize("spec", SPECS)
def test_loss_and_gradients_are_equal_to_the_bit(make_model, is_the_plain_one, spec, attention):
    model = make_model(checkpointing=spec, attention=attention)
    is_the_plain_one(model, attention=attention)


def calls_of_each_block(model, run):
    called = Counter()
    for block in model.layers:
        block.register_forward_pre_hook(lambda block, _: called.update([block]))
    run()
    return [called[block] for block in model.layers]


# Of three blocks, calls of each: those of the forward and those that backward begins again. A
# segment inside one that is computed again stops before its last part: the last of three blocks
# under nested:3 runs once again, the others twice.
CALLS = {
    "none": [1, 1, 1],
    "half": [1, 1, 1],  # a half is called, not the block
    "nested:2": [3, 2, 2],
    "nested:3": [3, 3, 2],
    "recursive": [3, 2, 2],
    "chain": [4, 3, 2],
}


@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_blocks_run_again_in_backward_and_not_without_gradients(
    make_model, batch, loss_and_gradients, spec
):
    model = make_model(checkpointing=spec)
    calls = calls_of_each_block(model, lambda: loss_and_gradients(model, batch))
    assert calls == CALLS.get(spec, [2, 2, 2])
    with torch.no_grad():
        assert calls_of_each_block(model, lambda: model(batch[0])) == [1, 1, 1]


def test_a_model_changes_its_strategy(make_model, batch, loss_and_gradients):
    model = make_model()
    for spec in ("chain", "none", "block"):
        model.use_checkpointing(spec)
        calls = calls_of_each_block(model, lambda: loss_and_gradients(model, batch))
        assert calls == CALLS.get(spec, [2, 2, 2]) and model.checkpointing == spec
    refused("segments:4", model.use_checkpointing, "segments:4")
    assert model.checkpointing == "block"


# Products and attentions of each block.
AGAIN = {"none": (0, 0), "block": (6, 1), "selective:attention": (6, 0), "selective:linear": (0, 1)}


@pytest.mark.parametrize("spec", AGAIN)
def test_operations_that_run_again(make_model, batch, loss_and_gradients, operations, spec):
    """In each of three blocks, of seven linear layers, of which the last ends the block, and an
    attention; eager attention's are counted in tests/theory/test_checkpointing.py."""
    with operations() as seen:
        loss_and_gradients(make_model(attention="sdpa_flash", checkpointing=spec), batch)
    products, attentions = AGAIN[spec]
    found = seen.counts["mm"], seen.counts["_scaled_dot_product_flash_attention_for_cpu"]
    # The head's three products, and each block's with two backward.
    assert found == (3 + 3 * (3 * 7 + products), 3 * (1 + attentions))


def test_our_attention_is_kept_and_is_the_same_to_the_bit(make_model, is_the_plain_one, operations):
    options = {"attention": "flash", "num_layers": 1}
    model = make_model(checkpointing="selective:attention", **options)
    with operations() as seen:
        is_the_plain_one(model, **options)
    assert seen.counts["flash_forward"] == 2  # once each


ALLOWED = "none, half, block, segments:k, nested:k, recursive, chain, selective:ops"


def test_strategies_that_cannot_be(make_model):
    for spec in (None, "block:2", "segments"):
        refused(f"allowed are {ALLOWED}$", make_model, checkpointing=spec)
    for k in ("0", "4", "two"):
        refused("allowed as k are 1 to 3", make_model, checkpointing=f"segments:{k}")
    line = "allowed as ops are linear, products, attention$"
    refused(line, make_model, checkpointing="selective:softmax")
