"""The book's figures, each drawn from measured rows.

Every function returns a Chart, also from a partial sweep or from no rows: a panel without data says
so. A line has a gap where a shape has no time (out of memory, unsupported, not measured).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from a2lib.report import panels, style
from a2lib.report.metrics import OURS, level, pick, with_speedup, with_tflops
from a2lib.report.panels import REFERENCE_LINE, TOKENS
from a2lib.report.style import DIM, INK, PAPER, Chart

MEASURES = {
    "ms": "latency (ms)",
    "speedup": "speed-up",
    "tflops": "TFLOP/s",
    "peak_bytes": "peak memory",
}
# Of svg.PAIRS: ours ahead by more than 2, by more than 1.25, by less; level; a peer ahead likewise.
HEAT = ("#f0ad78", "#f6cfab", "#fbe9da", "#eeeeee", "#dce9f7", "#b5d2f0", "#86b6e6")
HEAT_STEPS = (1.25, 2.0)


def grid(rows: pd.DataFrame, measure: str, *, down: str, across: str = "dtype", fixed: dict,
         lines: dict[str, float] | None = None, shared: bool = True) -> Chart:  # fmt: skip
    """Small multiples of a measure against sequence length, one line per implementation.

    `down` and `across` are the columns that vary over panels, `fixed` the values of the others,
    `lines` a horizontal reference per dtype (the matmul ceiling), `shared` gives all panels one
    scale. Latency and memory are log-log, speed-ups and rates log in length alone. With one
    column of panels (`fixed` names a dtype) lines are named where they end, else in a legend.
    """
    rows = pick(_measured(rows, measure), **fixed)
    row_keys, column_keys = _keys(rows, down), _keys(rows, across)
    names = style.implementations(rows.dropna(subset=[measure])["implementation"])
    if not len(rows):
        return panels.empty()
    beside = len(column_keys) == 1
    extra = [Line2D([], [], **REFERENCE_LINE, label="matmul ceiling")] if lines else []

    def draw(figure):
        axes = figure.subplots(len(row_keys), len(column_keys), squeeze=False, sharex=True,
                               sharey=True if shared else "col")  # fmt: skip
        ends = []
        for i, row_key in enumerate(row_keys):
            for j, column_key in enumerate(column_keys):
                panel = pick(rows, **{down: row_key, across: column_key})
                height = (lines or {}).get(column_key if across == "dtype" else row_key)
                ends.append((axes[i, j], _panel(axes[i, j], panel, measure, height)))
                axes[i, j].set_title(f"{_name(across, column_key)}, {_name(down, row_key)}")
            axes[i, 0].set_ylabel(MEASURES[measure])
        for ax in axes[-1]:
            ax.set_xlabel(TOKENS if beside else "tokens")
        panels.legend(figure, [] if beside else names, extra)
        return (lambda: [panels.name_ends(figure, *end) for end in ends]) if beside else None

    if beside:
        each = 2.5 if len(row_keys) > 1 else 3.1
        return Chart(draw, height=each * len(row_keys) + panels.legend_height(len(extra)),
                     room=panels.ROOM)  # fmt: skip
    height = panels.legend_height(len(names) + len(extra))
    return Chart(draw, height=1.95 * len(row_keys) + height)


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
        axes = figure.subplots(len(style.PASSES), 1, sharex=True, sharey=True)
        ends = []
        for ax, (pass_, title) in zip(axes, style.PASSES.items(), strict=True):
            here = pick(rows, pass_=pass_)
            called = panels.lines(ax, here, "ms", dashes=(0, (4, 2)), markers=False)
            drawn = panels.lines(ax, here, "ms_graph") or called
            if not drawn:
                panels.nothing(ax, here)
                continue
            panels.tokens_axis(ax)
            panels.values_axis(ax, "ms")
            ax.set_title(f"{title}, {dtype}, d = {head_dim}")
            ax.set_ylabel(MEASURES["ms"])
            ends.append((ax, drawn))
        axes[-1].set_xlabel(TOKENS)
        for ax, _ in ends:
            _slopes(ax)
        panels.legend(figure, [], how, columns=2)
        return lambda: [panels.name_ends(figure, *end) for end in ends]

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
        return lambda: [panels.name_ends(figure, *end) for end in ends]

    return Chart(draw, height=1.95 * len(shown) + 0.3, room=panels.ROOM)


def heat(rows: pd.DataFrame, dtype: str = "bf16") -> Chart:
    """Ours / the best peer by head size and length, a map per pass; below 1 ours is ahead.

    Each cell says the ratio of the medians. Its colour says who is ahead and in which step
    (HEAT_STEPS); cells whose two rows are level have the neutral colour, whatever the ratio. A
    cell without both times has a dash.
    """
    import seaborn  # a second to import, for this figure alone

    rows = pick(rows, dtype=dtype)
    passes = [name for name in style.PASSES if name in set(rows["pass"])]
    if not rows["ms"].notna().any() or OURS not in set(rows["implementation"]):
        return panels.empty()
    lengths, sizes = (sorted(rows[c].unique()) for c in ("seq_len", "head_dim"))

    def draw(figure):
        axes = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
        for ax, pass_ in zip(axes, passes, strict=True):
            step = pd.DataFrame(np.nan, index=lengths, columns=sizes)
            text = pd.DataFrame("", index=lengths, columns=sizes)
            for (length, size), cell in pick(rows, pass_=pass_).groupby(["seq_len", "head_dim"]):
                ratio, even = against_best(cell)
                text.loc[length, size] = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
                step.loc[length, size] = 0 if even else _heat_step(ratio)
            seaborn.heatmap(step, ax=ax, annot=text, fmt="", cmap=ListedColormap(HEAT), vmin=-3.5,
                            vmax=3.5, cbar=False, linewidths=1.5, linecolor=PAPER,
                            annot_kws={"color": INK, "fontsize": 10.5})  # fmt: skip
            for i, j in np.argwhere(step.isna().to_numpy()):
                ax.text(j + 0.5, i + 0.5, "–", color=DIM, ha="center", va="center")
            ax.set_title(style.PASSES[pass_])
            ax.set_xlabel("d")
            ax.tick_params(length=0)
            ax.set_xticklabels([str(size) for size in sizes], rotation=0)
            ax.set_yticklabels([style.tokens(length) for length in lengths], rotation=0)
        axes[0].set_ylabel("tokens")
        named = ((HEAT[0], "ours ahead"), (HEAT[3], "level"), (HEAT[-1], "a peer ahead"))
        panels.legend(figure, [], [Patch(color=c, label=words) for c, words in named], columns=3)

    return Chart(draw, height=0.9 + 0.27 * len(lengths) + panels.legend_height(3, 3))


def against_best(cell: pd.DataFrame) -> tuple[float, bool]:
    """Ours / the fastest peer among the rows of one shape, and whether the two are level.

    NaN and False where either has no time.
    """
    timed = cell.dropna(subset=["ms"]).sort_values("ms")
    ours = list(timed[timed["implementation"] == OURS].itertuples())
    peers = list(timed[timed["implementation"] != OURS].itertuples())
    if not (ours and peers):
        return float("nan"), False
    return ours[0].ms / peers[0].ms, level(ours[0], peers[0])


def dots(rows: pd.DataFrame, reference: float | None = None, reference_label: str = "") -> Chart:
    """One shape: the time of every implementation by pass, fastest end to end on top, log scale.

    A thin bar is p20 to p80. The fastest of a pass is bold, and so is what is level with it.
    `reference` draws a line across end to end: a published time at the same shape, in ms.
    """
    total = pick(rows, pass_="end_to_end").set_index("implementation")["ms"]
    names = style.implementations(rows["implementation"])
    names.sort(key=lambda name: -total.get(name, np.inf) if total.get(name) else -np.inf)
    if not names:
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(1, 3, sharey=True)
        for ax, (pass_, title) in zip(axes, style.PASSES.items(), strict=True):
            here = pick(rows, pass_=pass_).drop_duplicates("implementation")
            _dots_panel(ax, here, names, reference if pass_ == "end_to_end" else None)
            ax.set_title(title)
            ax.set_xlabel("ms")
        axes[0].set_ylim(-0.7, len(names) - 0.3)
        axes[0].set_yticks(range(len(names)), [style.SHORT.get(name, name) for name in names])
        if reference:
            figure.legend([Line2D([], [], **REFERENCE_LINE)], [reference_label],
                          loc="outside lower center", frameon=False)  # fmt: skip

    return Chart(draw, height=1.2 + 0.36 * max(3, len(names)))


def paper_shapes(rows: pd.DataFrame, ceiling: float | None) -> Chart:
    """TFLOP/s at the FlashAttention-3 paper's shapes: panels by head size, mask and pass."""
    rows = _measured(rows, "tflops")
    names = style.implementations(rows.dropna(subset=["tflops"])["implementation"])
    if not len(rows):
        return panels.empty()
    shown = [(d, causal, pass_) for pass_ in ("forward", "backward") for causal in (False, True)
             for d in (64, 128)]  # fmt: skip
    extra = [Line2D([], [], **REFERENCE_LINE, label="matmul ceiling")] if ceiling else []

    def draw(figure):
        axes = figure.subplots(4, 2, sharex=True, sharey=True)
        for ax, (d, causal, pass_) in zip(axes.flat, shown, strict=True):
            _panel(ax, pick(rows, head_dim=d, causal=causal, pass_=pass_), "tflops", ceiling)
            ax.set_title(f"{style.PASSES[pass_]}, {d}, {'causal' if causal else 'full'}")
        for ax in axes[:, 0]:
            ax.set_ylabel("TFLOP/s")
        for ax in axes[-1]:
            ax.set_xlabel("tokens")
        panels.legend(figure, names, extra)

    return Chart(draw, height=1.85 * 4 + panels.legend_height(len(names) + len(extra)))


def beside(rows: pd.DataFrame, reference: pd.DataFrame, head_dim: int, here: str) -> Chart:
    """Our times and published ones on another GPU, at one head size: panels by pass and dtype."""
    rows, reference = pick(rows, head_dim=head_dim), pick(reference, head_dim=head_dim)
    ours, eager = style.look("a2lib").colour, style.look("eager").colour
    flash, green = style.look("sdpa_flash").colour, style.look("sdpa_cudnn").colour
    drawn = [
        (rows, "a2lib", f"a2lib, {here}", ours, "o", "-"),
        (rows, "eager", f"eager, {here}", eager, "s", "-"),
        (reference, "triton_forward_compiled_backward", "published, H800", flash, "^", "--"),
        (reference, "eager", "eager, H800", green, "D", "--"),
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
                panels.tokens_axis(axes[i, j])
                panels.values_axis(axes[i, j], "ms")
                axes[i, j].set_title(f"{dtype}, {title}")
            axes[i, 0].set_ylabel(MEASURES["ms"])
        for ax in axes[-1]:
            ax.set_xlabel("tokens")
        handles = [Line2D([], [], color=c, marker=m, linestyle=s, markersize=4, label=label)
                   for _, _, label, c, m, s in drawn]  # fmt: skip
        panels.legend(figure, [], handles, columns=2)

    return Chart(draw, height=1.95 * 3 + panels.legend_height(4, 2))


def headline(rows: pd.DataFrame, *, head_dim: int = 64, width: float = 7.2) -> Chart:
    """The picture of the README: end to end latency of the handout's sweep, bf16 beside fp32."""
    rows = pick(_measured(rows, "ms"), head_dim=head_dim, pass_="end_to_end")
    names = style.implementations(rows.dropna(subset=["ms"])["implementation"])
    if not names:
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for ax, dtype in zip(axes, ("bf16", "fp32"), strict=True):
            _panel(ax, pick(rows, dtype=dtype), "ms")
            ax.set_title(f"{dtype}, d = {head_dim}, forward + backward")
            ax.set_xlabel(TOKENS)
        axes[0].set_ylabel(MEASURES["ms"])
        panels.legend(figure, names)

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


def _panel(ax, rows: pd.DataFrame, measure: str, ceiling: float | None = None) -> list:
    """Draw a panel of `grid`; returns the ends of its lines."""
    if not rows[measure].notna().any():
        panels.nothing(ax, rows)
        return []
    ends = panels.lines(ax, rows, measure)
    if ceiling:
        ax.axhline(ceiling, **REFERENCE_LINE)
    panels.tokens_axis(ax)
    panels.values_axis(ax, measure)
    return ends


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
    for name in style.implementations(rows["implementation"]):
        line = pick(rows, implementation=name).sort_values("second").dropna(subset=[column])
        if not len(line):
            continue
        look = style.look(name)
        if column == "ms" and line[["ms_p20", "ms_p80"]].notna().all(axis=None):
            ax.fill_between(line["second"], line["ms_p20"], line["ms_p80"], color=look.colour,
                            alpha=0.2, linewidth=0)  # fmt: skip
        ax.plot(line["second"], line[column], color=look.colour, marker=look.marker,
                markersize=3.6, linewidth=2 if look.ours else 1.3)  # fmt: skip
        ends.append((line["second"].iloc[-1], line[column].iloc[-1], name))
    return ends


def _heat_step(ratio: float) -> float:
    """-3 .. -1 where ours is ahead, 1 .. 3 where it is behind, by HEAT_STEPS; NaN stays NaN."""
    if not np.isfinite(ratio):
        return float("nan")
    size = 1 + sum(max(ratio, 1 / ratio) > step for step in HEAT_STEPS)
    return -size if ratio < 1 else size


def _dots_panel(ax, here: pd.DataFrame, names: list[str], reference: float | None) -> None:
    found = {row.implementation: row for row in here.itertuples()}
    timed = [row for row in found.values() if row.ms == row.ms]
    best = min(timed, key=lambda row: row.ms, default=None)
    finite = [row.ms for row in timed] + ([reference] if reference else []) or [1.0]
    ax.set_xscale("log")
    ax.set_xlim(min(finite) / 1.6, max(finite) * 5)
    for y, name in enumerate(names):
        look, row = style.look(name), found.get(name)
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
