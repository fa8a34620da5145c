"""What a rank holds, by component, beside what the formula says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
from matplotlib.patches import Patch

from a2lib.report import panels
from a2lib.report.chapters.fsdp.rows import (
    COMPUTES,
    MODELS,
    OURS,
    PEER,
    WORLD_SIZE,
    Fsdp,
    activations,
    gb,
    sizes,
)
from a2lib.report.style import Chart, listed, signed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory import fsdp as theory
from a2lib.theory import sharding

LIMIT = 0.03
SCHEMES = ("plain", "zero1", "sharded")  # of theory.sharding
# Component -> the column of its row, its colour, its name.
PARTS = {
    "parameters": ("parameter_bytes", "#0072b2", "weights"),
    "gradients": ("gradient_bytes", "#d55e00", "gradients"),
    "optimizer": ("optimizer_bytes", "#00825f", "moments"),
    "gathered": ("whole_bytes", "#86b6e6", "gathered weights"),
    "travelling": ("travelling_bytes", "#a86f00", "whole gradients"),
    "activations": ("", "#808080", "activations, rest"),
}
FORWARD = "a later forward's end"
# (moment, its step: the first one, or a later one, what it is called).
MOMENTS = (
    ("init", 0, "after init"), ("before", 0, "before the first step"),
    ("after", 0, "after the first step"), ("forward", None, FORWARD),
    ("peak", None, "that step's peak"),
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A moment: its formula and what was measured, bytes by component; None where there is none."""

    name: str
    formula: dict[str, float] | None
    measured: dict[str, float] | None

    @property
    def off(self) -> float | None:
        """How far the measured total is from the formula's, as a share of it."""
        if self.formula is None or self.measured is None:
            return None
        return sum(self.measured.values()) / sum(self.formula.values()) - 1


def pairs(c: Fsdp, model: str) -> list[Pair]:
    """The moments in order. Activations are no formula's: both have what the forward left."""
    s, left = sizes(model), activations(c, model)
    formulas = {moment.moment: moment.parts for moment in theory.between(s, WORLD_SIZE)}
    if left is not None:
        steps = {m.moment: m for m in theory.step(s, WORLD_SIZE, left, COMPUTES)}
        # The last block's forward, once the loss is computed.
        formulas["forward"] = steps["backward root"].parts
        formulas["peak"] = theory.peak(s, WORLD_SIZE, left, COMPUTES).parts
    return [Pair(name, formulas.get(moment), measured(c.at(moment, step, OURS, model)))
            for moment, step, name in MOMENTS]  # fmt: skip


def measured(row) -> dict[str, float] | None:
    """Bytes by component; what no component has is "activations"."""
    if row is None:
        return None
    found = {part: known(getattr(row, column)) for part, (column, *_) in PARTS.items() if column}
    found = {part: 0.0 if math.isnan(size) else size for part, size in found.items()}
    return found | {"activations": max(0.0, total(row) - sum(found.values()))}


def total(row) -> float:
    """Of a step its most, else what there was at the moment; NaN where neither is known."""
    most = known(row.tensor_bytes)
    return known(row.present_bytes) if math.isnan(most) else most


def known(value) -> float:
    """NaN where a table has a blank."""
    return math.nan if pd.isna(value) else float(value)


def per_parameter(caption: str, label: str) -> Table:
    """Bytes a parameter at the three moments, by what is divided over W ranks."""
    lines = [
        ["all whole (DDP)", "4", "8", "16"],
        ["AdamW's moments divided (ZeRO 1)", "4", "8", "8 + 8/W"],
        ["all divided (FSDP)", "4/W", "8/W", "16/W"],
    ]
    columns = ["", "after init", "before the first step", "after it"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def estimate(model: str) -> Markdown:
    """The formula with the model's numbers."""
    s = sizes(model)
    init, before, after = (gb(moment.total) for moment in theory.between(s, WORLD_SIZE))
    unit = COMPUTES * s.block
    return Markdown(
        f"For {MODELS[model]}, {s.parameters / 1e9:.2f} billion parameters on {WORLD_SIZE} ranks: "
        f"{init} GB after init, {before} GB before the first step and {after} GB after it, where "
        f"a rank of data parallelism holds {gb(16 * s.parameters)} GB. While it computes, two "
        f"blocks of {unit / 1e6:.0f} MB in bf16 and the root's {COMPUTES * s.root / 1e6:.0f} MB "
        f"are whole; in backward one block's gradient ({unit / 1e6:.0f} MB) and the cast to fp32 "
        f"of the one before ({theory.WIDE * s.block / 1e6:.0f} MB) as well."
    )


def verdict(c: Fsdp) -> Markdown:
    """Whether the formula holds, and what is missing where it does not."""
    told = []
    for model, words in MODELS.items():
        # The forward's end has its activations from itself: no test of the formula.
        tested = [pair for pair in pairs(c, model) if pair.name != FORWARD]
        tested = [pair for pair in tested if pair.off is not None]
        if not tested:
            continue
        far = [pair for pair in tested if abs(pair.off) > LIMIT]
        if not far:
            worst = max(tested, key=lambda pair: abs(pair.off))
            told.append(f"For {words} all {len(tested)} moments are within {LIMIT:.0%} of the "
                        f"formula; the furthest is {worst.name}, "
                        f"{signed(worst.off, 1)}.")  # fmt: skip
            continue
        parts = [f"{pair.name} {signed(pair.off, 1)} ({_difference(pair)})" for pair in far]
        told.append(f"For {words} {len(far)} of {len(tested)} moments are further than {LIMIT:.0%} "
                    f"from the formula: {listed(parts)}.")  # fmt: skip
    return Markdown(" ".join(told) or c.not_yet("what a rank holds, beside the formula"))


def _difference(pair: Pair) -> str:
    """The component that differs most, and by how much."""
    gaps = {part: pair.measured[part] - pair.formula[part] for part in PARTS}
    part = max(gaps, key=lambda name: abs(gaps[name]))
    return f"{PARTS[part][2]}: {'+' if gaps[part] > 0 else '−'}{gb(abs(gaps[part]))} GB"


def table(c: Fsdp, model: str, caption: str, label: str) -> Table:
    """A line for each moment: formula, measured, their difference, by component, the peer's."""
    lines = []
    for pair, (moment, step, _) in zip(pairs(c, model), MOMENTS, strict=True):
        peer = c.at(moment, step, PEER, model)
        lines.append([
            pair.name, _total(pair.formula), _total(pair.measured),
            MISSING if pair.off is None else signed(pair.off, 1),
            *(MISSING if pair.measured is None else gb(pair.measured[part]) for part in PARTS),
            MISSING if peer is None or math.isnan(total(peer)) else gb(total(peer)),
        ])  # fmt: skip
    names = [name for *_, name in PARTS.values()]
    columns = ["GB", "formula", "measured", "off by", *names, "FSDP2"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def _total(parts: dict[str, float] | None) -> str:
    return MISSING if parts is None else gb(sum(parts.values()))


def others(c: Fsdp) -> Markdown:
    """What the process takes beside its tensors, and the peer's peak."""
    told = []
    for model, words in MODELS.items():
        row, peer = (c.at("peak", None, who, model) for who in (OURS, PEER))
        if row is None or math.isnan(total(row)):
            continue
        reserved, driver = gb(row.reserved_bytes), gb(row.driver_bytes)
        text = (f"For {words} PyTorch's allocator has reserved {reserved} GB by then, and the "
                f"driver says that {driver} GB are in use, the contexts of CUDA and NCCL included")
        if peer is not None and not math.isnan(total(peer)):
            ratio = total(row) / total(peer)
            text += f"; the peak of FSDP2 is {gb(total(peer))} GB, ours {ratio:.3f} times that"
        told.append(text + ".")
    return Markdown(" ".join(told) or c.not_yet("the peak beside that of PyTorch's FSDP2"))


def figure(c: Fsdp) -> Chart:
    """For each moment the formula and, where there are rows, what was measured, stacked."""
    made = {model: pairs(c, model) for model in MODELS}

    def draw(figure):
        axes = figure.subplots(len(made), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (model, found) in zip(axes, made.items(), strict=True):
            for y, pair in enumerate(found):
                _stack(ax, pair.formula, y - 0.2, alpha=0.55)
                _stack(ax, pair.measured, y + 0.2, alpha=1)
                if pair.formula is None and pair.measured is None:
                    ax.annotate("not measured yet", (0, y), (4, 0), va="center",
                                textcoords="offset points")  # fmt: skip
            ax.set_yticks(range(len(found)), [pair.name for pair in found])
            ax.set_ylim(len(found) - 0.5, -0.5)
            ax.grid(axis="y", visible=False)
            ax.set_title(MODELS[model])
        axes[-1].set_xlim(0, 1.12 * axes[-1].get_xlim()[1])
        axes[-1].set_xlabel("GB a rank (above: formula, below: measured)")
        handles = [Patch(color=colour, label=name) for _, colour, name in PARTS.values()]
        panels.legend(figure, handles, columns=2)

    return Chart(draw, height=6.6)


def _stack(ax, parts: dict[str, float] | None, y: float, alpha: float) -> None:
    left = 0.0
    for part, size in (parts or {}).items():
        if size > 0:
            ax.barh(y, size / 1e9, left=left, color=PARTS[part][1], height=0.36, alpha=alpha)
            left += size / 1e9
    if parts:
        ax.annotate(gb(1e9 * left), (left, y), (3, 0), va="center", textcoords="offset points")


def sent(caption: str, label: str) -> Table:
    """GB that each of two ranks sends in a step, by what for."""
    lines = []
    for model, words in MODELS.items():
        s = sizes(model)
        ours = theory.sent_bytes(s, WORLD_SIZE, COMPUTES)
        size = theory.WIDE * s.parameters
        schemes = [sharding.sent(one, size, WORLD_SIZE).total for one in SCHEMES]
        parts = (ours[part] for part in ("forward", "backward", "gradients"))
        lines.append([words, *map(gb, (*schemes, sum(ours.values()), *parts))])
    columns = ["GB a step", "DDP", "ZeRO 1", "DDP, sharded optimizer", "FSDP", "its first gathers",
               "second gathers", "reduce-scatters"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)
