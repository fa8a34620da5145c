"""The formulas of one layer's time, and those of a whole layout, beside what was measured.

The formulas have two inputs, measured in the same run: C, the best rate at which the ranks of data
parallelism compute with nothing sent, and W, what their all-reduces send with nothing computed.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report.drawing import Drawing, text
from a2lib.report.page import pick
from a2lib.report.pages.parallelism_drawings import LEFT, STREAMS, clock
from a2lib.report.plots import reference
from a2lib.report.style import chart
from a2lib.theory import parallelism, schedules
from a2lib.theory.devices import DEVICES, Device
from a2lib.theory.estimate import Estimate, evaluate
from a2lib.theory.latency import Line, wire_share
from a2lib.theory.layouts import ATTENTIONS, STRATEGIES, Layout, Training
from a2lib.theory.parallelism import Cost, Layer
from a2lib.theory.transformer import SIZES

NAMES = {"dp": "data parallel", "fsdp": "FSDP", "tp": "tensor parallel", "fsdp_tp": "FSDP x TP"}
PASSES = ("forward", "backward")
SLOWER = ["by_multiplies", "by_messages", "by_both"]
ADDED = ["C", "W", "compute", "messages", "floor", "clock", "off", *SLOWER, "hidden"]
H200 = DEVICES["H200"]


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The passes with ``share``, messages over multiplies where each ran with nothing else, and
    what the formulas make of each: ``C`` and ``W`` of its ranks, in ms ``compute``, ``messages``,
    ``floor`` (the longer of both) and ``clock`` (with what has nothing to hide behind); ``off``,
    the time over the clock's, less 1, and the three parts it is the sum of: as multiplies were
    slower than C, messages slower than W, and both at once; ``hidden``, the share of the shorter of
    multiplies and messages that ran beside the longer."""
    sizes = rows["mesh"].str.split("x", expand=True).astype(int)
    share = rows["ms_communication"] / rows["ms_without"]
    rows = rows.assign(along_data=sizes[0], along_tensor=sizes[1], share=share)
    added = {}
    for _, group in rows.groupby(["backend", "world_size"]):
        layer = inputs(group)
        for i, row in group.iterrows() if layer else ():
            added[i] = _predicted(row, layer)
    return rows.join(pd.DataFrame.from_dict(added, orient="index", columns=ADDED))


def inputs(group: pd.DataFrame) -> Layer | None:
    """C and W of one group of ranks, of the stack with most batches, as a layer of one token; None
    where data parallelism was not measured."""
    rows = group[(group["scheme"] == "dp") & (group["implementation"] == "a2lib")]
    rows = rows.dropna(subset=["ms", "ms_without"])
    if not len(rows):
        return None
    stack = ["dtype", "layers", "d_model", "d_ff"]
    dtype, layers, d_model, d_ff = rows.groupby(stack, sort=False).size().idxmax()
    rows = rows[(rows[stack] == [dtype, layers, d_model, d_ff]).all(axis=1)]
    unit = Layer(1, int(d_model), int(d_ff), 1.0, 1.0, 4 if dtype == "fp32" else 2)
    rates, sent = [], []
    for _, row in rows.iterrows():
        costs = _costs(row, replace(unit, tokens=int(row["tokens"])))
        rates.append(1e3 * layers * sum(c.compute_s for c in costs) / row["ms_without"])
        if row["pass"] == "backward" and row["ms_communication"] > 0:
            sent.append(1e3 * layers * sum(c.data_s for c in costs) / row["ms_communication"])
    if not sent:
        return None
    return replace(unit, flops=max(rates), bandwidth=float(pd.Series(sent).median()))


def _costs(row, layer: Layer) -> list[Cost]:
    mesh = row["along_data"], row["along_tensor"]
    if row["scheme"] == "dp":
        found = parallelism.data_parallel(layer, mesh[0])
    else:
        found = parallelism.fully_sharded_tensor_parallel(layer, *mesh)
    return [found[name] for name in _passes(row)]


def _passes(row) -> tuple[str, ...]:
    return PASSES if row["pass"] == "end_to_end" else (row["pass"],)


def _predicted(row, unit: Layer) -> dict[str, float]:
    layers = int(row["layers"])
    costs = _costs(row, replace(unit, tokens=int(row["tokens"]), d_ff=int(row["d_ff"])))
    found = {
        "compute": sum(c.compute_s for c in costs),
        "messages": sum(c.data_s + c.tensor_s for c in costs),
        "floor": sum(max(c.compute_s, c.data_s + c.tensor_s) for c in costs),
    }
    found = {name: 1e3 * layers * seconds for name, seconds in found.items()}
    said = _clock(row, costs)
    found |= {"C": unit.flops, "W": unit.bandwidth, "clock": said, "off": row["ms"] / said - 1}
    own, sent = row["ms_without"], row["ms_communication"]
    if own > 0:
        slower = own / found["compute"]
        messages = sent / found["messages"] if found["messages"] and sent > 0 else 1.0
        by, both = _clock(row, costs, slower), _clock(row, costs, slower, messages)
        parts = by - said, both - by, row["ms"] - both
        found |= dict(zip(SLOWER, (part / said for part in parts), strict=True))
    if min(own, sent) > 0:
        found["hidden"] = (own + sent - row["ms"]) / min(own, sent)
    return found


def _clock(row, costs: list[Cost], compute: float = 1.0, messages: float = 1.0) -> float:
    """ms of a row's passes run event by event, if multiplies and messages take so many times their
    predicted seconds; two axes backward, whose order no schedule has, by the longer."""
    total = 0.0
    for name, cost in zip(_passes(row), costs, strict=True):
        c, d, t = compute * cost.compute_s, messages * cost.data_s, messages * cost.tensor_s
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
    if scheme == "tp":  # the batch in halves; three of a backward's six products give weights'
        weights = 0 if forward else compute / 2
        return schedules.tensor(n, compute - weights, tensor, 2, weights)
    return schedules.mesh_forward(n, compute, data, tensor, 2, True) if forward else None


def swept(rows: pd.DataFrame, scheme: str, pass_: str, backend: str = "nccl") -> pd.DataFrame:
    """A scheme's rows of one pass between two ranks along what decides its threshold: widths of the
    batch with most of them under tensor parallelism, else batches of the main width."""
    rows = pick(rows, scheme=scheme, pass_=pass_, backend=backend, world_size=2)
    rows = pick(rows, implementation="a2lib").dropna(subset=["ms"])
    along, held = ("d_ff", "tokens") if scheme == "tp" else ("tokens", "d_ff")
    rows = rows[rows[held] == rows.groupby(held).size().idxmax()]
    return rows.assign(at=rows[along].astype(float)).sort_values("at", ignore_index=True)


def crossing(rows: pd.DataFrame, scheme: str, pass_: str, backend: str = "nccl") -> float:
    """The batch or width at which messages and multiplies, each with nothing else running, take
    equally long: on a straight line in logarithms. Raises LookupError where none is between."""
    points = list(swept(rows, scheme, pass_, backend)[["at", "share"]].itertuples(index=False))
    for (x, high), (y, low) in zip(points, points[1:], strict=False):
        if high > 1 >= low:
            return x * (y / x) ** (math.log(high) / math.log(high / low))
    raise LookupError(f"{scheme} {pass_}: no crossing")


def threshold(layer: Layer, scheme: str, pass_: str) -> float:
    """The batch, or under tensor parallelism the width, from which computation should bind two
    ranks."""
    if scheme == "tp":
        return parallelism.least_width(layer, 2, pass_)
    return parallelism.least_tokens(layer, 2, 1, pass_)


def measured_layer(rows: pd.DataFrame, backend: str = "nccl") -> Layer:
    """The layer of one token with C and W as two ranks of ``backend`` had them."""
    return inputs(pick(rows, backend=backend, world_size=2))


def sending(rows: pd.DataFrame, backend: str = "nccl") -> pd.DataFrame:
    """Forward and backward passes that send, with ``foreseen``: the longer is what should be."""
    rows = pick(rows, backend=backend, implementation="a2lib", pass_=PASSES)
    rows = rows.dropna(subset=["ms_communication", *SLOWER])
    should = rows["messages"] > rows["compute"]
    return rows.assign(should=should, foreseen=should == (rows["share"] > 1))


@chart(height=5.0)
def hiding(figure, rows: pd.DataFrame):
    """Backward by batch under data parallelism and FSDP: what each part takes, what both take, and
    between the longer part and both what did not hide."""
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, scheme in zip(axes, ("dp", "fsdp"), strict=True):
        few = swept(rows, scheme, "backward")
        few = few[few["at"] <= 8192]
        x, own, sent = few["at"], few["ms_without"], few["ms_communication"]
        fine = np.linspace(x.min(), x.max(), 300)
        both, *parts = (np.interp(fine, x, y) for y in (few["ms"], own, sent))
        ax.fill_between(fine, np.maximum(*parts), both, color="#f6cfab", linewidth=0)
        for y, colour in ((own, "#0072b2"), (sent, "#00825f"), (few["ms"], "#d55e00")):
            ax.plot(x, y, color=colour, marker="o", markersize=4)
        ax.set(title=NAMES[scheme], ylabel="ms", ylim=(0, 18), xlim=(0, 8400))
        for words, place, colour in (
            ("together", (2600, 10.4), "#d55e00"),
            ("multiplies", (5600, 7.4), "#0072b2"),
            ("messages", (6600, 2.2), "#00825f"),
        ):
            ax.annotate(words, place, color=colour)
    axes[1].set_xlabel("tokens of the batch")


@chart(height=2.9)
def widths(figure, rows: pd.DataFrame):
    """Tensor parallelism's backward by width: multiplies and messages as predicted and measured."""
    few = swept(rows, "tp", "backward")
    few = few[few["at"] <= 2048]
    ax = figure.subplots()
    for own, predicted, words, colour, place in (
        ("ms_without", "compute", "multiplies", "#0072b2", (1500, 4.6)),
        ("ms_communication", "messages", "messages", "#00825f", (1760, 1.45)),
    ):
        ax.plot(few["at"], few[own], color=colour, marker="o", markersize=4)
        ax.plot(few["at"], few[predicted], color=colour, linestyle="--", linewidth=1.2)
        ax.annotate(words, place, color=colour, ha="right" if own == "ms_without" else "left")
    for at, words in (
        (crossing(rows, "tp", "backward"), "found"),
        (threshold(measured_layer(rows), "tp", "backward"), "predicted"),
    ):
        reference(ax, at, words, vertical=True)
    ax.set(xlabel="d_ff", ylabel="ms", ylim=(0, 5.6), xlim=(200, 2100))


def tail() -> Drawing:
    """Data parallelism's backward at its threshold, where a message takes as long as a layer."""
    run = schedules.run(schedules.data_parallel_backward(4, 1.0, 1.0))
    out = [text(LEFT, 11, "backward at the threshold", bold=True)]
    return Drawing(out, clock(out, run, 16, STREAMS))


def peaks(benchmark: pd.DataFrame, memory: pd.DataFrame, checkpointing: pd.DataFrame):
    """Measured peaks of training steps on one GPU that a plan describes: ``moment`` that the plan
    names, ``bytes``, and how far ``off`` the plan is.

    A process that has captured a step keeps workspaces for the capture's stream, too, which are
    taken off.
    """
    captured = set(benchmark.loc[benchmark["capture"].astype(bool), "run"])
    steps = {"mode": "train-step", "phase": "step", "status": "ok"}
    whole = pick(benchmark, compile="none", capture=False, **steps)
    more = whole["run"].isin(captured) * H200.workspace
    found = [whole.assign(section="benchmark", bytes=whole["peak_bytes"].astype(float) - more)]
    traced = pick(memory, **steps)
    traced = traced[traced["step_number"] == traced["step_number"].max()]
    found.append(traced.assign(section="memory", bytes=traced["allocated_bytes"].astype(float)))
    again = pick(checkpointing, status="ok", gradients="fresh", strategy=STRATEGIES)
    again = again[again["layers"] == again["model"].map(lambda name: SIZES[name].num_layers)]
    size = (again["held_bytes"] + again["peak_bytes"]).astype(float) + H200.workspace
    found.append(again.assign(section="checkpointing", bytes=size))
    names = ["section", "model", "batch", "context", "precision", "attention", "strategy", "bytes"]
    rows = pd.concat([one.reindex(columns=names) for one in found], ignore_index=True)
    known = rows["precision"].isin(("fp32", "tf32", "bf16")) & rows["attention"].isin(ATTENTIONS)
    rows = rows[known].dropna(subset=["bytes"]).fillna({"strategy": "none"})
    plans = []
    for r in rows.itertuples():
        precision = "bf16" if r.precision == "bf16" else "fp32"
        training = Training(
            SIZES[r.model], int(r.batch), int(r.context), precision, r.attention, "library"
        )
        layout = Layout(sharding="none", checkpointing=r.strategy)
        plans.append(evaluate(training, layout, H200))
    moment, total = [p.moment for p in plans], pd.Series([p.memory_bytes for p in plans])
    return rows.assign(moment=moment, off=total.to_numpy() / rows["bytes"] - 1)


def estimated_fsdp(model: str, efficiency: float, kept: str = "library") -> Estimate:
    """The FSDP chapter's step on paper: two GPUs, four sequences of 512 tokens on each."""
    rates = {"efficiency": efficiency, "attention_efficiency": efficiency}
    training = Training(SIZES[model], 8, 512, activations=kept, **rates)
    return evaluate(training, Layout(data=2, sharding="fsdp"), H200)


def linked(line: Line) -> Device:
    """The H200 with latency and bandwidth of a line through two ranks' all-reduces."""
    return replace(H200, link=line.bandwidth * wire_share("all_reduce", 2), latency=line.overhead_s)
