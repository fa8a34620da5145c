"""Hardware counters of the headline shapes: what passes each level of memory, what is busy.

Nsight Compute counts; where it is missing, or the driver keeps the counters to itself, each row is
`unsupported` with the reason. It runs this module as a program, which makes single calls, each
behind a marker kernel:

    python -m a2lib.experiments.flash.counting '{"shape": {"dtype": "bf16", ...}, "seed": 0,
        "calls": [["a2lib", "forward"], ["a2lib", "backward"]]}'

All calls run in one process, since starting one takes longer than counting. A call that fails
launches nothing more behind its marker, and the rest go on.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness import Job, Row, Task
from a2lib.experiments.passes import one_pass
from a2lib.lab import nsight, synchronize
from a2lib.lab.failures import note
from a2lib.lab.memory import free_memory
from a2lib.lab.program import ProgramError

SHAPES = {
    "cuda": (
        Shape("bf16", 1, 16, 16384, 64, True),
        Shape("bf16", 1, 16, 16384, 128, True),
        Shape("bf16", 1, 1, 65536, 64, True),
    ),
    "cpu": (Shape("fp32", 1, 2, 128, 64, True),),
}
IMPLEMENTATIONS = {"cuda": ("a2lib", "sdpa_cudnn", "sdpa_flash"), "cpu": ("eager",)}
PASSES = ("forward", "backward")
TIMEOUT_S = 240  # below the silence that a worker is allowed
# Warm calls are not counted: they compile, and let a library choose its algorithm.
WARM_CALLS = 2
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep, which no attention launches


def tasks(given: Parameters, device: str) -> list[Task]:
    """What to count on ``device`` ("cuda" or "cpu"); [] for a sweep without this table."""
    made = []
    for shape in SHAPES[device] if given.has("leaderboard") else ():
        asked = given.chosen_implementations(shape, device)
        names = [name for name in IMPLEMENTATIONS[device] if name in asked]
        if names:
            keys = [{**shape.key(n, pass_), "launch": 0} for n in names for pass_ in PASSES]
            made.append(Task.whole(str(shape), {"shape": dataclasses.asdict(shape)}, keys))
    return made


def measure(job: Job) -> None:
    """A row for each kernel launched, in order; a call that is not counted has one row, of launch
    0, with the reason."""
    if job.device != "cuda":
        return job.refuse("unsupported", "hardware counters need a CUDA GPU")
    calls = [(key["implementation"], key["pass"]) for key in job.keys]
    asked = json.dumps({"shape": job.spec["shape"], "calls": calls, "seed": job.seed})
    try:
        command = [sys.executable, "-m", __spec__.name, asked]
        counted = split(nsight.counted(command, timeout_s=TIMEOUT_S))
        if len(counted) != len(calls):
            raise ProgramError(f"{len(counted)} of {len(calls)} calls were counted")
    except ProgramError as error:
        return job.refuse("unsupported", str(error))
    for key, kernels in zip(job.keys, counted, strict=True):
        if not kernels:
            job.refuse("unsupported", "the call failed, or launched nothing", [key])
        for launch, kernel in enumerate(kernels):
            text = {"kernel": note(str(kernel["kernel"])), "note": ""}
            job.put({**key, "launch": launch} | kernel | text | {"status": "ok"})


def split(kernels: Sequence[Row]) -> list[list[Row]]:
    """The kernels between one marker and the next, a list for each marker."""
    groups: list[list[Row]] = []
    for kernel in kernels:
        if MARKER in str(kernel["kernel"]):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


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
        free_memory("cuda")


def _warm(implementation: str, pass_: str, shape: Shape, seed: int) -> Callable[[], object]:
    """One forward, or one backward of a graph that is there, as a call without arguments."""
    *qkv, do = peers.inputs(shape, "cuda", seed)
    forward = peers.build(implementation, shape)
    both = one_pass(forward, qkv, do, "end_to_end")
    for _ in range(WARM_CALLS):
        both()
    return one_pass(forward, qkv, do, pass_)


if __name__ == "__main__":
    main(sys.argv[1])
