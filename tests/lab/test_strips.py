"""The window of a step that is stored as a picture."""

from refusals import refused

from a2lib.lab.strips import around_begin_of_backward, around_end_of_backward
from a2lib.lab.trace import Kernel, Trace, TraceError

MS = 10**6


def test_the_window_of_a_replay_ends_backward_with_its_last_product():
    """20 ms of products, an all-reduce until 24, the optimizer from there to 60."""
    kernels = [
        Kernel("nvjet_tst", "7", 0, 20 * MS),
        Kernel("ncclDevKernel_AllReduce", "9", 18 * MS, 24 * MS),
        Kernel("multi_tensor_apply_kernel<FusedAdam>", "7", 24 * MS, 60 * MS),
    ]
    replay = Trace("torch", kernels, [], [])
    rows = around_end_of_backward(replay, captured=True)
    assert [(row["kind"], row["start_us"], row["duration_us"]) for row in rows] == [
        ("matmul", 0, 15_000),
        ("communication", 13_000, 6_000),
        ("optimizer", 19_000, 11_000),
    ]
    without = Trace("torch", kernels[1:], [], [])
    words = "no product was traced"
    refused(words, around_end_of_backward, without, captured=True, error=TraceError)
    for window in (around_end_of_backward, around_begin_of_backward):
        refused("no kernel of a backward", window, replay, error=TraceError)
