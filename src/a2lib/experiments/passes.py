"""A pass of attention as a call, and the GPU's own time of it, replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from a2lib.measure import failures, graphs

Row = dict[str, object]


def one_pass(
    forward: Callable, qkv: Sequence, do: object, pass_: str, *, anew: bool = False
) -> Callable[[], object]:
    """ "forward", "backward" or both ("end_to_end") of ``forward(q, k, v)`` as a call without
    arguments; the graph of a backward alone is made here, and kept.

    With ``anew`` its leaves are its own: autograd hands a leaf its gradient on the stream that
    first used it, and work on another than the captured stream ends a capture.
    """
    import torch

    if anew:
        qkv = [x.detach().requires_grad_() for x in qkv]
    if pass_ == "forward":
        return lambda: forward(*qkv)
    if pass_ == "end_to_end":
        return lambda: torch.autograd.grad(forward(*qkv), qkv, do)
    o = forward(*qkv)
    return lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)


def replayed(
    makers: Mapping[str, Callable], expected_ms: Mapping[str, float], **options: object
) -> tuple[dict[str, Row], bool]:
    """``ms_graph`` of each call of ``makers``, or the ``note`` why there is none, and whether the
    device is usable: if not, those not come to are missing. ``graphs.time_replays`` says how."""
    try:
        done = graphs.time_replays(makers, expected_ms, **options)
    except Exception as error:  # of the clock itself
        done = graphs.Replays(dict.fromkeys(makers, error))
    return {name: _values(result) for name, result in done.results.items()}, done.usable


def _values(result: object) -> Row:
    if isinstance(result, Exception):
        return {"note": failures.note(f"no graph: {failures.classify(result)[1]}")}
    return {"ms_graph": result.ms}
