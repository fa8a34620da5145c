"""What the pages on parallelism say of plans, by value."""

import itertools
from dataclasses import replace

import pytest

from a2lib.report.pages import calculator
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import SHARDINGS, Layout, evaluate
from a2lib.theory.planner import largest_batch, search
from a2lib.theory.transformer import PRESETS, SIZES, parameter_count


def test_the_choices_are_what_the_page_says_of_them():
    plans = {name: evaluate(*one) for name, one in calculator.CHOICES.items()}
    allowed = calculator.EXAMPLE.memory
    fits = [plan.memory_bytes <= allowed for plan in plans.values()]
    assert fits == [False, True, True, True, False, False]
    assert {plan.bound for plan in plans.values()} == {"computation"}
    most = {name: largest_batch(*one) for name, one in calculator.CHOICES.items()}
    assert most["replicas"] == 0 < most["zero1"] <= most["FSDP"] < most["FSDP, recompute"]
    # 16 bytes for each of 8.13 billion parameters are more than an H200's 141 GB less a tenth
    assert 130.0e9 == pytest.approx(16 * parameter_count(SIZES["8B"]), rel=1e-3) and allowed < 128e9
    job, layout = calculator.CHOICES["FSDP, eager"]
    longer = replace(job, batch=job.batch // 2, context=2 * job.context)
    assert evaluate(longer, layout).bound == "memory bandwidth"
    # the fullest moment of a step
    job, layout = calculator.CHOICES["replicas"]
    assert evaluate(job, layout).moment == "loss"
    assert evaluate(replace(job, batch=8, context=64), layout).moment == "after the backward"
    assert evaluate(job, replace(layout, microbatches=2)).moment == "accumulating"


def test_why_two_gpus_share_a_sequence_or_a_matrix_and_64_do_not():
    two = Job(SIZES["8B"], DEVICES["H200"], 2, 2, 32_768)
    many = replace(two, devices=64, batch=128, context=4096)
    assert search(two).layout.context == 2
    assert search(two, {"context": 1}).layout.tensor == 2
    assert (search(many).layout.data, search(many).layout.sharding) == (64, "zero1")
    for strategy, sharding in itertools.product(("none", "block"), SHARDINGS):
        layout = Layout(data=2, sharding=sharding, checkpointing=strategy)
        assert evaluate(two, layout).memory_bytes > two.memory


def test_the_405b_layout_fits_by_its_last_cut_alone_and_pipelines_pay():
    shape = PRESETS["Llama-3-405B"]
    job = Job(shape, DEVICES["H100"], 16_384, 2048, 8192, 0.03, activations="fused")
    layout = Layout(128, 8, 16, 1, 16, "zero2", chunks=8)
    plan = evaluate(job, layout)
    assert evaluate(job, replace(layout, sharding="zero1")).memory_bytes > 80e9 > plan.memory_bytes
    # a stage has fewer layers of more micro-batches: no fewer activations
    rank = replace(job, batch=16)
    one = evaluate(rank, Layout(1, 8, 1, 1, 16, "none")).memory["activations"]
    stages = evaluate(rank, Layout(1, 8, 16, 1, 16, "none", chunks=8)).memory["activations"]
    assert one == pytest.approx(stages, rel=0.02)
    by_pieces = [evaluate(job, replace(layout, chunks=v)).expected_s for v in (1, 2, 4, 8)]
    assert by_pieces == sorted(by_pieces, reverse=True)
    zero = evaluate(job, replace(layout, chunks=1, schedule="zb-h1")).expected_s
    assert by_pieces[0] > zero > by_pieces[2]
    flat = evaluate(job, Layout(2048, 8, sharding="fsdp", checkpointing="block"))
    assert flat.memory_bytes < 10e9 and flat.bound == "network"
    assert flat.expected_s > 1.1 * plan.expected_s
    # what sequence parallelism saves, and costs in waiting; recomputing costs more
    plain = evaluate(job, replace(layout, sequence=False))
    again = evaluate(job, replace(layout, checkpointing="block"))
    assert plain.memory_bytes > 2 * 80e9
    assert plain.expected_s < plan.expected_s < 1.05 * plain.expected_s < again.expected_s
