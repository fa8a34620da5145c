"""What blocks keep, send and compute again: by hand, and against every possible choice."""

import itertools

import pytest
from refusals import refused

from a2lib.activations import PRODUCTS, BlockPlan
from a2lib.shapes import SIZES, Shape
from a2lib.theory.memory import keeping
from a2lib.theory.memory.keeping import Result, choose

EIGHT, TOKENS = SIZES["8B"], 32_768


def held(plans, always, results):
    """(bytes on the device, milliseconds of computing again)"""
    sizes = {one.name: one.bytes for one in results}
    times = {one.name: one.ms for one in results}
    bytes_ = sum(sum(always) + sum(sizes[n] for n in p.kept) - p.moved for p in plans)
    return bytes_, sum(times[n] for p in plans for n in sizes if n not in p.kept)


def least_ms(always, results, blocks, room):
    """By trying all choices: the slow twin."""
    best = None
    for again in itertools.product((False, True), repeat=blocks * len(results)):
        each = list(zip(again, list(results) * blocks, strict=True))
        bytes_ = blocks * sum(always) + sum(one.bytes for gone, one in each if not gone)
        ms = sum(one.ms for gone, one in each if gone)
        if bytes_ <= room and (best is None or ms < best):
            best = ms
    return best


@pytest.mark.parametrize("times", [(2, 2, 3), (2, 3, 1), (1, 5, 2), (4, 4, 4)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_no_choice_computes_less_again(blocks, times):
    always = (4, 4, 1)
    results = [Result(n, b, t) for n, b, t in zip("abc", (4, 4, 7), times, strict=True)]
    for room in range(blocks * 9 - 1, blocks * 24 + 1):
        best = least_ms(always, results, blocks, room)
        if best is None:
            line = f"{blocks} blocks leave .*room for {room}"
            refused(line, choose, always, results, blocks, room)
            continue
        bytes_, ms = held(choose(always, results, blocks, room), always, results)
        assert bytes_ <= room and ms == best, room


def test_the_8b_model_on_two_gpus():
    """A residual-stream tensor of a rank has 2^28 bytes, one of the FFN's width 721,420,288."""
    always = keeping.block_always(EIGHT, TOKENS)
    results = keeping.block_results(EIGHT, TOKENS, 700e12)
    assert always == (2**28,) * 3 + (2**22,)
    assert [one.bytes for one in results] == [2**28] * 3 + [721_420_288] * 2
    each = [one.ms / one.bytes for one in results]
    assert max(each) == pytest.approx(min(each)) == pytest.approx(4096 / 700e9)
    whole = 34 * (6 * 2**28 + 2**22 + 2 * 721_420_288)
    assert choose(always, results, 34, whole) == [BlockPlan(PRODUCTS, 0)] * 34
    # Without a link something is computed again, by the first blocks.
    plans = choose(always, results, 34, 80e9)
    bytes_, ms = held(plans, always, results)
    assert 79e9 < bytes_ <= 80e9 and ms == pytest.approx((whole - 80e9) * each[0], rel=0.02)
    assert plans[-1] == BlockPlan(PRODUCTS, 0) and len(set(plans)) <= 4
    # With 25 GB/s in each block's 35 ms three tensors travel, and nothing is.
    link = {"host_room": 100e9, "link": 25e9, "block_ms": 35}
    plans = choose(always, results, 34, 80e9, **link)
    assert {p.kept for p in plans} == {PRODUCTS} and held(plans, always, results)[0] <= 80e9
    assert {p.moved for p in plans[:28]} == {3 * 2**28} and not any(p.moved for p in plans[-2:])
    # And where that is not enough both are used.
    plans = choose(always, results, 34, 60e9, **link)
    bytes_, ms = held(plans, always, results)
    assert bytes_ <= 60e9 and 0 < ms < held(choose(always, results, 34, 60e9), always, results)[1]
    assert sum(p.moved for p in plans) <= 100e9


def test_the_host_has_an_end():
    always, results = (10, 10), [Result("a", 10, 1.0)]
    link = {"host_room": 40, "link": 1e9, "block_ms": 1e3}
    plans = choose(always, results, 6, 140, **link)
    assert [p.moved for p in plans] == [10] * 4 + [0, 0]
    plans = choose(always, results, 6, 139, **link)
    assert [p.kept for p in plans] == [(), *[("a",)] * 5]
    line = "6 blocks leave 80 bytes .* room for 79"
    refused(line, choose, always, results, 6, 79, **link)


def test_what_is_alive_beside():
    small = Shape(8, 16, 1, 1, 10)  # u is 64 bytes, g 128, a table 80 numbers
    loss, block = 4 * 80 + 2 * 2 * 10 * 2 + 2 * 64, 2 * 80 * 2 + 4 * 128 + 8 * 64
    beside = 2 * 80 * 2 + max(loss, block) + 12 * (4 * 64 + 3 * 128)
    assert keeping.working_bytes(small, 4, 2) == beside and loss < block
