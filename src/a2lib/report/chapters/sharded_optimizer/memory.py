"""Memory at the three moments, by what it is, beside the formula."""

from __future__ import annotations

import itertools

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from a2lib.report import panels
from a2lib.report.chapters.sharded_optimizer.rows import (
    GB,
    MAIN,
    SETTINGS,
    SIDES,
    WORLD_SIZE,
    Setting,
    Sharding,
    formula,
    gb,
    name,
    weight_bytes,
)
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table, folded
from a2lib.theory.sharding import MOMENTS, REST, STATE

WORDS = {"init": "model made", "before": "before update", "after": "after update"}
# What a row has by name -> the component of the formula, and the colour of both.
COLUMNS = {"parameter_bytes": "parameters", "gradient_bytes": "gradients",
           "optimizer_bytes": STATE, "buffer_bytes": "buffers"}  # fmt: skip
COLOURS = {"parameters": "#0072b2", "gradients": "#a86f00", STATE: "#d55e00",
           "buffers": "#00825f", REST: "#808080"}  # fmt: skip
OURS, TORCH = ("plain", "sharded"), "torch_ddp"


def parts(row) -> dict[str, float]:
    """Measured bytes by component; the rest is what no column names."""
    found = {part: float(getattr(row, column)) for column, part in COLUMNS.items()
             if not pd.isna(getattr(row, column))}  # fmt: skip
    if not pd.isna(row.present_bytes):
        found[REST] = float(row.present_bytes) - sum(found.values())
    return found


def off(row, setting: Setting = MAIN) -> float:
    """By how much what is there differs from the formula, as a share of that."""
    counted, there = _both(row, setting)
    return there / counted - 1


def within(share: float) -> str:
    """A bound to two decimals of a per cent, never 0."""
    return f"{max(share, 1e-4):.2%}"


def sentence(c: Sharding, setting: Setting = MAIN) -> Markdown:
    """optimizer_state_sharding_accounting (a), in words."""
    told = []
    for optimizer in OURS:
        rows = [c.held(optimizer, moment, setting=setting) for moment in MOMENTS]
        if None in rows:
            continue
        levels = [f"{gb(row.present_bytes)}" for row in rows]
        worst = max((abs(off(row, setting)) for row in rows))
        text = (f"{'With' if optimizer == 'sharded' else 'Without'} sharding the fullest of "
                f"{WORLD_SIZE} GPUs holds {listed(levels)} GB at the three moments, at most "
                f"{within(worst)} from the formula")  # fmt: skip
        step = c.held(optimizer, "step", setting=setting)
        if step is not None:
            counted = formula(optimizer, setting).peak()
            text += (f"; the peak of a later step is {gb(step.tensor_bytes)} GB, by the count of "
                     f"its tensors {gb(counted)}")  # fmt: skip
        told.append(text)
    if not told:
        return Markdown(c.not_yet("the bytes at the three moments, by what they are"))
    ranks = c.held("sharded", "after", setting=setting)
    text = ". ".join(told) + "."
    if ranks is not None and len(told) > 1:
        saved = c.held("plain", "after", setting=setting).present_bytes - ranks.present_bytes
        text += (f" Sharding saves {gb(saved)} GB, and nothing before the first update: until then "
                 "there is no state.")  # fmt: skip
    every = [off(row, one) for one in SETTINGS for row in _rows(c, one)]
    return Markdown(
        f"{text} Of all {len(every)} lines of the tables below, PyTorch's wrappers and later peaks "
        f"included, none is further than {within(max(map(abs, every)))} from the formula."
    )


def figure(c: Sharding, setting: Setting = MAIN) -> Chart:
    """A bar for each moment with and without: measured, or the formula's where nothing is; a line
    across a measured bar is the formula's sum."""
    bars = []
    for moment in MOMENTS:
        for optimizer in OURS:
            row = c.held(optimizer, moment, setting=setting)
            counted = formula(optimizer, setting).at(moment)
            bars.append((moment, optimizer, parts(row) if row else counted, sum(counted.values()),
                         row is not None))  # fmt: skip
    measured = any(known for *_, known in bars)

    def draw(figure):
        ax = figure.subplots()
        places, labels = [], []
        for n, (moment, optimizer, found, counted, known) in enumerate(bars):
            y = n + 0.6 * (n // 2)
            places.append(y)
            labels.append(f"{WORDS[moment]}, {optimizer}")
            left = 0.0
            for part, colour in COLOURS.items():
                width = max(0.0, found.get(part, 0.0)) / GB
                ax.barh(y, width, left=left, color=colour, height=0.8)
                left += width
            ax.annotate(gb(left * GB), (left, y), (4, 0), textcoords="offset points", va="center")
            if known:
                ax.plot([counted / GB] * 2, [y - 0.46, y + 0.46], color="#000000", linewidth=1.6)
        ax.set_yticks(places, labels)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, 1.15 * max(sum(found.values()) for *_, found, _, _ in bars) / GB)
        ax.set_xlabel("GB on a GPU" if measured else "GB on a GPU, by the formula")
        named = [Patch(color=colour, label=part) for part, colour in COLOURS.items()]
        if measured:
            named.append(Line2D([], [], color="#000000", label="formula"))
        panels.legend(figure, named, columns=3)

    return Chart(draw, height=3.6)


def table(c: Sharding, setting: Setting, caption: str, label: str) -> Table:
    """A line for each optimizer, wrapper and moment, of the fullest rank."""
    lines = [_line(row, setting) for row in _rows(c, setting)]
    columns = ["", "moment", "in all", "formula", "off", *COLOURS, "most"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def rest(c: Sharding, caption: str, label: str) -> Markdown:
    """The same of the settings that are not the main one, folded away."""
    return Markdown("\n".join(
        folded(table(c, setting, f"{caption}: {setting.label}", f"{label}-{n}"), longest=0)
        for n, setting in enumerate(SETTINGS[1:])
    ))  # fmt: skip


def _rows(c: Sharding, setting: Setting) -> list:
    """Those of the fullest rank, wrapper by wrapper."""
    every = itertools.product(SIDES, ("plain", "sharded", "zero"), (*MOMENTS, "step"))
    found = [c.held(optimizer, moment, side, setting) for side, optimizer, moment in every]
    return [row for row in found if row is not None]


def _line(row, setting: Setting) -> list[str]:
    found = parts(row)
    cells = [_size(found.get(part)) for part in COLOURS]
    moment = WORDS.get(row.moment, "later peak")
    if row.moment == "step":
        cells = [MISSING] * len(COLOURS)
    counted, there = _both(row, setting)
    differs = MISSING if pd.isna(there) else f"{off(row, setting):+.2%}"
    return [name(row), moment, gb(there), gb(counted), differs, *cells, gb(row.allocated_bytes)]


def _size(n_bytes: float | None) -> str:
    return "<0.001" if n_bytes and n_bytes < 5e-4 * GB else gb(n_bytes)


def _both(row, setting: Setting) -> tuple[float, float]:
    """(bytes by the formula, as measured), of a later step its most. PyTorch's DDP has a copy of
    all gradients in its buckets."""
    of, buckets = formula(row.optimizer, setting), weight_bytes(setting) * (row.side == TORCH)
    if row.moment == "step":
        return of.peak() + buckets, float(row.tensor_bytes)
    return sum(of.at(row.moment).values()) + buckets, float(row.present_bytes)
