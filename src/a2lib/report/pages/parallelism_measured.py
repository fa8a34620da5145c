"""The formulas of one layer's time, and the estimate of a whole step, beside measured rows.

The formulas have two inputs, both measured in the same run: C, the best rate at which the ranks of
data parallelism compute without communication, and W, the bandwidth of their all-reduces without
computation.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report.drawing import Drawing, text
from a2lib.report.metrics import ceilings
from a2lib.report.page import one, pick
from a2lib.report.pages.parallelism_drawings import LEFT, STREAMS, clock
from a2lib.report.plots import reference
from a2lib.report.style import chart
from a2lib.report.units import Number, count
from a2lib.shapes import SIZES
from a2lib.theory import parallelism, schedules
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import Estimate, evaluate
from a2lib.theory.layouts import ATTENTIONS, STRATEGIES, Layout, Training
from a2lib.theory.parallelism import Cost, Layer

NAMES = {"dp": "data parallel", "fsdp": "FSDP", "tp": "tensor parallel", "fsdp_tp": "FSDP x TP"}
PASSES = ("forward", "backward")
# The three parts of a pass's time above its prediction.
PARTS = ["slow_matmuls", "slow_collectives", "slow_together"]
PREDICTED = ["C", "W", "compute", "communication", "predicted", "excess", *PARTS, "hidden"]
# Schemes and passes that communicate, so that each has a threshold.
THRESHOLDS = (
    ("dp", "backward"),
    ("fsdp", "forward"),
    ("fsdp", "backward"),
    ("tp", "forward"),
    ("tp", "backward"),
)
H200 = DEVICES["H200"]
BLUE, GREEN, ORANGE, SHADE = "#0072b2", "#00825f", "#d55e00", "#f6cfab"


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each pass what the formulas predict of it, with C and W of its group of ranks.

    along_data, along_tensor: the sizes of the mesh
    share: communication over computation, each timed alone
    C, W: operations and bytes a second
    compute, communication: ms of each, as predicted
    predicted: ms of the pass, if everything overlaps that has something to overlap with
    excess: the measured time over ``predicted``, less 1; the sum of the next three
    slow_matmuls: the part of it from matmuls slower than C
    slow_collectives: the part from collectives slower than W
    slow_together: the rest, which appears only when both run at once
    hidden: the share of the shorter of computation and communication that ran beside the longer
    """
    sizes = rows["mesh"].str.split("x", expand=True).astype(int)
    share = rows["ms_communication"] / rows["ms_without"]
    rows = rows.assign(along_data=sizes[0], along_tensor=sizes[1], share=share)
    added = {}
    for _, group in rows.groupby(["backend", "world_size"]):
        layer = inputs(group)
        if layer is None:
            continue
        for i, row in group.iterrows():
            added[i] = _predict(row, layer)
    return rows.join(pd.DataFrame.from_dict(added, orient="index", columns=PREDICTED))


def inputs(group: pd.DataFrame) -> Layer | None:
    """Return C and W of one group of ranks, as a layer of one token; None where data parallelism
    was not measured. Of several sizes of stack the one with most batches counts."""
    rows = group[(group["scheme"] == "dp") & (group["implementation"] == "a2lib")]
    rows = rows.dropna(subset=["ms", "ms_without"])
    if not len(rows):
        return None
    stack = ["dtype", "layers", "d_model", "d_ff"]
    dtype, layers, d_model, d_ff = rows.groupby(stack, sort=False).size().idxmax()
    rows = rows[(rows[stack] == [dtype, layers, d_model, d_ff]).all(axis=1)]
    unit = Layer(1, int(d_model), int(d_ff), 1.0, 1.0, 4 if dtype == "fp32" else 2)
    rates, bandwidths = [], []
    for _, row in rows.iterrows():
        costs = _costs(row, replace(unit, tokens=int(row["tokens"])))
        rates.append(1e3 * layers * sum(c.compute_s for c in costs) / row["ms_without"])
        if row["pass"] == "backward" and row["ms_communication"] > 0:
            sent = layers * sum(c.data_s for c in costs)
            bandwidths.append(1e3 * sent / row["ms_communication"])
    if not bandwidths:
        return None
    return replace(unit, flops=max(rates), bandwidth=float(pd.Series(bandwidths).median()))


def _costs(row, layer: Layer) -> list[Cost]:
    mesh = row["along_data"], row["along_tensor"]
    if row["scheme"] == "dp":
        costs = parallelism.data_parallel(layer, mesh[0])
    else:
        costs = parallelism.fully_sharded_tensor_parallel(layer, *mesh)
    return [costs[name] for name in _passes(row)]


def _passes(row) -> tuple[str, ...]:
    return PASSES if row["pass"] == "end_to_end" else (row["pass"],)


def _predict(row, unit: Layer) -> dict[str, float]:
    layers = int(row["layers"])
    costs = _costs(row, replace(unit, tokens=int(row["tokens"]), d_ff=int(row["d_ff"])))
    compute = 1e3 * layers * sum(c.compute_s for c in costs)
    communication = 1e3 * layers * sum(c.data_s + c.tensor_s for c in costs)
    predicted = _schedule_ms(row, costs)
    values = {
        "C": unit.flops,
        "W": unit.bandwidth,
        "compute": compute,
        "communication": communication,
        "predicted": predicted,
        "excess": row["ms"] / predicted - 1,
    }
    compute_alone, communication_alone = row["ms_without"], row["ms_communication"]
    if compute_alone > 0:
        slower = compute_alone / compute
        sends = communication > 0 and communication_alone > 0
        slower_links = communication_alone / communication if sends else 1.0
        with_matmuls = _schedule_ms(row, costs, slower)
        with_both = _schedule_ms(row, costs, slower, slower_links)
        values["slow_matmuls"] = (with_matmuls - predicted) / predicted
        values["slow_collectives"] = (with_both - with_matmuls) / predicted
        values["slow_together"] = (row["ms"] - with_both) / predicted
    shorter = min(compute_alone, communication_alone)
    if shorter > 0:
        values["hidden"] = (compute_alone + communication_alone - row["ms"]) / shorter
    return values


def _schedule_ms(row, costs: list[Cost], compute: float = 1.0, links: float = 1.0) -> float:
    """Return the ms of a row's passes when their schedule runs event by event, with matmuls and
    collectives ``compute`` and ``links`` times as slow as predicted.

    The backward of two axes has no schedule here: its time is that of the longer part.
    """
    total = 0.0
    for name, cost in zip(_passes(row), costs, strict=True):
        c, d, t = compute * cost.compute_s, links * cost.data_s, links * cost.tensor_s
        tasks = _tasks(row["scheme"], name == "forward", int(row["layers"]), c, d, t)
        total += schedules.run(tasks).seconds if tasks else row["layers"] * max(c, d + t)
    return 1e3 * total


def _tasks(scheme: str, forward: bool, n: int, compute, data, tensor):
    if scheme == "dp":
        return None if forward else schedules.data_parallel_backward(n, compute, data)
    if scheme == "fsdp":
        if forward:
            return schedules.fsdp(n, compute, data)
        return schedules.fsdp(n, compute, data / 2, data / 2)
    if scheme == "tp":  # two half-batches; three of a backward's six matmuls give weight gradients
        weights = 0 if forward else compute / 2
        return schedules.tensor(n, compute - weights, tensor, 2, weights)
    return schedules.mesh_forward(n, compute, data, tensor, 2, True) if forward else None


def swept(rows: pd.DataFrame, scheme: str, pass_: str, backend: str = "nccl") -> pd.DataFrame:
    """Return a scheme's rows of one pass on two ranks, in order of what decides its threshold,
    ``at``: the width for tensor parallelism, else the batch."""
    rows = pick(rows, scheme=scheme, pass_=pass_, backend=backend, world_size=2)
    rows = pick(rows, implementation="a2lib").dropna(subset=["ms"])
    along, fixed = ("d_ff", "tokens") if scheme == "tp" else ("tokens", "d_ff")
    rows = rows[rows[fixed] == rows.groupby(fixed).size().idxmax()]
    return rows.assign(at=rows[along].astype(float)).sort_values("at", ignore_index=True)


def crossing(rows: pd.DataFrame, scheme: str, pass_: str, backend: str = "nccl") -> float:
    """Return the batch or width at which communication and computation, each timed alone, take
    equally long: interpolated between two measured points, on a straight line in logarithms.
    Raises LookupError where no two neighbours have it between them."""
    points = list(swept(rows, scheme, pass_, backend).itertuples(index=False))
    for before, after in zip(points, points[1:], strict=False):
        if before.share > 1 >= after.share:
            steepness = math.log(before.share) / math.log(before.share / after.share)
            return before.at * (after.at / before.at) ** steepness
    raise LookupError(f"{scheme} {pass_}: no crossing")


def about(value: float) -> Number:
    """Write an interpolated batch or width to the nearest 50, or below 1,000 to the nearest 10."""
    step = 50 if value >= 1000 else 10
    return count(step * round(value / step))


def threshold(layer: Layer, scheme: str, pass_: str) -> float:
    """Return the batch, or for tensor parallelism the width, from which the formulas call a pass
    on two ranks compute-bound."""
    if scheme == "tp":
        return layer.d_ff / (parallelism.tensor_limit(layer, pass_) - 1)
    return layer.tokens / parallelism.data_slope(layer)


def measured_layer(rows: pd.DataFrame, backend: str = "nccl") -> Layer:
    """Return the layer of one token with the C and W of two ranks of ``backend``."""
    return inputs(pick(rows, backend=backend, world_size=2))


def sending(rows: pd.DataFrame, backend: str = "nccl") -> pd.DataFrame:
    """Return the forward and backward passes that communicate.

    expected: the bottleneck that the formulas name, "communication" or "matmuls"
    right: whether it is the longer part in the rows, too
    """
    rows = pick(rows, backend=backend, implementation="a2lib", pass_=PASSES)
    rows = rows.dropna(subset=["ms_communication", *PARTS])
    binds = rows["communication"] > rows["compute"]
    expected = binds.map({True: "communication", False: "matmuls"})
    return rows.assign(expected=expected, right=binds == (rows["share"] > 1))


def longer(row) -> float:
    """Return the ms of the longer of a pass's computation and communication, each timed alone."""
    return max(row.ms_without, row.ms_communication)


def by_rule(row) -> float:
    """Return the ms of a pass by the rule of thumb: the longer part and half of the shorter."""
    return longer(row) + min(row.ms_without, row.ms_communication) / 2


def could_hide(row) -> float:
    """Return the share of the shorter part that the schedule of the pass lets hide."""
    return (row.compute + row.communication - row.predicted) / min(row.compute, row.communication)


def sent_rate(row) -> float:
    """Return the bytes a second that a pass sends when it only communicates."""
    return row.W * row.communication / row.ms_communication


def thresholds_table(rows: pd.DataFrame, sheet: Layer) -> pd.DataFrame:
    """Return the thresholds of every scheme and pass: by the data sheet's C and W, by the measured
    ones, and where the measured lines cross."""
    layer = measured_layer(rows)
    lines = []
    for scheme, pass_ in THRESHOLDS:
        unit = "width" if scheme == "tp" else "tokens"
        by_sheet = count(threshold(sheet, scheme, pass_))
        by_rates = count(threshold(layer, scheme, pass_))
        measured = about(crossing(rows, scheme, pass_))
        lines.append([f"{NAMES[scheme]}, {pass_}: {unit}", by_sheet, by_rates, measured])
    heads = ["pass", "data sheet", "measured C, W", "measured"]
    return pd.DataFrame(lines, columns=heads)


@chart(height=5.0)
def hiding(figure, rows: pd.DataFrame):
    """Draw the backward by batch under data parallelism and FSDP: matmuls alone, communication
    alone, both together, and shaded what did not hide."""
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, scheme in zip(axes, ("dp", "fsdp"), strict=True):
        few = swept(rows, scheme, "backward")
        few = few[few["at"] <= 8192]
        x, compute, sent = few["at"], few["ms_without"], few["ms_communication"]
        fine = np.linspace(x.min(), x.max(), 300)
        together = np.interp(fine, x, few["ms"])
        longest = np.maximum(np.interp(fine, x, compute), np.interp(fine, x, sent))
        ax.fill_between(fine, longest, together, color=SHADE, linewidth=0)
        for y, colour in ((compute, BLUE), (sent, GREEN), (few["ms"], ORANGE)):
            ax.plot(x, y, color=colour, marker="o", markersize=4)
        ax.set(title=NAMES[scheme], ylabel="ms", ylim=(0, 18), xlim=(0, 8400))
        ax.annotate("together", (2600, 10.4), color=ORANGE)
        ax.annotate("matmuls alone", (5300, 7.2), color=BLUE)
        ax.annotate("communication alone", (5050, 2.0), color=GREEN)
    axes[1].set_xlabel("tokens of the batch")


@chart(height=2.9)
def widths(figure, rows: pd.DataFrame):
    """Draw tensor parallelism's backward by width: matmuls and communication, each alone, measured
    and as predicted."""
    few = swept(rows, "tp", "backward")
    few = few[few["at"] <= 2048]
    ax = figure.subplots()
    for measured, predicted, colour in (
        ("ms_without", "compute", BLUE),
        ("ms_communication", "communication", GREEN),
    ):
        ax.plot(few["at"], few[measured], color=colour, marker="o", markersize=4)
        ax.plot(few["at"], few[predicted], color=colour, linestyle="--", linewidth=1.2)
    ax.annotate("matmuls", (1500, 4.6), color=BLUE, ha="right")
    ax.annotate("communication", (1440, 1.35), color=GREEN)
    reference(ax, crossing(rows, "tp", "backward"), "measured", vertical=True)
    predicted = threshold(measured_layer(rows), "tp", "backward")
    reference(ax, predicted, "predicted", vertical=True)
    ax.set(xlabel="width d_ff of the layer", ylabel="ms", ylim=(0, 5.6), xlim=(200, 2100))


def tail() -> Drawing:
    """Draw data parallelism's backward at its threshold, where an all-reduce takes as long as a
    layer's matmuls."""
    run = schedules.run(schedules.data_parallel_backward(4, 1.0, 1.0))
    out = [text(LEFT, 11, "backward at the threshold", bold=True)]
    return Drawing(out, clock(out, run, 16, STREAMS))


def peaks(benchmark: pd.DataFrame, memory: pd.DataFrame, checkpointing: pd.DataFrame):
    """Return the measured peaks of training steps on one GPU that the estimate can describe.

    moment: the moment of the step at which the estimate has its peak
    bytes: the measured peak
    off: the estimate over the measured peak, less 1

    A process that has captured a step keeps workspaces for the capture's stream, too: they are
    taken off.
    """
    captured = set(benchmark.loc[benchmark["capture"].astype(bool), "run"])
    steps = {"mode": "train-step", "phase": "step", "status": "ok"}
    trained = pick(benchmark, compile="none", capture=False, **steps)
    more = trained["run"].isin(captured) * H200.workspace
    trained_bytes = trained["peak_bytes"].astype(float) - more
    traced = pick(memory, **steps)
    traced = traced[traced["step_number"] == traced["step_number"].max()]
    traced_bytes = traced["allocated_bytes"].astype(float)
    again = pick(checkpointing, status="ok", gradients="fresh", strategy=STRATEGIES)
    again = again[again["layers"] == again["model"].map(lambda name: SIZES[name].num_layers)]
    again_bytes = (again["held_bytes"] + again["peak_bytes"]).astype(float) + H200.workspace
    tables = [
        trained.assign(section="benchmark", bytes=trained_bytes),
        traced.assign(section="memory", bytes=traced_bytes),
        again.assign(section="checkpointing", bytes=again_bytes),
    ]
    names = ["section", "model", "batch", "context", "precision", "attention", "strategy", "bytes"]
    rows = pd.concat([table.reindex(columns=names) for table in tables], ignore_index=True)
    in_precision = rows["precision"].isin(("fp32", "tf32", "bf16"))
    rows = rows[in_precision & rows["attention"].isin(ATTENTIONS)]
    rows = rows.dropna(subset=["bytes"]).fillna({"strategy": "none"})
    plans = [_plan(row) for row in rows.itertuples()]
    expected = pd.Series([plan.memory_bytes for plan in plans]).to_numpy()
    return rows.assign(moment=[plan.moment for plan in plans], off=expected / rows["bytes"] - 1)


def _plan(row) -> Estimate:
    precision = "bf16" if row.precision == "bf16" else "fp32"
    sizes = SIZES[row.model], int(row.batch), int(row.context)
    training = Training(*sizes, precision, row.attention, "library")
    return evaluate(training, Layout(sharding="none", checkpointing=row.strategy), H200)


def reached(ceiling: pd.DataFrame) -> float:
    """Return the share of the data sheet's peak that large matmuls reach on one GPU."""
    return ceilings(ceiling)["bf16"] * 1e12 / H200.flops


def estimated_fsdp(model: str, efficiency: float, activations: str = "library") -> Estimate:
    """Return the estimate of the FSDP chapter's step: two GPUs, four sequences of 512 tokens on
    each."""
    training = _training(model, 8, efficiency, activations)
    return evaluate(training, Layout(data=2, sharding="fsdp"), H200)


def estimated_alone_ms(model: str, ceiling: pd.DataFrame) -> float:
    """Return the ms that the estimate gives one GPU for four sequences of 512 tokens."""
    training = _training(model, 4, reached(ceiling), "library")
    return 1e3 * evaluate(training, Layout(sharding="none"), H200).step_s


def _training(model: str, batch: int, efficiency: float, activations: str) -> Training:
    return Training(
        SIZES[model],
        batch,
        context=512,
        activations=activations,
        efficiency=efficiency,
    )


def estimated_fsdp_ms(model: str, ceiling: pd.DataFrame) -> float:
    """Return the ms that the estimate gives an FSDP step, half of what can hide hidden."""
    return 1e3 * estimated_fsdp(model, reached(ceiling)).step_s


def fsdp_step(fsdp: pd.DataFrame, model: str):
    """Return the row of a2lib's FSDP step in a CUDA graph."""
    return one(fsdp, model=model, wrapper="fsdp", capture=True)


def memory_error(fsdp_memory: pd.DataFrame, model: str, activations: str) -> float:
    """Return the estimate of an FSDP rank's peak over the measured peak, less 1."""
    measured = one(fsdp_memory, wrapper="fsdp", model=model, moment="peak").tensor_bytes
    return estimated_fsdp(model, 1.0, activations).memory_bytes / measured - 1
