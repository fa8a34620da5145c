"""Memory: peaks of steps beside their count, what a block saves, and which lines allocate most."""

import re

import numpy as np
import pandas as pd

from a2lib.report import plots, traces
from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.report.page import one, pick
from a2lib.report.pages import timeline
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.style import COLOURS, Chart, chart
from a2lib.report.units import gb, mb
from a2lib.shapes import SIZES
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import evaluate
from a2lib.theory.layouts import Layout, Training
from a2lib.theory.memory.saved import block_saved, block_saved_bytes
from a2lib.theory.memory.step import GRADIENTS, SAVED, StepMemory, asked, peak
from a2lib.theory.transformer import block_parameter_count, parameter_count, state_bytes

BATCH, MODEL = 4, "2.7B"
CONTEXTS = (128, 256, 512, 1024, 2048)
UNIT = {"MiB": 2**20, "GiB": 2**30, "GB": 1e9, "G": 1e9, "B": 1}
MATRIX = "softmax's output"
KINDS = {
    MATRIX: ("mask", "prob", "prob16", "lse"),
    "FFN": ("gate", "silu", "value", "product"),
    "norms, residual stream": ("x0", "y0", "root", "normal", "norm"),
    "q, k, v, attention's output": ("q", "k", "v0", "values", "o"),
    "bf16 copies of inputs": ("x",),
    "bf16 copies of weights": ("16",),
}
SHADES = ("#8b2f00", "#00825f", "#b0558a", "#a86f00", "#7fc1ad", "#444444")
MODES = {
    "inference": "forward alone",
    "forward": "forward that saves",
    "train-step": "training step",
}
# What one GPU of the largest model's step would hold: devices, sharding, checkpoints, optimizer.
WAYS = {
    "1 GPU, a checkpoint around each block": (1, "none", "block", "adamw"),
    "the same, AdamW's moments in 8 bits": (1, "none", "block", "adamw-8bit"),
    "2 GPUs, moments sharded, checkpoints": (2, "zero1", "block", "adamw"),
    "2 GPUs, all state sharded (FSDP)": (2, "fsdp", "none", "adamw"),
    "the same with checkpoints": (2, "fsdp", "block", "adamw"),
}


def step(context=512, precision="fp32", attention="eager", model=MODEL) -> StepMemory:
    """Return the training step of a named model whose tensors ``theory.memory`` counts."""
    return StepMemory(SIZES[model], BATCH, int(context), precision, attention)


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row, in bytes:

    state: model state, 16 bytes per parameter
    capacity: the memory that the driver gives
    counted: tensors and workspaces at the peak, by counting; of whole second training steps
    planned: the estimate of the layouts' evaluator; of the same
    wanted: the allocation that failed, from PyTorch's message; of steps that ran out of memory
    """
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    whole = (rows["phase"] == "step") & (rows["step_number"] == 1)
    capacity = rows["note"].map(lambda note: _said("total capacity of", note)).min()
    theory = [_theory(r) if w else {} for r, w in zip(rows.itertuples(), whole, strict=True)]
    state = rows["model"].map({m: state_bytes(s).total for m, s in SIZES.items()})
    rows = rows.assign(state=state, capacity=capacity)
    return rows.join(pd.DataFrame(theory, index=rows.index))


def _said(words: str, note: str) -> float:
    """Return the size behind these words in PyTorch's out-of-memory message."""
    size = re.search(rf"{words} ([\d.]+) (MiB|GiB)", str(note))
    return float(size[1]) * UNIT[size[2]] if size else np.nan


def _theory(row) -> dict:
    sizes = {"counted": np.nan, "planned": np.nan}
    if row.mode == "train-step":
        case = step(row.context, row.precision, row.attention, row.model)
        about = case.shape, BATCH, case.context, case.precision, case.attention
        estimate = evaluate(Training(*about, "library"), Layout(sharding="none"), DEVICES["H200"])
        sizes = {"counted": asked(case), "planned": estimate.memory_bytes}
    if row.status == "oom":
        sizes["wanted"] = _said("Tried to allocate", row.note)
    return sizes


def blocks(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row of a block, in bytes:

    formula: what the block saves for its backward, by counting
    gradients: its parameters' gradients, by counting
    largest, five: the largest saved tensor and the five largest together, seen by autograd's hooks
    """
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    seen = traces.pictures("saved", rows)
    largest_first = []
    for row in rows.itertuples():
        sizes = sorted((tensor["bytes"] for tensor in traces.traced(row, seen)), reverse=True)
        largest_first.append(sizes or [np.nan])
    return rows.assign(
        formula=[
            block_saved_bytes(SIZES[r.model], BATCH, int(r.context), r.attention, r.precision)
            for r in rows.itertuples()
        ],
        gradients=[4 * block_parameter_count(SIZES[m]) for m in rows["model"]],
        largest=[sizes[0] for sizes in largest_first],
        five=[sum(sizes[:5]) for sizes in largest_first],
    )


def recordings(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each recorded row:

    counted: bytes at the peak, by counting; of second training steps
    forward_largest, backward_largest: bytes of the largest allocation of the phase
    forward_of, backward_of: how many allocations have that size

    And to a single block's row, in bytes:

    ended: what is in use as its forward ends
    kept: the part of it that is saved for the backward
    grown: gradients at the peak
    left: what is still saved for the backward at the peak
    matrices: the number of tensors at the peak that are as large as the scores
    own: how many of these the forward has saved
    """
    lines, timelines, largest = (
        traces.pictures(name, rows) for name in ("lines", "memory", "largest")
    )
    derived = []
    for row in rows.itertuples():
        case = step(row.context, row.precision, row.attention, row.model)
        is_counted = row.mode == "train-step" and int(row.step_number) == 1
        sizes = {"counted": asked(case) if is_counted else np.nan}
        sizes |= _largest_by_phase(traces.traced(row, lines))
        recorded = traces.traced(row, timelines)
        if row.mode == "block" and recorded:
            at_peak = traces.traced(row, largest)
            sizes |= _block_moments(recorded, at_peak, case.sizes["scores"])
        derived.append(sizes)
    return rows.join(pd.DataFrame(derived, index=rows.index))


def _largest_by_phase(allocations: list[dict]) -> dict[str, float]:
    """Return for forward and backward the bytes of the largest allocation, and how many have that
    size."""
    sizes = {}
    for phase in ("forward", "backward"):
        here = [line for line in allocations if line["phase"] == phase]
        most = max((line["bytes"] for line in here), default=np.nan)
        sizes[f"{phase}_largest"] = most
        sizes[f"{phase}_of"] = sum(line["count"] for line in here if line["bytes"] == most)
    return sizes


def _block_moments(recorded: list[dict], at_peak: list[dict], scores: int) -> dict[str, int]:
    """Return what ``recordings`` adds to the row of a block, from its timeline, the tensors at its
    peak, and the bytes of the scores."""
    at = moments(recorded)
    matrices = [tensor for tensor in at_peak if tensor["bytes"] == scores]
    return {
        "ended": timeline.total(at["forward"]),
        "kept": at["forward"]["saved for backward"],
        "grown": at["peak"]["gradients"],
        "left": at["peak"]["saved for backward"],
        "matrices": len(matrices),
        "own": sum(tensor["category"] == "saved for backward" for tensor in matrices),
    }


def moments(rows: list[dict]) -> dict[str, dict]:
    """Return three points of a recorded timeline: the end of the forward, the peak (the first one),
    and the end of the backward."""

    def last(phase: str) -> dict:
        return [row for row in rows if row["phase"].endswith(phase)][-1]

    return {
        "forward": last("/forward"),
        "peak": max(rows, key=timeline.total),
        "backward": last("/backward"),
    }


def over(rows: pd.DataFrame, **about) -> list[dict]:
    """Return the recorded timeline of a second step, from its first phase on."""
    recorded = traces.picture("memory", rows, step_number=1, model=MODEL, **about)
    begin = next(i for i, point in enumerate(recorded) if "/" in point["phase"])
    return recorded[begin:]


def kinds(context: int, precision: str, attention: str) -> dict[str, int]:
    """Return the bytes that a block saves for its backward, by kind of tensor."""
    sizes = dict.fromkeys(KINDS, 0)
    for name, size in block_saved(SIZES[MODEL], BATCH, context, attention, precision).items():
        end = re.split("[/.]", name)[-1]
        kind = next(kind for kind, ends in KINDS.items() if end in ends)
        sizes[kind] += size
    return sizes


def block_bars(context: int) -> Chart:
    """Draw what one block saves by kind: a bar for each precision and attention, GB."""
    names = {"eager": "eager", "flash": "Flash"}
    bars = {f"{p}, {names[a]}": kinds(context, p, a) for p in ("fp32", "bf16") for a in names}
    frame = pd.DataFrame(bars).T / 1e9
    text = [f"{total:.3g}" for total in frame.sum(axis=1)]
    shades = dict(zip(KINDS, SHADES, strict=True))
    return plots.stacks(frame, shades, 3.3, text=text, least=9, xlabel="GB saved by one block")


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
    matrix = kinds(case.context, case.precision, case.attention)[MATRIX]
    whole_blocks, rest = divmod(saved, sum(case.saved.values()))
    scores = whole_blocks * matrix + min(rest, matrix)
    sizes |= {"saved: softmax's output": scores, "saved: other tensors": saved - scores}
    return {name: sizes[name] for name in PIECES}


def peak_bars(rows: pd.DataFrame, steps: dict[str, StepMemory]) -> Chart:
    """Draw the bytes at the peak of each step by category, by counting, in GB, and a line at the
    memory that the driver gives. A step that ran out of memory says so."""
    frame = pd.DataFrame({name: pieces(case) for name, case in steps.items()}).T / 1e9
    totals = [peak(case).total / 1e9 for case in steps.values()]
    ran = [_ran(rows, case) for case in steps.values()]
    words = [f"{x:.0f}{'' if ok else ', oom'}" for x, ok in zip(totals, ran, strict=True)]
    capacity = rows["capacity"].iloc[0] / 1e9

    def limit(ax):
        plots.reference(ax, capacity, "", vertical=True)
        at = (capacity, 0.98)
        here = {"xycoords": ("data", "axes fraction"), "va": "top"}
        plots.label(ax, f"{capacity:.0f} GB, one H200", at, (4, 0), **here)

    looks = {"text": words, "least": 9, "xlabel": "GB at the peak", "more": limit}
    return plots.stacks(frame, PIECES, 4.2, **looks)


def _ran(rows: pd.DataFrame, case: StepMemory) -> bool:
    about = {name: getattr(case, name) for name in ("context", "precision", "attention")}
    same = pick(rows, model=MODEL, mode="train-step", phase="step", step_number=1, **about)
    return bool((same["status"] == "ok").all())


@chart(height=2.8)
def trade(figure, contexts: tuple[int, ...]):
    """Draw saved tensors plus gradients against the blocks that the backward has passed, in GB:
    fp32, eager attention."""
    shape = SIZES[MODEL]
    gradients, done = 4 * block_parameter_count(shape), np.arange(shape.num_layers + 1)
    ax = figure.subplots()
    for context, colour in zip(contexts, COLOURS, strict=False):
        kept = block_saved_bytes(shape, BATCH, context, "eager", "fp32")
        size = ((shape.num_layers - done) * kept + done * gradients) / 1e9
        ax.plot(done, size, color=colour, linewidth=2)
        plots.label(ax, f"{context:,} tokens", (done[1], size[1]), (4, 5), color=colour)
    ax.set(xlabel="blocks that the backward has passed", ylabel="GB")
    ax.set(xlim=(0, shape.num_layers), ylim=(0, None))


def snapshot_cartoon() -> Drawing:
    """Draw what the timeline of a training step looks like, with a number at each thing to see."""
    blocks, wide, stair, gradient, base = 6, 21, 15, 5, 196
    colours = {name: f"fill: {colour}" for name, colour in timeline.CATEGORIES.items()}
    elements = [
        box(0, base - 16, WIDTH, 16, colours["parameters"]),
        box(0, base - 44, WIDTH, 28, colours["optimizer state"]),
    ]
    floor = base - 44

    def bar(x: float, width: float, grown: float, saved: float, temporary: float) -> None:
        y = floor
        parts = ((GRADIENTS, grown), (SAVED, saved), ("temporaries", temporary))
        for name, height in parts:
            if height:
                y -= height
                elements.append(box(x, y, width, height, colours[name]))

    for i in range(blocks):
        bar(10 + i * wide, wide, 0, stair * (i + 1), 0)
        bar(16 + i * wide, 6, 0, stair * (i + 1), 9)
    middle = 10 + blocks * wide
    bar(middle, 12, 0, stair * blocks, 14)
    for i in range(blocks):
        x = middle + 12 + i * wide
        bar(x, wide, gradient * (i + 1), stair * (blocks - i - 1), 0)
        bar(x, 9, gradient * i, stair * (blocks - i), 26)
    end = middle + 12 + blocks * wide
    bar(end, 46, gradient * blocks, 0, 0)
    for number, x, y in (
        ("1", 348, base - 18),
        ("2", 50, 92),
        ("3", middle - 8, 40),
        ("4", middle + 20, 28),
        ("5", middle + 92, 72),
        ("6", end + 24, 116),
    ):
        style = "fill: #ffffff; stroke: #000000"
        elements.append(box(x - 8, y - 12, 16, 16, style))
        elements.append(text(x, y, number, anchor="middle", bold=True))
    elements.append(stroke(f"M0 {base + 8}h{WIDTH - 2}l-7 -4m7 4l-7 4"))
    elements.append(text(WIDTH / 2, base + 26, "allocations, in order", anchor="middle"))
    return Drawing(elements, base + 34)


def ways(model: str) -> dict[str, list[float]]:
    """Return, by layout and context, the bytes that each GPU holds in a training step of a model by
    the evaluator of layouts; of fp32 and bf16 the larger, with eager attention."""

    def held(devices: int, sharding: str, checkpoints: str, optimizer: str, context: int) -> float:
        layout = Layout(data=devices, sharding=sharding, checkpointing=checkpoints)
        trainings = [
            Training(SIZES[model], BATCH, context, precision, "eager", "library", optimizer)
            for precision in ("fp32", "bf16")
        ]
        return max(evaluate(each, layout, DEVICES["H200"]).memory_bytes for each in trainings)

    return {way: [held(*layout, context) for context in CONTEXTS] for way, layout in WAYS.items()}


def at(
    rows: pd.DataFrame,
    context: int = 512,
    precision: str = "fp32",
    attention: str = "eager",
    mode: str = "train-step",
    model: str = MODEL,
    number: int = 1,
    phase: str = "step",
):
    """Return the row of a step, by default a whole second training step."""
    about = {"model": model, "context": context, "mode": mode, "precision": precision}
    return one(rows, attention=attention, step_number=number, phase=phase, **about)


def done(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the whole second steps that did not run out of memory."""
    return pick(rows, phase="step", step_number=1, status="ok")


def trained(rows: pd.DataFrame) -> pd.DataFrame:
    """Return those of ``done`` that are training steps."""
    return pick(done(rows), mode="train-step")


def block(rows: pd.DataFrame, context: int = 2048, precision="fp32", attention="eager"):
    """Return the row of what one block saves."""
    about = {"context": context, "precision": precision, "attention": attention}
    return one(rows, model=MODEL, **about)


def alone(rows: pd.DataFrame, context: int = 2048):
    """Return the row of the recording of one block alone: fp32, eager attention."""
    about = {"mode": "block", "model": MODEL, "precision": "fp32", "attention": "eager"}
    return one(rows, context=context, step_number=1, **about)


def two_terms(context: int) -> int:
    """Return the estimated peak of a training step in fp32 with eager attention: model state, or
    weights, moments and what all blocks save."""
    shape = SIZES[MODEL]
    parameters = parameter_count(shape)
    saved = shape.num_layers * block_saved_bytes(shape, BATCH, context)
    return max(16 * parameters, 12 * parameters + saved)


def copies(size: str) -> int:
    """Return the bytes of the bf16 copies of weights that autocast keeps: of every matrix except
    the embedding."""
    shape = SIZES[size]
    of_a_block = block_saved(shape, BATCH, 128, "eager", "bf16").items()
    weights = sum(size_ for name, size_ in of_a_block if name.endswith(".16"))
    return shape.num_layers * weights + 2 * shape.vocab_size * shape.d_model


def bf16_over_fp32(rows: pd.DataFrame, mode: str = "train-step") -> pd.Series:
    """Return the peak in bf16 divided by that in fp32 with eager attention, by model and context,
    where both fit."""
    few = pick(done(rows), mode=mode, attention="eager")
    wide = few.pivot_table("tensor_bytes", ["model", "context"], "precision").dropna()
    return wide["bf16"] / wide["fp32"]


def peak_cells(rows: pd.DataFrame) -> list[str]:
    """Return the measured peak of each row in GB, or "oom", for a training step with the counted
    peak in brackets."""
    cells = []
    for row in rows.itertuples():
        needed = "" if np.isnan(row.counted) else f" ({gb(row.counted, 3)[:-3]})"
        cells.append(gb(row.tensor_bytes, 3)[:-3] if row.status == "ok" else f"oom{needed}")
    return cells


def peaks(rows: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Return a table of the 3.4B model's peaks: a line per context, a column per mode."""
    few = pick(rows, model=MODEL, phase="step", step_number=1, precision=precision)
    columns_ = [
        MODES[mode] + (", FlashAttention" if attention == "flash" else "")
        for mode, attention in zip(few["mode"], few["attention"], strict=True)
    ]
    few = few.assign(cell=peak_cells(few), column=columns_)
    wide = few.pivot(index="context", columns="column", values="cell").reset_index()
    wide["context"] = wide["context"].map("{:,}".format)
    return wide.rename(columns={"context": "tokens"})


def other_sizes(rows: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Return a table of the other models' peaks: a line per model and precision, a column per
    context."""
    few = pick(rows, mode=mode, phase="step", step_number=1)
    few = few[few["model"] != MODEL]
    few = few.assign(cell=peak_cells(few))
    wide = few.pivot(index=["model", "precision"], columns="context", values="cell")
    wide = wide.reindex(["small", "medium", "large", "xl25", "10B"], level=0).reset_index()
    return wide.replace({"model": TITLES}).rename(columns={c: f"{c:,}" for c in CONTEXTS})


def saved_by_kind() -> pd.DataFrame:
    """Return a table of what one block saves with eager attention, in MB: a line per kind."""
    cases = {(c, p): kinds(c, p, "eager") for c in (128, 512, 2048) for p in ("fp32", "bf16")}
    frame = pd.DataFrame(
        {
            f"{context:,}, {precision}": {**sizes, "together": sum(sizes.values())}
            for (context, precision), sizes in cases.items()
        }
    )
    cells = frame.map(lambda x: f"{x / 1e6:,.0f}" if x > 1e8 else f"{x / 1e6:.1f}")
    return cells.rename_axis("").reset_index()


def block_over_time(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of what one recorded block holds at three moments, by category, in MB."""
    words = {"forward": "forward ends", "peak": "the peak", "backward": "backward ends"}
    parts = [name for name in timeline.CATEGORIES if name != "optimizer state"]
    table = []
    for context in (2048, 128):
        recorded = over(rows, context=context, mode="block", precision="fp32", attention="eager")
        for moment, held in moments(recorded).items():
            sizes = [mb(held[part], 4)[:-3] if held[part] else "0" for part in parts]
            total = mb(timeline.total(held), 4)[:-3]
            table.append([f"{context:,}", words[moment], *sizes, total])
    return pd.DataFrame(table, columns=["tokens", "moment", "weights", *parts[1:], "together"])


def in_use_after(rows: pd.DataFrame, **about) -> int:
    """Return the bytes of tensors that are in use when a recorded training step has ended."""
    return timeline.total(over(rows, mode="train-step", **about)[-1])


def peaks_in_backward(rows: pd.DataFrame) -> bool:
    """Return whether every second training step holds most in its backward."""
    phases = ["forward", "loss", "backward", "optimizer"]
    few = pick(rows, mode="train-step", step_number=1, status="ok", phase=phases)
    case = ["model", "context", "precision", "attention"]
    fullest = few.sort_values("tensor_bytes").groupby(case)["phase"].last()
    return bool((fullest == "backward").all())
