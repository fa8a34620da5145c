"""The notebook's text tables and its figure; not for the book."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from a2lib.experiments.benchmark.configurations import MODELS, Configuration
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.tables import MEANS, mean, number
from a2lib.experiments.harness.tables import table as text_table

Row = Mapping[str, str]
PARTS = ("import", "context", "product", "block_first", "block_second", "memory", "first", "second")
PHASES = ("forward", "loss", "backward", "optimizer", "step", "wall")
_NAMES = ("model", "mode", "precision", "attention", "compile")


def configuration(row: Row) -> Configuration:
    """The one that a stored row is of."""
    return Configuration(
        **{name: row[name] for name in _NAMES},
        context=int(row["context"]),
        batch=int(row["batch"]),
        capture=row["capture"] == "true",
    )


def table(rows: Sequence[Row]) -> str:
    """A line for each configuration: mean and standard deviation of each phase, in ms, what the
    host took to issue the step, and the peak of memory; or why there is none."""
    body = []
    rows = sorted(rows, key=lambda row: configuration(row).work())
    for mine in _grouped(rows, lambda row: (configuration(row), row["warmup"])):
        found = {row["phase"]: row for row in mine}
        some = found.get("step", mine[0])
        cells = [mean(found[phase]) if phase in found else "-" for phase in PHASES]
        host = number(float(some["ms_host"])) if some["ms_host"] else "-"
        peak = f"{int(some['peak_bytes']) / 1e9:.4g}" if some["peak_bytes"] else "-"
        why = some["note"] if some["status"] != "ok" else ""
        body.append([str(configuration(some)), some["warmup"], *cells, host, peak, why])
    heads = [f"{phase}, ms" for phase in PHASES]
    says = f"Each phase of a step after the steps of warm-up: {MEANS}."
    return text_table(body, ["", "warm-up", *heads, "host, ms", "peak, GB", ""], says)


def warmups(rows: Sequence[Row]) -> str:
    """What each number of warm-up steps gives as mean and standard deviation."""
    body = []
    for mine in _grouped(rows, lambda row: (configuration(row), int(row["warmup"]))):
        cells = [_of_steps(mine, phase) for phase in ("forward", "backward", "optimizer", "wall")]
        body.append([str(configuration(mine[0])), mine[0]["warmup"], *cells])
    heads = ["", "warm-up", "forward, ms", "backward", "optimizer", "wall"]
    return text_table(body, heads, "Mean and standard deviation after so many steps of warm-up.")


def firsts(rows: Sequence[Row]) -> str:
    """The median over the processes of each part, a line for each preparation."""
    body = []
    measured = {row["part"] for row in rows}
    names = [part for part in (*PARTS, "steady") if part in measured]
    rows = sorted(rows, key=lambda row: configuration(row).work())
    for mine in _grouped(rows, lambda row: (configuration(row), row["prepared"])):
        cells = []
        for part in names:
            times = [float(r["ms"]) for r in mine if r["part"] == part and r["ms"]]
            cells.append(number(statistics.median(times)) if times else "-")
        why = "; ".join(dict.fromkeys(r["note"] for r in mine if r["note"]))
        body.append([str(configuration(mine[0])), mine[0]["prepared"], *cells, why])
    says = "The first step and what comes before it, by what was prepared: medians over processes."
    return text_table(body, ["", "prepared", *(f"{name}, ms" for name in names), ""], says)


def powers(rows: Sequence[Row]) -> str:
    """What a step takes of time and energy, the power that makes, and how the driver kept it."""
    body = []
    for row in sorted(rows, key=lambda row: configuration(row).work()):
        ms = number(float(row["ms"])) if row["ms"] else row["status"]
        joules = watts = "-"
        if row["joules"]:
            joules = number(float(row["joules"]))
            watts = number(1000 * float(row["joules"]) / float(row["ms_mean"]))
        others = (row[name] or "-" for name in ("power_limit_w", "capped_percent", "sm_mhz"))
        body.append([str(configuration(row)), ms, joules, watts, *others, row["note"]])
    heads = ["ms", "J", "W", "limit, W", "at the limit, %", "MHz"]
    says = "Time, energy and power of a step, and the driver's limit."
    return text_table(body, ["", *heads, ""], says)


def figure(rows: Sequence[Row]):
    """Wall time against the number of the step, a panel for each model and context, one line for
    each warm-up; None without rows."""
    rows = [row for row in rows if row["phase"] == "wall" and row["ms"]]
    if not rows:
        return None

    def place(row: Row) -> tuple[int, int]:
        return int(row["context"]), list(MODELS).index(row["model"])

    panels = _grouped(sorted(rows, key=place), place)
    lines = len({row["context"] for row in rows})
    columns = -(-len(panels) // lines)
    size = (3.2 * columns, 3 * lines)
    drawn, axes = subplots(lines, columns, figsize=size, squeeze=False)
    for ax, mine in zip(axes.flat, panels, strict=False):
        for line in _grouped(mine, lambda row: int(row["warmup"])):
            steps = sorted((int(row["step_number"]), float(row["ms"])) for row in line)
            ax.plot(*zip(*steps, strict=True), marker=".", label=line[0]["warmup"])
        ax.set(title=f"{mine[0]['model']}, {mine[0]['context']} tokens", xlabel="step of a process")
        ax.set_yscale("log")
    axes[0, 0].set_ylabel("wall time, ms")
    axes[0, 0].legend(title="warm-up")
    return drawn


def _grouped(rows: Sequence[Row], by) -> list[list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return list(groups.values())


def _of_steps(rows: Sequence[Row], phase: str) -> str:
    mine = [row for row in rows if row["phase"] == phase]
    measured = [row for row in mine if int(row["step_number"]) >= int(row["warmup"])]
    times = [float(row["ms"]) for row in measured if row["ms"]]
    if not times:
        return next((row["status"] for row in measured if row["status"] != "ok"), "-")
    spread = f" ± {statistics.stdev(times):.2g}" if len(times) > 1 else ""
    return f"{number(statistics.fmean(times))}{spread}"
