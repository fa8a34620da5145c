"""Pipelines: how long a stage is idle, and how many micro-batches it holds.

Narayanan et al., 2019 (1F1B) and 2021 (interleaved stages), Qi et al., 2024 (zero bubble, ZB-H1).
"""

from a2lib.checks import check_name
from a2lib.theory.collectives import positive

PIPELINES = ("1f1b", "interleaved", "zb-h1")


def bubble_share(kind: str, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the share of a step in which a stage is idle: (p - 1) / (v m + p - 1).

    ``chunks`` is v, the virtual stages on each device. Under ZB-H1 a stage is idle for a third of
    1F1B's time, if forward, gradients of inputs and gradients of weights take equally long. Raises
    ValueError for another kind.
    """
    check_name("pipeline", kind, PIPELINES)
    positive(stages=stages, microbatches=microbatches, chunks=chunks)
    waits = (stages - 1) / (3 if kind == "zb-h1" else chunks)
    return waits / (microbatches + waits)


def peak_microbatches(
    kind: str, stages: int, microbatches: int, chunks: int = 1, stage: int = 0
) -> float:
    """Return how many micro-batches' activations ``stage`` (from 0) holds at its peak.

    1f1b: p - stage
    interleaved: p + (p - 1 - 2 stage) / v
    zb-h1: p on each stage, until weights have their gradients

    It is never more than m. Raises ValueError as ``bubble_share``.
    """
    check_name("pipeline", kind, PIPELINES)
    held = {
        "1f1b": stages - stage,
        "interleaved": stages + (stages - 1 - 2 * stage) / chunks,
        "zb-h1": stages,
    }
    return min(held[kind], microbatches)
