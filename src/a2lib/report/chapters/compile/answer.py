"""The first screen and the times of attention, compiled and eager."""

from __future__ import annotations

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.cost import model_extra
from a2lib.report.chapters.compile.models import held_up, ratio
from a2lib.report.chapters.compile.rows import (
    CONTEXT,
    GRID_BATCH,
    HEAD_DIMS,
    HOW,
    LENGTHS,
    PASSES,
    Compile,
    curve,
    pairs,
    pays_from,
    title,
)
from a2lib.report.chapters.measured import reason
from a2lib.report.metrics import LEVEL, pick, row_of
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import IMPLEMENTATIONS

DTYPE, HEAD = "fp32", 64  # of which the answer speaks
OTHERS = (("causal", "fp32", "with a mask"), ("heads", "fp32", "with a dimension of one head"),
          ("plain", "bf16", "in bf16"))  # fmt: skip
COLOURS = {16: "#d55e00", 32: "#0072b2", 64: "#00825f", 128: "#b0558a"}
MARKERS = {16: "o", 32: "^", 64: "v", 128: "X"}


def sentence(c: Compile) -> Markdown:
    """The answer: attention's gain at the longest length and from where it is ahead, the models',
    and what compiling takes."""
    attention, whole = _of_attention(c), _of_models(c)
    missing = [] if len(c.grid) else ["the grid of the handout, batch 8 without heads"]
    missing += [] if whole else ["whole models"]
    gap = c.not_yet(", and ".join(missing)) if missing else ""
    lead = "**The answer.**" if attention or whole else ""
    first = " ".join(filter(None, (lead, attention or whole)))
    return Markdown("\n\n".join(filter(None, (first, whole if attention else "", gap))))


def _of_attention(c: Compile) -> str:
    rows, written = (c.grid, "plain") if len(c.grid) else (c.causal, "causal")
    both = pick(pairs(rows), written=written, dtype=DTYPE, head_dim=HEAD) if len(rows) else rows
    if not len(both):
        return ""
    longest, shortest = int(both["seq_len"].max()), int(both["seq_len"].min())
    gains, froms = [], []
    for pass_ in PASSES:
        line = pick(both, pass_=pass_)
        at = row_of(line, seq_len=longest)
        gains.append(f"{at.gain:.2f} times as fast {pass_}" if at else f"not timed {pass_}")
        start = pays_from(line)
        froms.append("at no length" if start is None else "at every length" if start == shortest
                     else f"from {style.tokens(start)} tokens on")  # fmt: skip
    ahead = f"ahead forward {froms[0]} and backward {froms[1]}"
    if froms[0] == froms[1]:
        ahead = f"ahead {froms[0]}{'' if froms[0] == 'at no length' else ', forward and backward'}"
    batch = int(both["batch"].iloc[0])
    what = "without a mask" if written == "plain" else "causal"
    return (
        f"On an {c.device} compiled attention ({DTYPE}, heads of {HEAD}, batch {batch}, {what}) is "
        f"{listed(gains)} at {style.tokens(longest)} tokens, and {ahead}."
    )


def _of_models(c: Compile) -> str:
    """The largest model that has both times, and the smallest; then in bf16, and the cost."""
    found = []
    for model in reversed(MODELS):
        eager, compiled = c.model(model, "none"), c.best(model)
        if eager is not None and compiled is not None:
            found.append((title(model), eager, compiled))
    told = [
        f"of the {model} model takes {style.digits(eager.ms)} ms eager and "
        f"{style.digits(compiled.ms)} ms compiled {HOW[compiled.compile]}, "
        f"{_times(eager.ms, compiled.ms)}"
        for model, eager, compiled in dict.fromkeys([*found[:1], *found[-1:]])
    ]
    if not told:
        return ""
    said = f"A train-step ({DTYPE}, {CONTEXT} tokens) {'; one '.join(told)}."
    narrow = [g for m in MODELS if (g := ratio(c, m, "blocks", "train-step", CONTEXT, "bf16"))]
    held = [title(m) for m in MODELS if held_up(c, m, "none", "bf16")]
    if narrow:
        gain = style.between(narrow, "{:.2f}".format)
        said += f" In bf16 compiled blocks make a train-step {gain} times as fast"
        said += (
            f", mostly by fewer launches: the host holds up eager's step of {listed(held)}."
            if held
            else "."
        )
    cold = {way: [x for m in MODELS if (x := model_extra(c, m, way, DTYPE, "ms_cold"))]
            for way in HOW}  # fmt: skip
    costs = [f"{style.between([x / 1e3 for x in found], '{:.0f}'.format)} s {HOW[way]}"
             for way, found in cold.items() if found]  # fmt: skip
    same = [c.model(m, "model").ms / c.model(m, "blocks").ms for m in MODELS
            if c.model(m, "model") and c.model(m, "blocks")]  # fmt: skip
    level = ", for the same speed" if same and max(same) <= LEVEL and min(same) >= 1 / LEVEL else ""
    return said + (f" In {DTYPE} compiling takes {listed(costs)}{level}." if costs else "")


def _times(eager: float, compiled: float) -> str:
    if compiled > eager:
        return f"{compiled / eager:.2f} times as long"
    return f"{eager / compiled:.2f} times as fast"


def chart(c: Compile) -> Chart:
    """Eager over compiled time against the length, a panel for each pass, a line for each head
    size: as called, and dashed the GPU alone."""
    written = "plain" if len(c.grid) else "causal"
    both = pairs(c.known)
    if not len(both):
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(1, 2, sharey=True)
        for ax, pass_ in zip(axes, PASSES, strict=True):
            for d in HEAD_DIMS:
                line = curve(both, written, DTYPE, d, pass_)
                x = line["seq_len"].astype(float)
                look = {"color": COLOURS[d], "linewidth": 1.3}
                ax.plot(x, line["gain"], marker=MARKERS[d], markersize=3.6, **look,
                        label=f"heads of {d}" if pass_ == PASSES[0] else None)  # fmt: skip
                ax.plot(x, line["gain_gpu"], linestyle="--", **look)
            ax.axhline(1, color="#555555", linewidth=1)
            ax.set_title(pass_)
            panels.doubling_axis(ax)
            ax.set_xlabel("tokens")
        axes[0].set_ylabel("eager / compiled")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)

    return Chart(draw, height=4.2)


def table(c: Compile, written: str, dtype: str, caption: str, name: str) -> Table:
    """Each shape of the grid: both times and the gain of each pass, as called and on the GPU."""
    both = pairs(c.grid)
    mine = pick(both, written=written, dtype=dtype)
    lines = []
    for (d, n), group in mine.groupby(["head_dim", "seq_len"]):
        cells = []
        for pass_ in PASSES:
            r = row_of(group, pass_=pass_)
            cells += [MISSING] * 4 if r is None else [
                style.digits(r.ms_eager), style.digits(r.ms_compile), f"{r.gain:.2f}",
                MISSING if r.gain_gpu != r.gain_gpu else f"{r.gain_gpu:.2f}",
            ]  # fmt: skip
        lines.append([int(d), style.tokens(n), *cells])
    columns = ["d", "tokens", "forward: eager", "compiled", "gain", "on the GPU",
               "backward: eager", "compiled ", "gain ", "on the GPU "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=2)


def other_ways(c: Compile) -> Markdown:
    """The gains of the other ways to write attention, at the longest length that each has; with a
    mask, until it is measured, of the flash chapter's rows. Then a table of each."""
    both, told, left, tables = pairs(c.grid), [], [], []
    for written, dtype, words in OTHERS:
        mine = pick(both, written=written, dtype=dtype)
        if len(mine):
            caption = words if dtype in words else f"{words}, {dtype}"
            caption = f"Attention {caption}: times (ms) as called, and the gain"
            tables.append(table(c, written, dtype, caption, f"tab-compile-{written}-{dtype}"))
        else:
            left.append(words)
        mine = pick(mine, head_dim=HEAD)
        if not len(mine) and written == "causal":
            mine = pick(pairs(c.causal), dtype=dtype, head_dim=HEAD) if len(c.causal) else mine
            words = "with a mask, as the [chapter on FlashAttention](flash.md) has it for batch 1,"
        if not len(mine):
            continue
        longest = int(mine["seq_len"].max())
        rows = pick(mine, seq_len=longest).sort_values("pass", ascending=False)
        gains = [f"{r.gain:.2f} times as fast {r.pass_}"
                 for r in rows.rename(columns={"pass": "pass_"}).itertuples()]  # fmt: skip
        told.append(f"{words} it is {listed(gains)} at {style.tokens(longest)} tokens")
    said = f"Compiled, with heads of {HEAD}: {'; '.join(told)}." if told else ""
    if len(others := pairs(c.others).dropna(subset=["gain_gpu"])):
        said += f" {_ahead(others)}"
    if left:
        said += " " * bool(said) + c.not_yet(f"attention of batch {GRID_BATCH} {listed(left)}")
        said += (" What has to happen there without a time is derived and tested above: which of "
                 "them Inductor recognises, the kernels and the matrices.")  # fmt: skip
    return Markdown("\n\n".join([said, *(t.text for t in tables)]))


def untimed(c: Compile) -> Markdown:
    """The shapes of the grid without a time, each with its reason."""
    if not len(c.grid):
        return Markdown(c.not_yet("which shapes do not fit"))
    rows = c.grid[c.grid["status"] != "ok"]
    lines = [
        f"- {r.implementation}, {r.written}, {r.dtype}, {style.tokens(r.seq_len)} tokens, heads of "
        f"{r.head_dim}, {r.pass_}: {style.STATUS[r.status]} ({reason(r.note)})"
        for r in rows.rename(columns={"pass": "pass_"}).itertuples()
    ] or ["Every shape that was measured has a time."]
    known = pick(c.grid, written="plain", dtype=DTYPE)
    whole = len(PASSES) * len(IMPLEMENTATIONS)
    left = []
    for n in LENGTHS:
        heads = [d for d in HEAD_DIMS if len(pick(known, seq_len=n, head_dim=d)) < whole]
        if heads:
            some = f" with heads of {listed(list(map(str, heads)))}"
            left.append(f"{style.tokens(n)} tokens{some if len(heads) < len(HEAD_DIMS) else ''}")
    if left:
        lines.append(
            f"\n**Not measured yet, or not whole**, of the question's grid: {'; '.join(left)}."
        )
    return Markdown("\n".join(lines))


def regimes(c: Compile) -> Markdown:
    """Whose time the short shapes are: the host's, as called, where the GPU alone is ahead."""
    both = pairs(c.asked if len(c.grid) else c.causal)
    both = both[both["gain_gpu"].notna()]
    if not len(both):
        return Markdown(c.not_yet("the host's time and the GPU's apart"))
    return Markdown(" ".join(filter(None, (f"{_ahead(both)} {_host(both)}", c.shared()))))


def _ahead(both: pd.DataFrame) -> str:
    """In how many passes compiled is ahead, on the GPU alone and as called."""
    held = both[(both["gain"] <= 1) & (both["gain_gpu"] > 1)]
    behind = both[both["gain_gpu"] <= 1]
    behind_called = len(both[both["gain"] <= 1])
    said = (
        f"On the GPU alone compiled is ahead of eager in {len(both) - len(behind)} of {len(both)} "
        f"passes. As called it is behind in {behind_called or 'none'}"
    )
    if len(held):
        said += (
            f", in {'all' if len(held) == behind_called else len(held)} of which the GPU alone "
            f"would be ahead: there the host's time "
            f"decides, up to {style.tokens(held['seq_len'].max())} tokens"
        )
    return f"{said}."


def _host(both: pd.DataFrame) -> str:
    shortest, told = both["seq_len"].min(), []
    for pass_ in PASSES:
        line = pick(both, pass_=pass_, seq_len=shortest)
        eager, compiled = (style.between(1e3 * line[f"ms_host_{n}"], "{:.0f}".format)
                           for n in ("eager", "compile"))  # fmt: skip
        told.append(f"{compiled} µs {pass_} where eager takes {eager} µs")
    return (
        f"To issue a compiled call takes the host {listed(told)}, by head size at the shortest "
        "length, where the launches are the same: so far does the host's time scatter."
    )
