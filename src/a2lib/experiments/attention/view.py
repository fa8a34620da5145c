"""The notebook's text tables and its figure; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from a2lib.experiments.attention.configurations import PASSES
from a2lib.experiments.harness.picture import legend_beside, subplots
from a2lib.experiments.harness.tables import MEANS, mean, number, table

Row = Mapping[str, str]


def passes(rows: Sequence[Row]) -> str:
    """A line for each pass: mean and deviation by the host's clock, the same calls by events, a
    replay's and the host's time (ms), and memory; or why there is none."""
    body = []
    for row in sorted(rows, key=_place):
        times = [_number(row[column]) for column in ("ms_event", "ms_graph", "ms_host")]
        held = [_gb(row[column]) for column in ("held_bytes", "peak_bytes")]
        body.append([*_shape(row), row["pass"], mean(row), row["n"], *times, *held, row["note"]])
    heads = ["", "tokens", "d", "mask", "pass", "ms", "n", "events", "GPU", "host"]
    says = f"Each pass of attention by the host's clock over n calls: {MEANS}."
    return table(body, [*heads, "held, GB", "peak, GB", ""], says)


def saved(rows: Sequence[Row]) -> str:
    """What autograd saves, by tensor; a column for each, and a line for each shape."""
    body, tensors = [], list(dict.fromkeys(row["tensor"] for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in sorted(rows, key=_place):
        shown = f"{int(row['saved_bytes']):,}" if row["saved_bytes"] else row["status"]
        lines.setdefault(_shape(row), {})[row["tensor"]] = shown
    for shape, found in lines.items():
        body.append([*shape, *(found.get(name, "-") for name in tensors)])
    says = "Bytes that autograd saves for the backward pass, by tensor."
    return table(body, ["", "tokens", "d", "mask", *tensors], says)


def limits(rows: Sequence[Row]) -> str:
    """Predicted and found lengths."""
    body = []
    for row in rows:
        columns = ("allocator", "head_dim", "causal", "pass", "tensors_len", "predicted_len")
        columns += ("fits_len", "fails_len", "note")
        body.append([row[column] for column in columns])
    heads = ["allocator", "d", "causal", "pass", "by tensors", "predicted", "fits", "fails", ""]
    return table(body, heads, "The longest sequence that fits, predicted and found, in tokens.")


def figure(rows: Sequence[Row]):
    """Time against length, a panel for each pass, a line for each implementation, size and mask;
    None without rows."""
    rows = [row for row in rows if row["ms"]]
    if not rows:
        return None
    drawn, axes = subplots(1, len(PASSES), figsize=(8, 3.4), sharey=True)
    for ax, pass_ in zip(axes, PASSES, strict=True):
        lines: dict[tuple, list] = {}
        for row in rows:
            if row["pass"] == pass_:
                line = row["implementation"], int(row["head_dim"]), row["causal"]
                lines.setdefault(line, []).append((int(row["seq_len"]), float(row["ms"])))
        for (name, head_dim, causal), points in sorted(lines.items()):
            label = f"{name}, d = {head_dim}{', causal' if causal == 'true' else ''}"
            ax.plot(*zip(*sorted(points), strict=True), marker=".", label=label)
        ax.set(title=pass_, xlabel="tokens", xscale="log", yscale="log")
    axes[0].set_ylabel("ms")
    legend_beside(drawn, axes[1])
    return drawn


def _place(row: Row) -> tuple:
    return int(row["seq_len"]), row["causal"], int(row["head_dim"]), row["implementation"]


def _shape(row: Row) -> tuple[str, ...]:
    mask = "causal" if row["causal"] == "true" else "full"
    return row["implementation"], row["seq_len"], row["head_dim"], mask


def _number(cell: str) -> str:
    return number(float(cell)) if cell else "-"


def _gb(cell: str) -> str:
    return f"{int(cell) / 1e9:.4g}" if cell else "-"
