"""How long a step of a layout takes: by hand, by the schedules, and by a counter of operations."""

from dataclasses import replace

import pytest
from layout_toys import TINY, TOY, training
from refusals import refused

from a2lib.shapes import PRESETS
from a2lib.theory.estimate import evaluate, mfu, model_flops
from a2lib.theory.layouts import Layout
from a2lib.theory.transformer import forward_flops_by_part, parameter_count

# A block computes 3 (4 * 128 + 3 * 192) + 3.5 * 128 = 3,712 operations, the head 3 * 320.
COMPUTE = (2 * 3712 + 960) / 1e3


@pytest.mark.parametrize("layout, all_hidden, none_hidden", [
    (Layout(), COMPUTE, COMPUTE),
    # ten sums of 32 bytes, half of which pass twice
    (Layout(tensor=2, sequence=False), 32, 32 + COMPUTE / 2),
    # in their place 25 gathers and scatters of 32 bytes, half of which pass
    (Layout(tensor=2), 40, 40 + COMPUTE / 2),
    # a block again but for its last product: 1,024 operations, and three rings
    (Layout(tensor=2, checkpointing="block"), 31 * 1.6, 49.6 + COMPUTE / 2 + 1.024),
    # a ring attention of 32 bytes three times a block; weights gathered twice, and gradients, twice
    # as wide, scattered once
    (Layout(context=2), 168, 168 + COMPUTE / 2),
    (Layout(context=2, sharding="zero1"), 130.8, 130.8 + COMPUTE / 2),
    # either stage sends 32 bytes one way; the second has the head, and the first waits for it
    (Layout(pipeline=2), 2 * 4.672, 2 * 4.672 + 6.4),
])  # fmt: skip
def test_time_by_hand(layout, all_hidden, none_hidden):
    result = evaluate(training(batch=1), layout, TOY)
    time = result.time
    assert (time.all_hidden_s, time.none_hidden_s) == pytest.approx((all_hidden, none_hidden))
    assert result.step_s == pytest.approx((all_hidden + none_hidden) / 2)


def test_gradients_are_sent_as_wide_as_the_training_says():
    # A gather of bf16 weights takes 37.2 from the node's other device, and so do bf16 gradients.
    def sent(sharding, microbatches=1, **widths):
        layout = Layout(data=2, sharding=sharding, microbatches=microbatches)
        return evaluate(training(batch=4, **widths), layout, TOY).time.links_s / 37.2

    narrow = {"sent_gradients": "bf16"}
    for sharding, wide_rings, narrow_rings in (
        ("none", 4, 2), ("zero1", 3, 2), ("zero2", 3, 2), ("fsdp", 4, 3)
    ):  # fmt: skip
        assert sent(sharding) == pytest.approx(wide_rings)
        assert sent(sharding, **narrow) == pytest.approx(narrow_rings)
    # zero2 scatters for each micro-batch, zero1 once
    assert sent("zero2", 2) == pytest.approx(5) and sent("zero1", 2) == pytest.approx(3)
    assert sent("zero2", 2, **narrow) == pytest.approx(3)
    # as wide as they add up, where nothing else is said
    assert sent("zero1", gradients="bf16") == pytest.approx(2)
    assert sent("zero1", gradients="bf16", sent_gradients="fp32") == pytest.approx(3)
    message = "sent_gradients 'fp8': allowed are fp32, bf16"
    refused(message, training, sent_gradients="fp8")


def test_data_parallelism_over_nodes_gathers_over_the_network_and_in_the_node():
    # Four devices in two nodes: 372 bytes of 744 come over the network, shared by the node's two;
    # so each receives 186 there, and 372 from its neighbour: 558 = 3 / 4 of 744.
    def sent(batch=4, device=TOY, **layout):
        return evaluate(training(batch), Layout(**layout), device).time

    zero1 = sent(data=4, sharding="zero1")
    assert zero1.network_s == pytest.approx((1 + 2) * 186 / 1)  # gradients are twice as wide
    assert zero1.links_s == pytest.approx((1 + 2) * 372 / 10)
    # gradients, and then the weights
    assert sent(data=4, sharding="zero2").network_s == zero1.network_s
    # as many devices as there are in the node need no network, however they are cut
    assert sent(data=2).network_s == 0
    fsdp = sent(data=2, tensor=2, microbatches=2)  # one device of a group a node
    assert fsdp.network_s == pytest.approx(2 * (2 + 2) * 392 / 2)
    # a larger node, and another network
    assert sent(data=4, device=replace(TOY, node=4)).network_s == 0
    slower = sent(data=4, sharding="zero1", device=replace(TOY, network=0.5))
    assert slower.network_s == 2 * zero1.network_s


def test_selective_computes_the_scores_again_and_no_product():
    job = training(batch=2, context=64, attention="eager")
    flops = []
    for name in ("none", "selective", "block"):
        layout = Layout(sharding="none", checkpointing=name)
        work = evaluate(job, layout, TOY).time.work
        flops.append(TOY.flops * (work["products"] + work["attention"]))
    parts = forward_flops_by_part(TINY, 2, 64)
    assert flops[1] - flops[0] == pytest.approx(parts["attention"])
    assert flops[2] - flops[1] == pytest.approx(parts["projections"] + parts["ffn"] * 2 / 3)


@pytest.mark.parametrize("name", ["Llama-3-8B", "8B"])
def test_the_work_of_a_layout_without_recomputation_is_the_models(name):
    """In operations: products and half of the scores, whose backward computes five for four."""
    job = training(16, 4096, PRESETS[name])
    parts = forward_flops_by_part(job.shape, 16, 4096, causal=True)
    work = evaluate(job, Layout(), replace(TOY, flops=1.0)).time.work
    assert work["products"] == pytest.approx(3 * (sum(parts.values()) - parts["attention"]))
    assert work["attention"] == pytest.approx(3.5 * parts["attention"])


def test_model_flops_say_what_they_count():
    job = training(2, 64)
    parts = forward_flops_by_part(TINY, 2, 64)
    assert model_flops(job, "full") == 3 * sum(parts.values())
    assert model_flops(job) == 3 * (sum(parts.values()) - parts["attention"] / 2)
    assert model_flops(job, "6ND") == 6 * parameter_count(TINY) * 128
    layout = Layout(tensor=2)
    assert mfu(job, layout, TOY, 10.0, "full") == model_flops(job, "full") / (2 * 1e3 * 10)
    refused("count 'hfu': allowed are causal, full, 6ND", model_flops, job, "hfu")
