"""How far each implementation is from exact attention: o, dq, dk and dv against float64.

The truth is the definition in float64 on the very inputs that the implementation had, so that only
its own rounding is left. At ``score_scale`` 10 q is ten times as large: a few keys then take most
of the weight, and an error in a score counts as much more.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping

from a2lib.experiments.flash import peers
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness.sweep import Task
from a2lib.measure import failures

DTYPES = ("bf16", "fp32")
HEAD_DIMS = (64, 128)
SCORE_SCALES = (1, 10)
TENSORS = ("o", "dq", "dk", "dv")
HEADS = {"cuda": 4, "cpu": 2}
SEQ_LEN = {"cuda": 2048, "cpu": 128}

Row = dict[str, object]


def tasks(parameters: Parameters, device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"); [] for a sweep without this table."""
    if parameters.sweep not in ("leaderboard", "all"):
        return []
    made = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            shape = Shape(dtype, 1, HEADS[device], SEQ_LEN[device], head_dim, True)
            for score_scale in SCORE_SCALES:
                for name in parameters.chosen_implementations(shape, device):
                    spec = {
                        "shape": dataclasses.asdict(shape),
                        "score_scale": score_scale,
                        "implementation": name,
                    }
                    label = f"{name} {shape}, scores times {score_scale}"
                    keys = tuple(key(shape, name, score_scale, t) for t in TENSORS)
                    made.append(Task(label, spec, {label: keys}))
    return made


def key(shape: Shape, implementation: str, score_scale: int, tensor: str) -> Row:
    """The key columns of one row."""
    return {
        "implementation": implementation,
        **dataclasses.asdict(shape),
        "score_scale": score_scale,
        "tensor": tensor,
    }


def measure(spec: Mapping[str, object], device: str, seed: int) -> Iterator[Row]:
    """The rows of one of ``tasks``, o first; what fails is a row too.

    Raises failures.LostContext, after the rows, where the device has to be reset.
    """
    shape, name = Shape(**spec["shape"]), spec["implementation"]
    rows: dict[str, Row] = {}
    failure: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reason = peers.unsupported(name, device)
            if reason:
                raise NotImplementedError(reason)
            for tensor, result, truth in _results(name, shape, device, seed, spec["score_scale"]):
                rows[tensor] = errors(result, truth)
        except Exception as error:
            failure = error
    if failure is not None:
        status, note = failures.classify(failure, [str(w.message) for w in caught])
        rows |= {t: {"status": status, "note": note} for t in TENSORS if t not in rows}
    for tensor in TENSORS:
        yield key(shape, name, spec["score_scale"], tensor) | rows[tensor]
    if failure is not None and failures.is_lost(failure):
        raise failures.LostContext(note)


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


def _results(name: str, shape: Shape, device: str, seed: int, score_scale: int) -> Iterator:
    """(tensor, its value, its truth), each as soon as it is there."""
    import torch

    from a2lib.attention import attention_reference

    *qkv, do = peers.inputs(shape, device, seed)
    with torch.no_grad():
        qkv[0].mul_(score_scale)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    true_o = attention_reference(*exact, shape.causal)
    o = peers.build(name, shape, device)(*qkv)
    yield "o", o.detach(), true_o.detach()
    true_gradients = torch.autograd.grad(true_o, exact, do.double())
    yield from zip(TENSORS[1:], torch.autograd.grad(o, qkv, do), true_gradients, strict=True)
