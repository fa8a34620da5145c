"""Checkpointing changes what is kept, never what is computed."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

SPECS = ["block", "segments:1", "segments:2", "segments:3"]


@pytest.mark.parametrize("attention", ["eager", "sdpa_flash"])
@pytest.mark.parametrize("spec", SPECS)
def test_loss_and_gradients_are_equal_to_the_bit(
    make_model, batch, loss_and_gradients, spec, attention
):
    plain_loss, plain = loss_and_gradients(make_model(attention=attention), batch)
    model = make_model(checkpointing=spec, attention=attention)
    loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name


def bytes_kept(model, batch):
    """Bytes of distinct storages kept for backward, the parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch[0])
    return sum(size for size, _ in kept.values())


def calls_of_each_block(model, run):
    counts = [0] * len(model.layers)
    for i, block in enumerate(model.layers):

        def count(*_, i=i):
            counts[i] += 1

        block.register_forward_pre_hook(count)
    run()
    return counts


@pytest.mark.parametrize("spec, calls", [("none", 1), *((spec, 2) for spec in SPECS)])
def test_blocks_run_again_in_backward(make_model, batch, loss_and_gradients, spec, calls):
    model = make_model(checkpointing=spec)
    assert calls_of_each_block(model, lambda: loss_and_gradients(model, batch)) == [calls] * 3


@pytest.mark.parametrize("spec", ["none", *SPECS])
def test_nothing_is_kept_or_repeated_without_gradients(make_model, batch, spec):
    model = make_model(checkpointing=spec)
    with torch.no_grad():
        assert calls_of_each_block(model, lambda: model(batch[0])) == [1] * 3


def test_longer_segments_keep_fewer_inputs(make_model, batch):
    kept = {s: bytes_kept(make_model(checkpointing=s), batch) for s in ("none", *SPECS)}
    assert kept["block"] == kept["segments:1"]
    # checkpoint() keeps a segment's input as its argument; inside it, forward keeps nothing.
    assert kept["segments:3"] <= kept["segments:2"] <= kept["block"] < kept["none"] / 2


@pytest.mark.parametrize("spec", ["", "all", "Block", "block:2", "none:1", "segments", None, 2])
def test_unknown_strategies(make_model, spec):
    with pytest.raises(ValueError, match="allowed are none, block, segments:k$"):
        make_model(checkpointing=spec)


@pytest.mark.parametrize("k", ["", "0", "4", "-1", "two", "1.0", "1:2", "²"])
def test_segments_that_cannot_be(make_model, k):
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 3"):
        make_model(checkpointing=f"segments:{k}")
