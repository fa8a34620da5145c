"""What each rank does for the section on parallelism: one task is one stack, many batches.

A pass is timed in turns with the same pass without its messages and with these messages alone, in
the same processes, each call from rest.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from a2lib.experiments.harness import RankJob, Row
from a2lib.experiments.parallelism import PARTS, schemes
from a2lib.experiments.parallelism.schemes import DATA, TENSOR, TORCH_DTYPES, Stack
from a2lib.lab import PARALLELISM, Timing, timing
from a2lib.lab.timing import from_rest, sample_count, slowest

WARMUP = 2
BUDGET_MS = {"cuda": 800.0, "cpu": 300.0}
CALLS = (5, 30)
# Of a tensor's norm: above what other orders of sums make in so few layers, far below a part that
# is lacking. Each layer adds to a difference and makes the ones before it larger.
CHECKED_LAYERS = 3
TOLERANCE = {"bf16": 0.05, "fp32": 1e-3}
CHECKED_TOKENS = 32  # of a rank


def measure(job: RankJob) -> None:
    """Measure each batch that is wanted."""
    if job.expired():
        return
    job.begin(next(iter(job.wanted)))
    few = {**job.spec, "layers": min(job.spec["layers"], CHECKED_LAYERS)}
    wrong = errors(make(few, job.device, job.seed), few, job.device, job.seed)
    every = [item for one in job.everyone(wrong) for item in one.items()]
    name, error = max(every, key=lambda item: item[1])
    stack = make(job.spec, job.device, job.seed)
    bad = f"{name} is off the one process's by {error:.2g}"
    for keys in job.each():
        if not error <= TOLERANCE[job.spec["dtype"]]:
            job.refuse("error", bad, keys)
            continue
        batch = Batch(stack, job, keys[0]["tokens"])
        for key in keys:
            job.put({**key, "status": "ok", **batch.timed(key["pass"])})


@functools.cache
def device_mesh(device: str, *shape: int) -> DeviceMesh:
    """The mesh of all ranks, those along tensor next to each other; kept, since groups stay."""
    return init_device_mesh(device, shape, mesh_dim_names=(DATA, TENSOR))


def make(spec: Mapping[str, object], device: str, seed: int):
    """The stack of ``spec`` (parallelism.Setting), ours or PyTorch's; collective."""
    kind = Stack
    if spec["implementation"] == "torch":
        from a2lib.experiments.parallelism.peers import TorchStack as kind
    return kind(device_mesh(device, *spec["mesh"]), spec, device, seed)


def errors(stack, spec: Mapping[str, object], device: str, seed: int) -> dict[str, float]:
    """How far y, dx and each gradient are from those of one process, over the norm of these, by
    name; collective."""
    dtype = TORCH_DTYPES[spec["dtype"]]
    layers = [schemes.layer_weights(i, spec, device, seed) for i in range(spec["layers"])]
    generator = torch.Generator(device).manual_seed(seed + len(layers))
    shape = (CHECKED_TOKENS * PARTS * spec["mesh"][0], spec["d_model"])
    x, dy = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    for tensor in (x, *(w for layer in layers for w in layer.values())):
        tensor.requires_grad_()
    y = schemes.plain(x, layers)
    y.backward(dy)
    whole = {"y": y.detach(), "dx": x.grad}
    own_y, own_dx = passes(stack, stack.rows(x.detach()), stack.rows(dy))["end_to_end"]()
    pairs = {name: (mine, stack.rows(whole[name])) for name, mine in (("y", own_y), ("dx", own_dx))}
    for name, mine in stack.gradients().items():
        i, matrix = name.split(".")
        pairs[f"gradient of {name}"] = mine, stack.own(matrix, layers[int(i)][matrix].grad)
    return {name: _off(mine, theirs) for name, (mine, theirs) in pairs.items()}


def passes(stack, x: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """What ``stack`` does in each pass; ``backward`` after a forward."""
    if not isinstance(stack, Stack):
        return {"end_to_end": lambda: stack.end_to_end(x, dy)}
    return {
        "forward": lambda: stack.forward(x),
        "backward": lambda: stack.backward(dy),
        "end_to_end": lambda: (stack.forward(x), stack.backward(dy)),
    }


class Batch:
    """A stack's passes over a batch of ``tokens``, this rank's part of it random."""

    def __init__(self, stack, job: RankJob, tokens: int) -> None:
        self._stack, self._job = stack, job
        d_model, dtype = job.spec["d_model"], TORCH_DTYPES[job.spec["dtype"]]
        mesh = device_mesh(job.device, *job.spec["mesh"])
        generator = torch.Generator(job.device).manual_seed(job.seed + mesh.get_local_rank(DATA))
        shape = tokens // job.spec["mesh"][0], d_model
        given = {"generator": generator, "device": job.device, "dtype": dtype}
        x, dy = (torch.randn(shape, **given) for _ in range(2))
        self._passes = passes(stack, x, dy)
        if "forward" in self._passes:
            self._passes["forward"]()  # a backward needs it

    def timed(self, pass_: str) -> Row:
        """The values of a row."""
        run = self._passes[pass_]
        if not isinstance(self._stack, Stack):
            return self._in_turns({"ms": run})["ms"].row(PARALLELISM)
        wire = self._stack.wire

        def computes() -> None:
            wire.silent = True
            try:
                run()
            finally:
                wire.silent = False

        axes = wire.messages(run)
        sent = {"ms_communication": lambda: _sent(axes.values())} if axes else {}
        if len(axes) > 1:
            sent |= {f"ms_{axis}": lambda send=send: _sent([send]) for axis, send in axes.items()}
        found = self._in_turns({"ms": run, "ms_without": computes, **sent})
        row = found["ms"].row(PARALLELISM)
        base = found["ms_without"]
        row |= {"ms_without": base.ms, "ms_without_p20": base.ms_p20, "ms_without_p80": base.ms_p80}
        return row | {name: found[name].ms for name in sent}

    def _in_turns(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
        """The slowest rank's times of each way, some calls of each in turn."""
        device, everyone = self._job.device, self._job.everyone
        warm = ([from_rest(run, device) for _ in range(WARMUP)][-1] for run in ways.values())
        estimate = sum(max(everyone(ms)) for ms in warm)
        n = sample_count(BUDGET_MS[device], estimate, *CALLS)
        own: dict[str, list[float]] = {name: [] for name in ways}
        for name, count in timing.in_turns(dict.fromkeys(ways, n)):
            own[name] += [from_rest(ways[name], device) for _ in range(count)]
        by_rank = everyone(own)
        return {name: slowest([times[name] for times in by_rank]) for name in ways}


def _sent(axes: Iterable[Callable[[], list]]) -> None:
    """Start the messages of each axis, then wait for all."""
    for wait in [wait for send in axes for wait in send()]:
        wait()


def _off(mine: Tensor, theirs: Tensor) -> float:
    off = ((mine.double() - theirs.double()).norm() / theirs.double().norm()).item()
    return off if math.isfinite(off) else math.inf
