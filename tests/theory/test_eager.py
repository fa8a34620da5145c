"""The memory of eager attention: closed forms against what was measured, to the byte."""

import committed

from a2lib.theory.eager import PASSES, Eager, longest


def test_every_peak_of_eager_that_was_measured_is_the_count():
    """The sweep of FlashAttention-2's chapter."""
    rows = committed.measured("flash") + committed.measured("flash", "nvidia-h100-80gb-hbm3")
    checked = 0
    for row in rows:
        is_eager = row["implementation"] == "eager" and row["pass"] in PASSES
        if not is_eager or not row["peak_bytes"]:
            continue
        checked += 1
        batch = int(row["batch"]) * int(row["heads"])
        sizes = int(row["seq_len"]), int(row["head_dim"]), row["causal"] == "true"
        shape = Eager(batch, *sizes, {"fp32": 4, "bf16": 2}[row["dtype"]])
        assert int(row["peak_bytes"]) == shape.peak(row["pass"]), row
    assert checked > 70


def test_the_length_at_which_a_gpu_failed_is_the_counted():
    """Within one step of the search: a range that grows by pages may lose one at its end."""
    checked = 0
    for row in committed.measured("attention_limit"):
        if row["status"] != "ok":
            continue
        checked += 1
        batch, d, causal = int(row["batch"]), int(row["head_dim"]), row["causal"] == "true"
        room, fits, fails = int(row["room_bytes"]), int(row["fits_len"]), int(row["fails_len"])
        in_blocks = row["allocator"] == "blocks"
        step = fails - fits
        length = longest(batch, d, causal, room, row["pass"], step=step, in_blocks=in_blocks)
        assert fits == length or (not in_blocks and fits == length - step), row
    assert checked
