"""The collectives experiment: what the cells of notebooks/collectives.ipynb call, top to bottom.

    parameters = collectives.check(globals())
    run = collectives.start(parameters)
    collectives.measure(run)
    collectives.show(run)
    figure = collectives.draw(run)
    collectives.say_where(run)

``configurations`` says what is measured, ``handlers`` what each rank does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

from a2lib.experiments.collectives.configurations import MB, Collective, Parameters
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.picture import legend_beside, subplots
from a2lib.experiments.harness.ranks import gpus_of
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import number, show_tables, table
from a2lib.measure import COLLECTIVES
from a2lib.theory.latency import OPERATIONS, wire_share

NOTEBOOK = COLLECTIVES.notebook
SECTIONS = (COLLECTIVES,)
# A collective that is silent for this long hangs.
SILENCE_S = 180
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises ParameterError where there are too few GPUs, and what ``harness.run.start`` does.
    """
    asked = [one.ranks for one in given.collectives(_gpus())]
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=False, gpus=gpus_of(asked))


def tasks(collectives: Iterable[Collective]) -> list[Task]:
    """A task for each operation and dtype of the same ranks, each size its own culprit."""
    grouped: dict[tuple, dict[str, tuple]] = {}
    for one in collectives:
        sizes = grouped.setdefault((one.ranks, one.operation, one.dtype), {})
        sizes[f"{one.size / MB:g} MB"] = (one.key(),)
    return [
        Task(
            f"{operation} {dtype}, {ranks.backend} {ranks.world_size}",
            {},
            rows,
            ranks=ranks,
            silence_s=SILENCE_S,
        )
        for (ranks, operation, dtype), rows in grouped.items()
    ]


@measures
def measure(run: Run) -> None:
    """Time the collectives; a single shape always, a sweep what it lacks."""
    resume = run.parameters.sweep != "shape"
    harness.measure(run, COLLECTIVES, _tasks(run), what="collectives", resume=resume)


def show(run: Run) -> None:
    """Print the stored rows of this run's parameters: times, and both bandwidths."""
    wanted = {
        identity(COLLECTIVES, key) for t in _tasks(run) for ks in t.rows.values() for key in ks
    }
    rows = [r for r in run.store(COLLECTIVES).rows() if identity(COLLECTIVES, r) in wanted]
    heads = ["", "backend", "ranks", "dtype", "MB", "ms", "p20", "p80", "n", "by rank: least"]
    heads += ["median", "most", "queued", "algorithm, GB/s", "bus, GB/s", ""]
    says = "The median call of the slowest rank, those of the ranks themselves, and the bandwidths."
    show_tables(table([_line(row) for row in sorted(rows, key=_place)], heads, says))


def draw(run: Run):
    """Bus bandwidth of the stored rows of this device against size, as a matplotlib figure."""
    lines: dict[tuple, list] = {}
    for row in run.store(COLLECTIVES).rows():
        if row["ms"]:
            name = row["operation"], row["dtype"], row["backend"], int(row["world_size"])
            lines.setdefault(name, []).append((int(row["size"]) / MB, _bandwidths(row)[1]))
    if not lines:
        return None
    figure, ax = subplots(figsize=(8, 4))
    # A marker for each operation, a colour for each group of ranks, broken for 16 bits.
    groups = sorted({name[2:] for name in lines})
    for name, points in sorted(lines.items()):
        operation, dtype, *group = name
        ax.plot(*zip(*sorted(points), strict=True), marker="osv^"[OPERATIONS.index(operation)],
                color=f"C{groups.index(tuple(group))}", markersize=4,
                linestyle="-" if dtype == "fp32" else "--",
                label=" ".join(map(str, name)))  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="MB", ylabel="bus bandwidth, GB/s")
    legend_beside(figure, ax)
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Collectives on one node")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _tasks(run: Run) -> list[Task]:
    return tasks(run.parameters.collectives(_gpus()))


def _bandwidths(row: Row) -> tuple[float, float]:
    """Algorithm and bus bandwidth, GB/s."""
    rate = int(row["size"]) / float(row["ms"]) / 1e6
    return rate, rate * wire_share(row["operation"], int(row["world_size"]))


def _place(row: Row) -> tuple:
    return (row["backend"], int(row["world_size"]), row["operation"], row["dtype"],
            int(row["size"]))  # fmt: skip


def _line(row: Row) -> list[str]:
    key = [row["operation"], row["backend"], row["world_size"], row["dtype"]]
    key.append(f"{int(row['size']) / MB:g}")
    if row["status"] != "ok":
        return [*key, row["status"], *[""] * 9, row["note"]]
    columns = ("ms", "ms_p20", "ms_p80", "n", "ms_rank_min", "ms_rank_median", "ms_rank_max")
    times = [number(float(row[column])) for column in columns]
    queued = number(float(row["ms_queued"])) if row["ms_queued"] else "-"
    return [*key, *times, queued, *map(number, _bandwidths(row)), row["note"]]
