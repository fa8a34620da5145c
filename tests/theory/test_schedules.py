"""What closed forms say of overlap and bubbles, on a clock."""

import pytest
import schedules
from refusals import refused

from a2lib.theory import parallelism
from a2lib.theory.other_axes import bubble_share, peak_microbatches
from a2lib.theory.parallelism import EXAMPLE

LAYERS = 200


@pytest.mark.parametrize(
    "way, pass_",
    [
        (parallelism.fully_sharded, "forward"),
        (parallelism.fully_sharded, "backward"),
        (parallelism.data_parallel, "backward"),
        (parallelism.tensor_parallel, "forward"),
    ],
)
def test_a_pass_is_bound_by_communication_from_the_formulas_limit_on(way, pass_):
    is_tensor = way is parallelism.tensor_parallel
    limit = parallelism.tensor_limit(EXAMPLE) if is_tensor else parallelism.data_limit(EXAMPLE)

    def slowdown(factor):
        cost = way(EXAMPLE, factor * limit)[pass_]
        if is_tensor:
            tasks = schedules.tensor(LAYERS, cost.compute_s, cost.tensor_s, parts=2)
        elif way is parallelism.data_parallel:
            tasks = schedules.data_parallel_backward(LAYERS, cost.compute_s, cost.data_s)
        elif pass_ == "forward":
            tasks = schedules.fsdp(LAYERS, cost.compute_s, cost.data_s)
        else:  # a gather, and a scatter of the gradients
            tasks = schedules.fsdp(LAYERS, cost.compute_s, cost.data_s / 2, cost.data_s / 2)
        return schedules.run(tasks).seconds / LAYERS / cost.compute_s

    assert slowdown(0.97) == pytest.approx(1, abs=0.02)
    assert slowdown(1.03) > 1.025


def test_bubbles_and_what_a_stage_holds_by_hand():
    assert bubble_share("1f1b", 4, 8) == 3 / 11
    assert bubble_share("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_share("zb-h1", 4, 8) == 1 / 9
    held = [peak_microbatches("1f1b", 4, 8, 1, stage) for stage in range(4)]
    assert held == [4, 3, 2, 1]
    assert peak_microbatches("interleaved", 4, 8, 2) == 4 + 3 / 2
    assert peak_microbatches("1f1b", 4, 3) == 3
    refused("allowed are 1f1b, interleaved", bubble_share, "zigzag", 2, 2)
