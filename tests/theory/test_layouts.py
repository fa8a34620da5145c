"""What a layout holds and how long its step takes: by hand, and by other counts."""

import math
from collections import Counter
from dataclasses import replace

import committed
import pytest
from plan_toys import FREE, MIXED, NOTHING, TINY, TOY, WIDE, job
from refusals import refused

from a2lib.theory import layout_time, planner, schedules
from a2lib.theory.devices import DEVICES, named_device
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.other_axes import bubble_s
from a2lib.theory.stages import stage_blocks
from a2lib.theory.transformer import GroupedShape, forward_flops_by_part, parameter_count

# By hand. A block of TINY has 4 * 16 + 3 * 24 + 8 = 144 parameters, either table 40, the last norm
# 4: 372 in all. A token leaves 2 (16 + 4 + 16) + 5 * 8 = 112 bytes whole, 24 + 8 + 8 + 4 * 12 = 88
# that tensor parallelism cuts. The batch is one sequence of four tokens.
# The loss is the fullest moment where activations and logits outweigh all gradients.
BY_HAND = [
    (Layout(sharding="zero1"), {
        "parameters": 1488, "optimizer": 2976, "working weights": 744,
        "activations": 2 * 4 * 200 + 160, "temporaries": 12 * 4 * 10}),
    # the last block that goes backward finds the gradients of the head (44) and of the other
    (Layout(sharding="zero1", checkpointing="block"), {
        "parameters": 1488, "gradients": 4 * 188, "optimizer": 2976, "working weights": 744,
        "activations": 4 * 16, "temporaries": 4 * 200 - 64 + 4 * (24 + 36)}),
    # 76 of a block, 20 of a table; halves of everything that a token leaves, and of the logits,
    # whose product has its input whole
    (Layout(tensor=2, sharding="zero1"), {
        "parameters": 4 * 196, "optimizer": 8 * 196, "working weights": 2 * 196,
        "activations": 2 * 4 * 100 + 80, "temporaries": 12 * 4 * 5 + 2 * 4 * 4}),
    # without sequence parallelism the hidden's and the logits' alone
    (Layout(tensor=2, sharding="zero1", sequence=False), {
        "parameters": 4 * 196, "optimizer": 8 * 196, "working weights": 2 * 196,
        "activations": 2 * 4 * 156 + 160, "temporaries": 12 * 4 * 5}),
    # gradients of half of the weights stay, and one block's before they are sent
    (Layout(context=2, microbatches=1, sharding="zero2", checkpointing="block"), {
        "parameters": 744, "gradients": 2 * 188, "optimizer": 1488,
        "working weights": 2 * 372 + 2 * 144,
        "activations": 2 * 16, "temporaries": 2 * 200 - 32 + 2 * (24 + 36)}),
    # two tokens a device; three blocks' worth gathered, the largest layer
    (Layout(context=2, sharding="fsdp"), {
        "parameters": 744, "optimizer": 1488, "working weights": 3 * 2 * 144,
        "activations": 2 * 2 * 200 + 80, "temporaries": 12 * 2 * 10}),
    # the last stage: its norm and the logits weigh more than the first's embedding alone
    (Layout(pipeline=2, sharding="zero1"), {
        "parameters": 4 * 188, "optimizer": 8 * 188, "working weights": 2 * 188,
        "activations": 4 * 200 + 160, "temporaries": 12 * 4 * 10}),
]  # fmt: skip


@pytest.mark.parametrize("layout, components", BY_HAND)
def test_memory_by_hand(layout, components):
    assert evaluate(job(batch=1), layout).memory == NOTHING | components


def test_experts_are_cut_over_their_own_devices():
    """A dense block of MIXED has 144 parameters, the other 72 of attention and norms, a shared
    expert's 36, 16 of the router, 4 biases, and four experts of 36: 272."""
    one = job(batch=4, shape=MIXED)
    assert parameter_count(MIXED) == 144 + 272 + 2 * 40 + 4 == 500
    for expert, here in ((1, 500), (2, 500 - 72), (4, 500 - 108)):
        whole = evaluate(one, Layout(data=4, sharding="none", expert=expert)).memory
        zero1 = evaluate(one, Layout(data=4, sharding="zero1", expert=expert)).memory
        # the embedding has no 16-bit copy where nothing is cut
        assert (whole["parameters"], whole["optimizer"]) == (4 * here, 8 * here)
        assert (whole["working weights"], zero1["working weights"]) == (2 * (here - 40), 2 * here)
        # what is cut over all is cut once, however experts are
        assert zero1["parameters"] == pytest.approx(4 * 500 / 4)
        assert zero1["optimizer"] == pytest.approx(8 * 500 / 4)
        # a block with its experts, three times
        fsdp = evaluate(one, Layout(data=4, expert=expert)).memory
        assert fsdp["working weights"] == 3 * 2 * (272 - (500 - here))
        assert fsdp["parameters"] == pytest.approx(500)
    # each token's copy for its expert: 2 bytes of 4 numbers in either block
    assert sum(one.saved) == sum(job(shape=TINY).saved) + 8
    # the first stage has the dense block, the last the other
    two = evaluate(one, Layout(data=2, pipeline=2, sharding="none", expert=2)).memory
    assert two["parameters"] == 4 * (200 + 40 + 4)


def test_experts_get_their_tokens_once_a_node_and_once_each():
    """By hand: four tokens a device of 8 bytes each go to an expert and back, and again in the
    backward: 4 * 32 bytes, less the part that stays."""
    shape = replace(MIXED, d_ff=9, top_k=2)  # three experts of width 3 a token
    one = job(batch=4, shape=shape)

    def routed(expert, node, **more):
        cut = replace(one, device=replace(TOY, node=node), shape=replace(shape, **more))
        return layout_time._routed(cut, Layout(data=4, expert=expert), 4, 1)

    assert routed(1, 2) == (0, 0)
    assert routed(2, 2) == pytest.approx((4 * 64 / 2 / 10, 0))
    # half of a token's two copies for the other node, or one if both must lie in one
    assert routed(4, 2) == pytest.approx((4 * 64 / 2 / 10, 4 * 64 / 2 / 1))
    assert routed(4, 2, nodes=1) == pytest.approx((4 * 64 / 2 / 10, 4 * 32 / 2 / 1))
    assert routed(4, 1) == pytest.approx((0, 4 * 64 * 3 / 4))
    # of four copies two go to the other of two nodes, where they are one
    assert routed(4, 2, d_ff=15, top_k=4) == pytest.approx((4 * 128 / 2 / 10, 4 * 64 / 2 / 1))
    again = replace(Layout(data=4, expert=2), checkpointing="block")
    assert layout_time._routed(one, again, 4, 1) == pytest.approx((5 * 64 / 2 / 10, 0))
    # a plan has them in all its ways, the dense block none
    layout = Layout(data=2, sharding="none", expert=2)
    two = job(batch=2, shape=shape)
    plan, alone = evaluate(two, layout), evaluate(two, replace(layout, expert=1))
    less = 2 * 2 * 4 * 36 / 2 / 10  # of the gradients of experts, of which a device has its own
    assert plan.busy["node links"] == pytest.approx(alone.busy["node links"] - less + 12.8)
    assert plan.expected_s == pytest.approx(max(12.8 + plan.busy["computation"], plan.step_s))


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    small = replace(WIDE, vocab_size=2)  # whose logits weigh nothing, so the first is the fullest
    one = job(batch=8, shape=small)
    token = sum(one.saved)
    for m, held in ((2, 2), (4, 3), (8, 3)):
        plan = evaluate(one, Layout(pipeline=3, microbatches=m))
        tokens = 8 // m * 4
        assert plan.memory["activations"] == held * 4 * tokens * token
    # In two pieces a stage: 3 + 2 / 2 micro-batches' worth.
    plan = evaluate(replace(one, batch=24), Layout(pipeline=3, microbatches=6, chunks=2))
    assert plan.memory["activations"] == 4 * 4 * (24 // 6 * 4) * token


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
    small = replace(WIDE, num_layers=10, vocab_size=2)
    plan = evaluate(job(batch=8, shape=small), Layout(pipeline=4, microbatches=8))
    assert plan.memory["activations"] == 3 * 3 * 4 * sum(job(shape=small).saved)
    assert plan.memory["parameters"] == 4 * 3 * 656


# A block computes 3 (4 * 128 + 3 * 192) + 3.5 * 128 = 3,712 operations, the head 3 * 320.
COMPUTE = (2 * 3712 + 960) / 1e3


@pytest.mark.parametrize("layout, step, expected, serial, bound", [
    (Layout(), COMPUTE, COMPUTE, COMPUTE, "computation"),
    # ten sums of 32 bytes, half of which pass twice
    (Layout(tensor=2, sequence=False), 32, 32 + COMPUTE / 2, 32 + COMPUTE / 2, "node links"),
    # in their place 25 gathers and scatters of 32 bytes, half of which pass
    (Layout(tensor=2), 40, 40 + COMPUTE / 2, 40 + COMPUTE / 2, "node links"),
    # a block again but for its last product: 1,024 operations, and three rings
    (Layout(tensor=2, checkpointing="block"), 31 * 1.6, 49.6 + COMPUTE / 2 + 1.024,
     49.6 + COMPUTE / 2 + 1.024, "node links"),
    # a ring attention of 32 bytes three times a block; weights gathered twice, gradients once
    (Layout(context=2), 130.8, 130.8, 130.8 + COMPUTE / 2, "node links"),
    (Layout(context=2, sharding="zero1"), 93.6, 93.6, 93.6 + COMPUTE / 2, "node links"),
    # either stage sends 32 bytes one way; the second has the head
    (Layout(pipeline=2), 3.712 + 4.672, 3.712 + 4.672, 3.712 + 4.672 + 6.4, "computation"),
])  # fmt: skip
def test_time_by_hand(layout, step, expected, serial, bound):
    plan = evaluate(job(batch=1), layout)
    ends = (plan.step_s, plan.expected_s, plan.serial_s)
    assert ends == pytest.approx((step, expected, serial)) and plan.bound == bound
    assert ends == pytest.approx([plan.seconds(hidden) for hidden in ("all", "data", "none")])
    assert plan.seconds(0.25) == pytest.approx(serial - (serial - step) / 4)


def test_a_tied_table_is_one_on_a_device_and_one_at_either_end_of_a_pipeline():
    apart = job(batch=1, shape=GroupedShape(4, 6, 2, 2, 10))
    tied = job(batch=1, shape=GroupedShape(4, 6, 2, 2, 10, tied=True))
    for layout in (Layout(microbatches=1), Layout(tensor=2), Layout(data=1, sharding="none")):
        less = 4 * 40 / layout.tensor
        one, other = (evaluate(each, layout).memory for each in (apart, tied))
        assert one["parameters"] - other["parameters"] == less
        assert one["optimizer"] - other["optimizer"] == 2 * less
    # under autocast the embedding has no 16-bit copy, and the head, which it is, has one
    none = Layout(sharding="none")
    assert evaluate(apart, none).memory["working weights"] == 2 * 332
    assert evaluate(tied, none).memory["working weights"] == 2 * 332
    two = Layout(pipeline=2)
    assert evaluate(apart, two).memory == evaluate(tied, two).memory
    assert evaluate(apart, two).step_s == evaluate(tied, two).step_s


def test_data_parallelism_over_nodes_gathers_over_the_network_and_in_the_node():
    # Four devices in two nodes: 372 bytes of 744 come over the network, shared by the node's two;
    # so each receives 186 there, and 372 from its neighbour: 558 = 3 / 4 of 744.
    plan = evaluate(job(), Layout(data=4, sharding="zero1"))
    assert plan.busy["network"] == pytest.approx(2 * 186 / 1)
    assert plan.busy["node links"] == pytest.approx(2 * 372 / 10)
    zero2 = evaluate(job(), Layout(data=4, sharding="zero2"))  # gradients, and then the weights
    assert zero2.busy == plan.busy
    # hsdp cuts the state within a node: three rings there, and halves of the gradients between
    hsdp = evaluate(job(), Layout(data=4, sharding="hsdp"))
    assert hsdp.busy["network"] == pytest.approx(2 * 186 / 1)
    assert hsdp.busy["node links"] == pytest.approx(3 * 372 / 10)
    once = evaluate(job(batch=8), Layout(data=4, sharding="hsdp", microbatches=2)).busy
    assert once["network"] == hsdp.busy["network"]
    assert once["node links"] == pytest.approx(2 * hsdp.busy["node links"])
    whole = evaluate(job(), Layout(data=4, sharding="none"))
    for part in ("parameters", "optimizer"):
        assert hsdp.memory[part] == whole.memory[part] / 2
    # as many devices as there are in the node need no network, however they are cut
    inner = evaluate(job(devices=2), Layout(data=2, sharding="fsdp"))
    other = evaluate(job(devices=2), Layout(data=2, sharding="hsdp"))
    assert inner.busy["network"] == 0 and replace(inner, layout=other.layout) == other
    fsdp = evaluate(job(), Layout(data=2, tensor=2, microbatches=2))  # one device of a group a node
    assert fsdp.busy["network"] == pytest.approx(2 * 3 * 392 / 2)


def test_axes_of_a_torus_do_not_wait_for_each_other():
    # Eight tokens a device: 25 rings of 64 bytes; 392 bytes of weights, three times or twice.
    for sharding, data in (("fsdp", 3 * 19.6), ("zero1", 2 * 19.6)):
        layout = Layout(data=2, tensor=2, sharding=sharding)
        for torus, seconds in ((False, 80 + data), (True, 80)):
            plan = evaluate(job(device=replace(TOY, node=64, torus=torus)), layout)
            assert plan.busy["node links"] == pytest.approx(seconds)
            assert plan.serial_s == pytest.approx(80 + data + plan.busy["computation"])
    # context lies on data's axis, and waits for it
    one = job(device=replace(TOY, node=64, torus=True), batch=1)
    assert evaluate(one, Layout(context=2)).busy["node links"] == pytest.approx(19.2 + 111.6)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("stages, m", [(2, 4), (4, 8)])
@pytest.mark.parametrize("again", ["none", "block"])
def test_the_step_of_a_zero_bubble_pipeline_is_that_of_the_schedule(schedule, stages, m, again):
    small = replace(WIDE, vocab_size=1)
    one = job(batch=m, shape=small, device=FREE)
    layout = Layout(pipeline=stages, microbatches=m, schedule=schedule, checkpointing=again)
    plan = evaluate(one, layout)
    weight = 2 * 4 * small.block_matrices * 12 / stages / 1e3
    forward = weight + forward_flops_by_part(small, 1, 4, causal=True)["attention"] / stages / 1e3
    inputs = layout_time.block_flops(one, 4, again) * 12 / stages / 1e3 - forward - weight
    tasks = schedules.pipeline(schedule, stages, m, 1, forward, inputs + weight, weight)
    timeline = schedules.run(tasks)
    stage = [task.name for task in timeline.tasks if task.stream == "stage 0"]
    span = timeline.end[stage[-1]] - timeline.start[stage[0]]
    waits = bubble_s(schedule, stages, forward, inputs, weight)
    assert plan.busy["pipeline bubble"] == pytest.approx(waits, rel=0.05)
    assert plan.step_s == pytest.approx(span, rel=0.05)
    held = schedules.held_by_stage(timeline, 0, stages)
    kept = sum(one.saved) if again == "none" else 4 * small.d_model
    norm = 4 * (2 * 4 + 2) * small.d_model  # the last, whose stage holds as much as the first
    assert plan.memory["activations"] == held * 12 // stages * 4 * kept + norm


@pytest.mark.parametrize("stages, m", [(2, 1), (3, 4), (4, 8), (6, 2)])
def test_the_step_of_a_pipeline_is_that_of_the_schedule(stages, m):
    one = job(batch=8, shape=WIDE, device=FREE)
    plan = evaluate(one, Layout(pipeline=stages, microbatches=m))
    tokens = 8 // m * 4
    block = layout_time.block_flops(one, tokens, "none") * 12 / stages / 1e3
    seconds = [block] * (stages - 1) + [block + 6 * tokens * 8 * 64 / 1e3]
    tasks = []
    for task in schedules.pipeline("1f1b", stages, m):
        thirds = 1 if task.name[0] == "F" else 2
        stage = int(task.stream.removeprefix("stage "))
        tasks.append(replace(task, seconds=seconds[stage] * thirds / 3))
    assert plan.step_s == pytest.approx(schedules.run(tasks).seconds)


def test_devices_are_those_of_the_reference():
    rows = committed.reference("devices")
    stated = {(row["device"], row["quantity"]): float(row["value"]) for row in rows}
    for device in DEVICES.values():
        link = "ici_axis_egress" if device.torus else "nvlink_egress"
        for found, quantity, unit in (
            (device.flops, "bf16_dense", 1e12),
            (device.memory, "memory", 1e9),
            (device.memory_bandwidth, "memory_bandwidth", 1e12),
            (device.link, link, 1e9),
            (device.network, "network_egress", 1e9),
            (device.node, "node_devices", 1),
            *([(device.fp32, "fp32_plain", 1e12)] if device.fp32 else ()),
        ):
            assert found == pytest.approx(unit * stated[device.slug, quantity]), quantity
        assert device.fp32 or (device.slug, "fp32_plain") not in stated
    assert named_device("H200") is DEVICES["H200"]


def test_a_layout_that_breaks_a_rule_is_one_line():
    def broken(words, **layout):
        refused(words, lambda: evaluate(job(), Layout(**layout)))
        refused(words, planner.search, job(), layout)

    broken("data 3 does not divide batch 4; it must", data=3)
    broken("tensor 4 does not divide num_heads 2; it must", tensor=4)
    broken("pipeline 5 does not divide num_layers 2, nor up to three more, in 2 stages", pipeline=5)
    broken("context 3 does not divide context length 4; it must", context=3)
    broken("context 4: its double does not divide context length 4; it must", context=4)
    broken("microbatches 4 does not divide the 2 sequences", data=2, microbatches=4)
    broken("is 16; allowed are at most the 8 devices", data=4, tensor=2, pipeline=2)
    broken("data is -1; allowed are positive integers", data=-1)
    broken("tensor is 0; allowed are positive integers", tensor=0)
    broken("microbatches is 1.5; allowed are positive integers", microbatches=1.5)
    broken("sharding 'ddp': allowed are none, zero1, zero2, fsdp, hsdp", sharding="ddp")
    broken("schedule 'zb-v': allowed are 1f1b, zb-h1, zb-h2", schedule="zb-v")
    broken("checkpointing 'all': allowed are none, selective, block", checkpointing="all")
    broken("selective with flash attention; allowed are none and block", checkpointing="selective")


def test_what_experts_and_zero_bubble_ask_of_a_layout_is_one_line():
    def broken(words, **layout):
        refused(words, evaluate, job(batch=6, shape=MIXED), Layout(**layout))

    broken("expert 2 does not divide data x context 1; it must", expert=2)
    broken("expert 3 does not divide experts 4; it must", data=3, expert=3)
    broken("expert 2 with sharding hsdp; allowed is 1", data=2, expert=2, sharding="hsdp")
    broken("tensor 2 with experts; allowed is 1, since expert cuts them", tensor=2)
    broken("from 3 micro-batches on", pipeline=2, schedule="zb-h2", microbatches=2)
    broken("schedule zb-h1 with pipeline 1, chunks 1, microbatches 1; allowed", schedule="zb-h1")
    deep = job(shape=replace(MIXED, num_layers=4, dense=3))
    line = "pipeline 2: the first stage has fewer blocks than the 3"
    refused(line, evaluate, deep, Layout(pipeline=2))
    refused("expert 2 does not divide experts 0", evaluate, job(), Layout(data=2, expert=2))


def test_what_is_not_allowed_is_one_line():
    refused("devices is 0; allowed are positive integers", job, devices=0)
    refused("batch is -4; allowed are positive integers", job, batch=-4)
    refused("context is 2.0; allowed are positive integers", job, context=2.0)
    refused("headroom is 1; allowed are numbers from 0 to < 1", job, headroom=1)
    refused("headroom is nan; allowed", job, headroom=math.nan)
    refused("device 'A9': allowed are H100, H200, H800, A100, B200", named_device, "A9")
    refused("link is -1.0; allowed are numbers above 0", replace, TOY, link=-1.0)
    refused("fixed 'experts': allowed are data, tensor", planner.search, job(), {"experts": 2})
    for wrong in ("some", 1.5, math.nan):
        refused("allowed are all, data, none, numbers from 0", planner.search, job(), hidden=wrong)
    small = job(device=replace(TOY, memory=1e3))
    refused("of the 0.0 GB allowed on each", planner.search, small)
    # three micro-batches divide the batch, but no data rank of two
    fixed = {"data": 2, "microbatches": 2}
    refused("does not divide the 3", planner.search, job(batch=6), fixed)


def test_a_message_costs_the_latency_that_is_given():
    """With 1 s a message, by hand: what is added to the busy links and network of each axis."""
    slow = replace(TOY, latency=1.0)

    def added(layout, shape=TINY, node=8, attention="flash"):
        plain, late = (replace(device, node=node) for device in (TOY, slow))
        jobs = [replace(job(shape=shape, device=one), attention=attention) for one in (plain, late)]
        before, after = (evaluate(one, layout).busy for one in jobs)
        return [round(after[name] - before[name], 6) for name in ("node links", "network")]

    # Two blocks, an embedding and a head on one device. Gathers in both passes, a scatter.
    assert added(Layout(data=2)) == [3 * 4, 0]
    assert added(Layout(data=2, microbatches=2)) == [2 * 3 * 4, 0]
    assert added(Layout(data=2, sharding="zero1")) == [2 * 4, 0]
    assert added(Layout(data=2, sharding="none")) == [4, 0]
    whole = Layout(tensor=2, sharding="none", sequence=False)
    assert added(whole) == [2 * 4 + 2, 0]
    assert added(replace(whole, checkpointing="block")) == [2 * 5 + 2, 0]
    assert added(replace(whole, sequence=True)) == [2 * 10 + 5, 0]
    assert added(replace(whole, sequence=True, checkpointing="block")) == [2 * 13 + 5, 0]
    assert added(Layout(data=2, sharding="zero2", microbatches=2)) == [2 * 4 + 4, 0]
    # Either stage sends one hop and gets another's, and has a block and one table.
    assert added(Layout(pipeline=2, sharding="none")) == [1, 0]
    # Of several pieces each message is one that a task of the schedule waits for.
    for stages, m, chunks in ((2, 2, 2), (2, 4, 3), (4, 4, 3)):
        tasks = schedules.pipeline("interleaved", stages, m, chunks)
        of = {task.name: task.stream for task in tasks}
        sent = Counter(of[n] for task in tasks for n in task.after if of[n] != task.stream)
        layout = Layout(pipeline=stages, microbatches=m, chunks=chunks, sharding="none")
        assert added(layout, WIDE) == [max(sent.values()), 0], (stages, chunks)
    # To the experts and back, in either pass, and a gather again; gradients as before.
    experts = Layout(data=2, expert=2, sharding="none")
    assert added(experts, MIXED) == [4 + 4, 0]
    assert added(replace(experts, checkpointing="block"), MIXED) == [4 + 5, 0]
    assert added(replace(experts, data=4, expert=4), MIXED, node=2) == [4 + 4, 4 + 4]
    assert added(experts, MIXED, node=1) == [0, 4 + 4]
    # A ring of two: keys and values once forward, and twice backward; weights as data has them.
    assert added(Layout(context=2)) == [3 * 2 + 3 * 4, 0]
    # Four devices, two in a node: either part of the gather is a message of its own.
    assert added(Layout(data=4), node=2) == [3 * 4, 3 * 4]
    assert added(Layout(data=2), node=1) == [0, 3 * 4]
    assert added(Layout()) == [0, 0]
