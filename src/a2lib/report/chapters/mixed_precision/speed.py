"""Whole models in fp32, TF32 and bf16: what arithmetic expects, and the benchmark's rows."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, provenance, style
from a2lib.report.chapters.mixed_precision.rows import MISSING, PRECISIONS, Mixed, named
from a2lib.report.data import PUBLISHED
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table, shown
from a2lib.theory.transformer import SIZES, Shape, forward_flops, parameter_count

BATCH = 4
MODELS = tuple(name for name in SIZES if name != "8B")  # that one is the leaderboard's of 2026
CONTEXT = 512
PASSES = ("forward", "backward")
MODES = ("train-step", "forward-backward", "forward")
KEY = ("model", "context", "mode", "precision", "phase")
# How often an eager forward reads or writes, in fp32, per element of: the residual stream (two
# norms of 7, two additions of 3), the FFN's hidden vector (silu 2, product 3), the scores.
TRAVERSALS = {"residual": 20, "hidden": 5, "scores": 12}
CAST_BYTES = 6  # of a weight: its fp32 is read, its bf16 written
HOST = 0.9  # the host takes this share of a time or more: it is the host's


def elementwise_bytes(shape: Shape, context: int, batch: int = BATCH) -> int:
    """Bytes that the operations beside the products move in an eager forward, all in fp32."""
    tokens = batch * context
    elements = {
        "residual": tokens * shape.d_model,
        "hidden": tokens * shape.d_ff,
        "scores": batch * shape.num_heads * context**2,
    }
    return 4 * shape.num_layers * sum(TRAVERSALS[name] * n for name, n in elements.items())


def estimate(mixed: Mixed, model: str, context: int) -> dict[str, float] | None:
    """Precision -> ms that a forward takes the GPU: products at the measured rate, the rest at the
    measured bandwidth; None where those are not measured.

    TF32's rate is bf16's times the ratio that the maker states.
    """
    rates = metrics.ceilings(mixed.ceiling_rows)
    bandwidth = metrics.copy_bandwidth(mixed.ceiling_rows)
    if bandwidth is None or not {"fp32", "bf16"} <= set(rates):
        return None
    rates["tf32"] = rates["bf16"] * mixed.sheet("tf32_dense") / mixed.sheet("bf16_dense")
    shape = SIZES[model]
    flops, rest = forward_flops(shape, BATCH, context), elementwise_bytes(shape, context)
    casts = {"bf16": CAST_BYTES * (parameter_count(shape) - shape.vocab_size * shape.d_model)}
    return {
        p: flops / rates[p] / 1e9 + (rest + casts.get(p, 0)) / bandwidth / 1e9 for p in PRECISIONS
    }


def expected(mixed: Mixed, caption: str, label: str, context: int = CONTEXT) -> Table:
    """The estimate of every size: share of the products in fp32, and the gain of TF32 and bf16."""
    rates = metrics.ceilings(mixed.ceiling_rows)
    lines = []
    for model in MODELS:
        ms = estimate(mixed, model, context)
        if ms is None:
            continue
        products = forward_flops(SIZES[model], BATCH, context) / rates["fp32"] / 1e9
        lines.append([
            model, f"{products / ms['fp32']:.0%}", *(f"{style.digits(ms[p])}" for p in PRECISIONS),
            *(f"{ms['fp32'] / ms[p]:.1f}×" for p in PRECISIONS[1:]),
        ])  # fmt: skip
    columns = ["model", "products' share of fp32", *(f"{p} (ms)" for p in PRECISIONS),
               *(f"gain of {p}" for p in PRECISIONS[1:])]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def steps(mixed: Mixed) -> pd.DataFrame:
    """The benchmark's rows that compare precisions: eager, not compiled, batch 4, after the longest
    warm-up; of forward and backward."""
    rows = mixed.steps
    if not len(rows):
        return pd.DataFrame(columns=[*KEY, "status", "ms"])
    plain = rows[
        (rows["attention"] == "eager") & (rows["compile"] == "none")
        & (rows["capture"].astype(str).str.lower() == "false")
        & (rows["batch"].astype(int) == BATCH) & rows["phase"].isin(PASSES)
    ]  # fmt: skip
    plain = plain.sort_values("warmup").drop_duplicates(list(KEY), keep="last")
    return plain.assign(context=plain["context"].astype(int))


def table(mixed: Mixed, pass_: str, caption: str, label: str) -> Table:
    """A pass of every size and context in each precision, and the gain over fp32."""
    rows = steps(mixed)
    contexts = sorted(rows["context"].unique().tolist()) or [CONTEXT]
    lines = []
    for model in MODELS:
        for context in contexts:
            found = _found(rows, model, context, pass_)
            cells = [_time(found.get(p)) for p in PRECISIONS]
            gains = [_gain(found, p) for p in PRECISIONS[1:]]
            lines.append([model, style.tokens(context), *cells, *gains])
    columns = ["model", "context", *(f"{p} (ms)" for p in PRECISIONS),
               *(f"gain of {p}" for p in PRECISIONS[1:])]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=1, keys=2)


def gains(mixed: Mixed, context: int, pass_: str) -> dict[str, float]:
    """Model -> the time in fp32 over that in bf16, of the models that have both."""
    rows, made = steps(mixed), {}
    for model in MODELS:
        found = _found(rows, model, context, pass_)
        if _has(found, "fp32") and _has(found, "bf16"):
            made[model] = found["fp32"].ms / found["bf16"].ms
    return made


def trend(mixed: Mixed) -> Markdown:
    """The gain of the smallest and the largest size, by pass, and whether it grows all the way."""
    rows = steps(mixed)
    text = []
    for context in sorted(rows["context"].unique().tolist()):
        for pass_ in PASSES:
            made = list(gains(mixed, context, pass_).items())
            if len(made) < 2:
                continue
            values = [gain for _, gain in made]
            grows = "growing with every size" if values == sorted(values) else "not at every step"
            text.append(
                f"at {style.tokens(context)} tokens, {pass_}, from {values[0]:.2f}× ({made[0][0]}) "
                f"to {values[-1]:.2f}× ({made[-1][0]}), {grows}"
            )
    if not text:
        return Markdown(
            f"The times of whole models in each precision are {MISSING} on {named(PUBLISHED)}; "
            "what follows is the estimate."
        )
    return Markdown(f"The gain of bf16 over fp32: {'; '.join(text)}.")


def hosts(mixed: Mixed) -> Markdown:
    """Which of the bf16 times in the tables are the host's."""
    rows = steps(mixed)
    known = [
        (model, row)
        for model in MODELS for context in sorted(rows["context"].unique().tolist())
        for pass_ in PASSES
        if (row := _found(rows, model, context, pass_).get("bf16")) and row.status == "ok"
        and not pd.isna(row.ms_host)
    ]  # fmt: skip
    if not known:
        return Markdown(f"Whether the host or the GPU sets these times is {MISSING}.")
    bound = [model for model, row in known if row.ms_host >= HOST * row.ms]
    text = (
        f"In bf16 the host takes {HOST:.0%} of the time or more in {len(bound)} of {len(known)} "
        "rows"
    )
    if bound:
        text += f" ({listed(list(dict.fromkeys(bound)))}): there faster products gain nothing"
    return Markdown(f"{text}.")


def against_estimate(mixed: Mixed) -> Markdown:
    """The measured gain of the forward beside the estimated one, where both are there."""
    rows, text = steps(mixed), []
    for context in sorted(rows["context"].unique().tolist()):
        for model, gain in gains(mixed, context, "forward").items():
            ms = estimate(mixed, model, context)
            if ms:
                text.append(f"{model} at {style.tokens(context)}: {gain:.2f}× measured, "
                            f"{ms['fp32'] / ms['bf16']:.2f}× estimated")  # fmt: skip
    if not text:
        return Markdown(f"The estimate has nothing to be held against: {MISSING}.")
    return Markdown(f"Forward, {'; '.join(text)}.")


def published(mixed: Mixed, caption: str, label: str) -> Table:
    """The gains that public writeups report, computed from the times they print."""
    rows = pick(mixed.reference, table="times")
    lines = []
    for (device, model, context), group in rows.groupby(["device", "model", "context"], sort=False):
        cells = []
        for pass_ in PASSES:
            times = {p: metrics.time_of(group, precision=p, pass_=pass_) for p in ("fp32", "bf16")}
            cells += [style.digits(times["fp32"]), style.digits(times["bf16"]),
                      f"{times['fp32'] / times['bf16']:.2f}×"]  # fmt: skip
        lines.append([device, model, style.tokens(float(context)), *cells])
    columns = ["device", "model", "context"]
    for pass_ in PASSES:
        columns += [f"{pass_} fp32 (ms)", f"{pass_} bf16 (ms)", f"{pass_} gain"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=3)


def published_trend(mixed: Mixed) -> Markdown:
    """Where the published times have bf16 slower than fp32, and where most gained."""
    rows = pick(mixed.reference, table="times")
    made = {}
    for (device, model, context, pass_), group in rows.groupby(
        ["device", "model", "context", "pass"], sort=False
    ):
        times = [metrics.time_of(group, precision=p) for p in ("fp32", "bf16")]
        made[device, model, int(context), pass_] = times[0] / times[1]
    slower = [key for key, gain in made.items() if gain < 1]
    (device, model, context, pass_), gain = max(made.items(), key=lambda item: item[1])
    models = [name for name in MODELS if any(name == key[1] for key in slower)]
    return Markdown(
        f"As published, bf16 is slower than fp32 in {len(slower)} of {len(made)} cases "
        f"({listed(models)}), and gains most, {gain:.2f}×, in the {pass_} of {model} at "
        f"{style.tokens(context)} tokens on {device}."
    )


def source(mixed: Mixed) -> Markdown:
    """The line under the tables of whole models."""
    rows = steps(mixed)
    if "run" not in rows:
        return Markdown(provenance.block("No rows yet."))
    return provenance.source(rows, mixed.runs)


def _found(rows: pd.DataFrame, model: str, context: int, pass_: str) -> dict:
    """Precision -> its row, all of one mode: the first that has both fp32 and bf16."""
    mine = rows[(rows["model"] == model) & (rows["context"] == context) & (rows["phase"] == pass_)]
    by_mode = [{r.precision: r for r in pick(mine, mode=mode).itertuples()} for mode in MODES]
    both = [found for found in by_mode if _has(found, "fp32") and _has(found, "bf16")]
    return next(iter([*both, *filter(None, by_mode)]), {})


def _has(found: dict, precision: str) -> bool:
    return precision in found and found[precision].status == "ok"


def _time(row) -> str:
    return MISSING if row is None else shown(row)


def _gain(found: dict, precision: str) -> str:
    if not (_has(found, "fp32") and _has(found, precision)):
        return "–"
    return f"{found['fp32'].ms / found[precision].ms:.2f}×"
