"""Traces of a training step: the rows of each phase with what its kernels add up to."""

import re
from collections import defaultdict
from functools import cache

import numpy as np
import pandas as pd

from a2lib.report import traces
from a2lib.report.drawing import Drawing, box, stroke, text
from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.page import pick
from a2lib.report.plots import label, stacked
from a2lib.report.style import COLOURS, INK, chart
from a2lib.report.units import digits, percent
from a2lib.theory.roofline import floor
from a2lib.theory.step_floor import compiled_step, eager_step, fused_step
from a2lib.theory.transformer import SIZES

SETTING = ["model", "context", "batch", "mode", "precision", "attention", "compile"]
TRACE = [*SETTING, "profiler"]
# Precision, attention, compile -> the way's name, and the step whose floor it has.
WAYS = {
    ("fp32", "eager", "none"): ("fp32", eager_step),
    ("fp32", "eager", "blocks"): ("fp32, compiled", compiled_step),
    ("bf16", "eager", "none"): ("bf16", eager_step),
    ("bf16", "flash", "blocks"): ("bf16, Flash, compiled", fused_step),
    ("bf16_weights", "flash", "blocks"): ("16-bit weights, Flash, compiled", fused_step),
}
GROUPS = {"matmul": "matmul", "attention": "flash", "copy": "copies", "optimizer": "adamw"}
SHOWN = {
    "matmul": "#0072b2",
    "attention": "#d55e00",
    "between matmuls": "#00825f",
    "copies and casts": "#808080",
    "AdamW": "#444444",
}
# What only adds the parts of a product that was divided, or clears a workspace.
NO_CALL = re.compile(r"split_k_kernel|reduce")
# Name and part of what clears memory, or whose name is not there beside a product.
CLEARS = re.compile(r"^Memset|^rest (.*(_proj|ffn\.w|lm_head)|ln)")
INSIDE = "attn.attention."
# What a block does between its matrix multiplies: the ranges that launch it; its name in
# theory/step_floor.py, eager or compiled; what Inductor's names have that hold it, the first of
# them counts.
BETWEEN = {
    "masked": (
        (INSIDE + "scores", INSIDE + "softmax"),
        r"masked|between",
        r"softmax",
    ),
    "gate": (("ffn",), "gate", r"silu"),
    "rope": (("attn", INSIDE + "values"), "rope", r"flip|neg_stack|transpose"),
    "norms": (("ln1", "ln2", "block"), "norms|residual and norm", r"rsqrt|add"),
}
PER_SCORE = 5  # compare, subtract, exponential, add, divide


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows of each phase ("step": all of them) with, in ms, the time of its kernels by class:
    ``matmul``, ``flash`` (fused attention), ``copies``, ``adamw``, ``between`` (the others) and
    ``total``; ``rest``, all but the first two, and their ``share``; the calls of its ``kernels``
    and ``matmuls``; ``top``, the kernel that takes most, with ``top_calls``, ``top_share`` and
    ``top_parts``; of a forward its parts (``scores``, ``values``, ``softmax``, ``casts``, those
    of BETWEEN); what is known by count (``_counted``); ``slow`` and ``quick``, the step by the
    slowest and the quickest of its timers, with ``idle_least`` and ``idle_most``; ``replay``, the
    step as a CUDA graph.
    """
    key = [*TRACE, "phase"]
    by = defaultdict(list)
    for one in traces.kernels(rows).to_dict("records"):
        for phase in (one["phase"], "step"):
            by[*(one[c] for c in TRACE), phase].append(one)
    rows = rows.assign(
        way=[WAYS.get(w, ("other",))[0] for w in zip(*(rows[c] for c in SETTING[4:]), strict=True)]
    )
    if by:
        found = [dict(zip(key, at, strict=True)) | _sums(at[-1], k) for at, k in by.items()]
        sums = pd.DataFrame(found).astype(
            {"context": rows["context"].dtype, "batch": rows["batch"].dtype}
        )
        rows = rows.merge(sums, on=key, how="left")
    rate, flops = copy_bandwidth(rows_of("ceiling")), ceilings(rows_of("ceiling"))
    rows = rows.join(pd.DataFrame([_counted(r, flops, rate) for r in rows.itertuples()]))
    rows["depth"] = rows["us_queued"] / 1e3 * rows["launches"] / rows["ms_busy"]
    case = [*SETTING, "phase"]
    steps = rows_of("benchmark")
    launched = steps[~steps["capture"] & (steps["warmup"] > 0)]
    timed = [rows.assign(ms=rows["ms_timer"]), launched, rows_of("compile_model")]
    timed = pd.concat([t[[*case, "ms"]] for t in timed if len(t)]).dropna()
    rows = rows.join(timed.groupby(case)["ms"].agg(quick="min", slow="max"), on=case)
    replayed = steps[steps["capture"] & (steps["status"] == "ok")].drop_duplicates(case)
    rows = rows.join(replayed.set_index(case)["ms"].rename("replay"), on=case)
    rows["idle_least"] = (1 - rows["ms_busy"] / rows["quick"]).clip(lower=0)
    rows["idle_most"] = (1 - rows["ms_busy"] / rows["slow"]).clip(lower=0)
    return rows


def _sums(phase: str, k: list[dict]) -> dict:
    """What the kernels of a phase add up to; by Python, as pandas is slow on so few."""

    def total(own, what: str = "ms") -> float:
        return sum(one[what] for one in own)

    kinds, names = defaultdict(list), defaultdict(list)
    for one in k:
        kinds[GROUPS.get(one["kind"], "between")].append(one)
        names[one["kernel"]].append(one)
    found = {name: total(kinds[name]) for name in (*GROUPS.values(), "between")}
    found |= {"total": total(k), "kernels": total(k, "calls")}
    found["rest"] = found["total"] - found["matmul"] - found["flash"]
    found["share"] = 1 - found["rest"] / found["total"]
    products = (o for o in kinds["matmul"] if not NO_CALL.search(o["kernel"]))
    found |= {"matmuls": total(products, "calls"), "split": total(kinds["matmul"], "calls")}
    cleared = (o for o in kinds["copies"] if CLEARS.search(f"{o['kernel']} {o['part']}"))
    found["memsets"] = total(cleared, "calls")
    names.pop("rest", None)
    if names:
        top, own = max(names.items(), key=lambda named: total(named[1]))
        found |= {"top": top, "top_calls": total(own, "calls")}
        found["top_share"] = total(own) / found["total"]
        found["top_parts"] = ", ".join(sorted({o["part"] for o in own} - {""}))
    if phase != "forward":
        return found
    for what, (parts, *_) in BETWEEN.items():
        launched = [o["part"] in parts and o["kind"] != "matmul" for o in k]
        own = [o for o, its in zip(k, launched, strict=True) if its or _fused(o["kernel"]) == what]
        found |= {what: total(own), f"{what}_kernels": total(own, "calls")}
    at = {p: defaultdict(float) for p in ("scores", "values", "softmax")}
    for one in k:
        if (part := one["part"].removeprefix(INSIDE)) in at:
            at[part][one["kind"]] += one["ms"]
    if all(at.values()):
        found |= {p: at[p]["matmul"] for p in ("scores", "values")}
        found["masking"] = sum(at["scores"].values()) - found["scores"]
        found["casts"] = at["softmax"].pop("copy", 0.0)
        found["softmax"] = sum(at["softmax"].values())
        found["softmax_ratio"] = found["softmax"] / (found["scores"] + found["values"])
    return found


@cache
def _fused(kernel: str) -> str:
    """What of BETWEEN a kernel of Inductor's holds."""
    held = (what for what, (*_, names) in BETWEEN.items() if re.search(names, kernel))
    return next(held, "") if kernel.startswith("triton_") else ""


def _counted(row, flops: dict[str, float], rate: float | None) -> dict:
    """Of a phase by count: ``counted_matmuls``; the bytes between matrix multiplies, in all
    (``moved``) and of BETWEEN; and the floors of both by what the GPU reaches, in ms. Of a forward:
    operations and bytes of the softmax and of the two multiplies around it."""
    way = (row.precision, row.attention, row.compile)
    if row.model not in SIZES or way not in WAYS:
        return {}
    shape, batch, context = SIZES[row.model], int(row.batch), int(row.context)
    mode = {"forward": ("forward",), "forward-backward": ("forward", "loss", "backward")}
    phases = mode.get(row.mode, ("forward", "loss", "backward", "optimizer"))
    phases = phases if row.phase == "step" else (row.phase,)
    step = [k for k in WAYS[way][1](shape, batch, context, row.precision) if k.phase in phases]
    matmuls, rest = ([k for k in step if bool(k.flops) is one] for one in (True, False))
    found = {
        "counted_matmuls": sum(k.count for k in matmuls),
        "moved": sum(k.count * (k.read + k.written) for k in rest),
    }
    if rate and (peak := flops.get(row.precision.removesuffix("_weights"))):
        limits = peak * 1e12, rate * 1e12
        least = [floor(part, *limits)["total"].ms for part in (matmuls, rest)]
        found |= {"floor_matmul": least[0], "floor_rest": least[1], "floor": sum(least)}
    if row.phase == "forward":
        for what, (_, names, _) in BETWEEN.items():
            own = [k for k in rest if k.count >= shape.num_layers and re.fullmatch(names, k.name)]
            found[f"{what}_bytes"] = sum(k.count * (k.read + k.written) for k in own)
        multiplies = [k for k in step if k.name == "scores"]  # of eager attention
        found["multiply_bytes"] = sum(k.count * (k.read + k.written) for k in multiplies)
        found["multiply_flops"] = sum(k.count * k.flops for k in multiplies)
        scores = shape.num_layers * batch * shape.num_heads * context**2 if multiplies else 0
        found["softmax_bytes"] = 8 * scores  # read and written, in fp32 in either precision
        found["softmax_flops"] = PER_SCORE * scores
    return found


def listed(k: pd.DataFrame, what: dict[str, str]) -> list[pd.DataFrame]:
    """A trace's kernels as texts, those of one percent of its time or more: summed by phase,
    class and part; and by name, each with what it is by the first pattern of ``what`` in it."""
    tables = []
    for by in ("part", "kernel"):
        sums = k.groupby(["phase", "kind", by])[["calls", "ms"]].sum().reset_index()
        sums["share"] = sums["ms"] / sums["ms"].sum()
        sums["each, µs"] = [digits(us, 3) for us in 1e3 * sums["ms"] / sums["calls"]]
        sums = sums[(sums["share"] >= 0.01) & (sums[by] != "rest")].sort_values("ms")[::-1]
        if by == "kernel":
            known = [next((w for p, w in what.items() if re.search(p, n)), "") for n in sums[by]]
            sums.insert(2, "what it is", known)
            sums["name"] = [f"`{name}`" for name in sums.pop(by)]
        sums["share"] = [percent(share, 1) for share in sums["share"]]
        sums["ms"] = [digits(ms, 3) for ms in sums["ms"]]
        tables.append(sums.rename(columns={"kind": "class", "part": "launched by"}))
    return tables


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by way, those of no way last, then from the smallest model on, then by context."""
    place = {n: i for i, n in enumerate([*(name for name, _ in WAYS.values()), *SIZES])}
    keys = [rows["way"].map(place).fillna(len(place)), rows["model"].map(place), rows["context"]]
    return rows.iloc[np.lexsort(keys[::-1])]


def tops(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each fp32 forward (phase "forward") and of it with its backward ("step") the row of one
    trace: the first by mode whose top kernel has its full name, as some cut names short ("…")."""
    cases = {"forward": "forward", "forward-backward": ["forward", "step"], "train-step": "step"}
    plain = {"way": "fp32", "profiler": "nsys"}
    found = pd.concat([pick(rows, **plain, mode=m, phase=p) for m, p in cases.items()])
    found = found[~found["top"].str.endswith("…")]
    return by_size(found.drop_duplicates(["model", "context", "phase"]))


@chart(height=5.0)
def ways(figure, rows: pd.DataFrame):
    """Time of the kernels of a step by class, a bar for each way, the models below each other."""
    names = dict(zip(("matmul", "flash", "between", "copies", "adamw"), SHOWN, strict=True))
    panels = figure.subplots(2, 1)
    for ax, (model, own) in zip(panels, rows.groupby("model", sort=False), strict=True):
        own = by_size(own).set_index("way")[list(names)].rename(columns=names)
        total = own.sum(axis=1)
        share = (own["matmul"] + own["attention"]) / total
        said = [f"{digits(t, 3)}, {percent(s)}" for t, s in zip(total, share, strict=True)]
        stacked(ax, own, SHOWN, text=said, xlabel="time of kernels in a step (ms)")
        ax.set_xlim(0, 1.3 * total.max())
        ax.grid(False)  # the text crosses it
        ax.set_title(model, loc="left")
    panels[0].set_xlabel("")
    traces.legend(figure, SHOWN)


@chart(height=3.4)
def roofline(figure, rows: pd.DataFrame, bandwidth: float, flops: dict[str, float]):
    """Operations a second over operations a byte of the softmax and of the two multiplies around
    it, a mark for each row of a forward, under what memory and arithmetic reach (TB/s, TFLOP/s)."""
    low, high, top = 0.2, 1000.0, max(flops.values())
    ax = figure.subplots()
    ax.plot([low, top / bandwidth], [low * bandwidth, top], color=INK, linewidth=1.4)
    label(ax, "memory", (4, 4 * bandwidth), (-8, 0), ha="right")
    for precision in rows["precision"].unique():
        flat = flops[precision]
        ax.plot([flat / bandwidth, high], [flat, flat], color=INK, linewidth=1.4)
        label(ax, f"{precision} arithmetic", (high, flat), (0, 4), ha="right")
    for row in rows.itertuples():
        for kind, ms in (("softmax", row.softmax), ("multiply", row.scores + row.values)):
            work, moved = getattr(row, f"{kind}_flops"), getattr(row, f"{kind}_bytes")
            at, colour = (work / moved, work / ms / 1e9), COLOURS[3 if kind == "softmax" else 1]
            full = "full" if row.precision == "fp32" else "none"
            ax.plot(*at, "o", color=colour, markersize=8, fillstyle=full, zorder=3)
            if kind == "softmax" and row.precision == "fp32":
                label(ax, "softmax", at, (10, -4), va="top")
            elif kind == "multiply":
                label(ax, f"two multiplies, {row.precision}", at, (10, -4), va="top")
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low * bandwidth, 2.2 * top))
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.set_yticks([1, 10, 100], ["1", "10", "100"])
    ax.minorticks_off()
    ax.set(xlabel="operations a byte", ylabel="TFLOP/s")


def queue() -> Drawing:
    """Python launches, the GPU runs later: a kernel of the forward below the range of backward."""
    pale, blue, grey = "fill: #eeeeee", "fill: #0072b2", "fill: #808080"
    made = [text(2, 37, "Python"), text(2, 101, "GPU")]
    for x, width, name in ((62, 104, "forward"), (168, 150, "backward")):
        made.append(box(x, 22, width, 22, pale, name))
    for i in range(12):
        launch, run, width = 68 + 20 * i, 76 + 30 * i, 28
        if i > 4:
            launch, run, width = 174 + 20 * (i - 5), 226 + 18 * (i - 5), 16
        made.append(box(run, 86, width, 22, blue if i < 5 else grey))
        made.append(stroke(f"M{launch} 40 V48", "#000000", 1.6))
        if i in (0, 3, 4, 11):
            made.append(stroke(f"M{launch} 46 L{run + 2} 86", "#555555", 1.0))
    made.append(stroke("M168 114 V118 H224 V114", "#555555", 1.0))
    words = "launched in the forward, run during the backward"
    return Drawing([*made, text(196, 132, words, anchor="middle")], 140)
