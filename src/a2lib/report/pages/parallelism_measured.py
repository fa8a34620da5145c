"""The formulas of one layer's time, and the estimate of a whole step, beside measured rows.

The formulas have two inputs, both measured in the same run: C, the best rate at which the ranks of
data parallelism compute without communication, and W, the bandwidth of their all-reduces without
computation.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from a2lib.report.page import one, pick
from a2lib.report.pages.fsdp import COPIES, NCCL
from a2lib.report.style import DIM, chart
from a2lib.report.units import Number, count
from a2lib.shapes import SIZES
from a2lib.theory import parallelism
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import Estimate, evaluate
from a2lib.theory.layouts import Layout, Training
from a2lib.theory.parallelism import Cost, Layer

NAMES = {"dp": "data parallel", "fsdp": "FSDP", "tp": "tensor parallel"}
PREDICTED = ["W", "compute", "communication", "hidden"]
# Schemes and passes that communicate, so that each has a threshold.
THRESHOLDS = (
    ("dp", "backward"),
    ("fsdp", "forward"),
    ("fsdp", "backward"),
    ("tp", "forward"),
    ("tp", "backward"),
)
WIDTH = 11_008  # of the 8B model's layers; tensor parallelism was also measured with narrower ones
H200 = DEVICES["H200"]
BLUE, GREEN, ORANGE, SHADE = "#0072b2", "#00825f", "#d55e00", "#f6cfab"


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add what the formulas predict of each of a2lib's passes that communicate, between two GPUs.

    share: communication over computation, each timed alone
    W: the measured bandwidth, bytes per second
    compute, communication: ms of each, as predicted
    hidden: the share of the shorter of computation and communication that ran beside the longer
    """
    rows = rows.assign(share=rows["ms_communication"] / rows["ms_without"])
    layer = measured_layer(rows)
    communicating = between_two_gpus(rows).dropna(subset=["ms", "share"])
    added = {index: _predict(row, layer) for index, row in communicating.iterrows()}
    return rows.join(pd.DataFrame.from_dict(added, orient="index", columns=PREDICTED))


def between_two_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a2lib's forward and backward passes on two GPUs."""
    passes = ["forward", "backward"]
    return pick(rows, backend="nccl", world_size=2, implementation="a2lib", pass_=passes)


def measured_layer(rows: pd.DataFrame) -> Layer:
    """Return a layer of one token with the measured C and W; raise Missing without rows of data
    parallelism between two GPUs."""
    rows = pick(between_two_gpus(rows), scheme="dp")
    layers = [_layer(row) for _, row in rows.iterrows()]
    rates, bandwidths = [], []
    for layer, (_, row) in zip(layers, rows.iterrows(), strict=True):
        cost = _cost(row, layer)  # in operations and bytes, as a layer's C and W are 1
        rates.append(1e3 * row["layers"] * cost.compute_s / row["ms_without"])
        bandwidths.append(1e3 * row["layers"] * cost.data_s / row["ms_communication"])
    best, usual = np.nanmax(rates), np.nanmedian(bandwidths)
    return replace(layers[0], tokens=1, flops=float(best), bandwidth=float(usual))


def _layer(row) -> Layer:
    element = 4 if row["dtype"] == "fp32" else 2
    return Layer(int(row["tokens"]), int(row["d_model"]), int(row["d_ff"]), 1.0, 1.0, element)


def _cost(row, layer: Layer) -> Cost:
    if row["scheme"] == "dp":
        costs = parallelism.data_parallel(layer, 2)
    else:
        mesh = (2, 1) if row["scheme"] == "fsdp" else (1, 2)
        costs = parallelism.fully_sharded_tensor_parallel(layer, *mesh)
    return costs[row["pass"]]


def _predict(row, layer: Layer) -> dict[str, float]:
    cost = _cost(row, replace(_layer(row), flops=layer.flops, bandwidth=layer.bandwidth))
    compute = 1e3 * row["layers"] * cost.compute_s
    communication = 1e3 * row["layers"] * (cost.data_s + cost.tensor_s)
    compute_alone, communication_alone = row["ms_without"], row["ms_communication"]
    shorter = min(compute_alone, communication_alone)
    return {
        "W": layer.bandwidth,
        "compute": compute,
        "communication": communication,
        "hidden": (compute_alone + communication_alone - row["ms"]) / shorter,
    }


def swept(rows: pd.DataFrame, scheme: str, pass_: str) -> pd.DataFrame:
    """Return a scheme's rows of one pass, in order of what decides its threshold, ``at``: the width
    for tensor parallelism, else the batch."""
    rows = pick(between_two_gpus(rows), scheme=scheme, pass_=pass_).dropna(subset=["ms"])
    along, fixed = ("d_ff", "tokens") if scheme == "tp" else ("tokens", "d_ff")
    rows = rows[rows[fixed] == rows.groupby(fixed).size().idxmax()]
    return rows.assign(at=rows[along].astype(float)).sort_values("at", ignore_index=True)


def crossing(rows: pd.DataFrame, scheme: str, pass_: str) -> float:
    """Return the batch or width at which communication and computation, each timed alone, take
    equally long: interpolated between two measured points, on a straight line in logarithms.
    Raises LookupError where no two neighbours have it between them."""
    points = list(swept(rows, scheme, pass_).itertuples(index=False))
    for before, after in zip(points, points[1:], strict=False):
        if before.share > 1 >= after.share:
            steepness = math.log(before.share) / math.log(before.share / after.share)
            return before.at * (after.at / before.at) ** steepness
    raise LookupError(f"{scheme} {pass_}: no crossing")


def about(value: float) -> Number:
    """Write an interpolated batch or width to the nearest 50, or below 2,000 to the nearest 10."""
    step = 50 if value >= 2000 else 10
    return count(step * round(value / step))


def threshold(layer: Layer, scheme: str, pass_: str) -> float:
    """Return the batch, or for tensor parallelism the width, from which the formulas call a pass
    on two ranks compute-bound."""
    if scheme == "tp":
        return layer.d_ff / (parallelism.tensor_limit(layer, pass_) - 1)
    return layer.tokens / parallelism.data_slope(layer)


def limits_are_off(rows: pd.DataFrame, sheet: Layer) -> list[float]:
    """Return how far each measured limit is from the data sheet's."""
    return [abs(crossing(rows, *key) / threshold(sheet, *key) - 1) for key in THRESHOLDS]


def near_the_limit(rows: pd.DataFrame, times: int = 1):
    """Return data parallelism's backward of 2,048 tokens, or so many times as many, in four layers
    of the 8B model."""
    return backward(rows, "dp", 2048 * times)


def backward(rows: pd.DataFrame, scheme: str, tokens: int, d_ff: int = WIDTH):
    """Return a scheme's backward of so many tokens, in four layers of such a width."""
    return one(sending(rows), scheme=scheme, tokens=tokens, pass_="backward", d_ff=d_ff)


def sending(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the passes that communicate."""
    return rows.dropna(subset=PREDICTED)


def with_sheet(rows: pd.DataFrame, sheet: Layer) -> pd.DataFrame:
    """Return the passes that communicate, predicted by the data sheet's C and W.

    sheet_share: communication over computation
    sheet_right: whether the longer part is so in the rows, too
    over: the measured time over that of the longer part
    """
    sent, measured = sending(rows), measured_layer(rows)
    compute = sent["compute"] * measured.flops / sheet.flops
    communication = sent["communication"] * measured.bandwidth / sheet.bandwidth
    share, over = communication / compute, sent["ms"] / np.maximum(compute, communication)
    right = (share > 1) == (sent["share"] > 1)
    return sent.assign(sheet_share=share, sheet_right=right, over=over)


def near_a_threshold(rows: pd.DataFrame, sheet: Layer) -> pd.DataFrame:
    """Return the passes whose batch, or width, is at most twice or half the data sheet's
    threshold."""
    passes = with_sheet(rows, sheet)
    return passes[passes["sheet_share"].between(1 / 2, 2)]


def by_sheet(rows: pd.DataFrame, sheet: Layer) -> pd.Series:
    """Return, by scheme, the mean of ``over`` from 2,048 tokens on at the 8B model's width."""
    many = pick(with_sheet(rows, sheet).query("tokens >= 2048"), d_ff=WIDTH)
    return many.groupby("scheme")["over"].mean()


def longer(row) -> float:
    """Return the ms of the longer of a pass's computation and communication, each timed alone."""
    return max(row.ms_without, row.ms_communication)


def by_rule(row) -> float:
    """Return the ms of a pass by the rule of thumb: the longer part and half of the shorter."""
    return longer(row) + min(row.ms_without, row.ms_communication) / 2


def end_to_end(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the time of forward and backward over the rule's, for a2lib and PyTorch: a line for
    each batch, a column for each implementation and scheme. Both parts are a2lib's."""
    nccl = pick(rows, backend="nccl", world_size=2, pass_="end_to_end")
    ours = pick(nccl, implementation="a2lib")
    wide = ours["d_ff"].max()
    rule = {(row.scheme, row.tokens): by_rule(row) for row in ours.itertuples() if row.d_ff == wide}
    nccl = pick(nccl, implementation=["a2lib", "torch"], d_ff=wide)
    over = [row.ms / rule[row.scheme, row.tokens] for row in nccl.itertuples()]
    nccl = nccl.assign(over=over)
    return nccl.pivot(index="tokens", columns=["implementation", "scheme"], values="over")


def holds_from(over: pd.Series) -> int:
    """Return the smallest batch from which on a step takes at most 8 percent more or less than the
    rule says. Raises LookupError where no batch does."""
    found = None
    for tokens, ratio in over.sort_index(ascending=False).items():
        if not abs(ratio - 1) < 0.08:
            break
        found = int(tokens)
    if found is None:
        raise LookupError("the rule holds at no batch")
    return found


def sent_rate(row) -> float:
    """Return the bytes a second that a pass sends when it only communicates."""
    return row.W * row.communication / row.ms_communication


@chart(height=5.0)
def hiding(figure, rows: pd.DataFrame):
    """Draw the backward by batch under data parallelism and FSDP: matmuls alone, communication
    alone, both together, and shaded what did not hide."""
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, scheme in zip(axes, ("dp", "fsdp"), strict=True):
        ax.axvline(crossing(rows, scheme, "backward"), color=DIM, linewidth=0.8, linestyle="--")
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
        ax.annotate("together", (2950, 10.9), color=ORANGE)
        ax.annotate("matmuls alone", (5300, 7.2), color=BLUE)
        ax.annotate("communication alone", (5050, 2.0), color=GREEN)
    axes[1].set_xlabel("tokens of the batch")


def estimate(model: str, ranks: int = 2, wrapper: str = NCCL) -> Estimate:
    """Return the estimate of the FSDP chapter's step, four sequences of 512 tokens on each GPU: on
    two GPUs, or on one without communication. Copy engines carry gradients in bf16; over NCCL
    a2lib and FSDP2 send them in fp32."""
    sizes = SIZES[model], 4 * ranks, 512
    layout = Layout(data=ranks, sharding="fsdp" if ranks > 1 else "none")
    sent = "bf16" if wrapper == COPIES else "fp32"
    return evaluate(Training(*sizes, sent_gradients=sent), layout, H200)


def fsdp_step(fsdp: pd.DataFrame, model: str, wrapper: str = NCCL, captured: bool = True):
    """Return the row of an FSDP step, in a CUDA graph or launched from Python."""
    return one(fsdp, model=model, wrapper=wrapper, capture=captured)


def fsdp_peak(fsdp_memory: pd.DataFrame, model: str) -> float:
    """Return the measured peak of an FSDP rank, in bytes."""
    return one(fsdp_memory, wrapper="fsdp", model=model, moment="peak").tensor_bytes
