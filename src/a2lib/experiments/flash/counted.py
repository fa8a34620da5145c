"""The program whose kernels are counted: single calls, each behind a marker kernel.

    python -m a2lib.experiments.flash.counted '{"shape": {"dtype": "bf16", ...}, "seed": 0,
        "calls": [["a2lib", "forward"], ["a2lib", "backward"]]}'

All calls run in one process, since starting one takes longer than counting. A call that fails
launches nothing more behind its marker, and the rest go on.
"""

from __future__ import annotations

import gc
import json
import sys

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Shape
from a2lib.measure import synchronize

# Warm calls are not counted: they compile, and let a library choose its algorithm.
WARM_CALLS = 2
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep, which no attention launches


def main(text: str) -> None:
    """Run the calls of ``text`` under the profiler, one after another; needs a CUDA GPU."""
    import torch

    asked = json.loads(text)
    shape = Shape(**asked["shape"])
    peers.configure()
    for implementation, pass_ in asked["calls"]:
        try:
            call = _warm(implementation, pass_, shape, asked["seed"])
        except Exception as error:
            print(f"{implementation} {pass_} not counted: {error}", file=sys.stderr)
            call = None
        synchronize("cuda")
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        if call is not None:
            call()
        synchronize("cuda")
        torch.cuda.profiler.stop()
        call = None
        gc.collect()
        torch.cuda.empty_cache()


def _warm(implementation: str, pass_: str, shape: Shape, seed: int):
    """One forward, or one backward of a graph that is there, as a call without arguments."""
    import torch

    q, k, v, do = peers.inputs(shape, "cuda", seed)
    forward = peers.build(implementation, shape)
    for _ in range(WARM_CALLS):
        torch.autograd.grad(forward(q, k, v), (q, k, v), do)
    if pass_ == "forward":
        return lambda: forward(q, k, v)
    o = forward(q, k, v)
    return lambda: torch.autograd.grad(o, (q, k, v), do)


if __name__ == "__main__":
    main(sys.argv[1])
