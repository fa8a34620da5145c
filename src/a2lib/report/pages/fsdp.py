"""FSDP: each rank's memory beside the count, and each all-gather beside what it hides behind."""

from pathlib import Path

import pandas as pd

from a2lib.lab import bulk
from a2lib.report.page import one, pick
from a2lib.report.pages.benchmark import FAST, TITLES
from a2lib.report.pages.ddp import step as ddp_step
from a2lib.report.plots import inside, label, stacks
from a2lib.report.style import Chart, chart
from a2lib.report.tables import cells
from a2lib.report.units import count, digits, gb, ms, span
from a2lib.shapes import SIZES
from a2lib.theory import fsdp as theory
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.sharding import REST, Held
from a2lib.theory.transformer import parameter_count

MARK_MS = 0.01  # a wait of this length is the two events' own time
PASSES = ("forward", "backward")
WRAPPERS = {"ddp": "data parallelism", "zero1": "sharded optimizer", "fsdp": "FSDP"}
STATE_BYTES = {"ddp": 16, "zero1": 12, "fsdp": 8}  # per parameter, on each of two ranks
SHARDS_OPTIMIZER = {"ddp": False, "zero1": True}
MOMENTS = {
    "init": "after init",
    "before": "before update",
    "after": "after update",
    "forward": "forward's end",
    "peak": "peak",
}
PARTS = {  # a column of bytes, and its name in the figure
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "moments",
    "whole_bytes": "gathered, in flight",
    "travelling_bytes": "gathered, in flight",
}
SHADES = {
    "weights": "#0072b2",
    "gradients": "#a86f00",
    "moments": "#d55e00",
    "gathered, in flight": "#00825f",
    "activations": "#808080",
}


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each step of a2lib's FSDP what its traced step says of the all-gathers.

    gathers: number of all-gathers
    in_time: how many of them had ended when their unit's turn came
    stood: ms that the GPU waited for the others
    forward_ms, backward_ms: when each pass ended, from the step's begin
    gather_forward, gather_backward: ms of a block's all-gather in that pass (median)
    block_forward, block_backward: ms that a block computes in that pass (median)

    They are blank for a step that was not traced.
    """
    return rows.join(pd.DataFrame([_traced(row) for row in rows.itertuples()], rows.index))


def _traced(row) -> dict[str, float]:
    table = gathers(row) if row.wrapper == "fsdp" else None
    if table is None:
        return {}
    late = table[(table["slack_ms"] < 0) & (table["waited_ms"] > MARK_MS)]
    traced = {
        "gathers": len(table),
        "in_time": len(table) - len(late),
        "stood": late["waited_ms"].sum(),
    }
    for name in PASSES:
        of_pass = table[table["pass"] == name]
        traced[f"{name}_ms"] = of_pass["compute_end_ms"].max()
        blocks = of_pass[of_pass["unit"] != "root"]
        traced[f"gather_{name}"] = (blocks["gather_end_ms"] - blocks["gather_start_ms"]).median()
        traced[f"block_{name}"] = (blocks["compute_end_ms"] - blocks["compute_start_ms"]).median()
    return traced


def gathers(row) -> pd.DataFrame | None:
    """Return the all-gathers of a row's traced step, times from its begin; None if not traced."""
    root = Path(row.file).parents[2]
    launch = "captured" if row.capture else "launched"
    name = f"fsdp-{row.model}-{launch}-{row.world_size}-ranks"
    if (row.device, name) not in bulk.pictures("gathers", root):
        return None
    return pd.DataFrame(bulk.read("gathers", row.device, name, root).rows)


def memory_columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Return the moments that the page shows, with their counts.

    activations: bytes that belong to no named component
    whole: bytes of all tensors at that moment; at a peak, the most they took
    counted: the formula's bytes; for models that are not sharded, of blocks that are not compiled
    """
    rows = rows.sort_values("step_number")
    first_step = rows["moment"].isin(["init", "before", "after"]) & (rows["step_number"] == 0)
    rows = rows[first_step | rows["moment"].isin(["forward", "peak"])].copy()
    rows["activations"] = rows["present_bytes"] - rows[[*PARTS]].sum(axis=1)
    rows["whole"] = rows["tensor_bytes"].fillna(rows["present_bytes"])
    at_forward = rows[rows["moment"] == "forward"].set_index(["wrapper", "model"])["activations"]
    rows["counted"] = [
        _counted(row, at_forward.get((row.wrapper, row.model), float("nan")))
        for row in rows.itertuples()
    ]
    return rows


def _counted(row, activations: float) -> float:
    if row.wrapper in SHARDS_OPTIMIZER:
        return _counted_replicated(row)
    shape = SIZES[row.model]
    if row.moment == "peak":
        return theory.peak(shape, int(row.world_size), activations).total
    if row.moment == "forward":
        moments = theory.step(shape, int(row.world_size), activations)
        return next(held.total for held in moments if held.moment == "backward root")
    between = theory.between(shape, int(row.world_size))
    return next(held.total for held in between if held.moment == row.moment)


def _counted_replicated(row) -> float:
    """Return the count where every rank holds the whole model."""
    step = StepMemory(SIZES[row.model], 4, 512, precision="bf16", attention="flash")
    held = Held(step, 2, SHARDS_OPTIMIZER[row.wrapper])
    if row.moment == "forward":
        return float("nan")
    if row.moment == "peak":
        return held.peak()
    return sum(size for part, size in held.at(row.moment).items() if part != REST)


def step(steps: pd.DataFrame, model: str = "2.7B", wrapper: str = "fsdp", capture: bool = True):
    """Return the row of one step."""
    return one(steps, model=model, wrapper=wrapper, capture=capture)


def data_parallel(
    ddp: pd.DataFrame,
    model: str = "2.7B",
    carrier: str = "backend",
    bucket_mb: int = 100,
    capture: bool = True,
    updating: bool = False,
):
    """Return the row of a2lib's bucketed data parallelism, fp32 gradients, in bf16; ``updating``:
    with an update per bucket."""
    wrapper = "updating" if updating else "bucketed"
    return ddp_step(ddp, wrapper, bucket_mb, model=model, carrier=carrier, capture=capture)


def at_peak(memory: pd.DataFrame, wrapper: str = "fsdp", model: str = "2.7B"):
    """Return the row of a wrapper's peak."""
    return one(memory, wrapper=wrapper, model=model, moment="peak")


def whole_updates(
    steps: pd.DataFrame, benchmark: pd.DataFrame, sharded: pd.DataFrame
) -> list[float]:
    """Return two estimates, in ms, of the AdamW update of one GPU's 3.4B step: by its share of a
    step of the benchmark, and as timed on an idle GPU for the sharded optimizer."""
    forward_backward = benchmark_step(benchmark, "forward-backward").ms
    share = 1 - forward_backward / benchmark_step(benchmark, "train-step").ms
    idle = one(sharded, model="2.7B", optimizer="plain").ms_optimizer
    return [share * step(steps).ms_without, idle]


def benchmark_step(benchmark: pd.DataFrame, mode: str):
    """Return the row of the benchmark for the same work on one GPU, in a CUDA graph."""
    return one(
        benchmark,
        model="2.7B",
        mode=mode,
        context=512,
        batch=4,
        capture=True,
        phase="step",
        **FAST,
    )


def steps_table(steps: pd.DataFrame, ddp: pd.DataFrame, memory: pd.DataFrame) -> pd.DataFrame:
    """Return the step's time and peak by each kind of training on two GPUs."""

    def times(of_3b, of_3b_from_python, of_2b):
        return cells((of_3b, of_3b_from_python, of_2b))

    graph, python, small = step(steps), step(steps, capture=False), step(steps, model="xl25")
    torch_fsdp = step(steps, wrapper="fsdp2", capture=False)
    torch_ddp = one(ddp, wrapper="torch_ddp", model="2.7B")
    updating = {m: data_parallel(ddp, m, "copy_engines", updating=True) for m in ("2.7B", "xl25")}
    lines = {
        "one GPU": times(graph.ms_without, python.ms_without, small.ms_without),
        "FSDP": times(graph.ms, python.ms, small.ms),
        "DDP, copy engines": times(
            data_parallel(ddp, carrier="copy_engines").ms,
            None,
            data_parallel(ddp, "xl25", "copy_engines").ms,
        ),
        "DDP, copy engines, update per bucket": [
            "OOM" if updating["2.7B"].status == "oom" else digits(updating["2.7B"].ms, 3),
            None,
            digits(updating["xl25"].ms, 3),
        ],
        "DDP, NCCL, 100 MiB": times(
            data_parallel(ddp).ms,
            data_parallel(ddp, capture=False).ms,
            data_parallel(ddp, "xl25").ms,
        ),
        "DDP, NCCL, 1000 MiB": times(
            None,
            data_parallel(ddp, bucket_mb=1000, capture=False).ms,
            data_parallel(ddp, "xl25", bucket_mb=1000).ms,
        ),
        "PyTorch's FSDP2": times(None, torch_fsdp.ms, None),
        "PyTorch's DDP, 25 MiB": times(None, torch_ddp.ms, None),
    }
    peaks = {
        "FSDP": digits(at_peak(memory).whole / 1e9, 3),
        "DDP, NCCL, 100 MiB": digits(at_peak(memory, "ddp").whole / 1e9, 3),
        "PyTorch's FSDP2": digits(at_peak(memory, "fsdp2").whole / 1e9, 3),
    }
    return pd.DataFrame(
        [[name, *line, peaks.get(name)] for name, line in lines.items()],
        columns=["step", "3.4B, graph", "3.4B, Python", "2.0B, graph", "peak, GB"],
    )


def memory_table(memory: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return FSDP's memory in GB by component at each moment, beside its count and FSDP2's."""
    torch = pick(memory, model=model, wrapper="fsdp2").set_index("moment")["whole"]
    rows = pick(memory, model=model, wrapper="fsdp").set_index("moment")
    lines = []
    for moment, words in MOMENTS.items():
        row = rows.loc[moment]
        parts = [row["parameter_bytes"], row["gradient_bytes"], row["optimizer_bytes"]]
        parts += [row["whole_bytes"] + row["travelling_bytes"], row["activations"]]
        texts = [gigabytes(size) if size > 5e5 else "0" for size in parts]
        totals = [gigabytes(size) for size in (row["whole"], row["counted"], torch[moment])]
        lines.append([words, *texts, *totals])
    heads = ["moment", "weights", "grads", "moments", "gathered", "activations"]
    return pd.DataFrame(lines, columns=[*heads, "total", "count", "FSDP2"])


def saved_table(memory: pd.DataFrame) -> pd.DataFrame:
    """Return state and peak in GB of three kinds of training, and what FSDP saves of each."""
    lines = []
    for model in ("2.7B", "xl25"):
        peak = at_peak(memory, "fsdp", model).whole
        parameters = parameter_count(SIZES[model])
        for wrapper, words in WRAPPERS.items():
            after = one(memory, wrapper=wrapper, model=model, moment="after", step_number=0).whole
            top = at_peak(memory, wrapper, model)
            state = STATE_BYTES[wrapper] * parameters
            saved = [state - STATE_BYTES["fsdp"] * parameters, top.whole - peak]
            texts = [gigabytes(size) for size in (state, after, top.counted, top.whole)]
            texts += [None, None] if wrapper == "fsdp" else [gigabytes(size) for size in saved]
            lines.append([TITLES[model], words, *texts])
    heads = ["model", "kind", "state, count", "state", "peak, count", "peak"]
    return pd.DataFrame(lines, columns=[*heads, "state saved", "peak saved"])


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB, without the unit."""
    return digits(size / 1e9, 3)


def gathers_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return how many all-gathers of each traced step are in time, and what they take in ms."""
    rows = pick(steps, wrapper="fsdp").sort_values(["model", "capture"], ascending=[True, False])
    heads = ["gathers", "in time", "waits"]
    heads += ["gather, forward", "block, forward", "gather, backward", "block, backward"]
    lines = []
    for row in rows.itertuples():
        times = [row.stood, row.gather_forward, row.block_forward]
        times += [row.gather_backward, row.block_backward]
        numbers = [count(row.gathers), count(row.in_time), *cells(times)]
        lines.append([TITLES[row.model], launch_of(row), *numbers])
    return pd.DataFrame(lines, columns=["model", "launched", *heads])


def published_table(others: pd.DataFrame) -> pd.DataFrame:
    """Return what others published, as text."""
    table = others[["device", "wrapper", "batch"]]
    return table.rename(columns={"batch": "sequences per GPU"}).assign(
        step=[ms(time, 3) for time in others["ms_mean"]],
        peak=[gb(size, 3) for size in others["peak_bytes"]],
    )


def every_step(steps: pd.DataFrame) -> pd.DataFrame:
    """Return every row of the section as text, times in ms."""
    lines = []
    for row in steps.itertuples():
        name = {"fsdp": "a2lib", "fsdp2": "FSDP2"}[row.wrapper]
        words = [TITLES[row.model], name, launch_of(row), digits(row.ms, 3)]
        spread = span((row.ms_p20, row.ms_p80), digits, 3)
        ranks = f"{digits(row.ms_rank_min, 3)}, {digits(row.ms_rank_max, 3)}"
        times = cells((row.ms_without, row.ms_waited, row.ms_host))
        lines.append([*words, spread, *times, ranks])
    heads = ["model", "wrapper", "launched", "step", "20 to 80 %", "one GPU", "waits"]
    return pd.DataFrame(lines, columns=[*heads, "launching", "each rank"])


def launch_of(row) -> str:
    """Return whether a step was replayed from a CUDA graph or launched from Python, in words."""
    return "graph" if row.capture else "Python"


def memory_bars(memory: pd.DataFrame, model: str) -> Chart:
    """Draw what each of two GPUs holds in GB, after an update and at the peak, by three kinds of
    training."""
    parts = PARTS | {"activations": "activations"}
    names = {"ddp": "DDP", "zero1": "sharded optimizer", "fsdp": "FSDP"}
    bars = {}
    for wrapper, name in names.items():
        rows = pick(memory, model=model, wrapper=wrapper).set_index("moment")
        bars[f"{name}, after an update"] = rows.loc["after", [*parts]]
        # Where the model is not sharded, only the total is known at the peak, which is where the
        # backward begins: the components are those of the forward's end.
        moment = "peak" if wrapper == "fsdp" else "forward"
        at_top = rows.loc[moment, [*parts]].astype(float).fillna(0.0)
        at_top["activations"] = rows.loc["peak", "whole"] - at_top[[*PARTS]].sum()
        bars[f"{name}, at its peak"] = at_top
    frame = pd.DataFrame(bars).astype(float).groupby(parts).sum().T / 1e9
    text = [f"{total:.0f}" for total in frame.sum(axis=1)]
    return stacks(frame, SHADES, 3.6, columns=3, text=text, xlabel="GB on each of two GPUs")


@chart(height=1.8)
def lanes(figure, table: pd.DataFrame, until_ms: float):
    """Draw all-gathers above what the units compute, from a step's begin; waits are orange."""
    few = table[table["gather_start_ms"] < until_ms]
    ax = figure.subplots()
    edge = {"edgecolor": "#ffffff", "linewidth": 0.6}
    for y, what, colour in ((1.1, "gather", "#0072b2"), (0.1, "compute", "#808080")):
        start, end = few[f"{what}_start_ms"], few[f"{what}_end_ms"]
        ax.broken_barh(
            list(zip(start, end - start, strict=True)), (y, 0.8), facecolor=colour, **edge
        )
    late = few[few["waited_ms"] > MARK_MS]
    waits = list(zip(late["turn_ms"], late["waited_ms"], strict=True))
    ax.broken_barh(waits, (0.1, 0.8), facecolor="#d55e00")
    root = few[few["unit"] == "root"].iloc[0]
    label(
        ax, "root", ((root["gather_start_ms"] + root["gather_end_ms"]) / 2, 2), (0, 2), ha="center"
    )
    for row in few.itertuples():
        name = "root" if row.unit == "root" else row.unit.removeprefix("layers.")
        for y, start, end in (
            (1.5, row.gather_start_ms, row.gather_end_ms),
            (0.5, row.compute_start_ms, row.compute_end_ms),
        ):
            if end - start > 0.045 * until_ms and end < until_ms:
                inside(ax, name, ((start + end) / 2, y), "#ffffff")
    ax.set(ylim=(0, 2.3), xlim=(0, until_ms), xlabel="ms from the begin of the step")
    ax.set_yticks([1.5, 0.5], ["gathers", "computes"])
    ax.grid(False, axis="y")
