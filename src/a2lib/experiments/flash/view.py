"""A first look at measured rows in the notebook: text tables and one plot; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from a2lib.experiments.ceilings import line, matmul_tflops
from a2lib.experiments.flash.shapes import IMPLEMENTATIONS, Shape
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.tables import Table, notes, number, table
from a2lib.theory.attention import PASSES, attention_flops

Row = Mapping[str, object]
QUANTITIES = {
    "ms": "median time, ms",
    "GPU ms": "GPU's own time (CUDA graph), ms",
    "host ms": "host's time to issue a call, ms",
    "TFLOP/s": "rate, TFLOP/s",
    "MiB": "peak memory, MiB",
}
# The columns of the store behind them; a rate follows from the time.
COLUMNS = {"ms": "ms", "GPU ms": "ms_graph", "host ms": "ms_host", "MiB": "peak_bytes"}
COLOURS = (
    *("#0072b2", "#999999", "#e69f00", "#56b4e9", "#d55e00", "#cc79a7", "#009e73", "#882255"),
    "#000000",
)


def shape_of(row: Row) -> Shape:
    """The shape of a stored row."""
    sizes = (int(row[column]) for column in ("batch", "heads", "seq_len", "head_dim"))
    return Shape(row["dtype"], *sizes, row["causal"] in (True, "true"))


def tflops(row: Row) -> float:
    """TFLOP/s of a row, by the operations of the FlashAttention papers."""
    s = shape_of(row)
    sizes = (s.batch, s.heads, s.seq_len, s.seq_len, s.head_dim)
    return attention_flops(*sizes, s.causal, row["pass"]) / float(row["ms"]) / 1e9


def tables(
    rows: Sequence[Row], quantity: str, ceilings: Sequence[Row], one_shape: bool
) -> list[str]:
    """``rows`` as tables, implementation by pass for one shape, else length by implementation, and
    what is to be said below them."""
    if not rows:
        return []
    known = quantity == "TFLOP/s" or any(row[COLUMNS[quantity]] for row in rows)
    if quantity != "ms" and not known:
        return []  # measured on a GPU alone
    parts = [_one_shape(rows, quantity)] if one_shape else _by_length(rows, quantity)
    if quantity == "TFLOP/s":
        best = [line(r) for r in ceilings if r["operation"] == "matmul"]
        parts.append("\n".join(["Ceilings of this device:", *best]) if best else "")
    if quantity == "ms":
        failed = [r for r in rows if r["status"] != "ok"]
        parts.append(notes("Rows without a time:", failed, "implementation"))
    if quantity == "GPU ms":
        without = [r for r in rows if r["status"] == "ok" and r["note"]]
        parts.append(notes("Rows without a graph:", without, "implementation"))
    return parts


def figure(rows: Sequence[Row], ceilings: Sequence[Row], one_shape: bool, device: str):
    """Bars of the passes for one shape; for a sweep, the time against the length."""
    if one_shape:
        drawn, axes = subplots(1, 2, figsize=(10, 3.6))
        _bars(axes[0], rows, "ms")
        _bars(axes[1], rows, "TFLOP/s")
        known = [r for r in ceilings if r["operation"] == "matmul" and r["status"] == "ok"]
        dtypes = {"bf16" if r["dtype"] == "fp16" else r["dtype"] for r in rows}
        for dtype in dtypes:
            best = max((matmul_tflops(r) for r in known if r["dtype"] == dtype), default=None)
            if best:
                axes[1].axhline(best, color="black", linestyle=":", label="matmul")
        if rows:
            axes[0].legend(fontsize="small")
        drawn.suptitle(f"{shape_of(rows[0])} on {device}" if rows else device)
        return drawn
    groups = {g: rs for g, rs in _groups(rows).items() if len({r["seq_len"] for r in rs}) > 1}
    groups = groups or _groups(rows)
    columns = min(4, max(1, len(groups)))
    lines = -(-len(groups) // columns) or 1
    size = (max(5, 3.2 * columns), 2.9 * lines)
    drawn, axes = subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, (group, members) in zip(axes.flat, groups.items(), strict=False):
        _lines(axis, members)
        axis.set_title(_title(group, members), fontsize="small")
    handles = {
        label: h for a in axes.flat for h, label in zip(*a.get_legend_handles_labels(), strict=True)
    }
    if handles:
        drawn.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=8, fontsize="small"
        )
    drawn.suptitle(f"{_last_pass(rows)} on {device}" if rows else device)
    return drawn


def _one_shape(rows: Sequence[Row], quantity: str) -> Table:
    cells = {(row["implementation"], row["pass"]): _cell(row, quantity) for row in rows}
    passes = [p for p in PASSES if any(row["pass"] == p for row in rows)]
    body = [[n, *(cells.get((n, p), "") for p in passes)] for n in implementations(rows)]
    says = f"{shape_of(rows[0])} (batch x heads x seq_len x head_dim): {QUANTITIES[quantity]}."
    return table(body, ["implementation", *passes], says)


def _by_length(rows: Sequence[Row], quantity: str) -> list[Table]:
    pass_ = _last_pass(rows)
    names = implementations(rows)
    parts = []
    for group, members in _groups(rows).items():
        cells = {
            (int(r["seq_len"]), r["implementation"]): _cell(r, quantity)
            for r in members
            if r["pass"] == pass_
        }
        lengths = sorted({length for length, _ in cells})
        body = [[str(n), *(cells.get((n, name), "") for name in names)] for n in lengths]
        says = f"{_title(group, members)}: {pass_}, {QUANTITIES[quantity]}."
        parts.append(table(body, ["seq_len", *names], says))
    return parts


def _cell(row: Row, quantity: str) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    text = row[COLUMNS.get(quantity, "ms")]
    if not text:
        return "-"
    if quantity == "MiB":
        return f"{int(text) / 2**20:.1f}"
    value = tflops(row) if quantity == "TFLOP/s" else float(text)
    return number(value)


def _bars(axis, rows: Sequence[Row], quantity: str) -> None:
    names = implementations(rows)
    passes = [p for p in PASSES if any(row["pass"] == p for row in rows)]
    for offset, pass_ in enumerate(passes):
        ok = [r for r in rows if r["pass"] == pass_ and r["status"] == "ok"]
        at = [names.index(r["implementation"]) + 0.27 * (offset - 1) for r in ok]
        values = [float(r["ms"]) if quantity == "ms" else tflops(r) for r in ok]
        axis.bar(at, values, 0.25, label=pass_, color=COLOURS[(0, 2, 6)[PASSES.index(pass_)]])
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_ylabel(QUANTITIES[quantity])
    if quantity == "ms" and any(r["status"] == "ok" for r in rows):
        axis.set_yscale("log")


def _lines(axis, rows: Sequence[Row]) -> None:
    pass_ = _last_pass(rows)
    for name in implementations(rows):
        ok = [
            (int(r["seq_len"]), float(r["ms"]))
            for r in rows
            if r["implementation"] == name and r["pass"] == pass_ and r["status"] == "ok"
        ]
        if ok:
            colour = COLOURS[IMPLEMENTATIONS.index(name)]
            axis.plot(*zip(*sorted(ok), strict=True), marker=".", label=name, color=colour)
    if axis.lines:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xlabel("tokens per sequence")
    axis.set_ylabel("ms")


def _groups(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Rows by (heads, head_dim, dtype, causal): one line of lengths each."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        s = shape_of(row)
        found.setdefault((s.heads, s.head_dim, s.dtype, s.causal), []).append(row)
    return dict(sorted(found.items()))


def _title(group: tuple, members: Sequence[Row]) -> str:
    heads, head_dim, dtype, causal = group
    title = f"{heads} head{'s' if heads > 1 else ''} of {head_dim}, {dtype}"
    title += ", causal" if causal else ", full"
    batches = {int(row["batch"]) for row in members}
    if len(batches) > 1:
        title += f", {int(members[0]['batch']) * int(members[0]['seq_len'])} tokens in all"
    elif batches != {1}:
        title += f", batch {min(batches)}"
    return title


def implementations(rows: Sequence[Row]) -> list[str]:
    """Those that ``rows`` have, in the order of IMPLEMENTATIONS."""
    present = {row["implementation"] for row in rows}
    return [name for name in IMPLEMENTATIONS if name in present]


def _last_pass(rows: Sequence[Row]) -> str:
    present = {row["pass"] for row in rows}
    return [p for p in PASSES if p in present][-1]
