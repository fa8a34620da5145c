"""Why: what is launched and moved, eager and compiled, and the time that has to take."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.compile.rows import (
    BYTES,
    GRID_BATCH,
    LENGTHS,
    PASSES,
    WRITTEN,
    Compile,
    curve,
    pairs,
)
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import IMPLEMENTATIONS, attention_kernels, held, moves
from a2lib.theory.roofline import Floor, floor

LONGEST = LENGTHS[-1]
LONG = 4096  # from here on a matrix is far larger than all that is not one
SAYS = {"plain": "softmax(q k^T) v", "causal": "with a mask", "heads": "with a dimension of heads"}


def least(c: Compile, implementation: str, written: str, dtype: str, pass_: str, n: int, d: int,
          batch: int = GRID_BATCH) -> Floor | None:  # fmt: skip
    """The floor of a pass; None where the ceilings are not measured."""
    if c.bandwidth is None or dtype not in c.tflops:
        return None
    kernels = attention_kernels(implementation, written, pass_, batch, n, d, BYTES[dtype])
    return floor(kernels, c.tflops[dtype] * 1e12, c.bandwidth * 1e12)["total"]


def predicted(c: Compile, *where, **more) -> float | None:
    """The floor of eager over that of compiled, the gain that the bytes and operations allow."""
    eager, compiled = (least(c, name, *where, **more) for name in IMPLEMENTATIONS)
    return None if eager is None or compiled is None else eager.ms / compiled.ms


def counts(c: Compile, caption: str, name: str) -> Table:
    """Kernels and passes over the matrices by each way to write attention, as derived, and what
    Inductor made and the GPU ran, as measured."""
    lines = []
    for written in WRITTEN:
        for pass_ in PASSES:
            kernels = [len(attention_kernels(i, written, pass_, 1, 1, 1, 4))
                       for i in IMPLEMENTATIONS]  # fmt: skip
            moved = [moves(i, written, pass_) for i in IMPLEMENTATIONS]
            kept = [held(i, written, pass_) for i in IMPLEMENTATIONS]
            lines.append([
                SAYS[written], pass_, *(f"{a} → {b}" for a, b in (kernels, moved, kept)),
                *_seen(c, written, pass_),
            ])  # fmt: skip
    columns = ["attention", "pass", "kernels", "matrices moved", "matrices held", "generated",
               "library calls", "launched, eager → compiled"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _seen(c: Compile, written: str, pass_: str) -> list[str]:
    rows = pick(c.grid, written=written, pass_=pass_, status="ok")
    compiled = pick(rows, implementation="compile")
    launched = [_values(pick(rows, implementation=i), "launches") for i in IMPLEMENTATIONS]
    ran = MISSING if MISSING in launched else " → ".join(launched)
    return [_values(compiled, "kernels_called"), _values(compiled, "library_calls"), ran]


def _values(rows: pd.DataFrame, column: str) -> str:
    known = sorted({int(value) for value in rows[column].dropna()})
    if not known:
        return MISSING
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def recognised(c: Compile) -> Markdown:
    """Where Inductor recognised attention, as measured."""
    rows = pick(c.grid, implementation="compile", status="ok")
    if not len(rows):
        return Markdown(c.not_yet("which of the three Inductor recognises on a GPU"))
    told = []
    for written in WRITTEN:
        mine = pick(rows, written=written)
        if len(mine):
            hits = int((mine["attentions"] > 0).sum())
            told.append(f"{hits} of {len(mine)} compiled passes of `{written}`")
    return Markdown(f"Inductor put PyTorch's own attention in the place of {listed(told)}.")


def as_counted(c: Compile) -> Markdown:
    """Whether on the GPU Inductor counts the derived bytes, and whether the peaks are the derived
    matrices, by each way to write attention."""
    told = []
    for written in WRITTEN:
        rows = pick(c.grid, written=written, status="ok").rename(columns={"pass": "pass_"})
        counted = rows.dropna(subset=["moved_bytes"]).itertuples()
        bytes_ = [int(r.moved_bytes) == _bytes(r) for r in counted]
        long = rows[rows["seq_len"] >= LONG].dropna(subset=["peak_bytes"]).itertuples()
        peaks = [round(r.peak_bytes / _matrix(r)) == held(r.implementation, written, r.pass_)
                 for r in long]  # fmt: skip
        found = [f"{sum(same)} of {len(same)} {what}" for same, what in (
            (bytes_, "counts of bytes (Inductor's, to the byte)"),
            (peaks, f"peaks (from {style.tokens(LONG)} tokens on, to the nearest matrix)"),
        ) if same]  # fmt: skip
        told += [f"{listed(found)} of `{written}`"] if found else []
    if not told:
        return Markdown(c.not_yet("these bytes and peaks on the GPU"))
    return Markdown(
        f"On the {c.short} what is derived was found in {'; in '.join(told)}."
    )


def _bytes(row) -> int:
    sizes = int(row.batch), int(row.seq_len), int(row.head_dim), BYTES[row.dtype]
    kernels = attention_kernels("compile", row.written, row.pass_, *sizes)
    return sum(kernel.read + kernel.written for kernel in kernels)


def _matrix(row) -> int:
    return int(row.batch) * int(row.seq_len) ** 2 * BYTES[row.dtype]


def table(c: Compile, caption: str, name: str, dtype: str = "fp32") -> Table:
    """Bytes and floor of both at the longest length, the gain they predict, and the measured."""
    both = pairs(c.known)
    lines = []
    for written, batch in _known_ways(both):
        for pass_ in PASSES:
            for d in (16, 64, 128):
                where = (written, dtype, pass_, LONGEST, d)
                floors = [least(c, i, *where, batch=batch) for i in IMPLEMENTATIONS]
                r = row_of(curve(both, written, dtype, d, pass_), seq_len=LONGEST)
                if None in floors:
                    continue
                eager, compiled = floors
                lines.append([
                    written, pass_, d, style.digits(eager.bytes / 1e9),
                    style.digits(compiled.bytes / 1e9), style.digits(eager.ms),
                    MISSING if r is None else style.digits(_gpu(r, "eager")),
                    style.digits(compiled.ms),
                    MISSING if r is None else style.digits(_gpu(r, "compile")),
                    f"{eager.ms / compiled.ms:.2f}",
                    MISSING if r is None else f"{_gpu(r, 'eager') / _gpu(r, 'compile'):.2f}",
                ])  # fmt: skip
    columns = ["attention", "pass", "d", "GB: eager", "compiled", "eager: floor, ms", "measured",
               "compiled: floor, ms", "measured ", "gain: floor", "measured  "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def beside(c: Compile, dtype: str = "fp32") -> Markdown:
    """How near the measured gains at the longest length come to the predicted ones, and what is
    above the floor."""
    both = pairs(c.known)
    gains, shares = [], {i: [] for i in IMPLEMENTATIONS}
    below = []
    for written, batch in _known_ways(both):
        for r in (
            pick(both, written=written, dtype=dtype, seq_len=LONGEST)
            .rename(columns={"pass": "pass_"})
            .itertuples()
        ):
            where = (written, dtype, r.pass_, LONGEST, int(r.head_dim))
            if predicted(c, *where, batch=batch) is None:
                continue
            mine = {i: least(c, i, *where, batch=batch).ms / _gpu(r, i) for i in IMPLEMENTATIONS}
            if max(mine.values()) > 1:
                below.append(f"`{written}`, {r.pass_}, heads of {r.head_dim}")
                continue
            gains.append(mine["compile"] / mine["eager"])
            for i, share in mine.items():
                shares[i].append(share)
    told = []
    if gains:
        said = " and ".join(
            f"{style.between(s, '{:.0%}'.format)} of {'eager' if i == 'eager' else 'compiled'}'s "
            "time" for i, s in shares.items()
        )  # fmt: skip
        told.append(
            f"At {style.tokens(LONGEST)} tokens in {dtype} the measured gain is "
            f"{style.between(gains, '{:.2f}'.format)} times the predicted one. The floor is "
            f"{said}. What fills the rest was not taken apart; a guess is products of few columns, "
            "which reach neither ceiling."
        )
    if below:
        told.append(
            "Below the floor, so that the floor or the time is wrong, or the products are others "
            f"than those of the ceiling: {'; '.join(below)}."
        )
    return Markdown(" ".join(told) or c.not_yet("these times beside their floors"))


def _known_ways(both: pd.DataFrame) -> list[tuple[str, int]]:
    """(written, batch) of what is measured; of what the question asks without rows."""
    if not len(both):
        return [("plain", GRID_BATCH)]
    found = both[["written", "batch"]].drop_duplicates()
    return [(w, int(b)) for w in WRITTEN for b in sorted(found[found["written"] == w]["batch"])]


def _gpu(r, implementation: str) -> float:
    graph = getattr(r, f"ms_graph_{implementation}")
    return float(getattr(r, f"ms_{implementation}") if pd.isna(graph) else graph)
