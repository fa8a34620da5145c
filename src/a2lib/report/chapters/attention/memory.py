"""The memory to the byte: what waits, what is temporary, and where it ends."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.attention.rows import (
    BATCH,
    BYTES,
    HEAD_DIMS,
    LONGEST,
    MASKS,
    MIDDLE,
    PASSES,
    Plain,
    shape,
    shape_of,
)
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING as BLANK
from a2lib.report.tables import Markdown, Table
from a2lib.theory.allocator import BUFFER
from a2lib.theory.eager import PASSES as COUNTED
from a2lib.theory.eager import Eager, longest

WORDS = {
    "q": "input", "k": "input", "v": "input", "o": "output", "do": "gradient of the output",
    "p": "weights, waiting for the backward", "mask": "one byte a pair, for all sequences",
}  # fmt: skip
# GPUs by what their makers call their memory, in GB.
SIZES = (16, 24, 40, 80)
KINDS = {"inputs and output": "#8b5a2b", "waits for the backward": "#0072b2",
         "temporary": "#d55e00"}  # fmt: skip
LINEAR = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "queries", "keys")


def parts(caption: str, name: str) -> Table:
    """Tensor by tensor at the grid's largest length: before each pass, and at its peak."""
    lines = []
    for causal in MASKS:
        for pass_ in PASSES:
            s = shape(causal=causal)
            before = s.inputs(pass_)
            kernel, live = max(s.moments(pass_), key=lambda moment: sum(moment[1].values()))
            held = ", ".join(f"{n} {_mib(size)}" for n, size in before.items())
            added = ", ".join(f"{n} {_mib(size)}" for n, size in live.items())
            sums = [f"{sum(sizes.values()):,}" for sizes in (before, live)]
            lines.append([f"{pass_}, {MASKS[causal]}", held, sums[0], kernel, added, sums[1]])
    columns = ["pass", "before it (MiB)", "bytes", "peak in", "it adds (MiB)", "bytes "]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=5)


def checked(p: Plain) -> Markdown:
    """Whether what was measured is what is counted, in this grid and in the flash chapter's."""
    told = []
    rows = pick(p.table, implementation="eager", status="ok").rename(columns={"pass": "pass_"})
    rows = rows.dropna(subset=["peak_bytes", "held_bytes"])
    if len(rows):
        off = [
            (int(r.held_bytes) - sum(shape_of(r).inputs(r.pass_).values()),
             int(r.peak_bytes) - shape_of(r).peak(r.pass_))
            for r in rows.itertuples()
        ]  # fmt: skip
        told.append(_verdict("this grid", off))
    rows = p.flash.rename(columns={"pass": "pass_"}).dropna(subset=["peak_bytes"])
    rows = rows[rows["pass_"].isin(COUNTED)]
    if len(rows):
        off = [(int(r.peak_bytes) - shape_of(r).peak(r.pass_),) for r in rows.itertuples()]
        where = f"eager's rows in the sweep of [FlashAttention-2](flash.md), {p.device}"
        told.append(_verdict(where, off))
    text = " ".join(told)
    if not len(pick(p.table, implementation="eager", status="ok")):
        text = f"{text} {p.not_yet('the memory of this grid')}".strip()
    return Markdown(text)


def _verdict(where: str, off: list[tuple[int, ...]]) -> str:
    right = sum(not any(differences) for differences in off)
    text = f"In {where}, what is counted is what was measured, to the byte, in "
    if right == len(off):
        return f"{text}all {right} rows."
    worst = max(abs(d) for differences in off for d in differences)
    return f"{text}{right} of {len(off)} rows; elsewhere it is off by at most {worst:,} bytes."


def saved(p: Plain) -> Markdown:
    """Whether autograd's hooks saw what is counted."""
    rows = pick(p.saved, implementation="eager", status="ok")
    if not len(rows):
        return Markdown(p.not_yet("what autograd's hooks see on the GPU; a test sees it on a CPU"))
    off = [(int(r.saved_bytes) - shape_of(r).saved().get(r.tensor, 0),) for r in rows.itertuples()]
    return Markdown(_verdict("what autograd's own hooks see", off))


def kept(p: Plain) -> Markdown:
    """What autograd's hooks see of ours, by row; and which longer sequences nobody has tried."""
    told, lacking = [], []
    rows = pick(p.saved, implementation="a2lib", status="ok")
    if len(rows):
        more = rows[~rows["tensor"].isin(["q", "k", "v", "o"])]
        sums = more.groupby(["seq_len", "batch"])["saved_bytes"].sum()
        each = [float(size) / (int(n) * int(batch)) for (n, batch), size in sums.items()]
        told.append(
            f"Autograd's hooks see it keep {style.between(each, style.digits)} bytes for each row "
            "beside inputs and output."
        )
    else:
        lacking.append("what autograd's hooks see of it and of the softmax written out")
    if not (p.table["seq_len"] > LONGEST).any():
        lacking.append("the times beyond this grid")
    told += [p.not_yet(listed(lacking))] if lacking else []
    return Markdown(" ".join(told))


def over_time() -> Chart:
    """What lives during each kernel of a causal forward and backward, by kind."""
    s = shape(causal=True)
    bars = []
    for pass_ in PASSES:
        given = s.inputs("forward") | {"do": s.tensor} if pass_ == "forward" else s.inputs(pass_)
        for kernel, live in s.moments(pass_):
            sums = dict.fromkeys(KINDS, 0)
            for name, size in (given | live).items():
                sums[_kind(name, pass_)] += size
            bars.append((kernel, sums))

    def draw(figure):
        ax = figure.subplots()
        bottom = [0.0] * len(bars)
        for kind, colour in KINDS.items():
            sizes = [sums[kind] / 2**30 for _, sums in bars]
            ax.barh(range(len(bars)), sizes, left=bottom, color=colour, label=kind, height=0.72)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        ax.set_yticks(range(len(bars)), [kernel for kernel, _ in bars])
        ax.invert_yaxis()
        ax.axhline(len(s.moments("forward")) - 0.5, color=style.INK, linewidth=0.8)
        ax.set_xlabel("GiB")
        ax.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)

    return Chart(draw, height=0.9 + 0.25 * len(bars))


def _kind(name: str, pass_: str) -> str:
    if name in LINEAR:
        return "inputs and output"
    return "waits for the backward" if name in ("p", "mask") else "temporary"


def ends(p: Plain, caption: str, name: str) -> Table:
    """The longest sequence by the memory of a GPU: by tensors, by the allocator's blocks, in "
    "tiles."""
    lines = []
    for size in (*SIZES, p.capacity() / 1e9):
        cells = []
        for pass_, causal in (("forward", False), ("forward", True), ("backward", False)):
            found = [longest(BATCH, MIDDLE, causal, int(size * 1e9), pass_, how=how)
                     for how in ("tensors", "blocks")]  # fmt: skip
            cells += map(style.tokens, found)
        tiled = longest(BATCH, MIDDLE, False, int(size * 1e9), "backward", how="tiled")
        lines.append([f"{size:.0f}", *cells, style.tokens(tiled)])
    columns = ["GB", "forward: tensors", "blocks", "causal: tensors", "blocks ",
               "with backward: tensors", "blocks  ", "in tiles"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)


def limits(p: Plain, caption: str, name: str) -> Table:
    """The longest lengths that ran on the published GPU, by pass and vector; in brackets what was
    predicted where that is another."""
    rows, lines = pick(p.limits, status="ok"), []
    for allocator in ("blocks", "expandable"):
        for pass_ in PASSES:
            for causal in MASKS:
                mine = pick(rows, allocator=allocator, pass_=pass_, causal=causal)
                if not len(mine):
                    continue
                found = {int(row.head_dim): row for row in mine.itertuples()}
                by_tensors = sorted({int(row.tensors_len) for row in found.values()})
                lines.append([
                    allocator, f"{pass_}, {MASKS[causal]}",
                    " to ".join(style.tokens(n) for n in {by_tensors[0]: 0, by_tensors[-1]: 0}),
                    *(_ran(found.get(d)) for d in HEAD_DIMS),
                ])  # fmt: skip
    columns = ["allocator", "pass", "by tensors", *(f"d = {d}" for d in HEAD_DIMS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _ran(row) -> str:
    if row is None:
        return BLANK
    other = f" ({style.tokens(row.predicted_len)})" if row.fits_len != row.predicted_len else ""
    return f"{style.tokens(row.fits_len)}{other}"


def predicted(p: Plain) -> Markdown:
    """How often the predicted end is the end, and which way it is off."""
    rows = pick(p.limits, status="ok")
    if not len(rows):
        return Markdown(
            p.not_yet(f"where it ends, for vectors of {listed([str(d) for d in HEAD_DIMS])}; "
                      "what is above is the prediction")  # fmt: skip
        )
    off = (rows["fits_len"] - rows["predicted_len"]).astype(int)
    exact = int((off == 0).sum())
    by = [(int((off[mine] == 0).sum()), int(mine.sum()), name) for name in ("blocks", "expandable")
          if (mine := rows["allocator"] == name).any()]  # fmt: skip
    each = listed([f"{right} of {n} with {name}" for right, n, name in by])
    text = f"The predicted length is the longest that ran in {exact} of {len(off)} cases ({each})"
    if (off != 0).any():
        low, high = off[off != 0].min(), off[off != 0].max()
        far = f"{low:+,} to {high:+,} tokens away"
        if low == high:
            far = f"{abs(low):,} tokens {'shorter' if low < 0 else 'longer'}"
        text += f"; elsewhere the longest is {far}"
    short = rows[(off < 0) & (rows["allocator"] == "expandable")]
    if len(short):
        left = max(map(_left, short.rename(columns={"pass": "pass_"}).itertuples()))
        text += (
            f". With `expandable_segments` the tensors of such a length would have left at most "
            f"{left / 2**20:,.0f} MiB, and memory comes and goes by whole pages of "
            f"{BUFFER // 2**20} MiB there"
        )
    return Markdown(f"{text}.")


def _left(row) -> int:
    """The bytes that the tensors of the predicted length leave of the room there was."""
    sizes = int(row.batch), int(row.predicted_len), int(row.head_dim), bool(row.causal)
    history = Eager(*sizes, BYTES[row.dtype]).history(row.pass_)
    return int(row.room_bytes) - max(sum(live.values()) for live in history)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.4g}" if size < 2**30 else f"{size / 2**20:,.0f}"
