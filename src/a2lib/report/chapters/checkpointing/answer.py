"""The first screen: both answers with their reasons, and memory against time."""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from a2lib.report import panels, style
from a2lib.report.chapters.checkpointing import least
from a2lib.report.chapters.checkpointing.rows import (
    BATCH,
    CONTEXT,
    GRADIENTS,
    LAYERS,
    MODEL,
    NARROW,
    SEGMENTS,
    STRATEGIES,
    TITLES,
    WIDE,
    Checkpointing,
    again,
    best,
    block,
    gb,
    held,
    ms_predicted,
    predicted,
    total,
    words,
    work,
)
from a2lib.report.style import Chart, Look, Looks, listed
from a2lib.report.tables import Markdown

NEIGHBOURS = ("half", "block", "segments:2")
LOOKS = Looks(
    {
        "none": Look("no checkpoint", "#444444", "s"),
        "half": Look("half a block", "#b0558a", "X"),
        "segments": Look("segments of k", "#d55e00", "o", ours=True),
        "nested": Look("two levels of 4", "#00825f", "v"),
        "recursive": Look("halves of halves", "#0072b2", "^"),
        "chain": Look("first input alone", "#8b5a2b", "p"),
        "selective:linear": Look("linear layers kept", "#a86f00", "D"),
        "selective:attention": Look("attention kept", "#2a86bf", "P"),
    }
)
# Where the first input alone is tried, the axis of time reaches to it.
TIMES = {WIDE: (0.75, 1, 1.25, 1.5), NARROW: (0.75, 1, 1.5, 2, 3, 5)}
REACH = {WIDE: (0.72, 1.75), NARROW: (0.6, 6)}
SIZES = (2, 5, 10, 20, 50, 100)


def sentence(c: Checkpointing) -> Markdown:
    """Both answers: the best segment with its neighbours, the least memory and its work."""
    return Markdown(f"{_best(c)}\n\n{_least(c)}")


def _best(c: Checkpointing) -> str:
    b, (half, one, two) = block(), [total(s) for s in NEIGHBOURS]
    text = (
        f"**The answer.** (b) {_segment(best('fresh'))}. At batch {BATCH} and "
        f"{style.tokens(CONTEXT)} tokens, in fp32 with eager attention, a step of {MODEL} then "
        f"peaks at {gb(one)} GB by prediction, {gb(held('fresh'))} GB of it weights and AdamW's "
        f"moments; with two blocks in a segment at {gb(two)} GB, with a checkpoint around each "
        f"half of a block at {gb(half)} GB. A longer segment saves inputs of {gb(b.input)} GB and "
        f"costs the {gb(b.saved)} GB that a block keeps for its backward."
    )
    rows = [c.timed(s) for s in NEIGHBOURS]
    if not all(row is not None for row in rows):
        return f"{text} {c.not_yet('the peaks and the times')}"
    measured = [row.held_bytes + row.peak_bytes for row in rows]
    told = [f"{gb(size)} GB and {style.digits(row.ms)} ms ({words(s)})"
            for s, size, row in zip(NEIGHBOURS, measured, rows, strict=True)]  # fmt: skip
    every = [c.row(s) for s in ("none", *SEGMENTS)]
    tried = [row for row in every if row is not None]
    whole = len(tried) == len(every)
    which = "all single-level segments" if whole else f"the {len(tried)} tried so far"
    first = min((row for row in tried if row.status == "ok"), key=lambda row: row.peak_bytes)
    verdict = "as predicted" if first.strategy == best("fresh") else "not as predicted"
    return (f"{text} Measured, with products in TF32: {listed(told)}; the least of {which} is "
            f"{words(first.strategy)}, {verdict}.")  # fmt: skip


def _least(c: Checkpointing) -> str:
    b = block()
    text = (
        f"(a) To keep the first input alone takes the least: one input, whatever the depth, for "
        f"{style.digits(again('chain', NARROW))} forwards more at {LAYERS} blocks, a number that "
        "grows with them; halves of halves keep inputs by the logarithm of the depth, for "
        f"{style.digits(again('recursive'))} forwards more. "
        "But that gains only where gradients have their memory before the backward. Where the "
        f"backward makes them, each block that is done leaves {gb(b.gradients)} GB of them, more "
        "than the input that it frees: the peak is at the model's first block, beside almost all "
        "gradients, and fewer inputs lower nothing."
    )
    told = []
    for gradients in reversed(GRADIENTS):
        one, chain = (c.timed(s, gradients, NARROW) for s in ("block", "chain"))
        if one is None or chain is None:
            return f"{text} {c.not_yet('the first input alone')}"
        sizes = gb(chain.peak_bytes), gb(one.peak_bytes)
        same = sizes[0] == sizes[1]
        either = f"the same {sizes[0]}" if same else f"{sizes[0]} in place of {sizes[1]}"
        told.append(f"{either} GB with {gradients} gradients at {chain.ms / one.ms:.2f} times "
                    "the time")  # fmt: skip
    text += (f" Measured in {TITLES[NARROW]}, beside one block at a time and beyond what stays: "
             f"{listed(told)}.")  # fmt: skip
    depths = least.alike(c)
    if depths:
        size = gb(c.timed("chain", "kept", NARROW).peak_bytes)
        text += f" The {size} GB are the same at {listed(list(map(str, depths)))} blocks."
    return text


def _segment(strategy: str) -> str:
    if strategy == "block":
        return "One block"
    return f"Segments of {words(strategy)}"


def family(strategy: str) -> str:
    """What a strategy is drawn as."""
    if strategy in SEGMENTS:
        return "segments"
    return strategy if strategy in LOOKS else strategy.partition(":")[0]


def frontier(c: Checkpointing) -> Chart:
    """Peak beyond what stays against the time of a step over that of one block at a time: predicted
    points open, measured ones filled; a panel for each setting and way of gradients. Without a
    measured step of one block the predicted time is by operations alone."""

    def draw(figure):
        axes = figure.subplots(2, 2, sharex="row", sharey=True)
        for line, way in zip(axes, (WIDE, NARROW), strict=True):
            for ax, gradients in zip(line, GRADIENTS, strict=True):
                _panel(ax, c, gradients, way)
                ax.set_title(f"gradients {gradients}")
            line[0].set_ylabel(f"{TITLES[way].replace(', ', chr(10))}\npeak, GB")
        for ax in axes[-1]:
            ax.set_xlabel("time, over 1 block's")
        handles = [
            Line2D([], [], color=look.colour, marker=look.marker, linestyle="", markersize=5.5,
                   label=look.label)
            for look in LOOKS.values()
        ]  # fmt: skip
        panels.legend(figure, handles, columns=3)

    return Chart(draw, height=5.4)


def _panel(ax, c: Checkpointing, gradients: str, way: tuple[str, str]) -> None:
    base = c.timed("block", gradients, way)
    places = {s: (_time(c, s, gradients, way), predicted(s, gradients, way).peak / 1e9)
              for s in STRATEGIES[way]}  # fmt: skip
    line = [place for s, place in places.items() if s in SEGMENTS]
    ax.plot(*zip(*line, strict=True), color=LOOKS["segments"].colour, linewidth=0.8)
    for strategy, place in places.items():
        look = LOOKS[family(strategy)]
        marks = {"color": look.colour, "marker": look.marker, "linestyle": ""}
        ax.plot(*place, markersize=7, fillstyle="none", markeredgewidth=1.1, **marks)
        row = c.timed(strategy, gradients, way)
        if row is not None and base is not None:
            ax.plot(row.ms / base.ms, row.peak_bytes / 1e9, markersize=4, zorder=3, **marks)
    last = [s for s in places if s in SEGMENTS][-1]
    below = -10 if way == WIDE else 0  # clear of the dashed line, and of what lies beside
    ends = (last.partition(":")[2], line[-1], (6, below)), ("1", line[0], (-3, -13))
    for name, place, (right, up) in ends:
        ax.annotate(f"k = {name}", place, xytext=(right, up), textcoords="offset points",
                    ha="left" if right > 0 else "right")  # fmt: skip
    room = (c.capacity() - held(gradients)) / 1e9
    if places["none"][1] > room:
        ax.axhline(room, **panels.REFERENCE_LINE)
    ax.set(xscale="log", yscale="log", xlim=REACH[way], ylim=(1.6, 190))
    for axis, ticks in ((ax.xaxis, TIMES[way]), (ax.yaxis, SIZES)):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _time(c: Checkpointing, strategy: str, gradients: str, way: tuple[str, str]) -> float:
    ms = ms_predicted(c, strategy, gradients, way)
    if ms is None:
        return work(strategy, way)
    return ms / c.timed("block", gradients, way).ms
