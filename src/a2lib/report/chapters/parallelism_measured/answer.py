"""The first screen, C and W, the thresholds, and whether axes share their links."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report.chapters.parallelism_measured import overlap
from a2lib.report.chapters.parallelism_measured.rows import (
    BACKENDS,
    NAMES,
    PASSES,
    SLOWER,
    Beside,
    Machine,
    along_logarithms,
    crossing,
    share,
)
from a2lib.report.style import digits, listed, tokens
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory import parallelism
from a2lib.theory.parallelism import Layer

N = 2  # GPUs of the first screen
MAIN = ("nccl", N)


def machine(p: Beside, backend: str, n: int) -> Machine | None:
    """The machine of so many ranks; None where it is not measured."""
    return next((m for m in p.machines if (m.backend, m.world_size) == (backend, n)), None)


def sentence(p: Beside) -> Markdown:
    """From which batch on two GPUs are not bound by communication, on paper and measured, and how
    near the formulas are."""
    layer = p.maker(N).layer
    text = (
        f"By its maker's figures, C = {layer.flops / 1e12:.0f} TFLOP/s and W = "
        f"{layer.bandwidth / 1e9:.0f} GB/s, communication of data parallelism and FSDP hides on "
        f"{N} {p.short} from a batch of {_at(parallelism.least_tokens(layer, N, 1))} tokens on."
    )
    found = machine(p, *MAIN)
    if found is None:
        return Markdown(f"**The answer.** {text} {p.not_yet('C, W, and what the schemes take')}")
    said = ("**The answer.**", reason(p.of(found)), text, f"Measured, {_told(p, found)}")
    said = [" ".join(filter(None, said)), _on_the_cpu(p, found)]
    return Markdown("\n\n".join(filter(None, said)))


def _told(p: Beside, m: Machine) -> str:
    """C, W, where communication should stop to bind and where it does."""
    told = [f"{at} for {NAMES[scheme]}" for scheme, at in _found(p, m).items()]
    return (
        f"this layer has C = {rate(m.layer)} and W = {bandwidth(m.layer)}, and with these the "
        f"formula says {_at(parallelism.least_tokens(m.layer, m.world_size, 1))}. The batch at "
        f"which products and messages, each alone, take equally long backward is {listed(told)}."
    )


def _found(p: Beside, m: Machine) -> dict[str, str]:
    return {scheme: found_threshold(p, m, scheme, (m.world_size, 1), "backward")
            for scheme in ("dp", "fsdp")}  # fmt: skip


def _on_the_cpu(p: Beside, main: Machine) -> str:
    """The same of gloo in a sentence, and whether its messages hide."""
    m = machine(p, "gloo", N)
    if m is None:
        return ""
    text = (
        f"With {BACKENDS['gloo'][0]}, between {N} processes on the CPU, the formula says "
        f"{_at(parallelism.least_tokens(m.layer, N, 1))} and found are "
        f"{listed(list(_found(p, m).values()))}"
    )
    return ", ".join(filter(None, (text, overlap.beside(p, m, main)))) + "."


def verdicts(p: Beside, backend: str) -> Markdown:
    """Of each number of ranks what the first screen has of its own, and how near all times are."""
    found = [m for m in p.machines if m.backend == backend]
    if not found:
        return Markdown(p.not_yet(f"the schemes with {BACKENDS[backend][0]}"))
    told = []
    for m in found:
        parts = ["" if (m.backend, m.world_size) == MAIN else _told(p, m), agreement(p.of(m))]
        said = " ".join(filter(None, parts))
        told.append(f"- {m.label}: {said}" if said else "")
    return Markdown("\n".join(filter(None, told)))


def rate(layer: Layer) -> str:
    if layer.flops < 1e12:
        return f"{digits(layer.flops / 1e9)} GFLOP/s"
    return f"{digits(layer.flops / 1e12)} TFLOP/s"


def bandwidth(layer: Layer) -> str:
    return f"{digits(layer.bandwidth / 1e9)} GB/s"


def reason(rows: pd.DataFrame) -> str:
    """How often the regime is the predicted one, and what times are off by on average."""
    sent = rows[rows["phase"].isin(PASSES)].dropna(subset=["off", "ms_communication", *SLOWER])
    if not len(sent):
        return ""
    off, products, messages, at_once = map(signed, sent[["off", *SLOWER]].mean())
    return (
        f"What binds is the predicted one in {_foreseen(sent)} of {len(sent)} passes that send; "
        f"their times are {off} off the prediction on average: {products} as products alone are "
        f"slower than C says, {messages} as messages are than W says, {at_once} as both run at "
        "once."
    )


def agreement(rows: pd.DataFrame) -> str:
    """How far times are from what is predicted, as they are and with each part as it was alone."""
    rows = rows[rows["phase"].isin(PASSES)].dropna(subset=["off"])
    if not len(rows):
        return ""
    off = rows["off"]
    worst = case(rows.loc[off.idxmax()])
    text = (
        f"Times of {len(rows)} passes are {signed(off.min())} to {signed(off.max())} off the "
        f"prediction, {signed(off.median())} in the middle; the most is {worst}."
    )
    sent = rows.dropna(subset=["ms_communication"])
    off = both(sent).dropna()
    if not len(off):
        return text
    return (
        f"{text} What binds is the predicted one in {_foreseen(sent)} of the {len(sent)} that "
        "send. Had C and W been what products and messages took alone each time, those would "
        f"be off by {signed(off.min())} to {signed(off.max())}, {signed(off.median())} in the "
        "middle, which comes of both at once."
    )


def _foreseen(sent: pd.DataFrame) -> int:
    """In how many passes what takes longer alone is what should."""
    return int((regime(sent["messages"] / sent["compute"]) == regime(share(sent))).sum())


def case(row: pd.Series) -> str:
    """Which pass a row is of, in words."""
    mesh = int(row["along_data"]), int(row["along_tensor"])
    return (f"{mesh_name(row['scheme'], mesh)}, {row['phase']}, {tokens(row['tokens'])} tokens, "
            f"d_ff {tokens(row['d_ff'])}")  # fmt: skip


def both(rows: pd.DataFrame) -> pd.Series:
    """A time over what the clock says of what products and messages took alone, less 1."""
    return rows["by_both"] / (1 + rows["by_products"] + rows["by_messages"])


def regime(shares: pd.Series) -> pd.Series:
    """What binds, by messages over computation."""
    return shares.gt(1).map({True: "messages", False: "products"})


def signed(value: float) -> str:
    """A share as a whole percentage with its sign; 0 has none."""
    percent = round(100 * value)
    return f"{percent:+d}%".replace("-", "−") if percent else "0%"


def inputs(p: Beside, caption: str, name: str) -> Table:
    """C and W of each group of ranks; what the other schemes' messages reach, of the same rows."""
    lines = []
    for m in p.machines:
        cells = [_sent(p, m, scheme) for scheme in ("fsdp", "tp")]
        of_peak = MISSING
        if stated(m):
            of_peak = f"{m.layer.flops / p.maker(m.world_size).layer.flops:.0%}"
        lines.append([m.label, m.dtype, rate(m.layer), of_peak, bandwidth(m.layer), *cells,
                      f"{m.layer.flops / m.layer.bandwidth:,.0f}"])  # fmt: skip
    columns = ["ranks", "dtype", "C", "of the maker's", "W, data parallel", "FSDP's",
               "tensor parallel's", "C / W, operations a byte"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def stated(m: Machine) -> bool:
    """Whether the maker's figures are for what this machine computes and sends with."""
    return m.backend == "nccl" and m.dtype == "bf16"


def _sent(p: Beside, m: Machine, scheme: str) -> str:
    """GB/s that a scheme's messages reach with nothing beside them, at its largest batch."""
    rows = p.of(m, scheme=scheme, phase="backward", d_ff=m.layer.d_ff)
    rows = rows.dropna(subset=["ms_communication", "messages"]).sort_values("tokens")
    if not len(rows):
        return MISSING
    row = rows.iloc[-1]
    sent = m.layer.bandwidth * row["messages"] / float(row["ms_communication"])
    return f"{digits(sent / 1e9)} GB/s"


def predicted_threshold(m: Machine, scheme: str, mesh: tuple[int, int], pass_: str) -> float:
    """The batch, or under tensor parallelism the width, from which computation binds; infinity
    where no batch suffices."""
    if scheme == "tp":
        return parallelism.least_width(m.layer, mesh[1], pass_)
    return parallelism.least_tokens(m.layer, *mesh, pass_)


def _threshold_points(
    p: Beside, m: Machine, scheme: str, mesh: tuple[int, int], pass_: str
) -> pd.DataFrame:
    """`at` (batch or width), `share`, and how many times the predicted ones `products` and
    `sent` take alone, of the rows that a threshold is looked for in."""
    rows = p.of(m, scheme=scheme, phase=pass_, mesh="x".join(map(str, mesh)))
    along = "tokens"
    if scheme == "tp":  # of the batch with most widths
        along = "d_ff"
        rows = rows[rows["tokens"] == rows.groupby("tokens").size().idxmax()] if len(rows) else rows
    else:
        rows = rows[rows["d_ff"] == m.layer.d_ff]
    found = pd.DataFrame({
        "at": rows[along].astype(float), "share": share(rows),
        "products": rows["ms_without"].astype(float) / rows["compute"],
        "sent": rows["ms_communication"].astype(float) / rows["messages"],
    })  # fmt: skip
    return found.dropna(subset=["share"]).sort_values("at", ignore_index=True)


def slower_there(
    p: Beside, m: Machine, scheme: str, mesh: tuple[int, int], pass_: str
) -> list[str]:
    """How many times what C and W say products and messages take where they are equally long."""
    points = _threshold_points(p, m, scheme, mesh, pass_)
    at = crossing(_pairs(points))
    if at is None:
        return [MISSING] * 2
    return [f"{along_logarithms(points['at'], points[name], at):.2f}"
            for name in ("products", "sent")]  # fmt: skip


def _pairs(points: pd.DataFrame) -> list[tuple[float, float]]:
    return list(zip(points["at"], points["share"], strict=True))


def found_threshold(p: Beside, m: Machine, scheme: str, mesh: tuple[int, int], pass_: str) -> str:
    """Where measured messages and products take equally long, in words."""
    points = _pairs(_threshold_points(p, m, scheme, mesh, pass_))
    if not points:
        return MISSING
    at = crossing(points)
    if at is not None:
        return _at(at)
    if all(y <= 1 for _, y in points):
        return f"below {tokens(points[0][0])}"
    if all(y > 1 for _, y in points):
        return f"above {tokens(points[-1][0])}"
    return "no one place"


def schemes(p: Beside, m: Machine) -> list[tuple[str, tuple[int, int]]]:
    """The schemes and meshes that there are rows of, in order."""
    rows = p.of(m)
    found = {(row.scheme, (int(row.along_data), int(row.along_tensor))) for row in
             rows.itertuples()}  # fmt: skip
    order = list(NAMES)
    return sorted(found, key=lambda one: (order.index(one[0]), -one[1][0]))


def thresholds(p: Beside, caption: str, name: str) -> Table:
    """Of each scheme and pass that sends something: predicted by the maker's figures, predicted by
    the measured C and W, found."""
    lines = []
    for m in p.machines:
        for scheme, mesh in schemes(p, m):
            for pass_ in PASSES:
                if scheme == "dp" and pass_ == "forward":
                    continue
                on_paper = MISSING
                if stated(m):
                    on_paper = _at(predicted_threshold(p.maker(m.world_size), scheme, mesh, pass_))
                lines.append([
                    m.label, mesh_name(scheme, mesh), pass_,
                    "d_ff" if scheme == "tp" else "tokens", on_paper,
                    _at(predicted_threshold(m, scheme, mesh, pass_)),
                    found_threshold(p, m, scheme, mesh, pass_),
                    *slower_there(p, m, scheme, mesh, pass_),
                ])  # fmt: skip
    columns = ["ranks", "scheme", "pass", "of", "the maker's C, W", "measured C, W", "found",
               "products there", "messages there"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=4, keys=3)


def _at(value: float) -> str:
    return tokens(round(value)) if math.isfinite(value) else "none"


def mesh_name(scheme: str, mesh: tuple[int, int]) -> str:
    """A scheme in words, with its mesh where there are several."""
    return NAMES[scheme] + (f" {mesh[0]} × {mesh[1]}" if scheme == "fsdp_tp" else "")


def sharing(p: Beside) -> Markdown:
    """Whether the two axes of a mesh share a GPU's links, by their messages at once and apart."""
    told = []
    for m in p.machines:
        for scheme, mesh in schemes(p, m):
            rows = p.of(m, scheme=scheme, mesh="x".join(map(str, mesh)), phase="backward")
            apart = rows[["ms_data", "ms_tensor"]].astype(float)
            at_once = rows["ms_communication"].astype(float)
            together, longer = at_once / apart.sum(axis=1), at_once / apart.max(axis=1)
            if apart.notna().all(axis=1).any():
                told.append(f"{mesh_name(scheme, mesh)} with {m.label}: {together.median():.2f} "
                            f"times their sum, {longer.median():.2f} times the longer")  # fmt: skip
    if not told:
        what = "the messages of both axes of a mesh at once, on four GPUs or more"
        return Markdown(p.not_yet(what))
    return Markdown(
        f"Backward, the messages of both axes at once take, against each axis' alone: "
        f"{'; '.join(told)} (medians over the batches). Links that are shared add up, 1 times the "
        "sum; with links of its own for each axis it is 1 times the longer."
    )
