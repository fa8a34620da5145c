"""The atlas of attention's shapes: maps, the FlashAttention-3 paper's shapes, counts and tables."""

import pandas as pd

from a2lib.report import panels, plots
from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, Missing, pick
from a2lib.report.pages.flash import FA4, LOOKS, OWN, PART, PASSES, against
from a2lib.report.pages.flash_tables import latency
from a2lib.report.style import chart
from a2lib.report.units import binary, count, digits, span, times

PAPER_SHOWN = (OURS, "sdpa_cudnn", "flex", "sdpa_flash", FA4)
FEW_ROWS = {PART, FA4}  # not measured at every shape or pass
DTYPES = ("bf16", "fp32")


def ratios(rows: pd.DataFrame, dtype: str, pass_: str = "end_to_end") -> pd.DataFrame:
    """Return a2lib's GPU time over that of the fastest peer, one head: lengths by head sizes."""
    a2lib = pick(rows, kind="one head", dtype=dtype, pass_=pass_, implementation=OURS)
    a2lib = a2lib.assign(ratio=a2lib["ms"] / a2lib["best"])
    return a2lib.pivot(index="seq_len", columns="head_dim", values="ratio").astype(float)


def slower(rows: pd.DataFrame, dtype: str, pass_: str) -> set:
    """Return (length, head size) where a2lib is more than 2 % slower than the fastest peer."""
    return {at for at, ratio in ratios(rows, dtype, pass_).stack().items() if ratio > LEVEL}


@chart(height=3.9)
def maps(figure, rows: pd.DataFrame, dtype: str):
    """Draw ``ratios`` of the three passes side by side, in percent."""
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (pass_, title) in zip(axes, PASSES.items(), strict=True):
        plots.heat(ax, ratios(rows, dtype, pass_).rename(index=count))
        ax.set(title=title, xlabel="head size")
    for ax in axes[1:]:
        ax.invert_yaxis()  # each heat() turned the axis that all share
    axes[0].set_ylabel("tokens")


def standing(rows: pd.DataFrame) -> pd.DataFrame:
    """Return in how many shapes a2lib is faster, tied (within 2 %) and slower, which peer is faster
    most often, and a2lib's largest ratio; a line for each dtype and pass."""
    lines = []
    for dtype in DTYPES:
        for pass_, title in PASSES.items():
            a2lib = pick(rows, kind="one head", dtype=dtype, pass_=pass_, implementation=OURS)
            ratio = (a2lib["ms"] / a2lib["best"]).astype(float)
            peers, worst = a2lib["peer"][ratio > LEVEL], a2lib.loc[ratio.idxmax()]
            often = [f"{LOOKS.label(i)} ({n})" for i, n in peers.value_counts().items()]
            faster, tied = ratio < 1 / LEVEL, ratio.between(1 / LEVEL, LEVEL)
            counts = [faster.sum(), tied.sum(), len(peers)]
            place = f"{digits(ratio.max(), 3)} at {count(worst['seq_len'])}, {worst['head_dim']}"
            lines.append([f"{dtype} {title}", *counts, often[0] if often else None, place])
    names = ["of 40 shapes", "faster", "tied", "slower", "slower than"]
    return pd.DataFrame(lines, columns=[*names, "largest ratio at (tokens, d)"])


def two_gpus(h100: pd.DataFrame, h200: pd.DataFrame, name: str, dtype: str, pass_: str):
    """Return an implementation's time on the H100 over that on the H200, shape by shape."""
    where = {"kind": "one head", "dtype": dtype, "implementation": name, "pass_": pass_}
    wide = [
        pick(rows, **where).pivot(index="seq_len", columns="head_dim", values="ms").astype(float)
        for rows in (h100, h200)
    ]
    return (wide[0] / wide[1]).stack().dropna()


def machines(h100: pd.DataFrame, h200: pd.DataFrame) -> pd.DataFrame:
    """Return each implementation's times on the H100 over those on the H200, as ranges."""
    lines = []
    for dtype in DTYPES:
        for name in LOOKS:
            try:
                passes = [two_gpus(h100, h200, name, dtype, pass_) for pass_ in PASSES]
            except Missing:
                continue
            if all(map(len, passes)):
                cells = [span(ratio, times, 3) for ratio in passes]
                lines.append([f"{dtype}, {LOOKS.label(name)}", *cells])
    return pd.DataFrame(lines, columns=["H100 over H200", *PASSES.values()])


def paper_ratios(rows: pd.DataFrame, pass_: str) -> pd.Series:
    """Return a2lib's time over the fastest peer's at the paper's shapes, by mask, head, length."""
    a2lib = pick(rows, kind="paper", implementation=OURS, pass_=pass_)
    index = pd.MultiIndex.from_frame(a2lib[["causal", "head_dim", "seq_len"]])
    return against(rows, kind="paper", pass_=pass_).set_axis(index)


@chart(height=8.0)
def paper(figure, rows: pd.DataFrame, ceiling: float):
    """Draw TFLOP/s at the FlashAttention-3 paper's shapes: panels by pass, mask and head size; a
    dashed line at ``ceiling``, the best matmul."""
    rows = pick(rows, kind="paper", implementation=PAPER_SHOWN)
    names = LOOKS.order(rows["implementation"])
    shown = [(p, c) for p in OWN for c in (True, False)]
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
        ax.set_xlabel("tokens per sequence")
    panels.legend(figure, panels.handles(names, LOOKS), columns=5)


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the peak beyond the inputs of both passes, bf16, one head of 64, by length."""
    here = pick(rows, kind="one head", dtype="bf16", head_dim=64, pass_="end_to_end")
    here = here[~here["implementation"].isin(FEW_ROWS)]
    wide = here.pivot(index="seq_len", columns="implementation", values="peak_bytes")
    wide = wide[LOOKS.order(wide.columns)].astype(float).map(binary, na_action="ignore")
    wide = wide.rename(index=count, columns=LOOKS.label).rename_axis("tokens")
    return wide.reset_index()


def apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, of both passes in bf16 with one head of 64, the time launched from Python, the GPU
    time and the launch cost, ms."""
    here = pick(rows, kind="one head", dtype="bf16", head_dim=64, pass_="end_to_end")
    here = pick(here, seq_len=[128, 1024, 8192, 65536])
    place = here["implementation"].map(list(LOOKS).index)
    lines = [
        [LOOKS.label(r.implementation), count(r.seq_len)]
        + [digits(v, 3) for v in (r.called, r.ms, r.ms_host)]
        + ["launches" if r.ms_host > r.ms else "GPU"]
        for r in here.assign(place=place).sort_values(["place", "seq_len"]).itertuples()
    ]
    columns = ["", "tokens", "launched", "GPU", "launch cost", "limited by"]
    return pd.DataFrame(lines, columns=columns)


def errors(rows: pd.DataFrame, dtype: str, head_dim: int) -> pd.DataFrame:
    """Return relative errors against float64 by tensor; ``× 10``: scores ten times as large."""
    here = pick(rows, dtype=dtype, head_dim=head_dim)
    lines, columns = ["heads", "implementation"], ["score_scale", "tensor"]
    wide = here.pivot(index=lines, columns=columns, values="error").sort_index(axis=1)
    wide = wide.reindex(LOOKS.order(wide.index.levels[1]), level=1)
    wide.columns = [f"{t}{'' if s == 1 else f' × {s:.0f}'}" for s, t in wide.columns]
    wide = wide.map(lambda e: "n/a" if e != e else f"{e:.1e}".replace("e-0", "e-"))
    return wide.rename(index=LOOKS.label, level=1).rename_axis(["heads", ""]).reset_index()


def every(page, rows: pd.DataFrame, value: str, name: str) -> str:
    """Return the tables of one value for each dtype and pass: lines by head size and length, of the
    attentions that have a kernel for it."""
    tables = []
    for dtype in DTYPES:
        for pass_, title in PASSES.items():
            here = pick(rows, kind="one head", dtype=dtype, pass_=pass_)
            timed = set(here.dropna(subset=["ms"])["implementation"]) - FEW_ROWS
            frame = latency(pick(here, implementation=timed), ["head_dim", "seq_len"], value)
            label = f"tab-shapes-{name}-{dtype}-{pass_.replace('_', '-')}"
            tables.append(str(page.table(frame, f"{dtype}, {title}, ms", label, 0, 2, fold=False)))
    return "\n\n".join(tables)


def every_paper(page, rows: pd.DataFrame) -> str:
    """Return the tables of TFLOP/s at the paper's shapes."""
    tables = []
    for pass_ in OWN:
        for causal in (True, False):
            here = pick(rows, kind="paper", pass_=pass_, causal=causal)
            frame = latency(here, ["head_dim", "seq_len"], "tflops")
            words = f"{pass_}, {'causal' if causal else 'no mask'}, TFLOP/s"
            label = f"tab-shapes-paper-{pass_}-{str(causal).lower()}"
            tables.append(str(page.table(frame, words, label, 0, 2, fold=False)))
    return "\n\n".join(tables)
