"""Memory: peaks of steps beside their count, what a block saves, and which lines allocate most."""

import re

import numpy as np
import pandas as pd

from a2lib.report import plots, traces
from a2lib.report.page import one, pick
from a2lib.report.style import Chart
from a2lib.report.units import digits
from a2lib.shapes import SIZES
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import SAVED, StepMemory, asked, peak
from a2lib.theory.transformer import block_parameter_count, parameter_count

BATCH, MODEL = 4, "2.7B"  # the text's 3.4B model
CONTEXTS = (128, 256, 512, 1024, 2048)
MATRIX = ("mask", "prob", "prob16", "lse")  # the softmax's output, by the ends of tensors' names
MODES = {
    "inference": "forward alone",
    "forward": "forward that saves",
    "train-step": "training step",
}


def step(context=512, precision="fp32", attention="eager", model=MODEL) -> StepMemory:
    """Return the training step of a named model whose tensors ``theory.memory`` counts."""
    return StepMemory(SIZES[model], BATCH, int(context), precision, attention)


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row, in bytes:

    state: model state, 16 bytes per parameter
    capacity: the memory that the driver gives
    counted: tensors and workspaces at the peak, by counting; of whole second training steps
    """
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    whole = (rows["phase"] == "step") & (rows["step_number"] == 1)
    trained = rows[whole & (rows["mode"] == "train-step")]
    counted = []
    for row in trained.itertuples():
        counted.append(asked(step(row.context, row.precision, row.attention, row.model)))
    return rows.assign(
        state=16 * rows["model"].map(SIZES).map(parameter_count),
        capacity=rows["note"].map(_total_capacity).min(),
        counted=pd.Series(counted, trained.index),
    )


def _total_capacity(note: str) -> float:
    """Return the GPU's memory as PyTorch's out-of-memory message has it, in bytes."""
    size = re.search(r"total capacity of ([\d.]+) GiB", str(note))
    return float(size[1]) * 2**30 if size else np.nan


def blocks(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row of a block, in bytes:

    formula: what the block saves for its backward, by counting
    gradients: its parameters' gradients, by counting
    largest, five: the largest saved tensor and the five largest together, seen by autograd's hooks
    """
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    seen = traces.pictures("saved", rows)
    lines = []
    for row in rows.itertuples():
        shape, context = SIZES[row.model], int(row.context)
        sizes = [tensor["bytes"] for tensor in traces.traced(row, seen)]
        sizes.sort(reverse=True)
        line = {
            "formula": block_saved_bytes(shape, BATCH, context, row.attention, row.precision),
            "gradients": 4 * block_parameter_count(shape),
            "largest": sizes[0] if sizes else np.nan,
            "five": sum(sizes[:5]) if sizes else np.nan,
        }
        lines.append(line)
    return rows.join(pd.DataFrame(lines, index=rows.index))


def largest(lines: list[dict], phase: str) -> tuple[float, int]:
    """Return the bytes of the largest allocation of a recorded step's phase, and how many
    allocations have that size."""
    here = pick(pd.DataFrame(lines), phase=phase)
    most = here["bytes"].max()
    return most, here.loc[here["bytes"] == most, "count"].sum()


def over(rows: pd.DataFrame, **about) -> list[dict]:
    """Return the recorded timeline of a second step, from its first phase on."""
    recorded = traces.picture("memory", rows, step_number=1, model=MODEL, **about)
    is_in_phase = ["/" in point["phase"] for point in recorded]
    return recorded[is_in_phase.index(True) :]


def matrix_bytes(case: StepMemory) -> int:
    """Return the bytes of a block's saved tensors that are the softmax's output."""
    total = 0
    for name, size in case.saved.items():
        if re.split("[/.]", name)[-1] in MATRIX:
            total += size
    return total


PIECES = {
    "parameters": "#444444",
    "optimizer state": "#808080",
    "gradients": "#0072b2",
    "saved: softmax's output": "#8b2f00",
    "saved: other tensors": "#d55e00",
    "temporaries": "#f6cfab",
}


def pieces(case: StepMemory) -> dict[str, int]:
    """Return the bytes at the peak of a step by category, what is saved split into the softmax's
    output and the rest."""
    sizes = dict(peak(case).by_category)
    saved = sizes.pop(SAVED)
    matrix = matrix_bytes(case)
    whole_blocks, rest = divmod(saved, sum(case.saved.values()))
    scores = whole_blocks * matrix + min(rest, matrix)
    sizes["saved: softmax's output"] = scores
    sizes["saved: other tensors"] = saved - scores
    return sizes


def peak_bars(rows: pd.DataFrame, steps: dict[str, StepMemory]) -> Chart:
    """Draw the bytes at the peak of each step by category, by counting, in GB, and a line at the
    memory that the driver gives. A step that ran out of memory or was not run says so, and is
    paler."""
    sizes, words, pale = {}, [], []
    for name, case in steps.items():
        status = _status(rows, case)
        sizes[name if status else f"{name}, not run"] = pieces(case)
        total = f"{peak(case).total / 1e9:.0f}"
        words.append(f"{total}, oom" if "oom" in status else total)
        pale.append("ok" not in status)
    frame = pd.DataFrame.from_dict(sizes, orient="index") / 1e9
    capacity = rows["capacity"].iloc[0] / 1e9

    def limit(ax):
        for pieces_ in ax.containers:
            for piece, is_pale in zip(pieces_, pale, strict=True):
                piece.set_alpha(0.5 if is_pale else 1)
        plots.reference(ax, capacity, "", vertical=True)
        place = ("data", "axes fraction")
        name = f"{capacity:.0f} GB, one H200"
        plots.label(ax, name, (capacity, 0.98), (4, 0), xycoords=place, va="top")

    xlabel = "GB at the peak"
    return plots.stacks(frame, PIECES, 4.2, text=words, numbers=False, xlabel=xlabel, more=limit)


def _status(rows: pd.DataFrame, case: StepMemory) -> set[str]:
    """Return how the second training step ended where it was run ("ok" or "oom")."""
    here = (rows["model"] == MODEL) & (rows["mode"] == "train-step") & (rows["phase"] == "step")
    here &= (rows["context"] == case.context) & (rows["precision"] == case.precision)
    here &= (rows["attention"] == case.attention) & (rows["step_number"] == 1)
    return set(rows.loc[here, "status"])


def at(
    rows: pd.DataFrame,
    context: int = 512,
    precision: str = "fp32",
    attention: str = "eager",
    mode: str = "train-step",
    number: int = 1,
):
    """Return the row of a whole step of the 3.4B model, by default its second training step."""
    return one(
        rows,
        model=MODEL,
        context=context,
        mode=mode,
        precision=precision,
        attention=attention,
        step_number=number,
        phase="step",
    )


def finished(rows: pd.DataFrame, mode: str = "train-step") -> pd.DataFrame:
    """Return the whole second steps, by default training steps, that did not run out of memory."""
    return pick(rows, phase="step", step_number=1, status="ok", mode=mode)


def block(rows: pd.DataFrame, context: int = 2048, precision="fp32", attention="eager"):
    """Return the row of what one block saves."""
    return one(rows, model=MODEL, context=context, precision=precision, attention=attention)


def two_terms(context: int) -> int:
    """Return the estimated peak of a training step in fp32 with eager attention: model state, or
    weights, moments and what all blocks save."""
    shape = SIZES[MODEL]
    parameters = parameter_count(shape)
    saved = shape.num_layers * block_saved_bytes(shape, BATCH, context)
    return max(16 * parameters, 12 * parameters + saved)


def counted_step(context: int) -> int:
    """Return the counted peak of a training step in fp32 with FlashAttention, which was not run."""
    return asked(step(context, attention="flash"))


def bf16_over_fp32(
    rows: pd.DataFrame, mode: str = "train-step", value: str = "tensor_bytes"
) -> pd.Series:
    """Return the peak in bf16 (or another ``value``) divided by that in fp32 with eager attention,
    by model and context, where both fit."""
    few = pick(finished(rows, mode), attention="eager")
    few = few.assign(value=few[value].astype(float))
    wide = few.pivot_table("value", ["model", "context"], "precision").dropna()
    return wide["bf16"] / wide["fp32"]


def peak_cells(rows: pd.DataFrame) -> list[str]:
    """Return the measured peak of each row in GB, or "oom", and of a training step its counted peak
    in brackets."""
    cells = []
    for row in rows.itertuples():
        if row.status == "ok":
            cells.append(digits(row.tensor_bytes / 1e9, 3))
        elif np.isnan(row.counted):
            cells.append("oom")
        else:
            cells.append(f"oom ({digits(row.counted / 1e9, 3)})")
    return cells


def peaks(rows: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Return a table of the 3.4B model's peaks: a line per context, a column per mode, and what
    the training step with eager attention reserves."""
    few = pick(rows, model=MODEL, phase="step", step_number=1, precision=precision)
    attention = few["attention"].map({"eager": "", "flash": ", FlashAttention"})
    few = few.assign(cell=peak_cells(few), column=few["mode"].map(MODES) + attention)
    wide = few.pivot(index="context", columns="column", values="cell")
    steps = pick(few, mode="train-step", attention="eager").set_index("context")
    sizes = steps["reserved_bytes"].map(lambda size: digits(size / 1e9, 3), na_action="ignore")
    wide = wide.assign(reserved=sizes).reset_index()
    wide["context"] = wide["context"].map("{:,}".format)
    return wide.rename(columns={"context": "tokens"})
