"""FSDP: each rank's memory beside the count, and each all-gather beside what it hides behind."""

from pathlib import Path

import pandas as pd

from a2lib.lab import bulk
from a2lib.report.metrics import copy_bandwidth
from a2lib.report.page import one, pick
from a2lib.report.pages import sharded_optimizer
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.pages.ddp import step as ddp_step
from a2lib.report.plots import inside, label, name_lanes, stacks
from a2lib.report.style import INK, PAPER, Chart, chart
from a2lib.report.tables import cells
from a2lib.shapes import SIZES
from a2lib.theory import fsdp as theory
from a2lib.theory.sharding import UPDATE_BYTES
from a2lib.theory.transformer import parameter_count

MARK_MS = 0.01  # a wait of this length is the two events' own time
MODELS = ("xl25", "2.7B")
COPIES, NCCL = "fsdp_copies", "fsdp"  # a2lib's FSDP, by what carries its messages
# FSDP over copy engines by who updates its shards: PyTorch's AdamW or MasterAdamW after the
# backward, or MasterAdamW beside it; and one GPU that updates beside its backward.
ADAMW, MASTER, BESIDE = "fsdp_copies_adamw", "fsdp_copies_master", "fsdp_copies_updating"
WHOLE = "whole_updating"
# A line of a table of steps: a row's wrapper, and which of its columns.
STEPS = {
    "one GPU": (MASTER, "ms_without"),
    "one GPU, update overlapped": (WHOLE, "ms"),
    "FSDP, PyTorch's AdamW": (ADAMW, "ms"),
    "FSDP, MasterAdamW": (MASTER, "ms"),
    "FSDP, update overlapped": (BESIDE, "ms"),
}
PEERS = {
    "one GPU": ("ddp_copies", "ms_without"),
    "FSDP, copy engines": (COPIES, "ms"),
    "FSDP, NCCL": (NCCL, "ms"),
    "PyTorch's FSDP2": ("fsdp2", "ms"),
    "DDP, copy engines": ("ddp_copies", "ms"),
    "DDP, update overlapped": ("ddp_updating", "ms"),
}
# Bytes of a GPU's memory that a step of two ranks over copy engines moves per parameter, beside the
# passes and the update. A gather reads the fp32 rows twice and writes them in bf16 twice, and half
# of the weights are copied to either GPU; there are two. A reduction sends and receives a bf16
# half, and adds two of them to an fp32 one.
MOVED_BYTES = 2 * (4 + 2 + 1 + 1) + (1 + 1 + 2 + 2)
MOMENTS = {
    "init": "after init",
    "before": "before update",
    "after": "after update",
    "forward": "forward's end",
    "peak": "peak",
}
PARTS = {  # a column of bytes, and its name in the figure
    **sharded_optimizer.PARTS,
    "whole_bytes": "gathered, in flight",
    "travelling_bytes": "gathered, in flight",
}
SHADES = {
    **sharded_optimizer.SHADES,
    "gathered, in flight": "#00825f",
    "activations": "#808080",
}


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each step of a2lib's FSDP what its traced step says of the all-gathers.

    gathers: number of all-gathers
    in_time: how many had ended when their unit's turn came, or made the GPU wait MARK_MS at most
    backward_ms: when the backward ended, from the step's begin
    gather_forward: ms of a block's all-gather in the forward (median)
    block_forward, block_backward: ms that a block computes in that pass (median)

    They are blank for a step that was not traced.
    """
    return rows.join(pd.DataFrame([_traced(row) for row in rows.itertuples()], rows.index))


def _traced(row) -> dict[str, float]:
    table = gathers(row) if row.wrapper in (COPIES, NCCL) else None
    if table is None:
        return {}
    late = table[(table["slack_ms"] < 0) & (table["waited_ms"] > MARK_MS)]
    blocks = table[table["unit"] != "root"]
    gather = (blocks["gather_end_ms"] - blocks["gather_start_ms"]).groupby(blocks["pass"]).median()
    block = (blocks["compute_end_ms"] - blocks["compute_start_ms"]).groupby(blocks["pass"]).median()
    return {
        "gathers": len(table),
        "in_time": len(table) - len(late),
        "backward_ms": table.loc[table["pass"] == "backward", "compute_end_ms"].max(),
        "gather_forward": gather["forward"],
        "block_forward": block["forward"],
        "block_backward": block["backward"],
    }


def gathers(row) -> pd.DataFrame | None:
    """Return the all-gathers of a row's traced step, times from its begin; None if not traced."""
    root = Path(row.file).parents[2]
    launch = "captured" if row.capture else "launched"
    name = f"{row.wrapper}-{row.model}-{launch}-{row.world_size}-ranks"
    if (row.device, name) not in bulk.pictures("gathers", root):
        return None
    return pd.DataFrame(bulk.read("gathers", row.device, name, root).rows)


def memory_columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Return the moments that the page shows.

    activations: bytes that belong to no named component
    whole: bytes of all tensors at that moment; at a peak, the most they took
    counted: of a2lib's FSDP, the formula's bytes
    """
    rows = rows.sort_values("step_number")
    first_step = rows["moment"].isin(["init", "before", "after"]) & (rows["step_number"] == 0)
    rows = rows[first_step | rows["moment"].isin(["forward", "peak"])].copy()
    rows["activations"] = rows["present_bytes"] - rows[[*PARTS]].sum(axis=1)
    rows["whole"] = rows["tensor_bytes"].fillna(rows["present_bytes"])
    at_forward = rows[rows["moment"] == "forward"].set_index(["wrapper", "model"])["activations"]
    counted = []
    for row in rows.itertuples():
        activations = at_forward.get((row.wrapper, row.model), float("nan"))
        counted.append(_counted(row, activations))
    return rows.assign(counted=counted)


def _counted(row, activations: float) -> float:
    if row.wrapper != "fsdp":
        return float("nan")
    shape, ranks = SIZES[row.model], int(row.world_size)
    if row.moment == "peak":
        return theory.peak(shape, ranks, activations).total
    if row.moment == "forward":
        moments, name = theory.step(shape, ranks, activations), "backward root"
    else:
        moments, name = theory.between(shape, ranks), row.moment
    totals = {held.moment: held.total for held in moments}
    return totals[name]


def step(steps: pd.DataFrame, wrapper: str = NCCL, model: str = "xl25", capture: bool = True):
    """Return the row of one step."""
    return one(steps, model=model, wrapper=wrapper, capture=capture)


def python_step(steps: pd.DataFrame, wrapper: str, model: str = "xl25"):
    """Return the row of one step that is launched from Python."""
    return step(steps, wrapper, model, capture=False)


def narrow_ddp(steps: pd.DataFrame, updating: bool = False, model: str = "xl25"):
    """Return the row of data parallelism over copy engines with 16-bit weights and gradients (CUDA
    graph); its ``ms_without`` is one GPU that trains alike."""
    return step(steps, "ddp_updating" if updating else "ddp_copies", model)


def over_replicated(steps: pd.DataFrame, ddp: pd.DataFrame, model: str) -> float:
    """Return FSDP's step over copy engines with 16-bit weights over data parallelism's step over
    NCCL under autocast, in buckets of 1000 MiB; both launched from Python, in different runs."""
    replicated = ddp_step(ddp, bucket_mb=1000, model=model, capture=False)
    return python_step(steps, COPIES, model).ms / replicated.ms


def at_peak(memory: pd.DataFrame, wrapper: str = NCCL, model: str = "xl25"):
    """Return the row of a wrapper's peak."""
    return one(memory, wrapper=wrapper, model=model, moment="peak")


def state_bytes(memory: pd.DataFrame, wrapper: str) -> float:
    """Return the bytes of weights, gradients and moments of the 2.0B model after an update."""
    row = one(memory, wrapper=wrapper, model="xl25", moment="after")
    return row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes


def least_update_ms(ceiling: pd.DataFrame, model: str = "xl25") -> float:
    """Return the ms that an AdamW update of all weights takes at least, by its bytes at the
    bandwidth of a copy."""
    return UPDATE_BYTES * parameter_count(SIZES[model]) / copy_bandwidth(ceiling) / 1e9


def over_one_gpu(row) -> float:
    """Return a step over that of one GPU in the same turns."""
    return row.ms / row.ms_without


def times_table(steps: pd.DataFrame, lines: dict, capture: bool) -> pd.DataFrame:
    """Return the ms of the steps of ``lines`` by one launch: a column for each model."""
    table = pd.DataFrame({"step": [*lines]})
    for model in MODELS:
        rows = pick(steps, model=model, capture=capture).set_index("wrapper")
        table[TITLES[model]] = cells([rows.loc[wrapper, name] for wrapper, name in lines.values()])
    return table


def ratios_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the ms of the steps of STEPS in a CUDA graph, and behind each model's column the
    ratios to one GPU's step in the same turns."""
    times = times_table(steps, STEPS, capture=True)
    table = times[["step"]].copy()
    for model in MODELS:
        title = TITLES[model]
        table[title] = times[title]
        ratios = []
        for wrapper, name in STEPS.values():
            row = step(steps, wrapper, model)
            ratios.append(f"{getattr(row, name) / row.ms_without:.3f}")
        table[f"{title}, ratio"] = ratios
    return table


def moved_ms(ceiling: pd.DataFrame, model: str = "xl25") -> float:
    """Return the ms that MOVED_BYTES of all weights take at the bandwidth of a copy."""
    return MOVED_BYTES * parameter_count(SIZES[model]) / copy_bandwidth(ceiling) / 1e9


def expected_ms(row, ceiling: pd.DataFrame) -> float:
    """Return the ms of one GPU's step in a row's turns less half an update by its bytes."""
    return row.ms_without - least_update_ms(ceiling, row.model) / 2


def lost_ms(row, ceiling: pd.DataFrame) -> float:
    """Return by how many ms a step is longer than expected, without its waits for gathers."""
    return row.ms - expected_ms(row, ceiling) - row.ms_waited


def passes_longer_ms(steps: pd.DataFrame, ceiling: pd.DataFrame, model: str) -> float:
    """Return by how many ms forward and backward of a traced step over copy engines, without
    waits, are longer than one GPU's step less its update by bytes."""
    row = step(steps, COPIES, model)
    one_gpu = narrow_ddp(steps, model=model).ms_without - least_update_ms(ceiling, model)
    return row.backward_ms - row.ms_waited - one_gpu


def memory_table(memory: pd.DataFrame) -> pd.DataFrame:
    """Return FSDP's memory in GB by component, and its count: a column for each moment of the 3.4B
    step."""
    names = ["weights", "gradients", "moments", "gathered", "activations", "total", "count"]
    table = pd.DataFrame({"GB": names})
    for moment, words in MOMENTS.items():
        row = one(memory, model="2.7B", wrapper=NCCL, moment=moment)
        in_flight = row.whole_bytes + row.travelling_bytes
        parts = [row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, in_flight]
        parts.append(row.activations)
        parts += [row.whole, row.counted]
        table[words] = [f"{size / 1e9:.2f}" if size > 5e5 else "0" for size in parts]
    return table


def memory_bars(memory: pd.DataFrame) -> Chart:
    """Draw what each of two GPUs holds in GB of the 2.0B model, after an update and at the peak, by
    three kinds of training."""
    parts = PARTS | {"activations": "activations"}
    names = {"ddp": "DDP", "zero1": "sharded optimizer", NCCL: "FSDP"}
    bars = {}
    for wrapper, name in names.items():
        rows = pick(memory, model="xl25", wrapper=wrapper).set_index("moment")
        bars[f"{name}, after an update"] = rows.loc["after", [*parts]]
        # Where the model is not sharded, only the total is known at the peak, which is where the
        # backward begins: the components are those of the forward's end.
        moment = "peak" if wrapper == NCCL else "forward"
        at_top = rows.loc[moment, [*parts]].astype(float).fillna(0.0)
        at_top["activations"] = rows.loc["peak", "whole"] - at_top[[*PARTS]].sum()
        bars[f"{name}, at its peak"] = at_top
    frame = pd.DataFrame(bars).astype(float).groupby(parts).sum().T / 1e9
    text = [f"{total:.0f}" for total in frame.sum(axis=1)]
    return stacks(frame, SHADES, 3.6, columns=3, text=text, xlabel="GB on each of two GPUs")


@chart(height=1.8)
def lanes(figure, table: pd.DataFrame, until_ms: float):
    """Draw all-gathers above what the units compute, from a step's begin; waits are open."""
    few = table[table["gather_start_ms"] < until_ms]
    ax = figure.subplots()
    for y, what, colour in ((1.1, "gather", "#0072b2"), (0.1, "compute", "#808080")):
        for row in few.itertuples():
            start = getattr(row, f"{what}_start_ms")
            end = getattr(row, f"{what}_end_ms")
            ax.broken_barh([(start, end - start)], (y, 0.8), facecolor=colour, edgecolor="#ffffff")
            if end - start > 0.045 * until_ms and end < until_ms:
                number = row.unit.removeprefix("layers.")
                inside(ax, number, ((start + end) / 2, y + 0.4), "#ffffff")
    late = few[few["waited_ms"] > MARK_MS]
    waits = list(zip(late["turn_ms"], late["waited_ms"], strict=True))
    ax.broken_barh(waits, (0.13, 0.74), facecolor=PAPER, edgecolor=INK)
    root = few[few["unit"] == "root"].iloc[0]
    label(ax, "root", (root["gather_start_ms"], 2), (3, 2))
    ax.set(ylim=(0, 2.3), xlim=(0, until_ms), xlabel="ms from the begin of the step")
    name_lanes(ax, [1.5, 0.5], ["gathers", "computes"])
