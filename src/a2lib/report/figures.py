"""The book's figures, each drawn from measured rows.

Every function returns a Chart, also from a partial sweep or from no rows: a panel without data says
so. A line has a gap where a shape has no time (out of memory, unsupported, not measured).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from a2lib.report import style
from a2lib.report.metrics import pick, with_speedup, with_tflops
from a2lib.report.style import Chart

MEASURES = {
    "ms": "latency (ms)",
    "speedup": "speed-up",
    "tflops": "TFLOP/s",
    "peak_bytes": "peak memory",
}
CEILING_LINE = {"color": "black", "linewidth": 1, "linestyle": (0, (4, 3))}
LEGEND_ROW = 0.24  # inches that a row of the legend takes


def grid(rows: pd.DataFrame, measure: str, *, down: str, across: str = "dtype", fixed: dict,
         lines: dict[str, float] | None = None, shared: bool = True) -> Chart:  # fmt: skip
    """Small multiples of a measure against sequence length, one line per implementation.

    `down` and `across` are the columns that vary over panels, `fixed` the values of the others,
    `lines` a horizontal reference per dtype (the matmul ceiling), `shared` gives all panels one
    scale. Latency and memory are log-log, speed-ups and rates log in length alone.
    """
    rows = pick(_measured(rows, measure), **fixed)
    row_keys = _keys(rows, down)
    column_keys = _keys(rows, across)
    names = style.implementations(rows.dropna(subset=[measure])["implementation"])
    labels = list(lines or {})
    if not len(rows):
        return _empty()

    def draw(figure):
        axes = figure.subplots(len(row_keys), len(column_keys), squeeze=False, sharex=True,
                               sharey=True if shared else "col")  # fmt: skip
        for i, row_key in enumerate(row_keys):
            for j, column_key in enumerate(column_keys):
                panel = pick(rows, **{down: row_key, across: column_key})
                _panel(axes[i, j], panel, measure, (lines or {}).get(
                    column_key if across == "dtype" else row_key))  # fmt: skip
                axes[i, j].set_title(f"{_name(across, column_key)}, {_name(down, row_key)}")
            axes[i, 0].set_ylabel(MEASURES[measure])
        for ax in axes[-1]:
            ax.set_xlabel("sequence length (tokens)")
        extra = [Line2D([], [], **CEILING_LINE,
                        label="measured matmul ceiling")] if labels else []  # fmt: skip
        _legend(figure, names, extra)

    return Chart(draw, height=1.95 * len(row_keys) + _legend_height(len(names) + bool(labels)))


def dots(rows: pd.DataFrame, reference: float | None = None, reference_label: str = "") -> Chart:
    """One shape: the time of every implementation by pass, fastest end to end on top, log scale.

    `reference` draws a line across end to end: a published time at the same shape, in ms.
    """
    total = pick(rows, pass_="end_to_end").set_index("implementation")["ms"]
    names = style.implementations(rows["implementation"])
    names.sort(key=lambda name: -total.get(name, np.inf) if total.get(name) else -np.inf)
    if not names:
        return _empty()

    def draw(figure):
        axes = figure.subplots(1, 3, sharey=True)
        for ax, (pass_, title) in zip(axes, style.PASSES.items(), strict=True):
            here = pick(rows, pass_=pass_).set_index("implementation")
            times = [here["ms"].get(name, np.nan) for name in names]
            finite = [t for t in [*times, reference or np.nan] if np.isfinite(t)] or [1.0]
            ax.set_xscale("log")
            ax.set_xlim(min(finite) / 1.6, max(finite) * 4)
            for y, (name, time) in enumerate(zip(names, times, strict=True)):
                look, known = style.look(name), np.isfinite(time)
                status = here["status"].get(name, "")
                if known:
                    ax.plot(time, y, marker=look.marker, color=look.colour, linestyle="",
                            markersize=8 if look.ours else 6.5)  # fmt: skip
                ax.annotate(
                    style.digits(time) if known else style.STATUS.get(status, "not measured"),
                    (time if known else min(finite) / 1.4, y), (8 if known else 0, 0),
                    textcoords="offset points", va="center", fontsize=9,
                    fontweight="bold" if look.ours else "normal")  # fmt: skip
            ax.set_title(title)
            ax.set_xlabel("ms")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
            ax.xaxis.set_minor_formatter(NullFormatter())
            if reference and pass_ == "end_to_end":
                ax.axvline(reference, **CEILING_LINE, zorder=0)
                figure.legend([Line2D([], [], **CEILING_LINE)], [reference_label],
                              loc="outside lower center", frameon=False)  # fmt: skip
        axes[0].set_ylim(-0.7, len(names) - 0.3)
        axes[0].set_yticks(range(len(names)), [style.SHORT.get(name, name) for name in names])

    return Chart(draw, height=1.2 + 0.34 * max(3, len(names)))


def paper_shapes(rows: pd.DataFrame, ceiling: float | None) -> Chart:
    """TFLOP/s at the FlashAttention-3 paper's shapes: panels by head size, mask and pass."""
    rows = _measured(rows, "tflops")
    names = style.implementations(rows.dropna(subset=["tflops"])["implementation"])
    if not len(rows):
        return _empty()
    panels = [(d, causal, pass_) for pass_ in ("forward", "backward") for causal in (False, True)
              for d in (64, 128)]  # fmt: skip

    def draw(figure):
        axes = figure.subplots(4, 2, sharex=True, sharey=True)
        for ax, (d, causal, pass_) in zip(axes.flat, panels, strict=True):
            _panel(ax, pick(rows, head_dim=d, causal=causal, pass_=pass_), "tflops",
                   ceiling)  # fmt: skip
            ax.set_title(f"{style.PASSES[pass_]}, d = {d}, {'causal' if causal else 'full'}")
        for ax in axes[:, 0]:
            ax.set_ylabel("TFLOP/s")
        for ax in axes[-1]:
            ax.set_xlabel("sequence length (tokens)")
        extra = [Line2D([], [], **CEILING_LINE,
                        label="measured matmul ceiling")] if ceiling else []  # fmt: skip
        _legend(figure, names, extra)

    return Chart(draw, height=1.85 * 4 + _legend_height(len(names) + bool(ceiling)))


def beside(rows: pd.DataFrame, reference: pd.DataFrame, head_dim: int, here: str) -> Chart:
    """Our times and published ones on another GPU, at one head size: panels by pass and dtype."""
    rows, reference = pick(rows, head_dim=head_dim), pick(reference, head_dim=head_dim)
    drawn = [
        (rows, "a2lib", f"a2lib, {here}", "#D55E00", "o", "-"),
        (rows, "eager", f"eager, {here}", "#444444", "s", "-"),
        (reference, "triton_forward_compiled_backward", "published, H800", "#0072B2", "^", "--"),
        (reference, "eager", "eager, H800", "#009E73", "D", "--"),
    ]

    def draw(figure):
        axes = figure.subplots(3, 2, sharex=True, sharey=True)
        for i, (pass_, title) in enumerate(style.PASSES.items()):
            for j, dtype in enumerate(("bf16", "fp32")):
                for frame, name, _, colour, marker, line in drawn:
                    times = pick(frame, implementation=name, dtype=dtype, pass_=pass_)
                    times = times.sort_values("seq_len")
                    axes[i, j].plot(times["seq_len"].astype(float), times["ms"], color=colour,
                                    marker=marker, linestyle=line, markersize=3.6, linewidth=1.4)
                _axes(axes[i, j], "ms")
                axes[i, j].set_title(f"{dtype}, {title}")
            axes[i, 0].set_ylabel(MEASURES["ms"])
        for ax in axes[-1]:
            ax.set_xlabel("sequence length (tokens)")
        handles = [Line2D([], [], color=c, marker=m, linestyle=s, markersize=4, label=label)
                   for _, _, label, c, m, s in drawn]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)

    return Chart(draw, height=1.95 * 3 + _legend_height(4))


def headline(rows: pd.DataFrame, *, head_dim: int = 64, width: float = 7.2) -> Chart:
    """The picture of the README: end to end latency of the handout's sweep, bf16 beside fp32."""
    rows = pick(_measured(rows, "ms"), head_dim=head_dim, pass_="end_to_end")
    names = style.implementations(rows.dropna(subset=["ms"])["implementation"])
    if not names:
        return _empty()

    def draw(figure):
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for ax, dtype in zip(axes, ("bf16", "fp32"), strict=True):
            _panel(ax, pick(rows, dtype=dtype), "ms")
            ax.set_title(f"{dtype}, d = {head_dim}, causal, forward + backward")
            ax.set_xlabel("sequence length (tokens)")
        axes[0].set_ylabel(MEASURES["ms"])
        _legend(figure, names, columns=4)

    return Chart(draw, width=width, height=3.6)


def _measured(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    if measure == "tflops":
        return with_tflops(rows)
    if measure == "speedup":
        return with_speedup(rows)
    if measure == "peak_bytes":
        return rows.assign(peak_bytes=rows["peak_bytes"].astype("float64"))
    return rows


def _keys(rows: pd.DataFrame, column: str) -> list:
    present = list(rows[column].unique())
    order = {"pass": list(style.PASSES), "dtype": list(style.DTYPES)}.get(column, sorted(present))
    usual = {"pass": list(style.PASSES), "dtype": ["bf16", "fp32"], "head_dim": [64]}
    return [key for key in order if key in present] or usual.get(column, [""])


def _name(column: str, key) -> str:
    if column == "pass":
        return style.PASSES.get(key, key)
    if column == "device":
        return style.device_name(key)
    return f"d = {key}" if column == "head_dim" else str(key)


def _panel(ax, rows: pd.DataFrame, measure: str, ceiling: float | None = None) -> None:
    if not rows[measure].notna().any():
        _nothing(ax, rows)
        return
    for name in style.implementations(rows["implementation"]):
        line = pick(rows, implementation=name).sort_values("seq_len")
        look = style.look(name)
        ax.plot(line["seq_len"].astype(float), line[measure], color=look.colour, zorder=3 if
                look.ours else 2, marker=look.marker, markersize=4.6 if look.ours else 3.6,
                linewidth=2.2 if look.ours else 1.2)  # fmt: skip
    if ceiling:
        ax.axhline(ceiling, **CEILING_LINE)
    _axes(ax, measure)


def _axes(ax, measure: str) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(_short_tokens))
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_xlim()
    ticks = [2.0**n for n in range(0, 24) if low <= 2.0**n <= high]
    ax.set_xticks(ticks[-1::-2][::-1] if len(ticks) > 5 else ticks)
    if measure == "tflops":
        # A point at zero sets the bottom and leaves the top free, which panels share.
        ax.update_datalim([(ticks[0], 0)])
        ax.autoscale_view()
        return
    ax.set_yscale("log", base=10 if measure == "ms" else 2)
    ax.yaxis.set_minor_formatter(NullFormatter())
    bottom, top = ax.get_ylim()
    if measure == "ms" and top < 30 * bottom:  # too few powers of ten to read a value from
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _plain(value)))
    if measure == "speedup":
        ax.axhline(1, color="black", linewidth=0.8)
    text = _round_size if measure == "peak_bytes" else _plain
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _empty() -> Chart:
    return Chart(lambda figure: _nothing(figure.subplots()), height=1.2)


def _nothing(ax, rows: pd.DataFrame | None = None) -> None:
    reasons = sorted(set(rows["status"])) if rows is not None and len(rows) else []
    text = "no times: " + ", ".join(reasons) if reasons else "not measured yet"
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color="#555555")
    ax.set_axis_off()


def _round_size(n_bytes: float) -> str:
    number, unit = style.size(n_bytes).split()
    return f"{float(number):g} {unit}"


def _plain(value: float) -> str:
    return f"{value:g}" if value < 1e5 else f"{value:.0e}"


def _short_tokens(value: float, _position) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _legend(figure, names: list[str], extra: list | None = None, columns: int = 3) -> None:
    handles = [
        Line2D([], [], color=style.look(n).colour, marker=style.look(n).marker, markersize=5,
               linewidth=2.2 if style.look(n).ours else 1.2, label=style.look(n).label)
        for n in names
    ] + (extra or [])  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False,
                      columnspacing=1.2, handlelength=1.8)  # fmt: skip


def _legend_height(entries: int) -> float:
    return LEGEND_ROW * -(-entries // 3) + 0.35
