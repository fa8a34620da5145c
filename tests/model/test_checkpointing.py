"""Checkpointing changes what is kept, never what is computed."""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

SELECTIVE = ["selective:linear", "selective:products", "selective:attention"]
SPECS = [
    "half", "block", "segments:1", "segments:2", "segments:3", "nested:1", "nested:2", "nested:3",
    "recursive", "chain", *SELECTIVE,
]  # fmt: skip


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
def test_blocks_run_again_in_backward(make_model, batch, loss_and_gradients, spec):
    model = make_model(checkpointing=spec)
    calls = calls_of_each_block(model, lambda: loss_and_gradients(model, batch))
    assert calls == CALLS.get(spec, [2, 2, 2])


def test_a_model_changes_its_strategy(make_model, batch, loss_and_gradients):
    model = make_model()
    for spec in ("chain", "none", "block"):
        model.use_checkpointing(spec)
        calls = calls_of_each_block(model, lambda: loss_and_gradients(model, batch))
        assert calls == CALLS.get(spec, [2, 2, 2]) and model.checkpointing == spec
    with pytest.raises(ValueError, match="segments:4"):
        model.use_checkpointing("segments:4")
    assert model.checkpointing == "block"


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name; one whose kept result is taken does not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name().partition("::")[2].partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("attention", "spec", "operation", "again"),
    # What backward runs again in each of three blocks. Seven linear layers, of which the last ends
    # the block; two products of attention; attention itself.
    [("eager", "block", "mm", 6), ("eager", "half", "mm", 5), ("eager", "block", "bmm", 2),
     ("eager", "selective:linear", "mm", 0), ("eager", "selective:linear", "bmm", 2),
     ("eager", "selective:products", "mm", 0), ("eager", "selective:products", "bmm", 0),
     ("eager", "selective:attention", "bmm", 2), ("eager", "segments:3", "mm", 20 / 3),
     ("sdpa_flash", "block", "_scaled_dot_product_flash_attention_for_cpu", 1),
     ("sdpa_flash", "selective:attention", "_scaled_dot_product_flash_attention_for_cpu", 0),
     ("sdpa_flash", "selective:attention", "mm", 6)],
)  # fmt: skip
def test_operations_that_run_again(
    make_model, batch, loss_and_gradients, attention, spec, operation, again
):
    counts = {}
    for one in ("none", spec):
        with Operations() as seen:
            loss_and_gradients(make_model(attention=attention, checkpointing=one), batch)
        counts[one] = seen.counts[operation]
    assert counts["none"] > 0
    assert counts[spec] - counts["none"] == round(3 * again)


def test_our_attention_is_kept_and_is_the_same_to_the_bit(make_model, batch, loss_and_gradients):
    found = []
    for spec in ("none", "selective:attention"):
        with Operations() as seen:
            found.append(
                loss_and_gradients(make_model(attention="flash", checkpointing=spec), batch)
            )
        assert seen.counts["flash_forward"] == 3
    (loss, gradients), (kept_loss, kept) = found
    assert torch.equal(loss, kept_loss)
    assert all(torch.equal(gradients[name], kept[name]) for name in gradients)


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


ALLOWED = "none, half, block, segments:k, nested:k, recursive, chain, selective:ops"


@pytest.mark.parametrize(
    "spec",
    ["", "all", "Block", "block:2", "none:1", "segments", "nested", "chain:1", "selective", None],
)
def test_unknown_strategies(make_model, spec):
    with pytest.raises(ValueError, match=f"allowed are {ALLOWED}$"):
        make_model(checkpointing=spec)


@pytest.mark.parametrize("name", ["segments", "nested"])
@pytest.mark.parametrize("k", ["", "0", "4", "-1", "two", "1.0", "1:2", "²"])
def test_segments_that_cannot_be(make_model, name, k):
    with pytest.raises(ValueError, match="allowed as k are 1 to 3"):
        make_model(checkpointing=f"{name}:{k}")


@pytest.mark.parametrize("ops", ["", "softmax", "linear,products"])
def test_operations_that_cannot_be_kept(make_model, ops):
    with pytest.raises(ValueError, match="allowed as ops are linear, products, attention$"):
        make_model(checkpointing=f"selective:{ops}")
