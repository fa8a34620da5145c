"""Memory: peaks of steps beside their count, what a block keeps, and who asked for it."""

import re

import numpy as np
import pandas as pd

from a2lib.report import plots, traces
from a2lib.report.data import load_reference
from a2lib.report.page import pick
from a2lib.report.pages import timeline
from a2lib.report.style import COLOURS, Chart, chart
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import evaluate
from a2lib.theory.layouts import Layout, Training
from a2lib.theory.memory.saved import block_saved, block_saved_bytes
from a2lib.theory.memory.step import StepMemory, asked, peak
from a2lib.theory.transformer import SIZES, block_parameter_count, state_bytes

BATCH, MODEL = 4, "2.7B"
CONTEXTS = (128, 256, 512, 1024, 2048)
UNIT = {"MiB": 2**20, "GiB": 2**30, "GB": 1e9, "G": 1e9, "B": 1}
KINDS = {
    "softmax's output": ("mask", "prob", "prob16", "lse"),
    "FFN": ("gate", "silu", "value", "product"),
    "norms, residual stream": ("x0", "y0", "root", "normal", "norm"),
    "q, k, v, heads' results": ("q", "k", "v0", "values", "o"),
    "bf16 copies of inputs": ("x",),
    "bf16 copies of weights": ("16",),
}
SHADES = ("#d55e00", "#0072b2", "#808080", "#86b6e6", "#f0ad78", "#444444")
# What one GPU of the largest model's step would hold: devices, sharding, checkpoints, optimizer.
WAYS = {
    "1 GPU, a checkpoint around each block": (1, "none", "block", "adamw"),
    "the same, AdamW's moments in 8 bits": (1, "none", "block", "adamw-8bit"),
    "2 GPUs, moments sharded, checkpoints": (2, "zero1", "block", "adamw"),
    "2 GPUs, all state sharded (FSDP)": (2, "fsdp", "none", "adamw"),
    "the same with checkpoints": (2, "fsdp", "block", "adamw"),
}


def step(
    context=512, mode="train-step", precision="fp32", attention="eager", model=MODEL, first=False
) -> StepMemory:
    """A step of a named model as theory has it."""
    return StepMemory(SIZES[model], BATCH, int(context), mode, precision, attention, first)


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with, in bytes: ``state``, 16 a parameter; ``capacity``, all that the driver gives.
    Of whole second steps ``counted``, tensors and workspaces at the peak, and ``planned`` (train
    steps); of those that ran out ``wanted``, what there was no room for, by PyTorch's message."""
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    whole = (rows["phase"] == "step") & (rows["step_number"] == 1)
    given = rows["note"].map(lambda note: _said("total capacity of", note)).min()
    found = [_theory(r) if w else {} for r, w in zip(rows.itertuples(), whole, strict=True)]
    state = rows["model"].map({m: state_bytes(s).total for m, s in SIZES.items()})
    return rows.assign(state=state, capacity=given).join(pd.DataFrame(found, index=rows.index))


def _said(words: str, note: str) -> float:
    """The size behind these words in PyTorch's message that memory ran out."""
    found = re.search(rf"{words} ([\d.]+) (MiB|GiB)", str(note))
    return float(found[1]) * UNIT[found[2]] if found else np.nan


def _theory(row) -> dict:
    one = step(row.context, row.mode, row.precision, row.attention, row.model)
    found = {"counted": asked(one)}
    if row.mode == "train-step":
        training = Training(one.shape, BATCH, one.context, one.precision, one.attention, "library")
        estimate = evaluate(training, Layout(sharding="none"), DEVICES["H200"])
        found["planned"] = estimate.memory_bytes
    if row.status == "oom":
        found["wanted"] = _said("Tried to allocate", row.note)
    return found


def blocks(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with, in bytes: ``formula`` and ``gradients``, as counted; ``largest`` and ``five``,
    the largest tensor and the five largest that autograd's hooks saw."""
    rows = rows[(rows["batch"] == BATCH) & rows["model"].isin(SIZES)].reset_index(drop=True)
    seen, sizes = traces.pictures("saved", rows), []
    for row in rows.itertuples():
        found = sorted((tensor["bytes"] for tensor in traces.traced(row, seen)), reverse=True)
        sizes.append(found or [np.nan])
    return rows.assign(
        formula=[
            block_saved_bytes(SIZES[r.model], BATCH, int(r.context), r.attention, r.precision)
            for r in rows.itertuples()
        ],
        gradients=[4 * block_parameter_count(SIZES[m]) for m in rows["model"]],
        largest=[found[0] for found in sizes],
        five=[sum(found[:5]) for found in sizes],
    )


def recordings(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with ``counted`` (of steps) and, of their forward and backward, ``forward_largest``
    and ``backward_largest``, bytes of the largest allocation; how many it has (``_of``). A block's
    with what was there as its forward ended (``ended``), of that what it keeps (``kept``), and at
    its peak: gradients (``grown``), what is kept still (``left``), tensors of the scores' size
    (``matrices``), of which its forward keeps ``own``."""
    lines, timelines, largest = (
        traces.pictures(name, rows) for name in ("lines", "memory", "largest")
    )
    found = []
    for row in rows.itertuples():
        first = int(row.step_number) == 0
        block = row.mode == "block"
        mode = "train-step" if block else row.mode
        case = step(row.context, mode, row.precision, row.attention, row.model, first)
        mine = {"counted": np.nan if block else asked(case)}
        if asked_for := traces.traced(row, lines):
            for phase in ("forward", "backward"):
                own = [r for r in asked_for if r["phase"] == phase] or [{"bytes": np.nan}]
                most = max(r["bytes"] for r in own)
                mine[f"{phase}_largest"] = most
                mine[f"{phase}_of"] = sum(r.get("count", 0) for r in own if r["bytes"] == most)
        if block and (drawn := traces.traced(row, timelines)):
            at = moments(drawn)
            mine["ended"] = timeline.total(at["forward"])
            mine["kept"] = at["forward"]["saved for backward"]
            mine["grown"] = at["peak"]["gradients"]
            mine["left"] = at["peak"]["saved for backward"]
            scores = case.sizes["scores"]
            scores = [r for r in traces.traced(row, largest) if r["bytes"] == scores]
            mine["matrices"] = len(scores)
            mine["own"] = sum(r["category"] == "saved for backward" for r in scores)
        found.append(mine)
    return rows.join(pd.DataFrame(found, index=rows.index))


def moments(rows: list[dict]) -> dict[str, dict]:
    """Of a recorded timeline the point at which its forward ends, the peak (the first), and the
    point at which its backward ends."""

    def last(phase: str) -> dict:
        return [row for row in rows if row["phase"].endswith(phase)][-1]

    return {
        "forward": last("/forward"),
        "peak": max(rows, key=timeline.total),
        "backward": last("/backward"),
    }


def over(rows: pd.DataFrame, **about) -> list[dict]:
    """The recorded timeline of a step, from its first phase on."""
    found = traces.picture("memory", rows, step_number=1, model=MODEL, **about)
    return found[next(i for i, row in enumerate(found) if "/" in row["phase"]) :]


def kinds(context: int, precision: str, attention: str) -> dict[str, int]:
    """Bytes that a block keeps, by kind."""
    found = dict.fromkeys(KINDS, 0)
    for name, size in block_saved(SIZES[MODEL], BATCH, context, attention, precision).items():
        found[next(k for k, ends in KINDS.items() if re.split("[/.]", name)[-1] in ends)] += size
    return found


def block_bars(context: int) -> Chart:
    """What one block keeps by kind: a bar for each precision and attention, GB."""
    names = {"eager": "eager", "flash": "Flash"}
    bars = {f"{p}, {names[a]}": kinds(context, p, a) for p in ("fp32", "bf16") for a in names}
    frame = pd.DataFrame(bars).T / 1e9
    text = [f"{total:.3g}" for total in frame.sum(axis=1)]
    shades = dict(zip(KINDS, SHADES, strict=True))
    return plots.stacks(frame, shades, 3.3, text=text, least=9, xlabel="GB kept by one block")


def peak_bars(rows: pd.DataFrame, steps: dict[str, StepMemory]) -> Chart:
    """Bytes by category at the peak of each step, as counted, GB; what ran out of memory says so,
    and the dashed line is what the driver gives."""
    frame = pd.DataFrame({name: peak(one).by_category for name, one in steps.items()}).T / 1e9
    ran = [_ran(rows, one) for one in steps.values()]
    text = [f"{x:.0f}{'' if ok else ', oom'}" for x, ok in zip(frame.sum(axis=1), ran, strict=True)]

    def given(ax):
        plots.reference(ax, rows["capacity"].iloc[0] / 1e9, "", vertical=True)

    looks = {"text": text, "least": 9, "xlabel": "GB at the peak", "more": given}
    return plots.stacks(frame, timeline.CATEGORIES, 4.2, **looks)


def _ran(rows: pd.DataFrame, one: StepMemory) -> bool:
    about = {name: getattr(one, name) for name in ("context", "mode", "precision", "attention")}
    same = pick(rows, model=MODEL, phase="step", step_number=1, **about)
    return bool((same["status"] == "ok").all())


@chart(height=2.8)
def trade(figure, contexts: tuple[int, ...]):
    """Saved tensors and gradients while backward passes the blocks, fp32 and eager attention, GB
    beyond weights and moments."""
    shape = SIZES[MODEL]
    gradients, done = 4 * block_parameter_count(shape), np.arange(shape.num_layers + 1)
    ax = figure.subplots()
    for context, colour in zip(contexts, COLOURS, strict=False):
        kept = block_saved_bytes(shape, BATCH, context, "eager", "fp32")
        size = ((shape.num_layers - done) * kept + done * gradients) / 1e9
        ax.plot(done, size, color=colour, linewidth=2)
        plots.label(ax, f"{context:,} tokens", (done[1], size[1]), (4, 5), color=colour)
    ax.set(xlabel="blocks gone backward", ylabel="GB")
    ax.set(xlim=(0, shape.num_layers), ylim=(0, None))


class WrittenOut(StepMemory):
    """A step whose softmax and SiLU are written as formulas: a block keeps the exponentials beside
    the probabilities, which autocast keeps in 16 bits alone, and the sigmoid beside the SiLU."""

    @property
    def saved(self) -> dict[str, int]:
        kept = dict(super().saved)
        kept["0f/sigmoid"] = kept["0f/silu"]
        if self.precision == "fp32":
            kept["0a/exponentials"] = kept["0a/prob"]
        return kept


def published() -> pd.DataFrame:
    """Peaks that others printed, with ``printed_bytes``, and ours and a formula's count of it."""
    rows = load_reference("memory", numbers=("printed",))
    rows = rows[rows["quantity"] == "peak"].reset_index(drop=True)
    every = [step(r.context, r.mode, r.precision, model=r.model) for r in rows.itertuples()]
    return rows.assign(
        printed_bytes=rows["printed"] * rows["unit"].map(UNIT),
        counted=[peak(one).total for one in every],
        written=[peak(WrittenOut(**vars(one))).total for one in every],
    )


def ways(model: str) -> dict[str, list[float]]:
    """What a GPU would hold in a train step of the largest model by the evaluator of
    layouts, by way and context: the more of fp32 and bf16 with eager attention, bytes."""

    def held(n: int, sharding: str, kept: str, optimizer: str, context: int) -> float:
        layout = Layout(data=n, sharding=sharding, checkpointing=kept)
        trainings = [
            Training(SIZES[model], BATCH, context, precision, "eager", "library", optimizer)
            for precision in ("fp32", "bf16")
        ]
        return max(evaluate(one, layout, DEVICES["H200"]).memory_bytes for one in trainings)

    return {way: [held(*how, context) for context in CONTEXTS] for way, how in WAYS.items()}
