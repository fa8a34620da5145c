"""Figures for the rows of any section: small multiples, maps of ratios and spreads, one case in
dots.

A section's View says what is compared along what, and how its columns are written. Every function
returns a Chart, also from a partial sweep or from no rows: a panel without data says so. A line has
a gap where a row has no time (out of memory, unsupported, not measured).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from a2lib.report import panels, style
from a2lib.report.metrics import against_best, level, pick
from a2lib.report.panels import MEASURES, REFERENCE_LINE, Measure
from a2lib.report.style import DIM, INK, PAPER, Chart
from a2lib.report.view import View

# Of svg.PAIRS: ours ahead by more than 2, by more than 1.25, by less; level; a peer ahead likewise.
HEAT = ("#f0ad78", "#f6cfab", "#fbe9da", "#eeeeee", "#dce9f7", "#b5d2f0", "#86b6e6")
HEAT_STEPS = (1.25, 2.0)
SHADES = ("#dce9f7", "#b5d2f0", "#86b6e6")
SPREADS = (0.01, 0.05)  # a deviation beyond each, relative to the mean, is a stronger shade


def grid(rows: pd.DataFrame, measure: str, view: View, *, down: str, across: str | None = None,
         fixed: dict | None = None, lines: dict[str, float] | None = None, line_label: str = "",
         shared: bool = True, kind: Measure | None = None) -> Chart:  # fmt: skip
    """Small multiples of a column along the view's, one line per thing compared.

    `down` and `across` are the key columns that vary over panels, `fixed` the values of others.
    `lines` is a horizontal reference (called `line_label`) by value of either, `shared` gives all
    panels one scale. `kind` is the Measure, by default that of MEASURES. With one column of panels
    lines are named where they end, else in a legend.
    """
    kind = kind or MEASURES[measure]
    rows = pick(rows, **(fixed or {}))
    rows = rows.assign(**{measure: panels.numbers(rows, measure)})
    row_keys = view.shown(down, rows)
    column_keys = [None] if across is None else view.shown(across, rows)
    names = view.looks.order(rows.dropna(subset=[measure])[view.by])
    if not len(rows):
        return panels.empty()
    beside = len(column_keys) == 1
    bottom = view.columns[view.along]
    extra = [Line2D([], [], **REFERENCE_LINE, label=line_label)] if lines else []

    def draw(figure):
        axes = figure.subplots(len(row_keys), len(column_keys), squeeze=False, sharex=True,
                               sharey=True if shared else "col")  # fmt: skip
        ends = []
        for i, row_key in enumerate(row_keys):
            for j, column_key in enumerate(column_keys):
                here = pick(rows, **{down: row_key})
                title = view.columns[down].titled(row_key)
                if across is not None:
                    here = pick(here, **{across: column_key})
                    title = f"{view.columns[across].titled(column_key)}, {title}"
                height = (lines or {}).get(column_key, (lines or {}).get(row_key))
                ends.append((axes[i, j], panel(axes[i, j], here, measure, view, height, kind)))
                axes[i, j].set_title(title)
            axes[i, 0].set_ylabel(kind.label)
        for ax in axes[-1]:
            ax.set_xlabel(bottom.axis if beside and bottom.axis else bottom.head)
        shown = [] if beside else panels.handles(names, view.looks)
        panels.legend(figure, [*shown, *extra])
        if beside:
            return lambda: [panels.name_ends(figure, *end, view.looks) for end in ends]
        return None

    if beside:
        each = 2.5 if len(row_keys) > 1 else 3.1
        return Chart(draw, height=each * len(row_keys) + panels.legend_height(len(extra)),
                     room=panels.ROOM)  # fmt: skip
    height = panels.legend_height(len(names) + len(extra))
    return Chart(draw, height=1.95 * len(row_keys) + height)


def panel(ax, rows: pd.DataFrame, measure: str, view: View, reference: float | None = None,
          kind: Measure | None = None) -> list:  # fmt: skip
    """Draw one panel of `grid`, a dashed line at `reference`; returns the ends of its lines."""
    if not rows[measure].notna().any():
        panels.nothing(ax, rows)
        return []
    ends = panels.lines(ax, rows, measure, view)
    if reference:
        ax.axhline(reference, **REFERENCE_LINE)
    panels.along_axis(ax, view)
    panels.values_axis(ax, kind or MEASURES[measure])
    return ends


def heat(rows: pd.DataFrame, view: View, *, down: str, across: str, each: str) -> Chart:
    """Ours / the best peer by two key columns, a map per value of `each`; below 1 ours is ahead.

    Each cell says the ratio of the medians. Its colour says who is ahead and in which step
    (HEAT_STEPS); cells whose two rows are level have the neutral colour, whatever the ratio. A
    cell without both times has a dash.
    """
    import seaborn  # a second to import, for this figure alone

    maps = view.shown(each, rows)
    if not rows["ms"].notna().any() or view.ours not in set(rows[view.by]):
        return panels.empty()
    lines, columns = view.shown(down, rows), view.shown(across, rows)

    def draw(figure):
        axes = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for ax, value in zip(axes, maps, strict=True):
            step = pd.DataFrame(np.nan, index=lines, columns=columns)
            text = pd.DataFrame("", index=lines, columns=columns)
            for (line, column), cell in pick(rows, **{each: value}).groupby([down, across]):
                ratio, even = against_best(cell, view)
                text.loc[line, column] = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
                step.loc[line, column] = 0 if even else _heat_step(ratio)
            seaborn.heatmap(step, ax=ax, annot=text, fmt="", cmap=ListedColormap(HEAT), vmin=-3.5,
                            vmax=3.5, cbar=False, linewidths=1.5, linecolor=PAPER,
                            annot_kws={"color": INK, "fontsize": 10.5})  # fmt: skip
            for i, j in np.argwhere(step.isna().to_numpy()):
                ax.text(j + 0.5, i + 0.5, "–", color=DIM, ha="center", va="center")
            ax.set_title(view.columns[each].titled(value))
            ax.set_xlabel(view.columns[across].head)
            ax.tick_params(length=0)
            ax.set_xticklabels(map(view.columns[across].text, columns), rotation=0)
            ax.set_yticklabels(map(view.columns[down].text, lines), rotation=0)
        axes[0].set_ylabel(view.columns[down].head)
        named = ((HEAT[0], "ours ahead"), (HEAT[3], "level"), (HEAT[-1], "a peer ahead"))
        panels.legend(figure, [Patch(color=c, label=words) for c, words in named], columns=3)

    return Chart(draw, height=0.9 + 0.27 * len(lines) + panels.legend_height(3, 3))


def spreads(maps: dict[str, pd.DataFrame], *, down: str, across: str, wide: int = 2) -> Chart:
    """Relative deviations, a map per title, `wide` of them side by side, in percent.

    A map has the deviation over the mean in its cells, its lines and columns by the words that
    stand beside and below them; all maps have the same. Its shades are those of SPREADS, and a cell
    without a value has a dash.
    """
    import seaborn  # a second to import, for this figure alone

    if not any(shares.notna().any(axis=None) for shares in maps.values()):
        return panels.empty()
    n_lines, deep = len(next(iter(maps.values()))), -(-len(maps) // wide)

    def draw(figure):
        axes = figure.subplots(deep, wide, sharex=True, sharey=True, squeeze=False)
        for ax, (title, shares) in zip(axes.flat, maps.items(), strict=False):
            step = sum((shares > least).astype(float) for least in SPREADS).where(shares.notna())
            text = shares.map(lambda share: "" if np.isnan(share) else f"{100 * share:.1f}")
            seaborn.heatmap(step, ax=ax, annot=text, fmt="", cbar=False, vmin=-0.5, vmax=2.5,
                            cmap=ListedColormap(SHADES), linewidths=1.5, linecolor=PAPER,
                            annot_kws={"color": INK, "fontsize": 10.5})  # fmt: skip
            ax.grid(False)
            for i, j in np.argwhere(shares.isna().to_numpy()):
                ax.text(j + 0.5, i + 0.5, "–", color=DIM, ha="center", va="center")
            ax.set_title(title)
            ax.tick_params(length=0)
            ax.set_xticklabels(shares.columns, rotation=0)
            ax.set_yticklabels(shares.index, rotation=0)
        for ax in list(axes.flat)[len(maps) :]:
            ax.set_axis_off()
        for ax in axes[-1]:
            ax.set_xlabel(across)
        for ax in axes[:, 0]:
            ax.set_ylabel(down)

    return Chart(draw, height=0.5 + (0.45 + 0.27 * n_lines) * deep)


def dots(rows: pd.DataFrame, view: View, *, each: str, reference: float | None = None,
         reference_label: str = "") -> Chart:  # fmt: skip
    """One case: the time of everything compared, a panel per value of `each`, on a log scale.

    The fastest by the last of these values stands on top. A thin bar is p20 to p80. The fastest of
    a panel is bold, and so is what is level with it. `reference` draws a line across the last: a
    published time of the same case, in ms.
    """
    values = list(view.columns[each].order) or view.shown(each, rows)
    total = pick(rows, **{each: values[-1]}).set_index(view.by)["ms"] if values else {}
    names = view.looks.order(rows[view.by])
    names.sort(key=lambda name: -total.get(name, np.inf) if total.get(name) else -np.inf)
    if not names:
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
        for ax, value in zip(axes, values, strict=True):
            here = pick(rows, **{each: value}).drop_duplicates(view.by)
            _dots_panel(ax, here, names, view, reference if value == values[-1] else None)
            ax.set_title(view.columns[each].titled(value))
            ax.set_xlabel("ms")
        axes[0].set_ylim(-0.7, len(names) - 0.3)
        axes[0].set_yticks(range(len(names)), map(view.looks.short, names))
        if reference:
            figure.legend([Line2D([], [], **REFERENCE_LINE)], [reference_label],
                          loc="outside lower center", frameon=False)  # fmt: skip

    return Chart(draw, height=1.2 + 0.36 * max(3, len(names)))


def _heat_step(ratio: float) -> float:
    """-3 .. -1 where ours is ahead, 1 .. 3 where it is behind, by HEAT_STEPS; NaN stays NaN."""
    if not np.isfinite(ratio):
        return float("nan")
    size = 1 + sum(max(ratio, 1 / ratio) > step for step in HEAT_STEPS)
    return -size if ratio < 1 else size


def _dots_panel(ax, here: pd.DataFrame, names: list[str], view: View,
                reference: float | None) -> None:  # fmt: skip
    found = dict(zip(here[view.by], here.itertuples(), strict=True))
    timed = [row for row in found.values() if row.ms == row.ms]
    best = min(timed, key=lambda row: row.ms, default=None)
    finite = [row.ms for row in timed] + ([reference] if reference else []) or [1.0]
    ax.set_xscale("log")
    ax.set_xlim(min(finite) / 1.6, max(finite) * 5)
    for y, name in enumerate(names):
        look, row = view.looks.of(name), found.get(name)
        if row is None or row.ms != row.ms:
            words = style.STATUS.get(row.status, row.status) if row else "not measured"
            ax.annotate(words, (min(finite) / 1.4, y), va="center")
            continue
        if row.ms_p20 == row.ms_p20 and row.ms_p80 == row.ms_p80:
            ax.plot([row.ms_p20, row.ms_p80], [y, y], color=look.colour, linewidth=1.5)
        ax.plot(row.ms, y, marker=look.marker, color=look.colour, linestyle="",
                markersize=8 if look.ours else 6.5)  # fmt: skip
        ax.annotate(style.digits(row.ms), (max(row.ms, row.ms_p80) if row.ms_p80 == row.ms_p80
                    else row.ms, y), (7, 0), textcoords="offset points", va="center",
                    fontweight="bold" if level(row, best) else "normal")  # fmt: skip
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if max(finite) < 12 * min(finite) else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.plain(value)))
    ax.minorticks_off()
    if reference:
        ax.axvline(reference, **REFERENCE_LINE, zorder=0)
