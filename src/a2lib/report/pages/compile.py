"""torch.compile: what it gains for attention and whole models, beside what counting predicts."""

import pandas as pd

from a2lib.report.metrics import bytes_between_matmuls, ceilings, copy_bandwidth
from a2lib.report.page import one
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import BF16, PLAIN, TITLES
from a2lib.report.plots import label, name_lanes
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import percent
from a2lib.shapes import SIZES
from a2lib.theory.eager import attention_kernels
from a2lib.theory.roofline import floor
from a2lib.theory.step_floor import compiled_step, eager_step

MODELS = ("small", "medium", "large", "xl25", "2.7B")
HEAD_SIZES = (16, 32, 64, 128)
BATCH, TOKENS = 4, 512  # of the models' training steps, where nothing else is said
NUMBER_BYTES = {"fp32": 4, "bf16": 2}
STEP = {"mode": "train-step", "phase": "wall"}
EAGER = {"bf16": BF16, "fp32": PLAIN}
COMPILED = {**BF16, "compile": "blocks"}
# The profiler whose traces have all five models.
PROFILERS = {"bf16": "torch", "fp32": "nsys"}


def attention(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row of attention:

    gain: eager's GPU time divided by this row's, of the same case, both of CUDA-graph replays
    floor: the least time of its kernels, ms; only without a mask and without heads
    expected: eager's floor divided by this row's
    """
    rates, bandwidth = ceilings(rows_of("ceiling")), copy_bandwidth(rows_of("ceiling"))
    key = ["written", "dtype", "batch", "head_dim", "seq_len", "pass"]
    rows = rows.copy()
    rows["floor"] = float("nan")
    for place, row in rows[rows["written"] == "plain"].iterrows():
        sizes = row["batch"], row["seq_len"], row["head_dim"], NUMBER_BYTES[row["dtype"]]
        kernels = attention_kernels(row["implementation"], False, row["pass"], *map(int, sizes))
        least = floor(kernels, rates[row["dtype"]] * 1e12, bandwidth * 1e12)
        rows.loc[place, "floor"] = least["total"].ms
    eager = rows[rows["implementation"] == "eager"].set_index(key)[["ms_graph", "floor"]]
    base = rows[key].join(eager, on=key)
    rows["gain"] = base["ms_graph"] / rows["ms_graph"]
    rows["expected"] = base["floor"] / rows["floor"]
    return rows


def step(
    rows: pd.DataFrame,
    model: str,
    precision: str = "fp32",
    compiled: str = "blocks",
    context: int = TOKENS,
):
    """Return the row of a whole training step, launched from Python."""
    case = {"model": model, "precision": precision, "compile": compiled, "context": context}
    return one(rows, **case, **STEP)


def bytes_left(model: str, precision: str, context: int = TOKENS) -> float:
    """Return which part of the bytes that an eager step moves outside of matmuls remains if all
    between two matmuls is one kernel, by counting."""
    case = SIZES[model], BATCH, context, precision
    fused, eager = compiled_step(*case), eager_step(*case)
    return bytes_between_matmuls(fused) / bytes_between_matmuls(eager)


def traced_eager(traces: pd.DataFrame, model: str, precision: str):
    """Return the row of a traced eager step of TOKENS."""
    case = {"context": TOKENS, "mode": "train-step", "phase": "step", "way": precision}
    return one(traces, model=model, profiler=PROFILERS[precision], **case)


def predictions(rows: pd.DataFrame, steps: pd.DataFrame, traces: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each model's step, of TOKENS, in bf16 and in fp32:

    share: matmuls, of eager's kernel time
    left: the part of all other bytes that remains, by counting
    predicted: the share of the eager step that compiling saves, by both
    eager: the eager step in a CUDA graph, ms
    compiled: the step in compiled blocks, ms; in a CUDA graph in bf16, in fp32 launched from Python
    saved: the share that is saved
    """
    table = []
    for precision in EAGER:
        for model in MODELS:
            share = traced_eager(traces, model, precision).share
            left = bytes_left(model, precision)
            eager = benchmark.step(steps, model, EAGER[precision], capture=True)
            if precision == "bf16":
                compiled = benchmark.step(steps, model, COMPILED, capture=True)
            else:
                compiled = step(rows, model)
            line = {
                "model": model,
                "precision": precision,
                "share": share,
                "left": left,
                "predicted": (1 - share) * (1 - left),
                "eager": eager.ms,
                "compiled": compiled.ms,
                "saved": 1 - compiled.ms / eager.ms,
            }
            table.append(line)
    return pd.DataFrame(table)


@chart(height=4.6)
def predicted_and_measured(figure, table: pd.DataFrame):
    """Draw the predicted and the measured saving of each step of ``predictions``."""
    ax = figure.subplots()
    places = range(len(table))
    predicted, saved = 100 * table["predicted"], 100 * table["saved"]
    ax.plot(predicted, places, "|", color=COLOURS[4], markersize=15, markeredgewidth=2)
    ax.plot(saved, places, "o", color=COLOURS[0], markersize=7)
    named = len(MODELS) - 1  # the last in bf16 has room on both sides
    label(ax, "predicted", (predicted[named], named), (7, 0), va="center")
    for place in places:
        words, looks = percent(table["saved"][place]), {"color": COLOURS[0], "va": "center"}
        if place == named:
            at = saved[place], place
            label(ax, f"measured: {words}", at, (-8, 0), ha="right", **looks)
        else:
            label(ax, words, (max(predicted[place], saved[place]), place), (9, 0), **looks)
    names = table["model"].map(TITLES) + ", " + table["precision"]
    name_lanes(ax, places, names + "\nmatmuls: " + table["share"].map(percent))
    ax.invert_yaxis()
    ax.set(xlim=(0, 65), xlabel="% of the eager step's GPU time that is saved")


def recognized(rows: pd.DataFrame, implementation: str = "compile"):
    """Return the forward of the one attention that Inductor replaces: bf16, with a head
    dimension."""
    case = {"written": "heads", "dtype": "bf16", "seq_len": 16384, "pass_": "forward"}
    return one(rows, implementation=implementation, **case)


def at_length(
    rows: pd.DataFrame, tokens: int, head_dim: int, pass_: str, implementation: str = "compile"
):
    """Return a row of attention in fp32 without a mask."""
    case = {"written": "plain", "dtype": "fp32", "implementation": implementation}
    return one(rows, seq_len=tokens, head_dim=head_dim, pass_=pass_, **case)
