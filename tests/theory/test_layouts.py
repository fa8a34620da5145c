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

ALONE, PAIR = Layout(sharding="none"), Layout(data=2, sharding="none")
AGAIN = Layout(sharding="none", checkpointing="block")


def memory(job, layout, device=TOY):
    return evaluate(job, layout, device).memory


def lone(batch=1, context=8, **more):
    return training(batch, context, **more)


# By hand. A block of TINY has 4 * 16 + 3 * 24 + 8 = 144 parameters, either table 40, the last norm
# 4: 372 in all. A token leaves 4 * 8 + 8 = 40 bytes of the stream, and 16 + 16 + 8 + 3 * 12 = 76
# that tensor parallelism cuts; in the last norm 16. The batch is one sequence of eight tokens.
# The loss is the fullest moment where activations and logits outweigh all gradients.
@pytest.mark.parametrize("job, layout, moment, components", [
    (lone(), Layout(sharding="zero1"), "loss", {
        "parameters": 1488, "optimizer": 2976, "working weights": 744,
        "activations": 2 * 8 * 116 + 128, "temporaries": 12 * 8 * 10}),
    # the last block that goes backward finds the gradients of the head (44) and of the other
    (lone(), Layout(sharding="zero1", checkpointing="block"), "last block's backward", {
        "parameters": 1488, "gradients": 4 * 188, "optimizer": 2976, "working weights": 744,
        "activations": 8 * 8, "temporaries": 8 * 116 - 64 + 8 * (16 + 36)}),
    # 76 of a block, 20 of a table; halves of everything that a token leaves, and of the logits,
    # whose product has its input whole
    (lone(), Layout(tensor=2, sharding="zero1"), "loss", {
        "parameters": 4 * 196, "optimizer": 8 * 196, "working weights": 2 * 196,
        "activations": 2 * 8 * 58 + 64, "temporaries": 12 * 8 * 5 + 2 * 4 * 8}),
    # without sequence parallelism the hidden's and the logits' alone
    (lone(), Layout(tensor=2, sharding="zero1", sequence=False), "loss", {
        "parameters": 4 * 196, "optimizer": 8 * 196, "working weights": 2 * 196,
        "activations": 2 * 8 * 78 + 128, "temporaries": 12 * 8 * 5}),
    # gradients of half of the weights stay, and one block's before they are sent
    (lone(), Layout(context=2, sharding="zero2", checkpointing="block"), "last block's backward", {
        "parameters": 744, "gradients": 2 * 188, "optimizer": 1488,
        "working weights": 2 * 372 + 2 * 144,
        "activations": 4 * 8, "temporaries": 4 * 116 - 32 + 4 * (16 + 36)}),
    # four tokens a device; three blocks' worth gathered, the largest layer
    (lone(), Layout(context=2, sharding="fsdp"), "loss", {
        "parameters": 744, "optimizer": 1488, "working weights": 3 * 2 * 144,
        "activations": 2 * 4 * 116 + 64, "temporaries": 12 * 4 * 10}),
    # the last stage: its norm and the logits weigh more than the first's embedding alone
    (lone(), Layout(pipeline=2, sharding="zero1"), "loss", {
        "parameters": 4 * 188, "optimizer": 8 * 188, "working weights": 2 * 188,
        "activations": 8 * 116 + 128, "temporaries": 12 * 8 * 10}),
    # eight scores a token, in 2 bytes, and a mask of 16 bytes; no log-sum-exp. Of the weights the
    # embedding alone, 40, has no copy.
    (lone(context=4, attention="eager"), ALONE, "loss", {
        "parameters": 1488, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * (4 * 124 + 16) + 64, "temporaries": 12 * 4 * 10}),
    # three fp32 matrices of scores weigh more than three of the hidden
    (lone(context=4, attention="eager"), AGAIN, "last block's backward", {
        "parameters": 1488, "gradients": 4 * 188, "optimizer": 2976, "working weights": 2 * 144,
        "activations": 4 * 8, "temporaries": 4 * 124 + 16 - 32 + 4 * (16 + 96)}),
    # so few tokens that gradients outweigh them; then so long that scores outweigh the logits
    (lone(context=1), ALONE, "after the backward", {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976}),
    (lone(context=16, attention="eager"), ALONE, "first block's backward", {
        "parameters": 1488, "gradients": 4 * 44, "optimizer": 2976, "working weights": 2 * 288,
        "activations": 2 * (16 * 172 + 256), "temporaries": 16 * (16 + 384)}),
    # gradients that are added to are there from the beginning; of half of the tokens logits
    (lone(batch=2), replace(ALONE, microbatches=2), "accumulating", {
        "parameters": 1488, "gradients": 1488, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * 8 * 116 + 128, "temporaries": 960}),
    (lone(batch=2, gradients="bf16", loss_chunks=2), replace(ALONE, microbatches=2),
     "accumulating", {
        "parameters": 1488, "gradients": 744, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * 8 * 116 + 128, "temporaries": 480}),
    # replicas keep everything; FSDP half, and three blocks of 144 parameters
    (lone(batch=2), PAIR, "loss", {
        "parameters": 1488, "optimizer": 2976, "working weights": 2 * 332,
        "activations": 2 * 8 * 116 + 128, "temporaries": 960}),
    (lone(batch=2), Layout(data=2), "loss", {
        "parameters": 744, "optimizer": 1488, "working weights": 2 * 3 * 144,
        "activations": 2 * 8 * 116 + 128, "temporaries": 960}),
])  # fmt: skip
def test_the_fullest_moment_by_hand(job, layout, moment, components):
    result = evaluate(job, layout, TOY)
    assert (result.moment, result.memory) == (moment, NOTHING | components)


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
        (126, 16, (7, 8, 7)), (126, 9, (14, 14, 14)), (127, 16, (8, 8, 7)), (60, 2, (30, 30, 30)),
        (61, 2, (31, 31, 30)), (61, 16, (3, 4, 2)), (125, 16, (7, 8, 6)),
        (60, 31, (1, 2, 1)), (60, 1, (60, 60, 60)),
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


def test_a_tied_table_is_one_on_a_device_and_one_at_either_end_of_a_pipeline():
    apart = training(batch=1, shape=GroupedShape(4, 6, 2, 2, 10))
    tied = training(batch=1, shape=GroupedShape(4, 6, 2, 2, 10, tied=True))
    for layout in (Layout(), Layout(tensor=2), ALONE):
        less = 4 * 40 / layout.tensor
        job, other = memory(apart, layout), memory(tied, layout)
        assert job["parameters"] - other["parameters"] == less
        assert job["optimizer"] - other["optimizer"] == 2 * less
    # the embedding has no 16-bit copy, and the head, which it is, has one
    assert memory(apart, ALONE)["working weights"] == 2 * 332
    assert memory(tied, ALONE)["working weights"] == 2 * 332
    two = Layout(pipeline=2)
    assert memory(apart, two) == memory(tied, two)
    assert evaluate(apart, two, TOY).step_s == evaluate(tied, two, TOY).step_s


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
        ("data 3 x microbatches 1 must divide batch 4", training(), Layout(data=3)),
        ("tensor 4 must divide num_heads 2", training(), Layout(tensor=4)),
        ("one must divide the other", three, Layout(tensor=4)),
        ("pipeline 5 with num_layers 2; allowed", training(), Layout(pipeline=5)),
        ("context 3 with context length 4", training(), Layout(context=3)),
        ("context 2 with context length 4 and eager", training(attention="eager"),
         Layout(context=2)),
        ("data is -1; allowed are positive integers", training(), Layout(data=-1)),
        ("sharding 'ddp': allowed are none, zero1", training(), Layout(sharding="ddp")),
        ("selective with flash attention", training(), Layout(checkpointing="selective")),
        ("schedule zb-h1 with pipeline 1", training(), Layout(schedule="zb-h1")),
    ):  # fmt: skip
        refused(words, evaluate, job, layout, TOY)
    refused("attention 'sdpa': allowed are flash, eager", training, attention="sdpa")
    refused("efficiency is 1.01; allowed are numbers", replace, training(), efficiency=1.01)
    refused("link is -1.0; allowed are numbers above 0", replace, TOY, link=-1.0)
