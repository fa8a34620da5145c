"""Eager attention in PyTorch: its passes and its memory beside what theory counts of them."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from a2lib.report.data import load_reference
from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.plots import label, lines, reference, stacks
from a2lib.report.style import INK, Chart, Look, Looks, chart
from a2lib.theory.eager import Eager, attention_kernels, longest
from a2lib.theory.roofline import floor

BATCH = 8
LENGTHS, SIZES = (256, 1024, 4096, 8192, 16384), (16, 32, 64, 128)
LOOKS = Looks(
    eager=Look("eager PyTorch", "#444444", "s"),
    a2lib=Look("our FlashAttention", "#d55e00", "o", ours=True),
)
KINDS = {
    "inputs and output": "#8b5a2b",
    "waits for the backward": "#0072b2",
    "temporary": "#d55e00",
}
# What lives during each kernel of causal attention beside q, k, v, o and do: matrices that wait for
# the backward, temporary ones, and gradients of q's size.
MOMENTS = {
    "forward": [
        ("q k^T", 0, 1, 0),
        ("times scale", 0, 2, 0),
        ("indices of queries", 0, 1, 0),
        ("indices of keys", 0, 1, 0),
        ("compare", 0, 1, 0),
        ("copy to mask", 0, 2, 0),
        ("mask", 0, 2, 0),
        ("softmax", 1, 1, 0),
        ("p v", 1, 1, 0),
    ],
    "backward": [
        ("p^T do", 1, 0, 1),
        ("do v^T", 1, 1, 1),
        ("dp times p", 1, 2, 1),
        ("softmax backward", 1, 3, 1),
        ("copy to mask", 1, 2, 1),
        ("mask", 1, 2, 1),
        ("times scale", 1, 2, 1),
        ("ds k", 1, 1, 2),
        ("ds^T q", 1, 1, 3),
    ],
}
BEFORE_MASK = ("q k^T", "times scale", "indices of queries", "indices of keys")
PARTS = {
    "matrix multiplies": "#0072b2",
    "reading and writing matrices": "#d55e00",
    "beyond the floor": "#808080",
}
MIB = 2**20


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with ``gpu``, the GPU's time in ms (of a replay, or as called where that is shorter
    or all there is), and ``whole``, all bytes at the peak. Of eager's also, as counted: ``held``
    and ``added``, the bytes before a pass and what it adds; ``matrix``, bytes of one matrix;
    ``multiplies`` and ``floor``, the least time of its matrix multiplies and of all of it, ms."""
    rows = rows[(rows["batch"] == BATCH) & (rows["dtype"] == "fp32")].reset_index(drop=True)
    rate, bandwidth = ceilings(rows_of("ceiling")).get("fp32"), copy_bandwidth(rows_of("ceiling"))
    about = rows[["implementation", "pass", "seq_len", "head_dim", "causal"]]
    found = [
        _theory(*one, rate, bandwidth) if name == "eager" else {}
        for name, *one in about.itertuples(index=False, name=None)
    ]
    return rows.assign(
        gpu=np.fmin(rows["ms"].astype(float), rows["ms_graph"].astype(float)),
        whole=rows["held_bytes"] + rows["peak_bytes"],
    ).join(pd.DataFrame(found, index=rows.index))


def shape(n: int = LENGTHS[-1], d: int = 64, causal: bool = False) -> Eager:
    return Eager(BATCH, int(n), int(d), bool(causal))


def _theory(pass_, n, d, causal, rate, bandwidth) -> dict:
    one = shape(n, d, causal)
    held = sum(one.inputs(pass_).values())
    found = {"matrix": one.matrix, "held": held, "added": one.peak(pass_)}
    if rate and bandwidth:
        written = "causal" if causal else "plain"
        kernels = attention_kernels("eager", written, pass_, one.batch, one.n, one.d, 4)
        least = floor(kernels, rate * 1e12, bandwidth * 1e12)
        found |= {"multiplies": least["products"].ms, "floor": least["total"].ms}
    return found


def limits(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with ``counted_len``, the longest sequence by the closed form of what is allocated:
    blocks, or tensors alone where segments expand."""
    counted = [
        longest(
            int(r.batch),
            int(r.head_dim),
            bool(r.causal),
            int(r.room_bytes),
            r.pass_,
            step=int(r.fails_len - r.fits_len),
            how="blocks" if r.allocator == "blocks" else "tensors",
        )
        for r in rows.rename(columns={"pass": "pass_"}).itertuples()
    ]
    return rows.assign(counted_len=counted)


def saved(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Eager's rows with ``counted``, the bytes of the tensor that theory says are saved."""
    rows = rows[(rows["implementation"] == "eager") & (rows["status"] == "ok")]
    cases = [(shape(r.seq_len, r.head_dim, r.causal), r.tensor) for r in rows.itertuples()]
    return rows.assign(counted=[one.saved().get(tensor, 0) for one, tensor in cases])


def over_time(one: Eager) -> Chart:
    """What lives during each kernel of a causal forward and backward, by kind, GB."""
    bars = []
    for pass_, kernels in MOMENTS.items():
        inputs = 4 if pass_ == "forward" else 5  # q, k, v, do; and the output
        for kernel, waiting, temporary, gradients in kernels:
            output = 1 if kernel == "p v" else 0
            tensors = (inputs + output + gradients) * one.tensor
            mask = 0 if pass_ == "forward" and kernel in BEFORE_MASK else one.mask
            sizes = (tensors, waiting * one.matrix + mask, temporary * one.matrix)
            bars.append({"kernel": kernel} | dict(zip(KINDS, np.array(sizes) / 1e9, strict=True)))
    frame = pd.DataFrame(bars).set_index("kernel")
    most = int(frame.sum(axis=1).to_numpy().argmax())
    said = ["" if i != most else f"{x:.1f} GB" for i, x in enumerate(frame.sum(axis=1))]
    bold = {"ha": "right", "va": "center", "fontweight": "bold"}

    def passes(ax):
        border = len(MOMENTS["forward"])
        ax.axhline(border - 0.5, color=INK, linewidth=0.8)
        for y, words in ((0, "forward"), (border, "backward")):
            label(ax, words, (1, y), (-2, 0), xycoords=("axes fraction", "data"), **bold)

    height = 0.9 + 0.25 * len(bars)
    return stacks(frame, KINDS, height, text=said, least=9, xlabel="GB", more=passes)


def chain() -> Drawing:
    """The kernels of a forward and of a backward and the N x N matrices between them."""
    elements = []
    for y, words, kernels in (
        (24, "forward", ("Q Kᵀ", "scale", "mask", "softmax", "P V")),
        (104, "backward", ("dO Vᵀ", "× P", "softmax'", "scale", "dQ, dK")),
    ):
        elements.append(text(0, y - 8, words, bold=True))
        for i, kernel in enumerate(kernels):
            x = 1 + 72 * i
            elements.append(box(x, y, 60, 24, "fill: #dce9f7; stroke: #555555", kernel))
            if i < 4:
                waits = y < 50 and i == 3
                colour = "#0072b2" if waits else "#d55e00"
                elements.append(stroke(f"M{x + 60} {y + 12}H{x + 72}", colour, 3))
                elements.append(text(x + 66, y + 40, "N × N", anchor="middle"))
    elements.append(stroke("M282 68 V86 H102 V104", "#0072b2", 2, "; stroke-dasharray: 4 3"))
    elements.append(text(WIDTH, 84, "P waits", anchor="end"))
    return Drawing(elements, 150)


@chart(height=2.9)
def memory(figure, rows: pd.DataFrame, room: float):
    """All bytes at the peak of a causal backward against the tokens, eager and ours, GB."""
    rows = rows[rows["implementation"].isin(LOOKS) & rows["whole"].notna()]
    rows = rows.assign(size=rows["whole"] / 1e9)
    ax = figure.subplots()
    for x, y, name in lines(ax, rows, "seq_len", "size", "implementation", LOOKS):
        look = LOOKS.look(name)
        at, side = ((0, 8), "right") if look.ours else ((8, -3), "left")
        label(ax, look.label, (x, y), at, ha=side)
    reference(ax, room / 1e9, "free on the GPU")
    ax.set(xlabel="tokens", ylabel="GB at the peak of a backward", ylim=(0, room * 1.12 / 1e9))
    ax.xaxis.set_major_formatter("{x:,.0f}")


def parts(rows: pd.DataFrame) -> Chart:
    """The GPU's time of each pass: the floor of its matrix multiplies, that of the rest, and what
    is beyond, ms."""
    rows = rows.sort_values(["pass", "head_dim"], ascending=[False, True])
    frame = pd.DataFrame(
        {
            "matrix multiplies": rows["multiplies"],
            "reading and writing matrices": rows["floor"] - rows["multiplies"],
            "beyond the floor": (rows["gpu"] - rows["floor"]).clip(lower=0),
        }
    )
    frame.index = [f"{p}, d = {d}" for p, d in zip(rows["pass"], rows["head_dim"], strict=True)]
    text = [f"{total:.3g}" for total in frame.sum(axis=1)]
    return stacks(frame, PARTS, 3.6, text=text, xlabel="ms")


@dataclass(frozen=True)
class Account:
    """What a published program held before its backward, and what it added: matrices of N x N and
    tensors of q's size; rows of N numbers, the mask, and cuBLAS's workspace of so many MiB, two of
    them but where the first configuration had not run a backward yet."""

    matrices: int
    tensors: int
    workspace: float
    mask: bool = False
    rows: int = 0
    cold: bool = True
    added: tuple[int, int] | None = None


# Found by hand: the one account that gives every figure.
ACCOUNTS = {
    "unnamed GPU of 80 GB": Account(1, 4, 8.125, added=(3, 4)),
    "H800 PCIe": Account(2, 4, 32, mask=True, rows=3, cold=False, added=(4, 1)),
    "unnamed GPU of 16 to 24 GB": Account(2, 5, 8.125),
}


def accounted(device: str, n: int, d: int) -> dict[str, float]:
    """Bytes before the backward and at the peak, by the account of ``device``."""
    a, s = ACCOUNTS[device], shape(n, d)
    first = a.cold and (n, d) == (LENGTHS[0], SIZES[0])
    held = a.matrices * s.matrix + a.tensors * s.tensor + (1 if first else 2) * a.workspace * MIB
    held += a.rows * s.batch * s.n * 4 + (s.n**2 if a.mask else 0)
    if a.added is None:
        return {"held": held}
    more = a.added[0] * s.matrix + a.added[1] * s.tensor + first * a.workspace * MIB
    return {"held": held, "peak": held + more}


def published() -> pd.DataFrame:
    """Every figure of memory that others printed, in bytes, beside its account, and whether the two
    are the ``same`` to the last digit printed."""
    found, unit = [], {"MB": MIB, "MiB": MIB, "B": 1}
    for row in load_reference("attention").query("unit != ''").itertuples():
        for what, size in accounted(row.device, int(row.seq_len), int(row.head_dim)).items():
            if words := getattr(row, what):
                half = 0.5 * 10.0 ** -len(words.partition(".")[2]) + 1e-9
                same = abs(float(words) - size / unit[row.unit]) <= half
                where = int(row.seq_len), int(row.head_dim)
                printed = float(words) * unit[row.unit]
                found.append((row.device, *where, what, printed, size, same))
    names = ["device", "seq_len", "head_dim", "what", "printed", "counted", "same"]
    return pd.DataFrame(found, columns=names)
