"""The atlas of attention's shapes: maps, the FlashAttention-3 paper's shapes, counts and tables."""

import pandas as pd

from a2lib.report import panels, plots
from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, pick
from a2lib.report.pages.flash import LOOKS, PASSES
from a2lib.report.pages.flash_tables import latency
from a2lib.report.style import chart
from a2lib.report.units import binary, count, digits


def ratios(rows: pd.DataFrame, dtype: str, pass_: str) -> pd.DataFrame:
    """Our time over that of the fastest other implementation, one head: lengths by head sizes."""
    own = pick(rows, kind="one head", dtype=dtype, pass_=pass_, implementation=OURS)
    own = own.assign(ratio=own["ms"] / own["best"])
    return own.pivot(index="seq_len", columns="head_dim", values="ratio").astype(float)


@chart(height=3.9)
def maps(figure, rows: pd.DataFrame, dtype: str):
    """``ratios`` of the three passes side by side."""
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (pass_, title) in zip(axes, PASSES.items(), strict=True):
        found = ratios(rows, dtype, pass_)
        plots.heat(ax, found.rename(index=count))
        ax.set(title=title, xlabel="head size")
    for ax in axes[1:]:
        ax.invert_yaxis()  # each heat() turned the axis that all share
    axes[0].set_ylabel("tokens")


def standing(rows: pd.DataFrame) -> pd.DataFrame:
    """In how many shapes ours is ahead, level (within 2 %) and behind, who beats it most often, and
    where it is furthest behind; a line for each dtype and pass."""
    lines = []
    for dtype in ("bf16", "fp32"):
        for pass_, title in PASSES.items():
            own = pick(rows, kind="one head", dtype=dtype, pass_=pass_, implementation=OURS)
            ratio = (own["ms"] / own["best"]).astype(float)
            behind, worst = own["peer"][ratio > LEVEL], own.loc[ratio.idxmax()]
            often = [f"{LOOKS.label(i)} ({n})" for i, n in behind.value_counts().items()]
            ahead, near = ratio < 1 / LEVEL, ratio.between(1 / LEVEL, LEVEL)
            lines.append(
                [f"{dtype} {title}", ahead.sum(), near.sum()]
                + [len(behind), often[0] if often else None]
                + [f"×{digits(ratio.max(), 3)} at {count(worst['seq_len'])}, {worst['head_dim']}"]
            )
    columns = ["of 40 shapes ours is", "ahead", "within 2 %", "behind", "mostly behind"]
    return pd.DataFrame(lines, columns=[*columns, "largest ratio (tokens, head)"])


@chart(height=8.0)
def paper(figure, rows: pd.DataFrame, ceiling: float):
    """TFLOP/s at the FlashAttention-3 paper's shapes: panels by pass, mask and head size; a dashed
    line at ``ceiling``, the best plain multiply."""
    rows = pick(rows, kind="paper")
    names = LOOKS.order(rows["implementation"])
    shown = [(p, c) for p in ("forward", "backward") for c in (True, False)]
    axes = figure.subplots(4, 2, sharex=True, sharey=True)
    for line, (pass_, causal) in zip(axes, shown, strict=True):
        for ax, d in zip(line, (64, 128), strict=True):
            here = pick(rows, pass_=pass_, causal=causal, head_dim=d)
            plots.lines(ax, here, "seq_len", "tflops", "implementation", LOOKS)
            plots.reference(ax, ceiling, "")
            ax.set_title(f"{pass_}, {d}, {'causal' if causal else 'no mask'}")
            panels.doubling_axis(ax)
            ax.set_ylim(bottom=0)
        line[0].set_ylabel("TFLOP/s")
    for ax in axes[-1]:
        ax.set_xlabel("tokens a sequence")
    panels.legend(figure, panels.handles(names, LOOKS))


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak beyond the inputs, end to end, bf16, one head of 64, by length and implementation."""
    here = pick(rows, kind="one head", dtype="bf16", head_dim=64, pass_="end_to_end")
    wide = here.pivot(index="seq_len", columns="implementation", values="peak_bytes")
    wide = wide[LOOKS.order(wide.columns)].astype(float).map(binary, na_action="ignore")
    wide = wide.rename(index=count, columns=LOOKS.label).rename_axis("tokens")
    return wide.reset_index()


def apart(rows: pd.DataFrame) -> pd.DataFrame:
    """End to end, bf16, heads of 64: time as called, the GPU's and the host's to issue it, ms."""
    here = pick(rows, kind="one head", dtype="bf16", head_dim=64, pass_="end_to_end")
    here = pick(here, seq_len=[128, 1024, 8192, 65536])
    place = here["implementation"].map(list(LOOKS).index)
    lines = [
        [LOOKS.label(r.implementation), count(r.seq_len)]
        + [digits(v, 3) for v in (r.called, r.ms, r.ms_host)]
        + ["host" if r.ms_host > r.ms else "GPU"]
        for r in here.assign(place=place).sort_values(["place", "seq_len"]).itertuples()
    ]
    columns = ["", "tokens", "as called", "GPU", "host", "bound by"]
    return pd.DataFrame(lines, columns=columns)


def coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """The sweep's timed cells of each implementation and dtype, and why the others have no time."""
    here = pick(rows, kind="one head")
    found = here.groupby(["implementation", "dtype"]).agg(
        timed=("ms", "count"),
        without=("ms", lambda c: c.isna().sum()),
        reason=("note", lambda c: "; ".join(n for n in c.dropna().unique() if n)[:110]),
    )
    return found.rename(index=LOOKS.label).reset_index()


def errors(rows: pd.DataFrame, dtype: str, head_dim: int) -> pd.DataFrame:
    """Relative error against float64, tensor by tensor; ``× 10``: scores ten times as large."""
    here = pick(rows, dtype=dtype, head_dim=head_dim)
    lines, columns = ["heads", "implementation"], ["score_scale", "tensor"]
    wide = here.pivot(index=lines, columns=columns, values="error").sort_index(axis=1)
    wide = wide.reindex(LOOKS.order(wide.index.levels[1]), level=1)
    wide.columns = [f"{t}{'' if s == 1 else f' × {s:.0f}'}" for s, t in wide.columns]
    wide = wide.map(lambda e: "n/a" if e != e else f"{e:.1e}")
    return wide.rename(index=LOOKS.label, level=1).rename_axis(["heads", ""]).reset_index()


def every(page, rows: pd.DataFrame, value: str, words: str, name: str) -> str:
    """The tables of one value, a folded one for each dtype and pass: lines by head size, length;
    of the implementations that have a kernel for it."""
    found = []
    for dtype in ("bf16", "fp32"):
        for pass_, title in PASSES.items():
            here = pick(rows, kind="one head", dtype=dtype, pass_=pass_)
            timed = set(here.dropna(subset=["ms"])["implementation"])
            frame = latency(pick(here, implementation=timed), ["head_dim", "seq_len"], value)
            label = f"tab-shapes-{name}-{dtype}-{pass_.replace('_', '-')}"
            found.append(str(page.table(frame, f"{dtype}, {title}: {words}", label, 0, 2)))
    return "\n\n".join(found)
