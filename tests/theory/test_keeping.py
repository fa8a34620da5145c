"""Count by hand what blocks keep, send and compute again."""

import math

import pytest
from refusals import refused

from a2lib.activations import PRODUCTS, BlockPlan
from a2lib.shapes import SIZES, Shape
from a2lib.theory.memory import keeping
from a2lib.theory.memory.keeping import Result, choose

EIGHT, TOKENS = SIZES["8B"], 32_768


def held(plans, always, results):
    """Return the bytes on the device, and the milliseconds of computing again."""
    bytes_ = ms = 0
    for plan in plans:
        bytes_ += sum(always) - plan.moved
        for result in results:
            if result.name in plan.kept:
                bytes_ += result.bytes
            else:
                ms += result.ms
    return bytes_, ms


def columns(plans):
    """Return what each block keeps, and what each offloads."""
    kept, moved = [], []
    for plan in plans:
        kept.append(plan.kept)
        moved.append(plan.moved)
    return kept, moved


@pytest.mark.parametrize("blocks", [1, 3])
def test_one_tensor_less_recomputed_would_not_fit(blocks):
    always = (4, 4, 1)
    results = list(map(Result, "abc", (4, 4, 7), (4, 4, 7)))
    for room in range(blocks * 9, blocks * 24 + 1):
        plans = choose(always, results, blocks, room)
        bytes_, ms = held(plans, always, results)
        assert bytes_ <= room and bytes_ + ms == blocks * 24
        again = ""
        for plan in plans:
            again += "abc".translate(dict.fromkeys(map(ord, plan.kept)))
        assert again == "abcabcabc"[: len(again)]  # the first blocks
        last = {"": math.inf, "a": 4, "b": 4, "c": 7}[again[-1:]]
        assert bytes_ + last > room
    too_little = blocks * 9 - 1
    line = f"{blocks} blocks leave .*room for {too_little}"
    refused(line, choose, always, results, blocks, too_little)


def test_the_8b_model_on_two_gpus():
    """A residual-stream tensor of a rank has 2^28 bytes, one of the FFN's width 721,420,288."""
    always = keeping.block_always(EIGHT, TOKENS)
    results = keeping.block_results(EIGHT, TOKENS, 700e12)
    assert always == (2**28,) * 3 + (2**22,)
    ms_a_byte = 4096 / 700e9
    for result, bytes_ in zip(results, [2**28] * 3 + [721_420_288] * 2, strict=True):
        assert (result.bytes, result.ms) == (bytes_, pytest.approx(bytes_ * ms_a_byte))
    whole = 34 * (6 * 2**28 + 2**22 + 2 * 721_420_288)
    assert choose(always, results, 34, whole) == [BlockPlan(PRODUCTS, 0)] * 34
    # Without a link something is computed again, by the first blocks.
    plans = choose(always, results, 34, 80e9)
    bytes_, ms = held(plans, always, results)
    assert 79e9 < bytes_ <= 80e9 and ms == pytest.approx((whole - 80e9) * ms_a_byte, rel=0.02)
    assert plans[-1] == BlockPlan(PRODUCTS, 0) and len(set(plans)) <= 4
    # With 25 GB/s in each block's 35 ms three tensors travel, and nothing is.
    link = {"host_room": 100e9, "link": 25e9, "block_ms": 35}
    plans = choose(always, results, 34, 80e9, **link)
    assert held(plans, always, results)[0] <= 80e9
    assert plans[:28] == [BlockPlan(PRODUCTS, 3 * 2**28)] * 28
    assert columns(plans)[0] == [PRODUCTS] * 34
    assert plans[-2:] == [BlockPlan(PRODUCTS, 0)] * 2
    # And where that is not enough both are used.
    plans = choose(always, results, 34, 60e9, **link)
    bytes_, ms = held(plans, always, results)
    assert bytes_ <= 60e9 and 0 < ms < held(choose(always, results, 34, 60e9), always, results)[1]
    assert sum(columns(plans)[1]) <= 100e9


def test_the_host_has_an_end():
    always, results = (10, 10), [Result("a", 10, 1.0)]
    link = {"host_room": 40, "link": 1e9, "block_ms": 1e3}
    plans = choose(always, results, 6, 140, **link)
    assert columns(plans)[1] == [10] * 4 + [0, 0]
    plans = choose(always, results, 6, 139, **link)
    assert columns(plans)[0] == [(), *[("a",)] * 5]
    line = "6 blocks leave 80 bytes .* room for 79"
    refused(line, choose, always, results, 6, 79, **link)


def test_what_is_alive_beside():
    small = Shape(8, 16, 1, 1, 10)  # u is 64 bytes, g 128, a table 80 numbers
    loss, block = 4 * 80 + 2 * 2 * 10 * 2 + 2 * 64, 2 * 80 * 2 + 4 * 128 + 8 * 64
    beside = 2 * 80 * 2 + max(loss, block) + 12 * (4 * 64 + 3 * 128)
    assert keeping.working_bytes(small, 4, 2) == beside and loss < block
