"""What the library set out to reach, as ratios of rows: met, missed, or not measured."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report.chapters.fsdp import memory
from a2lib.report.chapters.fsdp.rows import MAIN, MODELS, OURS, PEER, WORLD_SIZE, Fsdp, sizes
from a2lib.report.chapters.measured import time
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory import fsdp as theory
from a2lib.theory.transformer import SIZES

# What is held against what, and the most that the ratio may be.
ONE_GPU, STEP, PEAK = 1.15, 0.60, 1.0


def ratios(c: Fsdp, model: str = MAIN) -> list[tuple[str, str, float | None, bool, float]]:
    """(ours, against what, the ratio, whether both are of one run, the limit)."""
    captured, launched = (c.row(OURS, model, capture) for capture in (True, False))
    peer = c.row(PEER, model)
    peaks = [c.at("peak", None, who, model) for who in (OURS, PEER)]
    return [
        ("the step, captured", "the step of one GPU, captured", *_alone(captured), ONE_GPU),
        ("the step, launched", "the step of one GPU, launched", *_alone(launched), ONE_GPU),
        ("the step, launched", "FSDP2's, launched", *_over(launched, peer), STEP),
        ("the step, captured", "FSDP2's, launched", *_over(captured, peer), STEP),
        ("the peak of a rank", "FSDP2's", *_peaks(*peaks), PEAK),
    ]


def _alone(row) -> tuple[float | None, bool]:
    return (None, True) if row is None else (float(row.ms) / float(row.ms_without), True)


def _over(row, other) -> tuple[float | None, bool]:
    if row is None or other is None:
        return None, True
    return float(row.ms) / float(other.ms), row.run == other.run


def _peaks(row, other) -> tuple[float | None, bool]:
    if row is None or other is None:
        return None, True
    ratio = memory.total(row) / memory.total(other)
    return (None if math.isnan(ratio) else ratio), row.run == other.run


def table(c: Fsdp, caption: str, label: str, model: str = MAIN) -> Table:
    lines = []
    for what, against, ratio, together, limit in ratios(c, model):
        verdict = MISSING
        if ratio is not None:
            verdict = ("met" if ratio <= limit else "missed") + ("" if together else ", two runs")
        lines.append([what, against, f"{limit:.2f}", _shown(ratio, limit), verdict])
    columns = ["ours", "against", "at most", "ratio", ""]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def _shown(ratio: float | None, limit: float) -> str:
    """With more digits where it would look like its limit."""
    if ratio is None:
        return MISSING
    near = f"{ratio:.3f}" == f"{limit:.3f}" and ratio != limit
    return f"{ratio:.5f}" if near else f"{ratio:.3f}"


def _larger(c: Fsdp, model: str, *beside) -> str:
    """The launched ratios of another model, and what a block takes of the host in both."""
    ours, peer = c.row(OURS, model), c.row(PEER, model)
    if ours is None or peer is None or pd.isna(ours.ms_host) or pd.isna(peer.ms_host):
        return ""
    run = "" if beside[0].run == ours.run else ", of another run"
    each = [[row.ms_host / SIZES[row.model].num_layers for row in pair]
            for pair in (beside, (ours, peer))]  # fmt: skip
    here, there = (" and ".join(map(time, pair)) for pair in each)
    text = (
        f" Of {MODELS[model]}{run}, ours takes {ours.ms / ours.ms_without:.3f} of the step of one "
        f"GPU and {ours.ms / peer.ms:.3f} of FSDP2's, {time(ours.ms)} and {time(peer.ms)} ms, to "
        f"issue which takes the host {time(ours.ms_host)} and {time(peer.ms_host)}. That is "
        f"{there} ms of the host for a block, where it was {here}"
    )
    captured = c.row(OURS, beside[0].model, capture=True)
    if captured is None:
        return f"{text}."
    # With the other run's host.
    issued = each[1][0] * SIZES[beside[0].model].num_layers
    if issued <= captured.ms:
        return f"{text}: with that host the launched step would be the GPU's."
    return (
        f"{text}: with that host too, {SIZES[beside[0].model].num_layers} blocks would take "
        f"{time(issued)} ms to issue, more than the {time(captured.ms)} of the replay, since the "
        "GPU has less to do in each."
    )


def sentence(c: Fsdp, model: str = MAIN) -> Markdown:
    """How many are met, and what the host has to do with the launched ones."""
    found = [(ratio, limit) for *_, ratio, _, limit in ratios(c, model) if ratio is not None]
    if not found:
        return Markdown(c.not_yet("whether the targets are met"))
    met = sum(ratio <= limit for ratio, limit in found)
    text = f"{met} of the {len(found)} targets that are measured are met."
    ours, peer = c.row(OURS, model), c.row(PEER, model)
    if ours is not None and peer is not None and not pd.isna(ours.ms_host):
        text += (
            f" Launched, the host takes {time(ours.ms_host)} ms to issue our step and "
            f"{time(peer.ms_host)} ms to issue FSDP2's, of {time(ours.ms)} and {time(peer.ms)} ms: "
            "where these are close, it is the host that is timed, and another host gives another "
            "ratio."
        )
    captured = c.row(OURS, model, capture=True)
    if ours is not None and captured is not None and ours.ms / ours.ms_without > ONE_GPU:
        text += (
            f" The same kernels replayed take {time(captured.ms)} ms: the rest of the launched "
            f"step's {time(ours.ms)} is the host, which has more to issue than for one GPU."
        )
    if ours is not None and peer is not None:
        text += "".join(_larger(c, other, ours, peer) for other in MODELS if other != model)
    peaks = [c.at("peak", None, who, model) for who in (OURS, PEER)]
    if None not in peaks and _peaks(*peaks)[0] is not None and _peaks(*peaks)[0] > PEAK:
        above = memory.total(peaks[0]) - memory.total(peaks[1])
        # Of FSDP2's, the other ranks have their part of the norms and of their two moments.
        norms = 3 * theory.WIDE * sizes(model).replicated * (1 - 1 / WORLD_SIZE)
        text += (
            f" At its fullest a rank of ours holds {above / 1e6:.2f} MB more than FSDP2's; norms "
            f"and their moments, which ours keeps whole, are {norms / 1e6:.2f} MB more."
        )
    return Markdown(text)
