"""A sharded optimizer: each rank's memory beside the count, and the update with its exchange."""

import pandas as pd

from a2lib.owners import CHUNKS
from a2lib.report.metrics import copy_bandwidth
from a2lib.report.page import one, pick
from a2lib.report.pages import collectives
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.plots import stacks
from a2lib.report.style import Chart
from a2lib.report.tables import cells
from a2lib.shapes import SIZES
from a2lib.theory.latency import Line, fit
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.sharding import UPDATE_BYTES, held_bytes
from a2lib.theory.transformer import parameter_count

MOMENTS = ("init", "before", "after")  # the model made; before the update; after it
OPTIMIZERS = {"plain": "replicated", "sharded": "sharded", "zero": "PyTorch's"}
CARRIERS = {"copy_engines": "copy engines", "backend": "NCCL"}
PARTS = {  # a column of bytes, and its name in figures and tables
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "moments",
}
SHADES = {"weights": "#0072b2", "gradients": "#a86f00", "moments": "#d55e00"}


def memory_columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Return, of each moment, the rank that holds more, with ``counted``, the formula's bytes at a
    moment of the first step. PyTorch's DDP, which keeps buckets of its own, has no count."""
    rows = rows.sort_values(["present_bytes", "tensor_bytes", "on_rank"])
    key = ["optimizer", "wrapper", "carrier", "model", "precision", "moment"]
    fullest = rows.drop_duplicates(rows.columns.intersection(key), keep="last")
    return fullest.assign(counted=[_counted(row) for row in fullest.itertuples()])


def _counted(row) -> float:
    if row.wrapper == "torch_ddp" or row.moment not in MOMENTS:
        return float("nan")
    sizes = SIZES[row.model], int(row.batch), int(row.context)
    step = StepMemory(*sizes, precision=row.precision, attention=row.attention)
    return held_bytes(step, int(row.world_size), row.optimizer != "plain", row.moment)


def moment(
    memory: pd.DataFrame,
    optimizer: str,
    when: str,
    precision: str = "bf16",
    model: str = "xl25",
):
    """Return the row of a model at a moment, gradients averaged by a2lib over NCCL."""
    return one(
        memory,
        optimizer=optimizer,
        moment=when,
        model=model,
        precision=precision,
        carrier="backend",
        wrapper="bucketed",
    )


def pairs(steps: pd.DataFrame) -> list[tuple]:
    """Return each replicated step with the sharded one of the same run."""
    same = ["model", "precision", "capture", "carrier", "run"]
    grouped = pick(steps, wrapper="bucketed").groupby(same)
    return [tuple(pair.sort_values("optimizer").itertuples()) for _, pair in grouped]


def of_torch(steps: pd.DataFrame, optimizer: str):
    """Return the step with PyTorch's DDP, whose optimizer is "plain" or PyTorch's "zero"."""
    return one(steps, optimizer=optimizer, wrapper="torch_ddp")


def _order(pair: tuple) -> tuple:
    plain = pair[0]
    return plain.precision, plain.model == "2.7B", plain.capture, plain.carrier


def steps_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return each of a2lib's steps, and PyTorch's, with a replicated and with a sharded optimizer,
    in ms."""
    lines = []
    for plain, sharded in sorted(pairs(steps), key=_order):
        launched = "CUDA graph" if plain.capture else "from Python"
        model = f"{TITLES[plain.model]}, {plain.precision}"
        numbers = cells((plain.ms, sharded.ms))
        lines.append([model, launched, CARRIERS[plain.carrier], *numbers])
    theirs = of_torch(steps, "plain")
    model = f"{TITLES[theirs.model]}, {theirs.precision}, PyTorch"
    numbers = cells((theirs.ms, of_torch(steps, "zero").ms))
    lines.append([model, "from Python", "NCCL", *numbers])
    return pd.DataFrame(lines, columns=["model", "launched", "sent by", "replicated", "sharded"])


def updates_in_bf16(benchmark: pd.DataFrame) -> pd.Series:
    """Return the ms of PyTorch's AdamW in one GPU's 2.0B steps in bf16, launched from Python."""
    mode = {"mode": "train-step", "phase": "optimizer", "capture": False, "precision": "bf16"}
    return pick(benchmark, model="xl25", context=512, **mode)["ms"].astype(float)


def updates_of(steps: pd.DataFrame, model: str) -> list[list[float]]:
    """Return the ms of a2lib's replicated updates of a model, and of its sharded ones."""
    rows = [pair for pair in pairs(steps) if pair[0].model == model]
    return [[pair[place].ms_optimizer for pair in rows] for place in (0, 1)]


def updates_table(steps: pd.DataFrame, estimated: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Return all updates in ms, by the ``estimate`` of each model and as measured, from the
    shortest to the longest."""
    updates = []
    for model, by_bytes in estimated.items():
        plain, sharded = updates_of(steps, model)
        updates.append((f"{TITLES[model]}, replicated", by_bytes["whole"], plain))
        updates.append((f"{TITLES[model]}, sharded", by_bytes["both"], sharded))
    theirs = [[of_torch(steps, o).ms_optimizer] for o in ("plain", "zero")]
    by_bytes = estimated["xl25"]
    by_torch = by_bytes["half"] + by_bytes["broadcasts"]
    updates.append(("PyTorch, 2.0B, replicated", by_bytes["whole"], theirs[0]))
    updates.append(("PyTorch, 2.0B, sharded", by_torch, theirs[1]))
    lines = []
    for name, expected, measured in updates:
        ends = [f"{least_or_most:.1f}" for least_or_most in (min(measured), max(measured))]
        lines.append([name, f"{expected:.1f}", " to ".join(dict.fromkeys(ends))])
    return pd.DataFrame(lines, columns=["update", "estimate", "measured"])


def memory_table(memory: pd.DataFrame) -> pd.DataFrame:
    """Return what the rank that holds more has at each moment of the first step in fp32, and in a
    later step, in GB; moments and peaks replicated and sharded."""
    lines = []
    for model in ("xl25", "2.7B"):
        for when in (*MOMENTS, "step"):
            plain, sharded = (moment(memory, o, when, "fp32", model) for o in ("plain", "sharded"))
            sizes = [plain.parameter_bytes, plain.gradient_bytes]
            sizes += [row.optimizer_bytes for row in (plain, sharded)]
            sizes += [row.tensor_bytes for row in (plain, sharded)]
            words = f"{TITLES[model]}, {'later' if when == 'step' else when}"
            lines.append([words, *cells(pd.Series(sizes) / 1e9)])
    names = ["weights", "gradients", "moments", "moments, sharded", "peak", "peak, sharded"]
    return pd.DataFrame(lines, columns=["when", *names])


def peaks_table(memory: pd.DataFrame) -> pd.DataFrame:
    """Return a later step's peak of tensors, and what the driver says that the process holds, in
    GB, by what averages the gradients (2.0B model, bf16)."""
    lines = []
    for carrier, words in CARRIERS.items():
        for optimizer in ("plain", "sharded"):
            mode = {"moment": "step", "model": "xl25", "precision": "bf16", "wrapper": "bucketed"}
            row = one(memory, optimizer=optimizer, carrier=carrier, **mode)
            sizes = pd.Series([row.tensor_bytes, row.driver_bytes]) / 1e9
            lines.append([f"{OPTIMIZERS[optimizer]}, {words}", *cells(sizes)])
    return pd.DataFrame(lines, columns=["optimizer", "tensors", "driver"])


def estimate(model: str, ceiling: pd.DataFrame, messages: pd.DataFrame) -> dict[str, float]:
    """Return the ms that bytes alone need, at the bandwidth of copies and of back-to-back
    collectives.

    whole, half: an update of all weights, and of half of them
    exchange: the all-gathers of the other half
    both: half an update with its exchange in chunks, each sent when it is updated: of the shorter
        one only a chunk's time is exposed
    broadcasts: a broadcast of every parameter by itself
    """
    shape = SIZES[model]
    weights = parameter_count(shape)
    update = UPDATE_BYTES * weights / copy_bandwidth(ceiling) / 1e9
    exchange = 1e3 * CHUNKS * line(messages, "all_gather").time_s(4 * weights / CHUNKS)
    return {
        "whole": update,
        "half": update / 2,
        "exchange": exchange,
        "both": max(update / 2, exchange) + min(update / 2, exchange) / CHUNKS,
        "broadcasts": broadcasts_ms(model, messages),
    }


def broadcasts_ms(model: str, messages: pd.DataFrame, of_one_gib: bool = False) -> float:
    """Return the ms of a broadcast for each parameter, by the fitted line; ``of_one_gib`` takes the
    measured bandwidth of 1 GiB for the line's."""
    shape = SIZES[model]
    weights = parameter_count(shape)
    tensors = 9 * shape.num_layers + 3
    broadcast = line(messages, "broadcast")
    bandwidth = broadcast.bandwidth
    if of_one_gib:
        seconds = dict(zip(*collectives.queued(messages, "broadcast"), strict=True))
        bandwidth = collectives.GIB / seconds[collectives.GIB]
    return 1e3 * (tensors * broadcast.overhead_s + 4 * weights / bandwidth)


def line(messages: pd.DataFrame, operation: str) -> Line:
    """Return the line through back-to-back collectives of an operation between two GPUs."""
    return fit(*collectives.queued(messages, operation))


def memory_bars(memory: pd.DataFrame) -> Chart:
    """Draw what a GPU holds after the first update and at a later step's peak, replicated and
    sharded, in GB. What the peak holds besides weights and moments counts as activations."""
    bars, totals = {}, []
    for when, words in {"after": "after the update", "step": "peak of a step"}.items():
        for optimizer in ("plain", "sharded"):
            row = moment(memory, optimizer, when)
            sizes = {name: getattr(row, column) / 1e9 for column, name in PARTS.items()}
            sizes["activations"] = row.tensor_bytes / 1e9 - sum(sizes.values())
            bars[f"{words}, {OPTIMIZERS[optimizer]}"] = sizes
            totals.append(f"{row.tensor_bytes / 1e9:.0f}")
    shades = {**SHADES, "activations": "#808080"}
    frame = pd.DataFrame(bars).T
    xlabel = "GB on each of two GPUs"
    return stacks(frame, shades, 2.6, columns=4, text=totals, xlabel=xlabel)
