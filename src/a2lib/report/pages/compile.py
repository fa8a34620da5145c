"""torch.compile: what it gains, beside the passes over memory that it leaves out."""

import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.panels import doubling_axis, name_ends
from a2lib.report.plots import label, lines, reference
from a2lib.report.style import COLOURS, chart, palette
from a2lib.report.traces import kernels
from a2lib.theory.eager import attention_kernels, moves
from a2lib.theory.roofline import floor

LENGTHS = (256, 1024, 4096, 8192, 16384)
MODELS = ("small", "medium", "large", "xl25", "2.7B")
BATCH = 8
LOOKS = palette((16, 32, 64, 128))  # by head size


def attention(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The attention rows with ``gain``, eager's GPU time over compiled's of the same case (1 for
    eager), ``floor``, the least time of its kernels in ms, ``expected``, eager's floor over
    compiled's, and ``matrices``, the N x N matrices that it moves."""
    rates, bandwidth = ceilings(rows_of("ceiling")), copy_bandwidth(rows_of("ceiling"))
    key = ["written", "dtype", "batch", "head_dim", "seq_len", "pass"]
    rows = rows.copy()
    rows["floor"] = [
        _floor(*found, rates, bandwidth)
        for found in rows[["implementation", *key]].itertuples(index=False, name=None)
    ]
    eager = rows[rows["implementation"] == "eager"].set_index(key)[["ms_graph", "floor"]]
    base = rows[key].join(eager, on=key)
    rows["gain"] = base["ms_graph"] / rows["ms_graph"]
    rows["expected"] = base["floor"] / rows["floor"]
    rows["matrices"] = [
        moves(i, w, p) if not (i == "compile" and w == "heads") else None
        for i, w, p in rows[["implementation", "written", "pass"]].itertuples(index=False)
    ]
    return rows


def _floor(implementation, written, dtype, batch, d, n, pass_, rates, bandwidth) -> float:
    size = {"fp32": 4, "bf16": 2}[dtype]
    made = attention_kernels(implementation, written, pass_, int(batch), int(n), int(d), size)
    return floor(made, rates[dtype] * 1e12, bandwidth * 1e12)["total"].ms


def models(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The models' rows with ``gain``, eager's time over each of the same case, and ``pays``, the
    steps after which what compiling takes has paid."""
    key = ["model", "context", "batch", "mode", "precision", "attention", "phase"]
    rows = rows.copy()
    eager = rows[rows["compile"] == "none"].set_index(key)[["ms", "ms_cold"]]
    base = rows[key].join(eager, on=key)
    rows["gain"] = base["ms"] / rows["ms"]
    extra = rows["ms_cold"] - base["ms_cold"]
    spared = base["ms"] - rows["ms"]
    rows["pays"] = (extra / spared).where((extra > 0) & (spared > 0))
    return rows


def shares(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Milliseconds of matrix multiplies and of everything else in a traced train-step at 512
    tokens, and the multiplies' ``share``, by model, precision and compile; by Nsight Systems."""
    traced = kernels(rows)
    if traced.empty:
        return rows.iloc[:0]
    few = traced[(traced["mode"] == "train-step") & (traced["context"] == 512)]
    few = few[few["profiler"] == "nsys"]
    few = few.assign(what=few["kind"].eq("matmul").map({True: "matmul", False: "rest"}))
    wide = few.pivot_table(
        "ms", ["model", "precision", "attention", "compile"], "what", aggfunc="sum"
    )
    wide = wide.reindex(columns=["matmul", "rest"])
    return wide.assign(share=wide["matmul"] / wide.sum(axis=1)).reset_index()


@chart(height=2.9, room=0.1)
def by_length(figure, rows: pd.DataFrame):
    """The gain of compiled attention on the GPU against the length, a line a head size."""
    few = rows[(rows["implementation"] == "compile") & (rows["seq_len"] >= 1024)]
    axes = figure.subplots(1, 2, sharey=True)
    for ax, pass_ in zip(axes, ("forward", "backward"), strict=True):
        ends = lines(ax, few[few["pass"] == pass_], "seq_len", "gain", "head_dim", LOOKS)
        doubling_axis(ax)
        ax.axhline(1, color="#000000", linewidth=0.8)
        ax.set(title=pass_, xlabel="tokens", ylim=(0.9, None))
    axes[0].set_ylabel("times as fast as eager")
    return lambda: name_ends(figure, axes[-1], ends, LOOKS)


@chart(height=3.0)
def by_share(figure, rows: pd.DataFrame, traced: pd.DataFrame):
    """The gain of a compiled step against the multiplies' share of eager's kernel time, with the
    line of a compiler that makes the rest twice as fast."""
    eager = traced[(traced["compile"] == "none") & (traced["attention"] == "eager")]
    ax = figure.subplots()
    share = [s / 100 for s in range(0, 101)]
    ax.plot(share, [1 / (s + (1 - s) / 2) for s in share], color=COLOURS[4], linewidth=1)
    ax.annotate("all but the multiplies twice as fast", (0.03, 1.99), va="bottom")
    steps = rows[(rows["compile"] == "blocks") & (rows["phase"] == "wall")]
    steps = steps[steps["context"] == 512][["model", "precision", "gain"]]
    for r in eager.merge(steps).itertuples():
        ax.plot(r.share, r.gain, "o", color=COLOURS[0], markersize=6)
        above = 5 if r.share > 0.85 else 14
        label(ax, f"{r.model}, {r.precision}", (r.share, r.gain), (6, above))
    ax.set(xlim=(0, 1.12), ylim=(0.9, 2.3), xlabel="share of matrix multiplies, eager")
    ax.set_ylabel("times as fast as eager")
    reference(ax, 1, "")
