"""The experiment on data parallelism: what the cells of notebooks/ddp.ipynb call, top to bottom.

    parameters = ddp.check(globals())
    run = ddp.start(parameters)
    ddp.measure(run)
    ddp.show(run)
    figure = ddp.draw(run)
    ddp.say_where(run)

``configurations`` says what is measured, ``wrappers`` how gradients are averaged, ``handlers`` what
each rank does with it. The training and the turns are ``experiments/data_parallel``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.ddp.configurations import Parameters, Way
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.ranks import gpus_of
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import number, show_tables, table
from a2lib.measure import DDP

NOTEBOOK = DDP.notebook
SECTIONS = (DDP,)
# Making and compiling a model, or capturing a step of one.
SILENCE_S = 240
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises ParameterError for what these ranks cannot do, and what ``harness.run.start`` does.
    """
    gpus = gpus_of(training.ranks for training in given.asked())
    return harness.start(given, NOTEBOOK, SECTIONS, gpus=gpus)


def tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training, each way its own culprit."""
    return [
        Task(
            training.label,
            training.spec(),
            {way.label: (training.key(way),) for way in ways},
            ranks=training.ranks,
            silence_s=SILENCE_S,
        )
        for training, ways in asked.items()
    ]


@measures
def measure(run: Run) -> None:
    """Time the steps; a single training always, a sweep what it lacks."""
    resume = run.parameters.sweep != "shape"
    harness.measure(run, DDP, tasks(run.parameters.asked()), what="ddp", resume=resume)


def show(run: Run) -> None:
    """Print the stored rows of this run's parameters."""
    heads = ["", "step, ms", "p20", "p80", "n", "without", "exposed", "communication", "backward",
             "host", "by rank: least", "median", "most", ""]  # fmt: skip
    for training, rows in _rows(run):
        says = (
            f"{training.label}, batch {training.batch}, context {training.context},"
            f" {training.precision}, {training.ranks.world_size} ranks of {training.ranks.backend}:"
            " the median step, and what communication adds to it."
        )
        show_tables(table([_line(way, row) for way, row in rows], heads, says))


def draw(run: Run):
    """The step and the part of it that communication is exposed for, as a matplotlib figure."""
    found = [(training, [pair for pair in rows if pair[1]["ms"]]) for training, rows in _rows(run)]
    found = [(training, rows) for training, rows in found if rows]
    if not found:
        return None
    most = max(len(rows) for _, rows in found)
    figure, axes = subplots(len(found), squeeze=False, figsize=(8, len(found) * (1 + most / 3)))
    for ax, (training, rows) in zip(axes[:, 0], found, strict=True):
        labels = [way.label for way, _ in rows]
        base = [float(row["ms_without"]) for _, row in rows]
        above = [float(row["ms"]) - float(row["ms_without"]) for _, row in rows]
        ax.barh(labels, base, color="#bbbbbb", label="without communication")
        ax.barh(labels, above, left=base, color="#d55e00", label="exposed")
        ax.invert_yaxis()
        ax.set(title=training.label, xlabel="ms")
    axes[0, 0].legend(fontsize=7)
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Distributed data parallel")


def _rows(run: Run) -> list[tuple[Training, list[tuple[Way, Row]]]]:
    stored = {identity(DDP, row): row for row in run.store(DDP).rows()}
    found = []
    for training, ways in run.parameters.asked().items():
        known = [(way, stored.get(identity(DDP, training.key(way)))) for way in ways]
        found.append((training, [(way, row) for way, row in known if row is not None]))
    return found


def _line(way: Way, row: Row) -> list[str]:
    if row["status"] != "ok":
        return [way.label, row["status"], *[""] * 11, row["note"]]
    exposed = float(row["ms"]) - float(row["ms_without"])
    columns = ("ms", "ms_p20", "ms_p80", "n", "ms_without")
    rest = ("ms_communication", "ms_backward_without", "ms_host", "ms_rank_min", "ms_rank_median")
    return [way.label, *(_cell(row[c]) for c in columns), number(exposed),
            *(_cell(row[c]) for c in (*rest, "ms_rank_max")), row["note"]]  # fmt: skip


def _cell(text: str) -> str:
    return number(float(text)) if text else "-"
