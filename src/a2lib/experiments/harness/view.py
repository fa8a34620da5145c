"""Measured rows in a notebook, as a table and as a figure: a first look, and not for the book."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from a2lib.experiments.harness.output import display, say_nothing
from a2lib.lab import Section

Row = Mapping[str, str]
Derived = Mapping[str, Callable[[Row], float]]
BYTES = {"GB": 1e9, "MB": 1e6, "KB": 1e3}
TALLEST = 12  # inches


@dataclass(frozen=True)
class Plot:
    """The column ``y`` against the column ``x``, or without it as bars, a panel for each value of
    the columns ``panels``. What else differs between rows names a line or a bar. The columns
    ``beside`` have the unit of ``y``, and lines or bars of their own."""

    y: str = "ms"
    beside: tuple[str, ...] = ()
    x: str = ""
    panels: tuple[str, ...] = ()


def show(
    rows: Sequence[Row],
    section: Section,
    says: str,
    shown: Sequence[str],
    across: str,
    derived: Derived,
) -> None:
    """Show a line of the columns ``shown`` and ``derived`` for each of ``rows``, named by the key
    columns in which they differ; with ``across`` its values are columns of the first one shown."""
    if not rows:
        say_nothing("No row of what is asked for is stored.")
        return
    import pandas as pd

    made = frame(rows, derived)
    same, named = _keys(made, section)
    named = [column for column in named if column != across]
    values = [c for c in dict.fromkeys([*shown, *derived]) if c != across]
    made["status"] = made["status"].where(made["status"] != "ok", "")
    if across:
        first, *values = values
        if first.endswith("_bytes"):
            made[across] = made[across].astype(str) + "_bytes"
        lines: dict[tuple, dict] = {}
        for row in made.to_dict("records"):
            line = lines.setdefault(tuple(str(row[c]) for c in named), {c: row[c] for c in named})
            line[row[across]] = row["status"] or row[first]
            line |= {c: row[c] for c in (*values, "note") if row[c] == row[c] and row[c] != ""}
        table = pd.DataFrame(lines.values())
        last = [column for column in (*values, "note") if column in table]
        table = table[[*(column for column in table if column not in last), *last]]
    else:
        table = made[[*named, *values, "status", "note"]]
    table = table[[c for c in table if not (table[c].isna() | (table[c] == "")).all()]]
    show_frame(", ".join([says, *(_says(column, value) for column, value in same.items())]), table)


def show_frame(says: str, table) -> None:
    """Show a DataFrame: numbers with four digits, bytes in their unit."""
    import pandas as pd

    table = pd.DataFrame(dict(_column(str(name), table[name]) for name in table))
    bundle = {
        "text/plain": f"{says}\n{table.to_string(index=False)}",
        "text/html": f"<p>{says}</p>{table.to_html(index=False, border=0)}",
    }
    if not display(bundle):
        print(bundle["text/plain"])


def draw(rows: Sequence[Row], section: Section, plot: Plot, derived: Derived | None = None):
    """``rows`` as a matplotlib figure; None where none has what is drawn."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    made = frame(rows, derived or {}) if rows else None
    if made is None or plot.y not in made or made[plot.y].dtype.kind not in "fi":
        return None
    _, named = _keys(made, section)
    panels = [column for column in plot.panels if column in named]
    own = [column for column in named if column not in (plot.x, *panels)]
    made["name"] = [_name(line, own) for _, line in made.iterrows()]
    made["panel"] = [_name(line, panels) for _, line in made.iterrows()]
    values = [plot.y, *(c for c in plot.beside if c in made and made[c].notna().any())]
    kept = ["name", "panel", *([plot.x] if plot.x else [])]
    made = made.melt(kept, values, "column", "value").dropna(subset=["value"])
    by = {"col": "panel", "col_wrap": 2} if panels else {}
    apart = {"sharex": False, "sharey": False}
    if plot.x:
        style = "column" if plot.beside else "name"
        legend = "auto" if made["name"].nunique() * made["column"].nunique() > 1 else False
        look = {"hue": "name", "style": style, "markers": True, "dashes": bool(plot.beside)}
        how = {"kind": "line", "height": 3, "aspect": 1.4, "legend": legend, "facet_kws": apart}
        grid = sns.relplot(made, x=plot.x, y="value", errorbar=None, **look, **how, **by)
        grid.set(ylabel=plot.y)
        grid.set(xscale="log" if made[plot.x].min() > 0 else "linear", yscale="log")
    else:
        height = min(TALLEST, 1.2 + made["name"].nunique() * len(values) / 4)
        colour = {"hue": "column"} if len(values) > 1 else {"color": "#0072b2"}
        how = {"kind": "bar", "height": height, "aspect": 5 / height, **colour, **apart, **by}
        grid = sns.catplot(made, x="value", y="name", errorbar=None, **how)
        label = plot.y if len(values) == 1 else plot.y.rpartition("_")[2]
        grid.set(xlabel=label, ylabel="")
    if panels:
        grid.set_titles("{col_name}")
    if grid.legend is not None:
        grid.legend.set_title("")
    plt.close(grid.figure)  # the cell shows it: one that pyplot holds too is shown twice
    return grid.figure


def subplots(**options):
    """A figure of its own and its axes, as ``pyplot.subplots`` gives them, which a cell shows once:
    what pyplot still holds is shown twice."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained", **options)
    plt.close(figure)
    return figure, axes


def frame(rows: Sequence[Row], derived: Derived):
    """``rows`` as a DataFrame, a column of numbers as numbers, with the columns ``derived``."""
    import pandas as pd

    made = pd.DataFrame(rows)
    for column in made:
        numbers = pd.to_numeric(made[column], errors="coerce")
        if (numbers.notna() | (made[column] == "")).all() and numbers.notna().any():
            made[column] = numbers
    for name, value in derived.items():
        made[name] = [value(row) if row["status"] == "ok" else None for row in rows]
    return made


def _keys(made, section: Section) -> tuple[dict[str, object], list[str]]:
    """The key columns that all rows agree in, with their values, and those that tell them apart."""
    agree = [column for column in section.key if made[column].nunique(dropna=False) == 1]
    return {c: made[c].iloc[0] for c in agree}, [c for c in section.key if c not in agree]


def _says(column: str, value: object) -> str:
    return f"{column.replace('_', ' ')} {_text(value)}".strip()


def _name(line, columns: Sequence[str]) -> str:
    """What names a row by ``columns``: the value alone where that is a word."""
    words = (
        _text(line[c])
        if isinstance(line[c], str) and line[c] not in ("true", "false", "")
        else _says(c, line[c])
        for c in columns
        if line[c] not in ("false", "", 0)
    )
    return " ".join(words) or " ".join(_says(c, line[c]) for c in columns)


def _text(value: object) -> str:
    return "" if value == "true" else f"{value:g}" if isinstance(value, float) else str(value)


def _column(name: str, values) -> tuple[str, list[str]]:
    """The head and the cells of a column."""
    head, scale = name.replace("_", " "), 1
    if name.endswith("_bytes") and values.dtype.kind in "if":
        unit = next((unit for unit, size in BYTES.items() if values.max() >= size), "KB")
        head, scale = f"{head.removesuffix(' bytes')}, {unit}", BYTES[unit]
    return head, [_cell(value, scale) for value in values.tolist()]


def _cell(value: object, scale: float) -> str:
    if value is None or value != value:
        return ""
    return number(value / scale) if isinstance(value, (int, float)) else str(value)


def mean(row: Row) -> str:
    """The mean of a row's times and their deviation, for a derived column."""
    spread = f" ± {float(row['ms_std']):.2g}" if row["ms_std"] else ""
    return f"{number(float(row['ms_mean']))}{spread}" if row["ms_mean"] else ""


def number(value: float) -> str:
    """Four digits, and never fewer than its whole part has."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
