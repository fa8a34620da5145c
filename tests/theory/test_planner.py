"""The planner: costs of a layout by hand and by other counts, the search against every layout."""

import csv
import itertools
import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from a2lib.paths import ROOT
from a2lib.theory import __main__ as command
from a2lib.theory import layouts, planner, schedules
from a2lib.theory.checkpointing import recomputed_flops
from a2lib.theory.devices import DEVICES, Device, named_device
from a2lib.theory.layouts import AXES, SHARDINGS, STRATEGIES, Job, Layout, evaluate
from a2lib.theory.saved import block_saved, block_saved_bytes
from a2lib.theory.schedules import Task
from a2lib.theory.strategy_memory import strategy_memory
from a2lib.theory.transformer import SIZES, Shape, forward_flops_by_part, state_bytes, step_flops

# Round numbers: 1,000 operations, 10 bytes to a device of the node (of two), 1 byte to others.
TOY = Device("toy", 1e3, 1e6, 1e30, 10.0, 1.0, 2)
TINY = Shape(d_model=4, d_ff=6, num_layers=2, num_heads=2, vocab_size=10)
FREE = replace(TOY, link=1e30, network=1e30)
WIDE = Shape(d_model=8, d_ff=16, num_layers=12, num_heads=4, vocab_size=64)


def job(devices=8, batch=4, context=4, shape=TINY, device=TOY, headroom=0.0):
    return Job(shape, device, devices, batch, context, headroom)


# By hand. A block of TINY has 4 * 16 + 3 * 24 + 8 = 144 parameters, either table 40, the last norm
# 4: 372 in all. A token leaves 2 (16 + 4 + 16) + 5 * 8 = 112 bytes whole, 24 + 8 + 8 + 4 * 12 = 88
# that tensor parallelism cuts. The batch is one sequence of four tokens.
# The loss is the fullest moment where activations and logits outweigh all gradients.
BY_HAND = [
    (Layout(sharding="zero1"), {
        "parameters": 1488, "gradients": 0, "optimizer": 2976, "working weights": 744,
        "activations": 2 * 4 * 200 + 160, "temporaries": 12 * 4 * 10}),
    # the last block that goes backward finds the gradients of the head (44) and of the other
    (Layout(sharding="zero1", checkpointing="block"), {
        "parameters": 1488, "gradients": 4 * 188, "optimizer": 2976, "working weights": 744,
        "activations": 4 * 16, "temporaries": 4 * 200 - 64 + 4 * (24 + 36)}),
    # 76 of a block, 20 of a table; the hidden's and the logits' halves
    (Layout(tensor=2, sharding="zero1"), {
        "parameters": 4 * 196, "gradients": 0, "optimizer": 8 * 196,
        "working weights": 2 * 196, "activations": 2 * 4 * 156 + 160, "temporaries": 12 * 4 * 5}),
    # two tokens a device; three blocks' worth gathered, the largest layer
    (Layout(context=2, sharding="fsdp"), {
        "parameters": 744, "gradients": 0, "optimizer": 1488, "working weights": 3 * 2 * 144,
        "activations": 2 * 2 * 200 + 80, "temporaries": 12 * 2 * 10}),
    # the last stage: its norm and the logits weigh more than the first's embedding alone
    (Layout(pipeline=2, sharding="zero1"), {
        "parameters": 4 * 188, "gradients": 0, "optimizer": 8 * 188,
        "working weights": 2 * 188, "activations": 4 * 200 + 160, "temporaries": 12 * 4 * 10}),
]  # fmt: skip


@pytest.mark.parametrize("layout, components", BY_HAND)
def test_memory_by_hand(layout, components):
    assert evaluate(job(batch=1), layout).memory == components


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    small = replace(WIDE, vocab_size=2)  # whose logits weigh nothing, so the first is the fullest
    one = job(batch=8, shape=small)
    token = sum(one.saved)
    for m, held in ((2, 2), (4, 3), (8, 3)):
        plan = evaluate(one, Layout(pipeline=3, microbatches=m))
        tokens = 8 // m * 4
        assert plan.memory["activations"] == held * 4 * tokens * token


# A block computes 3 (4 * 128 + 3 * 192) + 3.5 * 128 = 3,712 operations, the head 3 * 320.
COMPUTE = (2 * 3712 + 960) / 1e3


@pytest.mark.parametrize("layout, step, serial, bound", [
    (Layout(), COMPUTE, COMPUTE, "computation"),
    # ten sums of 32 bytes, half of which pass twice
    (Layout(tensor=2), 32, 32 + COMPUTE / 2, "node links"),
    # a ring attention of 32 bytes three times a block; weights gathered twice, gradients once
    (Layout(context=2), 19.2 + 111.6, 19.2 + 111.6 + COMPUTE / 2, "node links"),
    (Layout(context=2, sharding="zero1"), 19.2 + 74.4, 19.2 + 74.4 + COMPUTE / 2, "node links"),
    # either stage sends 32 bytes one way; the second has the head
    (Layout(pipeline=2), 3.712 + 4.672, 3.712 + 4.672 + 6.4, "computation"),
])  # fmt: skip
def test_time_by_hand(layout, step, serial, bound):
    plan = evaluate(job(batch=1), layout)
    assert plan.step_s == pytest.approx(step)
    assert plan.serial_s == pytest.approx(serial)
    assert plan.bound == bound


def test_data_parallelism_over_nodes_gathers_over_the_network_and_in_the_node():
    # Four devices in two nodes: 372 bytes of 744 come over the network, shared by the node's two;
    # so each receives 186 there, and 372 from its neighbour: 558 = 3 / 4 of 744.
    plan = evaluate(job(), Layout(data=4, sharding="zero1"))
    assert plan.busy["network"] == pytest.approx(2 * 186 / 1)
    assert plan.busy["node links"] == pytest.approx(2 * 372 / 10)
    fsdp = evaluate(job(), Layout(data=2, tensor=2, microbatches=2))  # one device of a group a node
    assert fsdp.busy["network"] == pytest.approx(2 * 3 * 392 / 2)
    # as many devices as there are in the node need no network, however they are cut
    assert evaluate(job(devices=2), Layout(data=2)).busy["network"] == 0


def test_axes_of_a_torus_do_not_wait_for_each_other():
    # Eight tokens a device: ten sums of 64 bytes; 392 bytes of weights, three times or twice.
    for sharding, data in (("fsdp", 3 * 19.6), ("zero1", 2 * 19.6)):
        layout = Layout(data=2, tensor=2, sharding=sharding)
        for torus, seconds in ((False, 64 + data), (True, 64)):
            plan = evaluate(job(device=replace(TOY, node=64, torus=torus)), layout)
            assert plan.busy["node links"] == pytest.approx(seconds)
            assert plan.serial_s == pytest.approx(64 + data + plan.busy["computation"])
    # context lies on data's axis, and waits for it
    one = job(device=replace(TOY, node=64, torus=True), batch=1)
    assert evaluate(one, Layout(context=2)).busy["node links"] == pytest.approx(19.2 + 111.6)


def test_state_is_that_of_the_transformer():
    for size in SIZES.values():
        memory = evaluate(job(shape=size), Layout(microbatches=2)).memory
        state = state_bytes(size)
        assert memory["parameters"] == state.parameters
        assert memory["gradients"] == state.gradients
        assert memory["optimizer"] == state.optimizer


def test_a_block_keeps_what_saved_has_but_the_weights():
    shape, batch, context = SIZES["small"], 3, 64
    copies = sum(one.bytes for one in block_saved(shape, 1, 1, "flash", "bf16")
                 if one.what == "16-bit weight")  # fmt: skip
    kept = block_saved_bytes(shape, batch, context, "flash", "bf16") - copies
    assert sum(job(shape=shape).saved) * batch * context == kept


@pytest.mark.parametrize("shape", [TINY, SIZES["8B"]])
def test_operations_are_the_steps_and_what_flash_and_checkpoints_compute_again(shape):
    one = job(shape=shape, batch=2, context=64, device=FREE)
    none = evaluate(one, Layout()).busy["computation"] * FREE.flops
    attention = forward_flops_by_part(shape, 2, 64, causal=True)["attention"]
    assert none == pytest.approx(step_flops(shape, 2, 64, causal=True) + attention / 2)
    block = evaluate(one, Layout(checkpointing="block")).busy["computation"] * FREE.flops
    # checkpointing.py counts all scores, of which causal attention computes half
    again = recomputed_flops("block", shape, 2, 64) - attention
    assert block - none == pytest.approx(again)


@pytest.mark.parametrize("stages, m", [(2, 1), (3, 4), (4, 8), (6, 2)])
def test_the_step_of_a_pipeline_is_that_of_the_schedule(stages, m):
    one = job(batch=8, shape=WIDE, device=FREE)
    plan = evaluate(one, Layout(pipeline=stages, microbatches=m))
    tokens = 8 // m * 4
    block = layouts.block_flops(one, tokens, False) * 12 / stages / 1e3
    seconds = [block] * (stages - 1) + [block + 6 * tokens * 8 * 64 / 1e3]
    tasks = [
        Task(name.name, name.stream,
             seconds[int(name.stream.split()[1])] * (1 if name.name[0] == "F" else 2) / 3,
             name.after)
        for name in schedules.pipeline("1f1b", stages, m)
    ]  # fmt: skip
    assert plan.step_s == pytest.approx(schedules.run(tasks).seconds)


def every_plan(one, overlap):
    """All layouts that the rules allow, by trying all numbers: the best plan's rank."""
    best = None
    for sizes in itertools.product(range(1, one.devices + 1), repeat=4):
        if math.prod(sizes) > one.devices:
            continue
        for m, sharding, strategy in itertools.product(
            range(1, one.batch + 1), planner.SEARCHED, STRATEGIES
        ):
            try:
                plan = evaluate(one, Layout(*sizes, m, sharding, strategy))
            except ValueError:
                continue
            if plan.memory_bytes <= one.memory:
                steps = (plan.step_s, plan.serial_s) if overlap else (plan.serial_s, plan.step_s)
                rank = tuple(float(f"{x:.6g}") for x in (*steps, plan.memory_bytes))
                best = rank if best is None else min(best, rank)
    return best


FAST = replace(TOY, link=1e4, network=1e3)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("one", [
    job(),
    job(devices=6, batch=6, context=12, device=FAST),
    job(devices=12, batch=4, context=8, shape=WIDE, device=FAST),
    job(devices=12, batch=4, context=8, shape=WIDE, device=replace(FAST, torus=True, node=12)),
    job(devices=8, batch=4, context=8, shape=WIDE, device=replace(FAST, memory=40_000.0)),
])  # fmt: skip
def test_no_layout_is_better_than_the_one_found(one, overlap):
    plan = planner.search(one, overlap=overlap)
    assert plan == evaluate(one, plan.layout)
    steps = (plan.step_s, plan.serial_s) if overlap else (plan.serial_s, plan.step_s)
    assert every_plan(one, overlap) == tuple(float(f"{x:.6g}") for x in (*steps, plan.memory_bytes))


def test_memory_decides_in_one_of_those():
    one = job(devices=8, batch=4, context=8, shape=WIDE, device=FAST)
    tight = replace(one, device=replace(FAST, memory=40_000.0))
    assert planner.search(one).memory_bytes > 40_000
    assert planner.search(tight).step_s >= planner.search(one).step_s


def test_more_is_never_slower():
    def least(**changed):
        device = {k: changed.pop(k) for k in list(changed) if k in vars(DEVICES["H100"])}
        one = Job(SIZES["medium"], replace(DEVICES["H100"], **device), 16, 32, 1024)
        return planner.search(replace(one, **changed)).step_s

    def falls(name, values):
        found = [least(**{name: value}) for value in values]
        assert found == sorted(found, reverse=True) and found[-1] < found[0], name

    falls("devices", [1, 2, 3, 8, 12, 64, 65])
    falls("memory", [1.5e9, 3e9, 80e9])
    falls("flops", [1e12, 1e14, 1e15])
    falls("network", [1e9, 1e10, 1e11])
    rises = [least(batch=batch) for batch in (16, 32, 64)]
    assert rises == sorted(rises) and rises[0] < rises[-1]


def test_what_is_held_stays():
    held = {"tensor": 2, "pipeline": 3, "microbatches": 2, "sharding": "fsdp",
            "checkpointing": "block"}  # fmt: skip
    one = job(devices=24, shape=WIDE)
    layout = asdict(planner.search(one, held).layout)
    assert {name: layout[name] for name in held} == held
    assert planner.search(one, held).step_s >= planner.search(one).step_s


def test_a_hundred_thousand_devices_are_used_as_far_as_the_rules_allow():
    one = Job(SIZES["10B"], DEVICES["H100"], 100_000, 512, 4096)
    plan = planner.search(one)
    assert 1000 < plan.layout.devices <= 100_000
    assert plan.memory_bytes <= one.memory == 0.9 * 80e9


def test_devices_are_those_of_the_reference():
    with (ROOT / "data" / "reference" / "devices.csv").open() as lines:
        stated = {(row["device"], row["quantity"]): float(row["value"])
                  for row in csv.DictReader(lines)}  # fmt: skip
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


@pytest.mark.parametrize("layout, words", [
    ({"data": 3}, "data 3 does not divide batch 4; it must"),
    ({"tensor": 4}, "tensor 4 does not divide num_heads 2; it must"),
    ({"pipeline": 5}, "pipeline 5 does not divide num_layers 2; it must"),
    ({"context": 3}, "context 3 does not divide context length 4; it must"),
    ({"context": 4}, "context 4: its double does not divide context length 4; it must"),
    ({"data": 2, "microbatches": 4}, "microbatches 4 does not divide the 2 sequences"),
    ({"data": 4, "tensor": 2, "pipeline": 2}, "is 16; allowed are at most the 8 devices"),
    ({"data": -1}, "data is -1; allowed are positive integers"),
    ({"tensor": 0}, "tensor is 0; allowed are positive integers"),
    ({"microbatches": 1.5}, "microbatches is 1.5; allowed are positive integers"),
    ({"sharding": "ddp"}, "sharding 'ddp': allowed are none, zero1, fsdp"),
    ({"checkpointing": "all"}, "checkpointing 'all': allowed are none, block"),
])  # fmt: skip
def test_a_layout_that_breaks_a_rule_is_one_line(layout, words):
    for refuses in (
        lambda: evaluate(job(), Layout(**layout)),
        lambda: planner.search(job(), layout),
    ):
        with pytest.raises(ValueError) as error:
            refuses()
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("refuses, words", [
    (lambda: job(devices=0), "devices is 0; allowed are positive integers"),
    (lambda: job(batch=-4), "batch is -4; allowed are positive integers"),
    (lambda: job(context=2.0), "context is 2.0; allowed are positive integers"),
    (lambda: job(headroom=1), "headroom is 1; allowed are numbers from 0 to < 1"),
    (lambda: job(headroom=math.nan), "headroom is nan; allowed"),
    (lambda: named_device("A9"), "device 'A9': allowed are H100, H200, B200, TPU-v5p"),
    (lambda: replace(TOY, link=-1.0), "link is -1.0; allowed are numbers above 0"),
    (lambda: planner.search(job(), {"expert": 2}), "fixed 'expert': allowed are data, tensor"),
    (lambda: planner.search(job(device=replace(TOY, memory=1e3))), "of the 0.0 GB allowed on each"),
    # three micro-batches divide the batch, but no data rank of two
    (lambda: planner.search(job(batch=6), {"data": 2, "microbatches": 2}), "does not divide the 3"),
])  # fmt: skip
def test_what_is_not_allowed_is_one_line(refuses, words):
    with pytest.raises(ValueError) as error:
        refuses()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_command_prints_the_plan(capsys):
    arguments = ["plan", "--devices", "8", "--batch", "16", "--context", "2048"]
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = Job(SIZES["8B"], DEVICES["H200"], 8, 16, 2048)
    plan = planner.search(one)
    assert found["layout"] == {**asdict(plan.layout), "devices": plan.layout.devices}
    assert found["step_s"] == plan.step_s and found["bound"] == plan.bound
    total = found["memory_bytes"].pop("total")
    assert total == pytest.approx(plan.memory_bytes)
    assert sum(v for k, v in found["memory_bytes"].items() if k != "allowed") == total
    assert found["assumptions"] == list(layouts.ASSUMPTIONS)
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    for words in (*plan.memory, *plan.busy, *layouts.ASSUMPTIONS, f"{plan.step_s:.4g} s"):
        assert words in text


def test_the_command_holds_what_is_given(capsys):
    held = ["--tensor", "2", "--pipeline", "1", "--context-parallel", "2", "--data", "1",
            "--microbatches", "1", "--sharding", "fsdp", "--checkpointing", "block"]  # fmt: skip
    sizes = ["--size", "small", "--layers", "6", "--d-ff", "64", "--heads", "6", "--vocab", "100",
             "--d-model", "24", "--device", "B200", "--devices", "9"]  # fmt: skip
    assert command.main(["plan", *sizes, *held, "--json", "--no-overlap"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == {
        "data": 1, "tensor": 2, "pipeline": 1, "context": 2, "microbatches": 1,
        "sharding": "fsdp", "checkpointing": "block", "devices": 4}  # fmt: skip
    assert {k: v for k, v in found["model"].items() if k != "parameters"} == asdict(
        Shape(24, 64, 6, 6, 100)
    )
    assert found["device"]["slug"] == "nvidia-b200" and found["devices"] == 9


@pytest.mark.parametrize("given, words", [
    (["--device", "A9"], "device 'A9': allowed are H100, H200, B200, TPU-v5p"),
    (["--tensor", "3"], "tensor 3 does not divide num_heads 32; it must"),
    (["--devices", "-2"], "devices is -2; allowed are positive integers"),
    (["--devices", "1"], "of the 126.9 GB allowed on each"),
    (["--size", "9B"], "size '9B': allowed are small"),
])  # fmt: skip
def test_a_wrong_option_ends_the_command_with_one_line(given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["plan", *given])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m a2lib.theory plan: ") and words in line


def test_the_help_names_axes_rules_and_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["plan", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in (*AXES, *SHARDINGS, *DEVICES, *SIZES, "examples:"))


def test_the_planner_needs_no_torch_and_no_numpy():
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'pandas'): sys.modules[name] = None\n"
        "sys.argv = ['a2lib.theory', 'plan', '--json']\n"
        "runpy.run_module('a2lib.theory', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"]["devices"] == 2


@pytest.mark.parametrize("checkpointing", STRATEGIES)
@pytest.mark.parametrize("context", [128, 512, 2048])
def test_one_device_is_what_its_tensors_are_counted_to(checkpointing, context):
    """Against ``strategy_memory``, which goes through a block tensor by tensor; the plan has all
    of a block at once."""
    for shape in (SIZES["small"], SIZES["2.7B"]):
        layout = Layout(sharding="none", checkpointing=checkpointing)
        plan = evaluate(job(shape=shape, context=context), layout)
        ways = {"attention": "flash", "precision": "bf16"}
        counted = strategy_memory(shape, 4, context, checkpointing, **ways).peak
        state = state_bytes(shape)
        total = state.parameters + state.optimizer + counted
        assert plan.memory_bytes == pytest.approx(total, rel=0.08), (shape, total)


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
    assert added(Layout(tensor=2, sharding="none")) == [2 * 4 + 2, 0]
    assert added(Layout(tensor=2, sharding="none", checkpointing="block")) == [2 * 5 + 2, 0]
    # Either stage sends one hop and gets another's, and has a block and one table.
    assert added(Layout(pipeline=2, sharding="none")) == [1, 0]
    # A ring of two: keys and values once forward, and twice backward; weights as data has them.
    assert added(Layout(context=2)) == [3 * 2 + 3 * 4, 0]
    # Four devices, two in a node: either part of the gather is a message of its own.
    assert added(Layout(data=4), node=2) == [3 * 4, 3 * 4]
    assert added(Layout(data=2), node=1) == [0, 3 * 4]
    assert added(Layout()) == [0, 0]


def test_the_command_takes_measured_links(capsys):
    given = ["plan", "--devices", "2", "--batch", "2", "--context", "1024", "--size", "small",
             "--tensor", "2", "--json"]  # fmt: skip
    found, own = {}, ["--bandwidth", "2.25e11", "--latency-us", "20"]
    for name, more in {"makers": [], "own": own}.items():
        assert command.main([*given, *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["makers"]["device"]["latency"] == 0
    assert (found["own"]["device"]["link"], found["own"]["device"]["latency"]) == (2.25e11, 20e-6)
    sums = 4 * SIZES["small"].num_layers + 2
    before, after = (found[name]["busy_s"]["node links"] for name in ("makers", "own"))
    assert after == pytest.approx(2 * before + 20e-6 * sums)
    assert command.main([*given[:-1], "--latency-us", "20"]) == 0
    assert "links of 450 GB/s, 20 us a message" in capsys.readouterr().out
    for wrong, words in ((["--bandwidth", "0"], "bandwidth is 0.0; allowed are numbers above 0"),
                         (["--latency-us", "-1"], "latency-us is -1; allowed are numbers from 0"),
                         (["--latency-us", "nan"], "allowed are numbers from 0")):  # fmt: skip
        with pytest.raises(SystemExit):
            command.main([*given, *wrong])
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
