"""The chapter's figures: small multiples of its sweep, and what no other section draws.

Every function returns a Chart, also from a partial sweep or from no rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from a2lib.report import figures, panels
from a2lib.report.chapters.flash.shapes import with_speedup, with_tflops
from a2lib.report.chapters.flash.view import COLUMNS, LOOKS, PASSES, VIEW
from a2lib.report.metrics import OURS, pick
from a2lib.report.panels import MEASURES, REFERENCE_LINE
from a2lib.report.style import DIM, INK, Chart

TOKENS = COLUMNS[VIEW.along].axis
CEILING = "matmul ceiling"


def grid(rows: pd.DataFrame, measure: str, *, down: str, across: str = "dtype", fixed: dict,
         lines: dict[str, float] | None = None, shared: bool = True) -> Chart:  # fmt: skip
    """Small multiples of one of panels.MEASURES against sequence length (figures.grid).

    `lines` is a horizontal reference per dtype, the matmul ceiling.
    """
    return figures.grid(_measured(rows, measure), measure, VIEW, down=down, across=across,
                        fixed=fixed, lines=lines, line_label=CEILING, shared=shared)  # fmt: skip


def latency_regimes(rows: pd.DataFrame, peer: str = "sdpa_cudnn", *, dtype: str = "bf16",
                    head_dim: int = 64) -> Chart:  # fmt: skip
    """What of a short call is the host's: ours and a peer against length, a panel per pass.

    Solid: the time of the same calls in a CUDA graph, which is the GPU's (`ms_graph`). Dashed: the
    time as called from Python (`ms`). Both axes are logarithmic; dotted lines have slopes one and
    two. A line that was not measured is left out.
    """
    rows = pick(rows, dtype=dtype, head_dim=head_dim)
    rows = rows[rows["implementation"].isin([OURS, peer])]
    rows = rows.assign(ms_graph=panels.numbers(rows, "ms_graph"), ms=panels.numbers(rows, "ms"))
    if not rows[["ms", "ms_graph"]].notna().any(axis=None):
        return panels.empty()
    how = [Line2D([], [], color=INK, linewidth=1.6, label="GPU time (CUDA graph)"),
           Line2D([], [], color=INK, linewidth=1.3, linestyle="--", label="as called")]  # fmt: skip

    def draw(figure):
        axes = figure.subplots(len(PASSES), 1, sharex=True, sharey=True)
        ends = []
        for ax, (pass_, title) in zip(axes, PASSES.items(), strict=True):
            here = pick(rows, pass_=pass_)
            called = panels.lines(ax, here, "ms", VIEW, dashes=(0, (4, 2)), markers=False)
            drawn = panels.lines(ax, here, "ms_graph", VIEW) or called
            if not drawn:
                panels.nothing(ax, here)
                continue
            panels.along_axis(ax, VIEW)
            panels.values_axis(ax, MEASURES["ms"])
            ax.set_title(f"{title}, {dtype}, d = {head_dim}")
            ax.set_ylabel(MEASURES["ms"].label)
            ends.append((ax, drawn))
        axes[-1].set_xlabel(TOKENS)
        for ax, _ in ends:
            _slopes(ax)
        panels.legend(figure, how, columns=2)
        return lambda: [panels.name_ends(figure, *end, LOOKS) for end in ends]

    return Chart(draw, height=2.4 * 3 + panels.legend_height(2, 2), room=panels.ROOM)


def sustained(rows: pd.DataFrame) -> Chart:
    """A kernel called for seconds on end: its time and the GPU's clock, second by second.

    Rows of `flash_protocol`: protocol, implementation, second, ms, ms_p20, ms_p80, sm_mhz. Two
    panels for each protocol; a pale band is p20 to p80.
    """
    rows = rows.assign(**{name: panels.numbers(rows, name) for name in
                          ("second", "ms", "ms_p20", "ms_p80", "sm_mhz")})  # fmt: skip
    rows = rows[rows["ms"].notna() | rows["sm_mhz"].notna()]
    if not len(rows):
        return panels.empty()
    protocols = list(dict.fromkeys(rows["protocol"]))
    shown = [(p, *what) for p in protocols for what in (("ms", "ms"), ("sm_mhz", "SM clock (MHz)"))]

    def draw(figure):
        axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        ends = []
        for ax, (protocol, column, label) in zip(axes, shown, strict=True):
            here = pick(rows, protocol=protocol)
            ends.append((ax, _against_seconds(ax, here, column)))
            ax.set_ylabel(label)
            ax.yaxis.set_major_locator(MaxNLocator(5))
            if column == "ms":
                ax.set_title(protocol)
        axes[-1].set_xlabel("seconds of calls without a pause")
        return lambda: [panels.name_ends(figure, *end, LOOKS) for end in ends]

    return Chart(draw, height=1.95 * len(shown) + 0.3, room=panels.ROOM)


def heat(rows: pd.DataFrame, dtype: str = "bf16") -> Chart:
    """Ours / the best peer by head size and length, a map per pass (figures.heat)."""
    return figures.heat(pick(rows, dtype=dtype), VIEW, down="seq_len", across="head_dim",
                        each="pass")  # fmt: skip


def dots(rows: pd.DataFrame, reference: float | None = None, reference_label: str = "") -> Chart:
    """One shape: the time of every implementation by pass, fastest end to end on top.

    `reference` draws a line across end to end: a published time at the same shape, in ms.
    """
    return figures.dots(rows, VIEW, each="pass", reference=reference,
                        reference_label=reference_label)  # fmt: skip


def paper_shapes(rows: pd.DataFrame, ceiling: float | None) -> Chart:
    """TFLOP/s at the FlashAttention-3 paper's shapes: panels by head size, mask and pass."""
    rows = _measured(rows, "tflops")
    names = LOOKS.order(rows.dropna(subset=["tflops"])["implementation"])
    if not len(rows):
        return panels.empty()
    shown = [(d, causal, pass_) for pass_ in ("forward", "backward") for causal in (False, True)
             for d in (64, 128)]  # fmt: skip
    extra = [Line2D([], [], **REFERENCE_LINE, label=CEILING)] if ceiling else []

    def draw(figure):
        axes = figure.subplots(4, 2, sharex=True, sharey=True)
        for ax, (d, causal, pass_) in zip(axes.flat, shown, strict=True):
            figures.panel(ax, pick(rows, head_dim=d, causal=causal, pass_=pass_), "tflops", VIEW,
                          ceiling)  # fmt: skip
            ax.set_title(f"{PASSES[pass_]}, {d}, {'causal' if causal else 'full'}")
        for ax in axes[:, 0]:
            ax.set_ylabel("TFLOP/s")
        for ax in axes[-1]:
            ax.set_xlabel("tokens")
        panels.legend(figure, [*panels.handles(names, LOOKS), *extra])

    return Chart(draw, height=1.85 * 4 + panels.legend_height(len(names) + len(extra)))


def beside(rows: pd.DataFrame, reference: pd.DataFrame, head_dim: int, here: str) -> Chart:
    """Our times and published ones on another GPU, at one head size: panels by pass and dtype."""
    rows, reference = pick(rows, head_dim=head_dim), pick(reference, head_dim=head_dim)
    ours, eager = LOOKS.of("a2lib").colour, LOOKS.of("eager").colour
    flash, green = LOOKS.of("sdpa_flash").colour, LOOKS.of("sdpa_cudnn").colour
    drawn = [
        (rows, "a2lib", f"a2lib, {here}", ours, "o", "-"),
        (rows, "eager", f"eager, {here}", eager, "s", "-"),
        (reference, "triton_forward_compiled_backward", "published, H800", flash, "^", "--"),
        (reference, "eager", "eager, H800", green, "D", "--"),
    ]

    def draw(figure):
        axes = figure.subplots(3, 2, sharex=True, sharey=True)
        for i, (pass_, title) in enumerate(PASSES.items()):
            for j, dtype in enumerate(("bf16", "fp32")):
                for frame, name, _, colour, marker, line in drawn:
                    times = pick(frame, implementation=name, dtype=dtype, pass_=pass_)
                    times = times.sort_values("seq_len")
                    axes[i, j].plot(times["seq_len"].astype(float), times["ms"], color=colour,
                                    marker=marker, linestyle=line, markersize=3.6, linewidth=1.4)
                panels.along_axis(axes[i, j], VIEW)
                panels.values_axis(axes[i, j], MEASURES["ms"])
                axes[i, j].set_title(f"{dtype}, {title}")
            axes[i, 0].set_ylabel(MEASURES["ms"].label)
        for ax in axes[-1]:
            ax.set_xlabel("tokens")
        handles = [Line2D([], [], color=c, marker=m, linestyle=s, markersize=4, label=label)
                   for _, _, label, c, m, s in drawn]  # fmt: skip
        panels.legend(figure, handles, columns=2)

    return Chart(draw, height=1.95 * 3 + panels.legend_height(4, 2))


def headline(rows: pd.DataFrame, *, head_dim: int = 64, width: float = 7.2) -> Chart:
    """The picture of the README: end to end latency of the handout's sweep, bf16 beside fp32."""
    rows = pick(_measured(rows, "ms"), head_dim=head_dim, pass_="end_to_end")
    names = LOOKS.order(rows.dropna(subset=["ms"])["implementation"])
    if not names:
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for ax, dtype in zip(axes, ("bf16", "fp32"), strict=True):
            figures.panel(ax, pick(rows, dtype=dtype), "ms", VIEW)
            ax.set_title(f"{dtype}, d = {head_dim}, forward + backward")
            ax.set_xlabel(TOKENS)
        axes[0].set_ylabel(MEASURES["ms"].label)
        panels.legend(figure, panels.handles(names, LOOKS))

    return Chart(draw, width=width, height=3.6)


def _measured(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    if measure == "tflops":
        return with_tflops(rows)
    if measure == "speedup":
        return with_speedup(rows)
    return rows


def _slopes(ax) -> None:
    """Dotted lines of slope one and two in the upper left, where the curves are not."""
    (low, _), (_, top) = ax.get_xlim(), ax.get_ylim()
    xs = np.array([low * 2, low * 8])
    for power, words in ((1, "∝ N"), (2, "∝ N²")):
        ys = top / 24 * (xs / xs[0]) ** power
        ax.plot(xs, ys, color=DIM, linestyle=":", linewidth=1.2, zorder=1, scalex=False,
                scaley=False)  # fmt: skip
        ax.annotate(words, (xs[1], ys[1]), (4, 0), textcoords="offset points", va="center",
                    color=DIM)  # fmt: skip


def _against_seconds(ax, rows: pd.DataFrame, column: str) -> list:
    ends = []
    for name in LOOKS.order(rows["implementation"]):
        line = pick(rows, implementation=name).sort_values("second").dropna(subset=[column])
        if not len(line):
            continue
        look = LOOKS.of(name)
        if column == "ms" and line[["ms_p20", "ms_p80"]].notna().all(axis=None):
            ax.fill_between(line["second"], line["ms_p20"], line["ms_p80"], color=look.colour,
                            alpha=0.2, linewidth=0)  # fmt: skip
        ax.plot(line["second"], line[column], color=look.colour, marker=look.marker,
                markersize=3.6, linewidth=2 if look.ours else 1.3)  # fmt: skip
        ends.append((line["second"].iloc[-1], line[column].iloc[-1], name))
    return ends
