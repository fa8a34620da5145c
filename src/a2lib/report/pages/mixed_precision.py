"""Mixed precision: sums as exact arithmetic predicts them, and what bf16 gains by model size."""

import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.plots import label
from a2lib.report.style import COLOURS, INK, chart
from a2lib.theory.floating import Loop, decimal, handout_loops
from a2lib.theory.transformer import SIZES, forward_flops, parameter_count

MODELS = ("small", "medium", "large", "xl25", "2.7B", "10B")
BATCH, CONTEXT = 4, 512
# How often an eager forward reads or writes a tensor of each kind beside its matrix multiplies.
TRAVERSALS = {"residual": 20, "hidden": 5, "scores": 12}
CAST_BYTES = 6  # autocast reads a weight in fp32 and writes it in bf16, in every forward


def loop(total: str, addend: str, terms: int = 1000) -> Loop:
    """The handout's loop of these formats."""
    of = total, addend, terms, False
    return next(x for x in handout_loops() if (x.sum, x.addend, x.terms, x.cast) == of)


def sums(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The loops with ``predicted``, the result by exact arithmetic, every digit of it."""
    found = {
        (one.sum, one.addend, one.cast, one.terms, one.step): decimal(one.result())
        for one in handout_loops()
    }
    keys = rows[["sum_dtype", "addend_dtype", "cast", "terms", "addend"]]
    return rows.assign(predicted=[found.get(tuple(key)) for key in keys.itertuples(index=False)])


def gains(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """A row for each model, pass and precision: the GPU's time in eager mode at 512 tokens, of a
    step replayed from a CUDA graph (``ms``; a backward is what forward and backward take beyond
    the forward), ``gain``, fp32's time over it, and of a forward ``estimate``, the gain by counting
    matrix multiplies at the measured rate and other operations at the measured bandwidth. A model
    whose bf16 backward was timed as called has the passes of that step as called, too."""
    few = rows[(rows["context"] == CONTEXT) & (rows["compile"] == "none")]
    few = few[(few["attention"] == "eager") & few["model"].isin(MODELS)]
    few = few[few["mode"].isin(["forward", "forward-backward"])]
    launched = few[~few["capture"] & (few["mode"] == "forward-backward")]
    few = few[few["capture"] & (few["phase"] == "step")]
    wide = few.pivot_table("ms", ["model", "precision"], "mode", sort=False).dropna(how="all")
    if wide.empty:
        return rows.iloc[:0]
    wide["backward"] = wide["forward-backward"] - wide["forward"]
    both = launched[launched["precision"] == "bf16"].dropna(subset=["ms"])["model"]
    launched = launched[launched["model"].isin(both)]
    called = launched.pivot_table("ms", ["model", "precision"], "phase")
    called = called.reindex(columns=["forward", "backward"]).add_suffix(" as called")
    wide = wide.join(called)
    passes = wide.columns.drop("forward-backward")
    long = wide[passes].stack().rename("ms").dropna().reset_index()
    long = long.rename(columns={"mode": "pass", "level_2": "pass"})
    base = long[long["precision"] == "fp32"].set_index(["model", "pass"])["ms"]
    long["gain"] = long.join(base.rename("fp32"), on=["model", "pass"])["fp32"] / long["ms"]
    known = (long["pass"] == "forward") & (long["precision"] == "bf16")
    ceiling = rows_of("ceiling")
    guess = long["model"].map({m: estimate(m, ceiling)["bf16"] for m in set(long["model"])})
    long["estimate"] = guess.where(known)
    same = {c: few[c].iloc[0] for c in ("device", "file", "local", "run")}
    return long.assign(status="ok", **same)


def estimate(model: str, ceiling: pd.DataFrame) -> dict[str, float]:
    """The gain of a forward over fp32, by precision, and the share of matrix multiplies in fp32."""
    rates, bandwidth = ceilings(ceiling), copy_bandwidth(ceiling)
    shape = SIZES[model]
    tokens = BATCH * CONTEXT
    elements = {"residual": tokens * shape.d_model, "hidden": tokens * shape.d_ff}
    elements["scores"] = BATCH * shape.num_heads * CONTEXT**2
    moved = 4 * shape.num_layers * sum(TRAVERSALS[k] * n for k, n in elements.items())
    casts = CAST_BYTES * (parameter_count(shape) - shape.vocab_size * shape.d_model)
    flops = forward_flops(shape, BATCH, CONTEXT)
    ms = {
        "fp32": flops / rates["fp32"] / 1e9 + moved / bandwidth / 1e9,
        "bf16": flops / rates["bf16"] / 1e9 + (moved + casts) / bandwidth / 1e9,
    }
    return {"bf16": ms["fp32"] / ms["bf16"], "share": flops / rates["fp32"] / 1e9 / ms["fp32"]}


@chart(height=3.0, room=0.12)
def running(figure):
    """10,000 times 0.001 added up in three formats, as exact arithmetic predicts them."""
    colours = dict(zip(("fp32", "fp16", "bf16"), (COLOURS[1], COLOURS[2], COLOURS[0]), strict=True))
    ax, terms = figure.subplots(), 10_000
    for name, colour in colours.items():
        found = loop(name, name, terms).partial_sums()
        at = [*range(0, terms, 40), terms - 1]
        ax.plot([i + 1 for i in at], [float(found[i]) for i in at], color=colour, linewidth=2)
        label(ax, name, (terms, float(found[-1])), va="center")
    ax.plot([0, terms], [0, 10], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlim=(0, terms), ylim=(0, 11), xlabel="additions of 0.001 (dashed: exact)")
    ax.set_ylabel("running sum")
    ax.xaxis.set_major_formatter("{x:,.0f}")


@chart(height=3.0, room=0.12)
def by_size(figure, rows: pd.DataFrame):
    """What bf16 gains in forward and backward, smallest model first, beside the estimate."""
    few = rows[rows["precision"] == "bf16"].set_index(["pass", "model"])
    models = [m for m in MODELS if ("forward", m) in few.index]
    ax = figure.subplots()
    drawn = (
        ("estimate", "forward", "estimate", COLOURS[4], "--", ""),
        ("forward", "forward", "gain", COLOURS[0], "-", "o"),
        ("backward", "backward", "gain", COLOURS[1], "-", "^"),
    )
    for name, pass_, column, colour, dashes, marker in drawn:
        here = [
            (i, few.loc[(pass_, m), column])
            for i, m in enumerate(models)
            if (pass_, m) in few.index
        ]
        x, y = zip(*here, strict=True)
        ax.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=5)
        at = (34, -3) if name == "backward" else (7, 0)  # clear of the forward's line
        label(ax, name, (x[-1], y[-1]), at, va="center", color=colour)
    ax.set_xticks(range(len(models)), map(TITLES.get, models))
    ax.set(ylim=(0, None), ylabel="times as fast as fp32", xlim=(-0.3, len(models) - 0.2))
