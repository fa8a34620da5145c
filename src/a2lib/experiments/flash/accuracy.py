"""How far each implementation is from exact attention: o, dq, dk and dv against float64.

The truth is the definition in float64 on the very inputs that the implementation had, so that only
its own rounding is left. At ``score_scale`` 10 q is ten times as large: a few keys then take most
of the weight, and an error in a score counts as much more.
"""

import dataclasses
import warnings
from collections.abc import Iterator

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness import Job, Row, Task
from a2lib.lab import failures

DTYPES = ("bf16", "fp32")
HEAD_DIMS = (64, 128)
SCORE_SCALES = (1, 10)
TENSORS = ("o", "dq", "dk", "dv")
HEADS = {"cuda": (4, 16), "cpu": (2,)}  # 4: ours cuts both passes in chunks; 16: it does not
SEQ_LEN = {"cuda": 2048, "cpu": 128}

prepare = peers.configure


def tasks(given: Parameters, device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"); [] for a sweep without this table."""
    shapes = [
        Shape(dtype, 1, heads, SEQ_LEN[device], head_dim, True)
        for heads in HEADS[device]
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
    ]
    return [
        task(name, shape, score_scale)
        for shape in (shapes if given.has("leaderboard") else ())
        for score_scale in SCORE_SCALES
        for name in given.chosen_implementations(shape, device)
    ]


def task(name: str, shape: Shape, score_scale: int) -> Task:
    """The errors of one implementation."""
    sizes, how = dataclasses.asdict(shape), {"implementation": name, "score_scale": score_scale}
    keys = ({**sizes, **how, "tensor": tensor} for tensor in TENSORS)
    label = f"{name} {shape}, scores times {score_scale}"
    return Task.whole(label, {"shape": sizes, **how}, keys)


def measure(job: Job) -> None:
    """The rows of one task, o first; what fails is a row too.

    Raises failures.LostContext, after the rows, where the device has to be reset.
    """
    import torch

    torch._dynamo.reset()
    left = {key["tensor"]: key for key in job.keys}
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            for tensor, result, truth in _results(job):
                row = errors(result, truth)
                if tensor in left:
                    job.put({**left.pop(tensor), **row})
        except Exception as error:
            job.fail(failures.detached(error), left.values(), [str(w.message) for w in caught])


def errors(result, truth) -> Row:
    """``error`` and ``error_max`` of ``result`` against ``truth`` (float64, of one shape), or an
    `error` row where it is not finite."""
    difference = result.double() - truth
    if not difference.isfinite().all().item():
        return {"status": "error", "note": "not finite"}
    return {
        "status": "ok",
        "note": "",
        "error": (difference.norm() / truth.norm()).item(),
        "error_max": (difference.abs().max() / truth.abs().max()).item(),
    }


def _results(job: Job) -> Iterator:
    """(tensor, its value, its truth), each as soon as it is there."""
    import torch

    from a2lib.attention import attention_reference

    name, shape = job.spec["implementation"], Shape(**job.spec["shape"])
    peers.check(name, job.device)
    *qkv, do = peers.inputs(shape, job.device, job.seed)
    with torch.no_grad():
        qkv[0].mul_(job.spec["score_scale"])
    exact = [x.detach().double().requires_grad_() for x in qkv]
    true_o = attention_reference(*exact, shape.causal)
    o = peers.build(name, shape, job.device)(*qkv)
    yield "o", o.detach(), true_o.detach()
    true_gradients = torch.autograd.grad(true_o, exact, do.double())
    yield from zip(TENSORS[1:], torch.autograd.grad(o, qkv, do), true_gradients, strict=True)
