"""Measured rows as numbered tables: Markdown that MyST parses, so cells may hold roles."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.metrics import level

HEADS = {"seq_len": "tokens", "head_dim": "d", "causal": "mask"}
MISSING = "·"  # a cell nobody has measured yet


class Markdown:
    """Text that a page shows as MyST Markdown."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Table(Markdown):
    """A frame of display texts with a caption and a label for {numref}.

    The frame's columns become the head; the first `left` columns are left-aligned text, the rest
    right-aligned numbers. The first `keys` columns name a line: they are its heads for a screen
    reader, and one or two of them stay in view while the table scrolls.
    """

    def __init__(self, frame: pd.DataFrame, caption: str, name: str, left: int = 1, keys: int = 1):
        self.frame = frame
        head = f":::{{table}} {caption}\n:name: {name}\n:class: dataframe keys-{keys}\n\n"
        super().__init__(f"{head}{pipe(frame, left)}\n:::\n")

    def html(self) -> str:
        """The same table as plain HTML, class `dataframe`."""
        return self.frame.to_html(index=False, border=0, escape=False)


def pipe(frame: pd.DataFrame, left: int = 1) -> str:
    """A frame as a Markdown pipe table; an empty one has a row that says so."""
    if not len(frame):
        frame = pd.DataFrame([["nothing measured yet"]], columns=[" "])
    head = "| " + " | ".join(map(str, frame.columns)) + " |"
    rule = "|" + "|".join(":--" if i < left else "--:" for i in range(frame.shape[1])) + "|"
    body = ["| " + " | ".join(map(_cell, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join([head, rule, *body])


def shown(row) -> str:
    """A row's time in ms to three figures, or why it has none: oom, n/a, error."""
    return style.digits(row.ms) if row.status == "ok" else style.STATUS.get(row.status, row.status)


def latency(rows: pd.DataFrame, caption: str, name: str,
            index: tuple[str, ...] = ("seq_len",)) -> Table:  # fmt: skip
    """Times in ms, a line per value of the `index` columns, a column per implementation.

    The fastest of a line is bold, and so is what is level with it.
    """
    names = style.implementations(rows["implementation"])
    lines = []
    order = pd.Categorical(rows["pass"], list(style.PASSES), ordered=True)
    for values, group in rows.assign(**{"pass": order}).groupby(list(index), observed=True):
        cells = {r.implementation: shown(r) for r in group.itertuples()}
        times = list(group.dropna(subset=["ms"]).itertuples())
        best = min(times, key=lambda row: row.ms, default=None)
        for row in times if len(times) > 1 else []:
            if level(row, best):
                cells[row.implementation] = f"**{cells[row.implementation]}**"
        start = [_key_text(key, cell) for key, cell in zip(index, values, strict=True)]
        lines.append([*start, *(cells.get(n, MISSING) for n in names)])
    columns = [*(HEADS.get(k, k) for k in index), *(style.SHORT.get(n, n) for n in names)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=len(index))


def coverage(rows: pd.DataFrame, expected: int, caption: str, name: str) -> Table:
    """Per implementation and dtype: rows with a time, and those without by reason.

    `expected` is how many rows a complete sweep has for each; the reasons are the notes recorded.
    """
    lines = []
    for (dtype, implementation), group in rows.groupby(["dtype", "implementation"], sort=False):
        counts = group["status"].value_counts()
        notes = [note for note in group.loc[group["status"] != "ok", "note"].unique() if note]
        lines.append([
            style.look(implementation).label, dtype, int(counts.get("ok", 0)),
            int(counts.get("oom", 0)), int(counts.get("unsupported", 0)),
            int(counts.get("error", 0)), max(0, expected - len(group)), _clip("; ".join(notes)),
        ])  # fmt: skip
    order = [style.look(name).label for name in style.implementations(rows["implementation"])]
    lines.sort(key=lambda line: (style.DTYPES.index(line[1]), order.index(line[0])))
    columns = ["implementation", "dtype", "timed", "oom", "n/a", "error", "missing", "reason"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def memory(rows: pd.DataFrame, caption: str, name: str) -> Table:
    """Peak memory per sequence length and implementation, of one dtype, head size and pass."""
    names = style.implementations(rows["implementation"])
    lines = []
    for length, group in rows.groupby("seq_len"):
        cells = {
            r.implementation: style.size(float(r.peak_bytes))
            if r.status == "ok" and not pd.isna(r.peak_bytes)
            else (style.STATUS.get(r.status, MISSING))
            for r in group.itertuples()
        }
        lines.append([style.tokens(length), *(cells.get(n, MISSING) for n in names)])
    columns = ["tokens", *(style.SHORT.get(n, n) for n in names)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)


def _key_text(key: str, value) -> str:
    if key == "seq_len":
        return style.tokens(value)
    if key == "causal":
        return "causal" if value else "full"
    return style.PASSES.get(value, value) if key == "pass" else str(value)


def _clip(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")



def sweep(rows: pd.DataFrame, label: str) -> Markdown:
    """Every latency of a sweep: one folded table per dtype and pass, lines by head size, length."""
    parts = []
    for dtype in style.DTYPES:
        for pass_, title in style.PASSES.items():
            part = rows[(rows["dtype"] == dtype) & (rows["pass"] == pass_)]
            if len(part):
                name = f"tab-{label}-{dtype}-{pass_.replace('_', '-')}"
                table = latency(part, f"{dtype}, {title}: latency (ms)", name,
                                ("head_dim", "seq_len"))  # fmt: skip
                parts.append(folded(table, f"{dtype}, {title}"))
    return Markdown("\n\n".join(parts) or "Nothing measured yet.")


def folded(table: Table, title: str, longest: int = 16) -> str:
    """The table's text, folded away under its title where it has more lines than `longest`."""
    if len(table.frame) <= longest:
        return table.text
    return f"::::{{dropdown}} {title}\n{table.text}::::\n"
