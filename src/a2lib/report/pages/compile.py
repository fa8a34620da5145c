"""torch.compile: what it gains for attention and whole models, beside what counting predicts."""

import pandas as pd

from a2lib.report.metrics import bytes_between_matmuls, ceilings, copy_bandwidth
from a2lib.report.page import one
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import PLAIN, TITLES
from a2lib.report.pages.profile import traced
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
# The steps whose kernels were traced and whose compiled form keeps the GPU busy.
TRACED = (
    ("small", "fp32", TOKENS),
    ("small", "fp32", 1024),
    ("medium", "fp32", TOKENS),
    ("large", "fp32", TOKENS),
    ("xl25", "fp32", TOKENS),
    ("2.7B", "fp32", 128),
    ("2.7B", "fp32", TOKENS),
    ("2.7B", "fp32", 1024),
    ("2.7B", "bf16", TOKENS),
)


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


def models(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row of a model its gain: eager's time divided by this row's, both launched from
    Python."""
    key = ["model", "context", "batch", "mode", "precision", "attention", "phase"]
    rows = rows.copy()
    eager = rows[rows["compile"] == "none"].set_index(key)["ms"]
    rows["gain"] = rows[key].join(eager, on=key)["ms"] / rows["ms"]
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


def predictions(rows: pd.DataFrame, replayed: pd.DataFrame, traces: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each step of TRACED, with shares of the eager step's GPU time:

    share: matmuls, of eager's kernel time
    left: the part of all other bytes that remains, by counting
    predicted: what compiling saves by both
    saved, saved_by_mean: what compiled blocks, launched from Python, save by the median and the
        mean of their steps
    """
    table = []
    for model, precision, context in TRACED:
        # The eager way is called as its precision.
        share = traced(traces, model, precision, context=context).share
        left = bytes_left(model, precision, context)
        eager = {**PLAIN, "precision": precision}
        eager_ms = benchmark.step(replayed, model, eager, capture=True, context=context).ms
        compiled = step(rows, model, precision, context=context)
        line = {
            "model": model,
            "precision": precision,
            "context": context,
            "share": share,
            "left": left,
            "predicted": (1 - share) * (1 - left),
            "saved": 1 - compiled.ms / eager_ms,
            "saved_by_mean": 1 - compiled.ms_mean / eager_ms,
        }
        table.append(line)
    return pd.DataFrame(table)


@chart(height=3.6)
def predicted_and_measured(figure, table: pd.DataFrame):
    """Draw the predicted and the measured saving of each step of ``predictions``."""
    ax = figure.subplots()
    places = range(len(table))
    predicted, saved = 100 * table["predicted"], 100 * table["saved"]
    ax.plot(predicted, places, "|", color=COLOURS[4], markersize=15, markeredgewidth=2)
    ax.plot(saved, places, "o", color=COLOURS[0], markersize=7)
    # In the last row, far from all others, the words would read as a legend.
    label(ax, "measured", (saved[0], 0), (0, -14), color=COLOURS[0], ha="center", va="center")
    label(ax, "predicted", (predicted[0], 0), (7, 0), va="center")
    lane = len(table) - 1
    label(
        ax,
        percent(table["saved"][lane]),
        (saved[lane], lane),
        (-34, 0),
        color=COLOURS[0],
        va="center",
    )
    names = table["model"].map(TITLES) + ", " + table["precision"]
    name_lanes(ax, places, names + "\nmatmuls: " + table["share"].map(percent))
    ax.invert_yaxis()
    ax.set(xlim=(0, 48), xlabel="% of the eager step's GPU time that is saved")


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
