"""Whole models in fp32, TF32 and bf16: what arithmetic expects, the times as called, and those that
others print. ``gains`` has the GPU's own times."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, provenance, style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.measured import HOST
from a2lib.report.chapters.mixed_precision.rows import MISSING, PRECISIONS, Mixed
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING as BLANK
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
# The precisions whose launches are no fewer.
LAUNCHES = {"fp32": PRECISIONS, "tf32": PRECISIONS, "bf16": ("bf16",)}
WAITING = 3  # a host that takes so many times what those took it waits for the GPU
CAST_BYTES = 6  # of a weight: its fp32 is read, its bf16 written


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
            TITLES[model], f"{products / ms['fp32']:.0%}",
            *(style.digits(ms[p]) for p in PRECISIONS),
            *(f"{ms['fp32'] / ms[p]:.1f}×" for p in PRECISIONS[1:]),
        ])  # fmt: skip
    columns = ["model", "products' share of fp32", *(f"{p} (ms)" for p in PRECISIONS),
               *(f"gain of {p}" for p in PRECISIONS[1:])]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def steps(mixed: Mixed, capture: bool = False, phases: tuple[str, ...] = PASSES) -> pd.DataFrame:
    """The benchmark's rows that compare precisions: eager, not compiled, batch 4, after the longest
    warm-up; of forward and backward as called, or with ``capture`` those of replays."""
    rows = mixed.steps
    if not len(rows):
        return pd.DataFrame(columns=[*KEY, "status", "ms", "ms_host"])
    plain = rows[
        (rows["attention"] == "eager") & (rows["compile"] == "none")
        & (rows["capture"].astype(str).str.lower() == str(capture).lower())
        & (rows["batch"].astype(int) == BATCH) & rows["phase"].isin(phases)
    ]  # fmt: skip
    plain = plain.sort_values("warmup").drop_duplicates(list(KEY), keep="last")
    return plain.assign(context=plain["context"].astype(int))


def table(mixed: Mixed, caption: str, label: str) -> Table:
    """Forward and backward as called, of each size and context that has more than fp32, and what
    bf16 gains over it; times that are the host's in italics."""
    rows, lines = steps(mixed), []
    for model in MODELS:
        for context in contexts(rows):
            cells, known = [], set()
            for pass_ in PASSES:
                mine = found(rows, model, context, pass_)
                known |= {p for p in mine if has(mine, p)}
                cells += [_time(rows, mine.get(p)) for p in PRECISIONS]
                both = has(mine, "fp32") and has(mine, "bf16")
                cells.append(f"{mine['fp32'].ms / mine['bf16'].ms:.2f}×" if both else BLANK)
            if known - {"fp32"}:
                lines.append([TITLES[model], style.tokens(context), *cells])
    columns = ["model", "context"]
    for i, pass_ in enumerate(PASSES):
        columns += [f"{pass_}: fp32", *(f"{p}{' ' * i}" for p in PRECISIONS[1:]), f"gain{' ' * i}"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=1, keys=2)


def hosts(mixed: Mixed) -> Markdown:
    """Which of the bf16 times in that table are the host's, and where bf16 is slower than fp32."""
    rows, known, slower = steps(mixed), [], 0
    for model in MODELS:
        for context in contexts(rows):
            for pass_ in PASSES:
                mine = found(rows, model, context, pass_)
                if has(mine, "bf16") and not pd.isna(mine["bf16"].ms_host):
                    known.append((model, mine["bf16"]))
                    slower += has(mine, "fp32") and mine["bf16"].ms > mine["fp32"].ms
    if not known:
        return Markdown(f"Whether the host or the GPU sets the times as called is {MISSING}.")
    bound = [TITLES[model] for model, row in known if of_host(rows, row)]
    text = (
        f"As called in bf16, the host takes {HOST:.0%} of the time or more in {len(bound)} of "
        f"{len(known)} rows"
    )
    if bound:
        models = listed(list(dict.fromkeys(bound)))
        text += f" ({models}): there products still faster would gain nothing"
    if slower:
        text += f", and bf16 is slower than fp32 in {slower} rows"
    return Markdown(f"{text}.")


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
        lines.append([device, TITLES[model], style.tokens(float(context)), *cells])
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
    models = [TITLES[m] for m in MODELS if any(m == key[1] for key in slower)]
    return Markdown(
        f"As published, bf16 is slower than fp32 in {len(slower)} of {len(made)} cases "
        f"({listed(models)}), and gains most, {gain:.2f}×, in the {pass_} of {TITLES[model]} at "
        f"{style.tokens(context)} tokens on {device}."
    )


def source(mixed: Mixed) -> Markdown:
    """The line under the tables of whole models."""
    replays = steps(mixed, capture=True, phases=("step",))
    rows = pd.concat([steps(mixed), replays[replays["mode"] != MODES[0]]])
    if "run" not in rows:
        return Markdown(provenance.block("No rows yet."))
    return provenance.source(rows, mixed.runs)


def contexts(rows: pd.DataFrame) -> list[int]:
    return sorted(rows["context"].unique().tolist())


def found(rows: pd.DataFrame, model: str, context: int, pass_: str) -> dict:
    """Precision -> its row, all of one mode: the first that has both fp32 and bf16, else any."""
    mine = rows[(rows["model"] == model) & (rows["context"] == context) & (rows["phase"] == pass_)]
    every = list(mine.itertuples())
    by_mode = [{r.precision: r for r in every if r.mode == mode} for mode in MODES]
    both = [rows for rows in by_mode if has(rows, "fp32") and has(rows, "bf16")]
    timed = [rows for rows in by_mode if any(has(rows, p) for p in rows)]
    return next(iter([*both, *timed, *filter(None, by_mode)]), {})


def has(mine: dict, precision: str) -> bool:
    """Whether it has a time."""
    return precision in mine and mine[precision].status == "ok"


def of_host(rows: pd.DataFrame, row) -> bool:
    """Whether a row's time is the host's: it took most of that time, and not to wait for a full
    queue of launches, as where no fewer launches took it far less."""
    more = LAUNCHES[row.precision]
    alike = rows[(rows["model"] == row.model) & (rows["phase"] == row.phase)
                 & rows["precision"].isin(more)]["ms_host"]  # fmt: skip
    return bool(row.ms_host >= HOST * row.ms and row.ms < WAITING * alike.min())


def _time(rows: pd.DataFrame, row) -> str:
    if row is None:
        return BLANK
    return f"*{shown(row)}*" if row.status == "ok" and of_host(rows, row) else shown(row)
