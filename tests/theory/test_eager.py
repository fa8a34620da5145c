"""The memory of eager attention: closed forms against the code that runs, to the byte."""

import math

import committed
import pytest
from refusals import refused

from a2lib.theory.eager import PASSES, Eager, longest, tiled_total
from a2lib.theory.memory.allocator import BUFFER, MIB, Allocator, OutOfMemory, fits


def test_every_peak_of_eager_that_was_measured_is_the_count():
    """The sweep of FlashAttention-2's chapter."""
    rows = committed.measured("flash") + committed.measured("flash", "nvidia-h100-80gb-hbm3")
    rows = [r for r in rows if r["implementation"] == "eager" and r["peak_bytes"]]
    assert len(rows) > 100
    for row in (row for row in rows if row["pass"] in PASSES):
        batch = int(row["batch"]) * int(row["heads"])
        sizes = int(row["seq_len"]), int(row["head_dim"]), row["causal"] == "true"
        shape = Eager(batch, *sizes, {"fp32": 4, "bf16": 2}[row["dtype"]])
        assert int(row["peak_bytes"]) == shape.peak(row["pass"]), row


def test_the_length_at_which_a_gpu_failed_is_the_predicted():
    """In blocks exactly. A range that grows by pages may lose one at its end, and two where a
    gradient lies in front of what is given back."""
    rows = [row for row in committed.measured("attention_limit") if row["status"] == "ok"]
    assert rows
    for row in rows:
        batch, d, causal = int(row["batch"]), int(row["head_dim"]), row["causal"] == "true"
        room, found, step = (int(row[c]) for c in ("room_bytes", "fits_len", "fails_len"))
        step -= found
        if row["allocator"] == "blocks":
            want = longest(batch, d, causal, room, row["pass"], step=step, how="blocks")
            assert found == want, row
        else:
            least, most = (
                longest(batch, d, causal, room - lost, row["pass"], step=step)
                for lost in (3 * BUFFER, 0)
            )
            assert least <= found <= most, row


def test_the_longest_sequence_is_the_last_that_fits():
    for pass_ in PASSES:
        n = longest(8, 64, True, 10**9, pass_)
        fits = [Eager(8, m, 64, True).total(pass_) for m in (n, n + 1)]
        assert fits[0] <= 10**9 < fits[1]
        assert longest(8, 64, True, 10**9, pass_, step=256) == n // 256 * 256
    tiled = longest(8, 64, True, 10**9, "backward", how="tiled")
    totals = [tiled_total(8, n, 64, "backward") for n in (tiled, tiled + 1)]
    assert totals[0] <= 10**9 < totals[1]
    # Four matrices of 32 bytes a pair of tokens, and little else.
    assert longest(8, 16, False, 128 * 10**9, "backward") == pytest.approx(math.sqrt(1e9), rel=0.01)
    assert longest(8, 64, False, 10**3, "forward") == 0


def test_the_allocator_by_hand():
    device = Allocator(100 * MIB)
    device.allocate("a", 40 * MIB)
    device.allocate("small", MIB)  # from a pool that is left out
    device.allocate("b", 5 * MIB)  # 20 MiB, of which 15 stay free
    assert device.reserved == 60 * MIB
    device.free("a")
    device.allocate("c", 12 * MIB)  # the smallest block that holds it
    device.allocate("d", 30 * MIB)
    assert device.reserved == 60 * MIB
    with pytest.raises(OutOfMemory):
        device.allocate("e", 41 * MIB)
    for name in ("b", "c", "d"):
        device.free(name)
    device.allocate("e", 90 * MIB)  # after both segments went back
    assert device.reserved == 90 * MIB
    history = [{"a": 20 * MIB}, {"a": 20 * MIB, "b": 20 * MIB}, {"b": 20 * MIB, "c": 10 * MIB},
               {"b": 20 * MIB, "c": 10 * MIB, "a": 20 * MIB}]  # fmt: skip
    # c takes half of what a has left, and then a needs a segment of its own.
    assert not fits(59 * MIB, history) and fits(60 * MIB, history)
    assert fits(40 * MIB, history[:-1])


def test_impossible_sizes_are_refused():
    refused("batch is 0", Eager, 0, 1, 1, False)
    refused("allowed are forward, backward", Eager(1, 1, 1, False).moments, "sideways")
    wrong = (8, 64, True, 10**9, "forward")
    refused("allowed are tensors, blocks, tiled", longest, *wrong, how="guess")
