"""What a layout holds, and what it may be: by hand, and by other counts."""

from dataclasses import replace

import committed
import pytest
from layout_toys import NOTHING, TOY, WIDE, kept, training
from refusals import refused

from a2lib.shapes import GroupedShape, Shape
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import evaluate
from a2lib.theory.layouts import Layout, stage_blocks

ALONE = Layout(sharding="none")


def memory(job, layout, device=TOY):
    return evaluate(job, layout, device).memory


def lone(batch=1, context=8, **more):
    return training(batch, context, **more)


# By hand. A block of TINY has 4 * 16 + 3 * 24 + 8 = 144 parameters, either table 40, the last norm
# 4: 372 in all. A token leaves 4 * 8 + 8 = 40 bytes of the stream, and 16 + 16 + 8 + 3 * 12 = 76
# that tensor parallelism cuts; in the last norm 16. The batch is one sequence of eight tokens.
# The peak is where the backward starts, where activations and logits outweigh all gradients.
@pytest.mark.parametrize("job, layout, components", [
    (lone(), Layout(sharding="zero1"), {
        "parameters": 1488, "optimizer": 2976, "working weights": 744,
        "activations": 2 * 8 * 116 + 128, "temporaries": 12 * 8 * 10}),
    # the end: one block computed again, and all gradients
    (lone(), Layout(sharding="zero1", checkpointing="block"), {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976, "working weights": 744,
        "activations": 8 * 8, "temporaries": 8 * 116 - 64 + 8 * (16 + 36)}),
    # 76 of a block, 20 of a table; halves of everything that a token leaves, and of the logits,
    # whose product has its input whole
    (lone(context=16), Layout(tensor=2, sharding="zero1"), {
        "parameters": 4 * 196, "optimizer": 8 * 196, "working weights": 2 * 196,
        "activations": 2 * 16 * 58 + 128, "temporaries": 12 * 16 * 5 + 2 * 4 * 16}),
    # gradients of half of the weights stay, and one block's before they are sent
    (lone(), Layout(context=2, sharding="zero2", checkpointing="block"), {
        "parameters": 744, "gradients": 744, "optimizer": 1488,
        "working weights": 2 * 372 + 2 * 144,
        "activations": 4 * 8, "temporaries": 4 * 116 - 32 + 4 * (16 + 36)}),
    # four tokens a device; three blocks' worth gathered, the largest layer
    (lone(), Layout(context=2, sharding="fsdp"), {
        "parameters": 744, "optimizer": 1488, "working weights": 3 * 2 * 144,
        "activations": 2 * 4 * 116 + 64, "temporaries": 12 * 4 * 10}),
    # the last stage: its norm and the logits weigh more than the first's embedding alone
    (lone(context=16), Layout(pipeline=2, sharding="zero1"), {
        "parameters": 4 * 188, "optimizer": 8 * 188, "working weights": 2 * 188,
        "activations": 16 * 116 + 256, "temporaries": 12 * 16 * 10}),
    # the end: eight scores a token, in 2 bytes, and a mask of 16 bytes; no log-sum-exp. Three fp32
    # matrices of scores are more than three tensors of the hidden width.
    (lone(context=4, attention="eager"), ALONE, {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976, "working weights": 744,
        "activations": 4 * 124 + 16, "temporaries": 4 * (16 + 3 * 4 * 8)}),
    # gradients that are added to are there from the beginning; of half of the tokens logits
    (lone(batch=2, gradients="bf16", loss_chunks=2), replace(ALONE, microbatches=2), {
        "parameters": 1488, "gradients": 744, "optimizer": 2976, "working weights": 744,
        "activations": 2 * 8 * 116 + 128, "temporaries": 480}),
    # half, and three blocks of 144 parameters
    (lone(batch=2), Layout(data=2), {
        "parameters": 744, "optimizer": 1488, "working weights": 2 * 3 * 144,
        "activations": 2 * 8 * 116 + 128, "temporaries": 960}),
])  # fmt: skip
def test_the_largest_peak_by_hand(job, layout, components):
    assert memory(job, layout) == NOTHING | components


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    small = replace(WIDE, vocab_size=2)  # whose logits weigh nothing, so the first is the fullest
    job = training(batch=8, shape=small)
    token = kept(job)
    for m, held in ((2, 2), (4, 3), (8, 3)):
        result = memory(job, Layout(pipeline=3, microbatches=m))
        assert result["activations"] == held * 4 * (8 // m * 4) * token
    # In two pieces a stage: 3 + 2 / 2 micro-batches' worth.
    result = memory(replace(job, batch=24), Layout(pipeline=3, microbatches=6, chunks=2))
    assert result["activations"] == 4 * 4 * (24 // 6 * 4) * token


def test_stages_are_equal_but_for_the_ends():
    for layers, stages, blocks in (
        (126, 16, (7, 8, 7)), (127, 16, (8, 8, 7)), (61, 2, (31, 31, 30)), (61, 16, (3, 4, 2)),
        (60, 1, (60, 60, 60)),
    ):  # fmt: skip
        assert stage_blocks(layers, stages) == blocks
        first, middle, last = blocks
        assert stages == 1 or first + middle * (stages - 2) + last == layers
    assert stage_blocks(124, 16) is stage_blocks(60, 61) is stage_blocks(5, 7) is None
    # The first stage has fewer blocks, so the second, of one more, may be the fullest.
    small = training(batch=8, shape=replace(WIDE, num_layers=10, vocab_size=2))
    result = memory(small, Layout(pipeline=4, microbatches=8))
    assert result["activations"] == 3 * 3 * 4 * kept(small)
    assert result["parameters"] == 4 * 3 * 656


def test_fused_kernels_keep_what_korthikanti_et_al_count():
    """Their 34 s b h + 5 a s s b (table 2) less three masks of dropout and its result, of an FFN of
    two matrices of 4 h. Cut over t devices it is a t-th of that."""
    shape, context = GroupedShape(1024, 4096, 1, 16, gated=False), 512
    theirs = 34 * 1024 - 2 * 1024
    flash = training(shape=shape, context=context)
    eager = replace(flash, attention="eager")
    assert kept(flash) == theirs + 4 * 16 + 8  # log-sum-exps and roots
    whole, scores = kept(eager), 2 * 16 * 512
    assert whole == theirs + scores + 8
    keeps = {"none": whole, "block": 2 * 1024, "selective": whole - scores}
    for checkpointing, each in keeps.items():
        for t in (1, 2, 8):
            cut = Layout(tensor=t, microbatches=2, checkpointing=checkpointing)
            result = memory(replace(eager, batch=2), cut)["activations"]
            mask = context**2 if checkpointing == "none" else 0
            assert result == pytest.approx(mask + context * (each + 4 * 1024) / t)
    # a gate keeps one hidden more
    gated = training(shape=Shape(1024, 4096, 1, 16), context=context)
    assert kept(gated) == kept(flash) + 2 * 4096


def test_devices_are_those_of_the_reference():
    rows = committed.reference("devices")
    stated = {(row["device"], row["quantity"]): float(row["value"]) for row in rows}
    for device in DEVICES.values():
        for result, quantity, unit in (
            (device.flops, "bf16_dense", 1e12),
            (device.memory, "memory", 1e9),
            (device.memory_bandwidth, "memory_bandwidth", 1e12),
            (device.link, "nvlink_egress", 1e9),
            (device.network, "network_egress", 1e9),
            (device.node, "node_devices", 1),
        ):
            assert result == pytest.approx(unit * stated[device.slug, quantity]), quantity


def test_a_layout_that_breaks_a_rule_is_one_line():
    three = training(shape=GroupedShape(24, 24, 1, 12, 10, num_kv_heads=3))
    for words, job, layout in (
        ("tensor 4 must divide the 2 heads of keys", training(), Layout(tensor=4)),
        ("tensor 4 must divide the 3 heads of keys", three, Layout(tensor=4)),
        ("pipeline 5 with num_layers 2; allowed", training(), Layout(pipeline=5)),
        ("context 3 with context length 4", training(), Layout(context=3)),
        ("context 2 with context length 4 and eager", training(attention="eager"),
         Layout(context=2)),
        ("sharding 'ddp': allowed are none, zero1", training(), Layout(sharding="ddp")),
        ("selective with flash attention", training(), Layout(checkpointing="selective")),
        ("schedule zb-h1 with pipeline 1", training(), Layout(schedule="zb-h1")),
    ):  # fmt: skip
        refused(words, evaluate, job, layout, TOY)
    refused("efficiency is 1.01; allowed are numbers", replace, training(), efficiency=1.01)
