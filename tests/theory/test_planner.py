"""The search of the planner: against every layout, and within its limits."""

import itertools
import math
from dataclasses import asdict, replace

import pytest
from plan_toys import FAST, FREE, MIXED, TOY, WIDE, job
from refusals import refused

from a2lib.theory import layouts, planner
from a2lib.theory.devices import DEVICES
from a2lib.theory.layouts import SHARDINGS, STRATEGIES, Job, Layout, evaluate
from a2lib.theory.transformer import SIZES, Shape


def every_plan(one):
    """Those that fit of all layouts that the rules allow, by trying all numbers."""
    found = []
    for sizes in itertools.product(range(1, one.devices + 1), repeat=4):
        if math.prod(sizes) > one.devices:
            continue
        pieces = range(1, one.shape.num_layers + 1) if sizes[2] > 1 else [1]
        experts = range(1, one.shape.experts + 1) if one.shape.experts else [1]
        for m, sharding, strategy, chunks, expert in itertools.product(
            range(1, one.batch + 1), SHARDINGS, STRATEGIES, pieces, experts
        ):
            try:
                layout = Layout(*sizes, m, sharding, strategy, chunks, expert=expert)
                plan = evaluate(one, layout)
            except ValueError:
                continue
            if plan.memory_bytes <= one.memory:
                found.append(plan)
    return found


@pytest.mark.parametrize(
    "one, ways",
    [  # of devices, batch, context length, shape and device
        (job(), [("data", False), (0.5, True)]),
        (job(6, 6, 12, device=FAST), [("data", True), ("all", True)]),
        (job(12, 4, 8, WIDE, FAST), [("none", True), (0.5, False)]),
        (job(12, 4, 8, WIDE, replace(FAST, torus=True, node=12)), [("data", True), ("all", False)]),
        (job(8, 4, 8, WIDE, replace(FAST, memory=40_000.0)), [("data", True), ("none", False)]),
        (replace(job(8, 2, 8, WIDE, FAST), attention="eager"), [("data", False), (0.5, True)]),
        (job(4, 4, 8, device=replace(FAST, latency=1.0)), [("data", False), ("all", True)]),
        (job(12, 4, 8, replace(MIXED, experts=8, top_k=2), FAST), [("data", False), ("all", True)]),
    ],
)
def test_no_layout_is_better_than_the_one_found(one, ways):
    every = every_plan(one)
    for hidden, across in ways:
        plan = planner.search(one, hidden=hidden, across=across)
        assert plan == evaluate(one, plan.layout)
        within = [other for other in every if across or other.layout.tensor <= one.device.node]
        least = min(planner._rank(other, hidden) for other in within)
        assert least == planner._rank(plan, hidden), (hidden, across)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fixed", [{}, {"microbatches": 2}, {"checkpointing": "none"}])
def test_what_takes_least_of_a_mesh_is_among_those_looked_at_first(precision, fixed):
    """The search passes over a mesh of which these do not fit."""
    device = replace(TOY, fp32=1e3, workspace=64.0)
    hidden, vocabulary = replace(WIDE, d_ff=4096), replace(WIDE, vocab_size=65_536)
    sizes = (12, 4, WIDE), (8, 64, WIDE), (4, 4, hidden), (4, 4, vocabulary), (12, 8, MIXED)
    for batch, context, shape in sizes:
        one = Job(shape, device, 24, batch, context, precision=precision)

        def held(layout, one=one):
            return sum(layouts.memory(one, layout)[1].values())

        for mesh in planner._meshes(one, fixed)[0]:
            every = [held(layout) for layout in planner._layouts(one, fixed, mesh)[0]]
            some = [held(layout) for layout in planner._least_memory(one, fixed, mesh)]
            assert min(every, default=None) == min(some, default=None), mesh


def test_of_more_layouts_than_can_be_tried_the_best_found_says_so(monkeypatch):
    one = Job(Shape(10080, 27720, 60, 120, 55440), DEVICES["H100"], 5040, 5040, 5040)
    monkeypatch.setattr(planner, "MOST_COUNTED", 100_000)
    whole = planner.search(one)
    monkeypatch.setattr(planner, "MOST_COUNTED", 300)
    some = planner.search(one)
    assert whole.tried and not some.tried
    assert replace(some, tried=True) == evaluate(one, some.layout)
    assert whole.expected_s <= some.expected_s < 1.2 * whole.expected_s
    monkeypatch.setattr(planner, "MOST_MESHES", 10)
    fewer = planner.search(one)
    assert not fewer.tried and some.expected_s <= fewer.expected_s
    assert planner.search(one, asdict(whole.layout)).tried
    worst = Shape(1_048_320, 14_414_400, 98_280, 65_520, 14_414_400)
    one = Job(worst, DEVICES["H100"], 2**20, 14_414_400, 183_783_600)
    refused("tried fits, and more .*; hold one or more of data", planner.search, one)
    refused("is above 1,099,511,627,776", planner.search, replace(one, batch=10**22))


def test_values_are_left_out_of_the_longest_list_and_never_an_end():
    assert planner._thinned(6, [1, 2, 3], [4, 5]) == ([[1, 2, 3], [4, 5]], True)
    assert planner._thinned(6, list(range(10)), [4, 5]) == ([[0, 8, 9], [4, 5]], False)
    (found,), tried = planner._thinned(3, list(range(100)))
    assert (found[0], found[-1], len(found), tried) == (0, 99, 3, False)
    assert planner._thinned(1, [1, 2], [3, 4]) == ([[1, 2], [3, 4]], True)


def test_tensor_parallelism_stays_within_a_node_unless_it_is_asked_for():
    # links so quick that more devices along tensor are always quicker
    one = job(devices=4, batch=1, context=1, shape=WIDE, device=replace(FREE, node=2))
    assert planner.search(one).layout.tensor == 2
    assert planner.search(one, across=True).layout.tensor == 4
    assert planner.search(one, {"tensor": 4}).layout.tensor == 4


def test_a_hundred_thousand_devices_are_used_as_far_as_the_rules_allow():
    one = Job(SIZES["10B"], DEVICES["H100"], 100_000, 512, 4096)
    plan = planner.search(one)
    assert 1000 < plan.layout.devices <= 100_000
    assert plan.memory_bytes <= one.memory == 0.9 * 80e9


def test_a_search_has_experts_and_a_zero_bubble_pipeline_if_it_is_held():
    one = job(devices=8, batch=16, shape=replace(MIXED, num_layers=8), device=FAST)
    plan = planner.search(one, {"schedule": "zb-h1", "pipeline": 4, "expert": 2})
    assert (plan.layout.schedule, plan.layout.expert, plan.layout.chunks) == ("zb-h1", 2, 1)
    assert plan.layout.microbatches >= 4
    plain = planner.search(one, {**asdict(plan.layout), "schedule": "1f1b"})
    assert plan.step_s < plain.step_s
