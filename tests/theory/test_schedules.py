"""What closed forms say of overlap and bubbles, on a clock."""

from refusals import refused

from a2lib.theory.other_axes import bubble_share, peak_microbatches


def test_bubbles_and_what_a_stage_holds_by_hand():
    assert bubble_share("1f1b", 4, 8) == 3 / 11
    assert bubble_share("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_share("zb-h1", 4, 8) == 1 / 9
    held = [peak_microbatches("1f1b", 4, 8, 1, stage) for stage in range(4)]
    assert held == [4, 3, 2, 1]
    assert peak_microbatches("interleaved", 4, 8, 2) == 4 + 3 / 2
    assert peak_microbatches("1f1b", 4, 3) == 3
    refused("allowed are 1f1b, interleaved", bubble_share, "zigzag", 2, 2)
