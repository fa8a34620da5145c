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
    made_of,
    pairs,
)
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import IMPLEMENTATIONS, attention_kernels, held, launches, moves
from a2lib.theory.roofline import Floor, floor

LONGEST = LENGTHS[-1]
LONG = 4096  # from here on a matrix is far larger than all that is not one
COUNTED = 10**9  # elements of an operand, of which Inductor's count takes no more


def least(c: Compile, implementation: str, written: str, dtype: str, pass_: str, n: int, d: int,
          batch: int = GRID_BATCH) -> Floor | None:  # fmt: skip
    """The floor of a pass; None where the ceilings are not measured."""
    if c.bandwidth is None or dtype not in c.tflops:
        return None
    written = made_of(written, dtype)
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
    for written, dtype in (*((written, "fp32") for written in WRITTEN), ("heads", "bf16")):
        for pass_ in PASSES:
            made = made_of(written, dtype)
            kernels = [len(attention_kernels(i, made, pass_, 1, 1, 1, BYTES[dtype]))
                       for i in IMPLEMENTATIONS]  # fmt: skip
            moved = [moves(i, made, pass_) for i in IMPLEMENTATIONS]
            kept = [held(i, made, pass_) for i in IMPLEMENTATIONS]
            lines.append([
                f"`{written}`, {dtype}", pass_,
                *(f"{a} → {b}" for a, b in (kernels, moved, kept)),
                *_seen(c, written, dtype, pass_),
            ])  # fmt: skip
    columns = ["attention", "pass", "kernels", "matrices moved", "matrices held", "generated",
               "library calls", "launched, eager → compiled"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _seen(c: Compile, written: str, dtype: str, pass_: str) -> list[str]:
    rows = pick(c.grid, written=written, dtype=dtype, pass_=pass_, status="ok")
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
        for dtype in BYTES:
            mine = pick(rows, written=written, dtype=dtype)
            if len(mine):
                hits = int((mine["attentions"] > 0).sum())
                told.append(f"{hits} of {len(mine)} compiled passes of `{written}` in {dtype}")
    said = f"Inductor put PyTorch's own attention in the place of {listed(told)}."
    if len(c.unmasked):
        tiled = [r.peak_bytes < r.heads * _matrix(r) for r in c.unmasked.itertuples()]
        said += (
            " With heads and without a mask, at the shapes of the "
            "[FlashAttention-3 paper](flash-shapes.md), compiled attention in bf16 holds less than "
            f"one matrix in {sum(tiled)} of {len(tiled)} forwards, where code of Inductor's "
            "own has at least one."
        )
    return Markdown(said)


def as_counted(c: Compile) -> Markdown:
    """Whether on the GPU Inductor counts the derived bytes, and whether launches and peaks are the
    derived ones, by each way to write attention."""
    told, cut, split = [], set(), set()
    for written in WRITTEN:
        rows = pick(c.grid, written=written, status="ok").rename(columns={"pass": "pass_"})
        counted = list(rows.dropna(subset=["moved_bytes"]).itertuples())
        bytes_ = [int(r.moved_bytes) == _bytes(r) for r in counted]
        cut |= {r.seq_len for r in counted if _matrix(r) > COUNTED * BYTES[r.dtype]}
        ran = list(rows.dropna(subset=["launches"]).itertuples())
        whole = [(r.launches, launches(*_where(r))) for r in ran]
        split |= {r.seq_len for r, (_, n) in zip(ran, whole, strict=True) if n > launches(*_one(r))}
        long = rows[rows["seq_len"] >= LONG].dropna(subset=["peak_bytes"]).itertuples()
        peaks = [round(r.peak_bytes / _matrix(r)) == held(*_where(r)[:3])
                 for r in long]  # fmt: skip
        how = ("", "") if told else (
            " (Inductor's, to the byte)",
            f" (from {style.tokens(LONG)} tokens on, to the nearest matrix)",
        )  # fmt: skip
        found = [f"{sum(same)} of {len(same)} {what}" for same, what in (
            (bytes_, f"counts of bytes{how[0]}"),
            ([int(got) == expected for got, expected in whole], "counts of launches"),
            (peaks, f"peaks{how[1]}"),
        ) if same]  # fmt: skip
        told += [f"{listed(found)} of `{written}`"] if found else []
    if not told:
        return Markdown(c.not_yet("these bytes, launches and peaks on the GPU"))
    said = f"On the {c.short} what is derived was found in {'; in '.join(told)}."
    if cut:
        said += (
            f" Inductor counts no more than 10⁹ elements of an operand, and at "
            f"{_lengths(cut)} tokens, where a matrix has more, the derived bytes are cut likewise."
        )
    if split:
        said += (
            " PyTorch's element-wise kernels index no more than 2 GiB: where a matrix has more, at "
            f"{_lengths(split)} tokens, eager launches them in pieces."
        )
    return Markdown(said)


def _lengths(found: set[int]) -> str:
    return listed([style.tokens(n) for n in sorted(found)])


def _where(row, *head_dim: int) -> tuple:
    sizes = int(row.batch), int(row.seq_len), *head_dim, BYTES[row.dtype]
    return row.implementation, made_of(row.written, row.dtype), row.pass_, *sizes


def _one(row) -> tuple:
    """The same pass of one token, which nothing has to cut."""
    return *_where(row)[:3], 1, 1, 1


def _bytes(row) -> int:
    """As derived, with no more than ``COUNTED`` elements of a matrix."""
    kernels = attention_kernels(*_where(row, int(row.head_dim)))
    beyond = max(0, _matrix(row) - COUNTED * BYTES[row.dtype])
    passes = moves("compile", made_of(row.written, row.dtype), row.pass_)
    return sum(kernel.read + kernel.written for kernel in kernels) - passes * beyond


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
                times = MISSING if r is None else [_gpu(r, i) for i in IMPLEMENTATIONS]
                lines.append([
                    f"`{written}`", pass_, d, _arrow(eager.bytes / 1e9, compiled.bytes / 1e9),
                    _arrow(eager.ms, compiled.ms), MISSING if r is None else _arrow(*times),
                    f"{eager.ms / compiled.ms:.2f}",
                    MISSING if r is None else f"{times[0] / times[1]:.2f}",
                ])  # fmt: skip
    columns = ["attention", "pass", "d", "GB", "floor, ms", "measured, ms", "gain: floor",
               "measured"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def beside(c: Compile, dtype: str = "fp32") -> Markdown:
    """How near the measured gains at the longest length come to the predicted ones, and what is
    above the floor."""
    both = pairs(c.known)
    gains, shares, below, common = [], {i: [] for i in IMPLEMENTATIONS}, [], []
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
            beyond = [_gpu(r, i) * (1 - share) for i, share in mine.items()]
            common.append(beyond[1] / beyond[0] if beyond[0] > 0 else 0.0)
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
            f"{said}. Compiled's time beyond it is {style.between(common, '{:.0%}'.format)} of "
            "eager's: so much is in what both run. It was not taken apart; a guess is products of "
            "few columns, which reach neither ceiling."
        )
    if below:
        told.append(
            "Below the floor, so that the floor or the time is wrong, or the products are others "
            f"than those of the ceiling: {'; '.join(below)}."
        )
    return Markdown(" ".join(told) or c.not_yet("these times beside their floors"))


def saved(c: Compile, caption: str, name: str) -> Table:
    """By length: the GPU's time that compiling saves, over all head sizes, and the rate at which
    that moves the bytes it saves."""
    lines = []
    for pass_, n, fewer, ms, rates in _saved(c):
        share = MISSING
        if c.bandwidth is not None:
            share = style.between([r / c.bandwidth for r in rates], "{:.0%}".format)
        lines.append([pass_, style.tokens(n), style.digits(fewer / 1e9),
                      style.between(ms, style.digits), style.between(rates, "{:.2f}".format),
                      share])  # fmt: skip
    columns = ["pass", "tokens", "GB fewer", "ms fewer", "TB/s", "of a copy's"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def _saved(c: Compile) -> list[tuple]:
    """(pass, tokens, bytes fewer, ms fewer by head size, TB/s by head size) of `plain` in fp32."""
    both, found = pairs(c.grid), []
    for pass_ in PASSES:
        fewer = moves("eager", "plain", pass_) - moves("compile", "plain", pass_)
        for n in (n for n in LENGTHS if n >= LONG):
            rows = pick(both, written="plain", dtype="fp32", pass_=pass_, seq_len=n)
            ms = [_gpu(r, "eager") - _gpu(r, "compile") for r in rows.itertuples()]
            if ms and min(ms) > 0:
                bytes_ = fewer * GRID_BATCH * n * n * BYTES["fp32"]
                found.append((pass_, n, bytes_, ms, [bytes_ / t / 1e9 for t in ms]))
    return found


def rates(c: Compile) -> Markdown:
    """That what is saved does not go with the head size, and where it had been slowest."""
    found = _saved(c)
    if not found:
        return Markdown(c.not_yet("how fast that is moved which compiling saves"))
    worst = max(max(ms) / min(ms) for *_, ms, _ in found)
    slow = min(found, key=lambda line: max(line[4]))
    lines = pick(pairs(c.grid), written="plain", dtype="fp32", pass_=slow[0]).dropna(
        subset=["gain_gpu"])  # fmt: skip
    best = lines.loc[lines.groupby("head_dim")["gain_gpu"].idxmax()]["seq_len"].unique().tolist()
    said = (
        "The products are the same in both, so what is saved is the same at every head size"
        + (f", within {worst - 1:.0%}: " if worst > 1 else ": ")
        + "a smaller share of a larger time, the larger the head."
    )
    said += f" It had been moved slowest {slow[0]} at {style.tokens(slow[1])} tokens"
    if best == [slow[1]]:
        said += ", and there the gain is largest: eager is slow, not compiled fast"
    return Markdown(said + ".")


def _known_ways(both: pd.DataFrame) -> list[tuple[str, int]]:
    """(written, batch) of what is measured; of what the question asks without rows."""
    if not len(both):
        return [("plain", GRID_BATCH)]
    found = both[["written", "batch"]].drop_duplicates()
    return [(w, int(b)) for w in WRITTEN for b in sorted(found[found["written"] == w]["batch"])]


def _arrow(before: float, after: float) -> str:
    return f"{style.digits(before)} → {style.digits(after)}"


def _gpu(r, implementation: str) -> float:
    graph = getattr(r, f"ms_graph_{implementation}")
    return float(getattr(r, f"ms_{implementation}") if pd.isna(graph) else graph)
