"""Eager attention in PyTorch: times and memory of its passes beside what theory counts of them."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from a2lib.report.data import load_reference
from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.page import one, pick
from a2lib.report.plots import label, lines, reference, stacks
from a2lib.report.style import INK, Chart, Look, Looks, chart
from a2lib.report.units import gb
from a2lib.theory.eager import Eager, attention_kernels, longest
from a2lib.theory.roofline import floor

BATCH = 8
LENGTHS, SIZES = (256, 1024, 4096, 8192, 16384), (16, 32, 64, 128)
LONGEST = LENGTHS[-1]
PASSES = ("forward", "backward")
LOOKS = Looks(
    eager=Look("eager PyTorch", "#444444", "s"),
    a2lib=Look("a2lib's FlashAttention", "#d55e00", "o", ours=True),
)
SAVED, TEMPORARY = "saved for the backward", "temporary"
KINDS = {SAVED: "#0072b2", TEMPORARY: "#d55e00"}
# The kernels of causal attention in order, and of every temporary matrix the first and the last
# kernel during which it is in memory.
KERNELS = {
    "forward": ("Q Kᵀ", "scale", "make mask", "copy", "fill in mask", "softmax", "P V"),
    "backward": (
        "Pᵀ dO",
        "dO Vᵀ",
        "dP × P",
        "softmax'",
        "copy",
        "fill in mask",
        "scale",
        "dS K",
        "dSᵀ Q",
    ),
}
LIVES = {
    "forward": ((0, 1), (1, 4), (3, 6)),
    "backward": ((1, 3), (2, 3), (3, 5), (4, 6), (6, 8)),
}
SAVED_FROM = {"forward": 5, "backward": 0}
MATMULS, MOVING, ABOVE = "least time: matmuls", "least time: moving matrices", "above the least"
PARTS = {MATMULS: "#0072b2", MOVING: "#d55e00", ABOVE: "#808080"}
MIB = 2**20


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add columns to the rows of batch 8 in fp32.

    gpu: GPU time in ms, of a CUDA-graph replay or of the call where that is shorter
    whole: bytes of all tensors at the peak
    held, added: of eager attention, bytes before a pass and at its peak, by counting
    matrix: bytes of one matrix
    matmuls, least: the least time of the matmuls and of the whole pass, ms
    """
    rows = rows[(rows["batch"] == BATCH) & (rows["dtype"] == "fp32")].reset_index(drop=True)
    rate, bandwidth = ceilings(rows_of("ceiling")).get("fp32"), copy_bandwidth(rows_of("ceiling"))
    cells = rows[["implementation", "pass", "seq_len", "head_dim", "causal"]]
    theory = [
        _theory(*cell, rate, bandwidth) if name == "eager" else {}
        for name, *cell in cells.itertuples(index=False, name=None)
    ]
    return rows.assign(
        gpu=np.fmin(rows["ms"].astype(float), rows["ms_graph"].astype(float)),
        whole=rows["held_bytes"] + rows["peak_bytes"],
    ).join(pd.DataFrame(theory, index=rows.index))


def shape(n: int = LONGEST, d: int = 64, causal: bool = False) -> Eager:
    return Eager(BATCH, int(n), int(d), bool(causal))


def _theory(pass_, n, d, causal, rate, bandwidth) -> dict:
    eager = shape(n, d, causal)
    counted = {
        "matrix": eager.matrix,
        "held": sum(eager.inputs(pass_).values()),
        "added": eager.peak(pass_),
    }
    if rate and bandwidth:
        written = "causal" if causal else "plain"
        kernels = attention_kernels("eager", written, pass_, eager.batch, eager.n, eager.d, 4)
        least = floor(kernels, rate * 1e12, bandwidth * 1e12)
        counted["matmuls"] = least["products"].ms
        counted["least"] = least["total"].ms
    return counted


def at(rows, pass_="forward", n=LONGEST, d=64, causal=False, implementation="eager"):
    """Return the row of a pass."""
    return one(
        rows, implementation=implementation, seq_len=n, head_dim=d, causal=causal, pass_=pass_
    )


def both_ms(rows, implementation: str, n: int = LONGEST, time: str = "gpu") -> float:
    """Return the ms of a causal forward and backward with heads of 64; ``time`` is a column."""
    passes = [at(rows, p, n, causal=True, implementation=implementation) for p in PASSES]
    return sum(getattr(row, time) for row in passes)


def accesses(rows, bandwidth: float, n: int = LONGEST, **where) -> pd.Series:
    """Return eager's time above the least time, by pass, causal and head size.

    The unit is an access: the time to read or write one matrix at ``bandwidth``, in TB/s.
    """
    index = ["pass", "causal", "head_dim"]
    eager = pick(rows, implementation="eager", seq_len=n, **where).set_index(index).sort_index()
    return (eager["gpu"] - eager["least"]) * bandwidth * 1e9 / eager["matrix"]


def limits(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add ``counted_len``: the longest sequence by the closed form of what is allocated, blocks or,
    where segments expand, tensors alone."""
    counted = [
        longest(
            int(r.batch),
            int(r.head_dim),
            bool(r.causal),
            int(r.room_bytes),
            r.pass_,
            step=int(r.fails_len - r.fits_len),
            in_blocks=r.allocator == "blocks",
        )
        for r in rows.rename(columns={"pass": "pass_"}).itertuples()
    ]
    return rows.assign(counted_len=counted)


def saved(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return eager's rows with ``counted``, the bytes of the tensor that theory says are saved."""
    rows = rows[(rows["implementation"] == "eager") & (rows["status"] == "ok")]
    cases = [(shape(r.seq_len, r.head_dim, r.causal), r.tensor) for r in rows.itertuples()]
    return rows.assign(counted=[eager.saved().get(tensor, 0) for eager, tensor in cases])


def matrices(pass_: str) -> pd.DataFrame:
    """Return how many matrices of each kind are in memory during each kernel of a causal pass."""
    lines = []
    for i, _ in enumerate(KERNELS[pass_]):
        alive = sum(first <= i <= last for first, last in LIVES[pass_])
        lines.append({SAVED: int(i >= SAVED_FROM[pass_]), TEMPORARY: alive})
    return pd.DataFrame(lines, index=pd.Index(KERNELS[pass_], name="kernel"))


def over_time(eager: Eager) -> Chart:
    """Draw the matrices that are in memory during each kernel of a causal forward and backward."""
    frame = pd.concat([matrices(pass_) for pass_ in PASSES])
    total = frame.sum(axis=1)
    most = int(total.to_numpy().argmax())
    words = [""] * len(frame)
    words[most] = f"{total.iloc[most]} matrices"
    border = len(KERNELS["forward"])

    def passes(ax):
        ax.axhline(border - 0.5, color=INK, linewidth=0.8)
        for y, name in ((0, "forward"), (border, "backward")):
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
            label(ax, name, (1, y), (-2, 0), fontweight="bold", **place)
        ax.set_xticks(range(5))

    xlabel = f"N × N matrices in memory, {gb(eager.matrix)} each"
    height = 0.9 + 0.25 * len(frame)
    return stacks(frame, KINDS, height, text=words, least=9, xlabel=xlabel, more=passes)


def chain() -> Drawing:
    """Draw the kernels of a forward and of a backward and the N x N matrices between them."""
    elements = []
    for y, words, kernels in (
        (24, "forward", ("Q Kᵀ", "scale", "mask", "softmax", "P V")),
        (104, "backward", ("dO Vᵀ", "× P", "softmax'", "scale", "dQ, dK")),
    ):
        elements.append(text(2, y - 8, words, bold=True))
        for i, kernel in enumerate(kernels):
            x = 2 + 72 * i
            elements.append(box(x, y, 60, 24, "fill: #dce9f7; stroke: #555555", kernel))
            if i < 4:
                is_saved = words == "forward" and kernel == "softmax"
                colour = KINDS[SAVED] if is_saved else KINDS[TEMPORARY]
                elements.append(stroke(f"M{x + 60} {y + 12}H{x + 72}", colour, 3))
                elements.append(text(x + 66, y + 40, "N × N", anchor="middle"))
    dashes = "; stroke-dasharray: 4 3"
    elements.append(stroke("M284 68 V86 H104 V104", KINDS[SAVED], 2, dashes))
    elements.append(text(WIDTH, 84, "P is saved", anchor="end"))
    return Drawing(elements, 150)


@chart(height=2.9)
def memory(figure, rows: pd.DataFrame, room: float):
    """Draw all bytes at the peak of a causal backward against the tokens, eager and a2lib, GB."""
    rows = rows[rows["implementation"].isin(LOOKS) & rows["whole"].notna()]
    rows = rows.assign(size=rows["whole"] / 1e9)
    ax = figure.subplots()
    for x, y, name in lines(ax, rows, "seq_len", "size", "implementation", LOOKS):
        look = LOOKS.look(name)
        offset, side = ((0, 8), "right") if look.ours else ((8, -3), "left")
        label(ax, look.label, (x, y), offset, ha=side)
    reference(ax, room / 1e9, "free on the GPU")
    ax.set(xlabel="tokens", ylabel="GB at the peak of a backward", ylim=(0, room * 1.12 / 1e9))
    ax.xaxis.set_major_formatter("{x:,.0f}")


def parts(rows: pd.DataFrame) -> Chart:
    """Draw the GPU time of each pass in ms: the least time of its matmuls, that of moving matrices,
    and what was measured above them."""
    rows = rows.sort_values(["pass", "head_dim"], ascending=[False, True])
    frame = pd.DataFrame(
        {
            MATMULS: rows["matmuls"],
            MOVING: rows["least"] - rows["matmuls"],
            ABOVE: (rows["gpu"] - rows["least"]).clip(lower=0),
        }
    )
    frame.index = [f"{p}, d = {d}" for p, d in zip(rows["pass"], rows["head_dim"], strict=True)]
    words = [f"{total:.3g}" for total in frame.sum(axis=1)]
    return stacks(frame, PARTS, 3.6, text=words, xlabel="GPU time, ms")


@dataclass(frozen=True)
class Account:
    """What a published program held before its backward, and what it added.

    matrices, tensors: of N x N, and of q's size, before the backward
    workspace: MiB of one of cuBLAS's two workspaces
    mask: whether the mask is one of the tensors
    rows: rows of N numbers
    cold: whether the first configuration had only one workspace before its backward
    added: matrices and tensors that the backward adds
    """

    matrices: int
    tensors: int
    workspace: float
    mask: bool = False
    rows: int = 0
    cold: bool = True
    added: tuple[int, int] | None = None


# Chosen by hand: the one account that gives every figure.
ACCOUNTS = {
    "unnamed GPU of 80 GB": Account(1, 4, 8.125, added=(3, 4)),
    "H800 PCIe": Account(2, 4, 32, mask=True, rows=3, cold=False, added=(4, 1)),
    "unnamed GPU of 16 to 24 GB": Account(2, 5, 8.125),
}


def accounted(device: str, n: int, d: int) -> dict[str, float]:
    """Return bytes before the backward and at the peak, by the account of ``device``."""
    a, s = ACCOUNTS[device], shape(n, d)
    first = a.cold and (n, d) == (LENGTHS[0], SIZES[0])
    held = a.matrices * s.matrix + a.tensors * s.tensor + (1 if first else 2) * a.workspace * MIB
    held += a.rows * s.batch * s.n * 4 + (s.n**2 if a.mask else 0)
    if a.added is None:
        return {"held": held}
    more = a.added[0] * s.matrix + a.added[1] * s.tensor + first * a.workspace * MIB
    return {"held": held, "peak": held + more}


def published() -> pd.DataFrame:
    """Return every figure of memory that others printed, in bytes, beside its account, and whether
    the two are the ``same`` to the last digit printed."""
    lines, unit = [], {"MB": MIB, "MiB": MIB, "B": 1}
    for row in load_reference("attention").query("unit != ''").itertuples():
        for what, size in accounted(row.device, int(row.seq_len), int(row.head_dim)).items():
            words = getattr(row, what)
            if words:
                half = 0.5 * 10.0 ** -len(words.partition(".")[2]) + 1e-9
                same = abs(float(words) - size / unit[row.unit]) <= half
                where = int(row.seq_len), int(row.head_dim)
                printed = float(words) * unit[row.unit]
                lines.append((row.device, *where, what, printed, size, same))
    names = ["device", "seq_len", "head_dim", "what", "printed", "counted", "same"]
    return pd.DataFrame(lines, columns=names)
