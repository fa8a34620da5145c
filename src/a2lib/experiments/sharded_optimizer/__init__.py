"""The experiment on the sharded optimizer: what notebooks/sharded_optimizer.ipynb calls.

    parameters = sharded_optimizer.check(globals())
    run = sharded_optimizer.start(parameters)
    sharded_optimizer.measure_memory(run)
    sharded_optimizer.show_memory(run)
    sharded_optimizer.measure_times(run)
    sharded_optimizer.show_times(run)
    figure = sharded_optimizer.draw(run)
    sharded_optimizer.say_where(run)

``configurations`` says what is measured, ``optimizers`` what is held against what, ``memory`` and
``handlers`` what each rank does. The training and the turns are ``experiments/data_parallel``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.ranks import gpus_of
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import number, show_tables, table
from a2lib.experiments.sharded_optimizer.configurations import (
    MOMENTS,
    Parameters,
    Way,
    in_sides,
)
from a2lib.measure import SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY, Section

NOTEBOOK = SHARDED_OPTIMIZER.notebook
SECTIONS = (SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY)
# Making and compiling a model, or capturing steps of one.
SILENCE_S = 240
# Column of the bytes -> what they are, in the order of a bar.
PARTS = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "buffer_bytes": "buffers",
    "rest": "rest",
}
MB = 1e6
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises ParameterError for what these ranks cannot do, and what ``harness.run.start`` does.
    """
    asked = given.asked()
    groups = [training.ranks for training in (*asked.times, *asked.memory)]
    return harness.start(given, NOTEBOOK, SECTIONS, gpus=gpus_of(groups))


def time_tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training; the optimizers of a wrapper, which take turns, one culprit."""
    return [
        Task(
            _label(training),
            training.spec(),
            {
                side: tuple(training.key(way) for way in ways)
                for side, ways in in_sides(every).items()
            },
            ranks=training.ranks,
            silence_s=SILENCE_S,
        )
        for training, every in asked.items()
    ]


def memory_tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training, each way its own culprit: every moment on every rank."""
    return [
        Task(
            f"memory of {_label(training)}",
            training.spec(),
            {f"{way.optimizer} {way.side}": tuple(_memory_keys(training, way)) for way in every},
            ranks=training.ranks,
            silence_s=SILENCE_S,
        )
        for training, every in asked.items()
    ]


def _memory_keys(training: Training, way: Way) -> Iterator[dict[str, object]]:
    key = training.key(way)
    del key["capture"]
    for moment in MOMENTS:
        for rank in range(training.ranks.world_size):
            yield {**key, "moment": moment, "on_rank": rank}


@measures
def measure_memory(run: Run) -> None:
    """Read the memory of each rank; of a single training always, in a sweep what it lacks."""
    asked = run.parameters.asked()
    tasks = memory_tasks(asked.memory)
    _measure(run, SHARDED_OPTIMIZER_MEMORY, tasks, "memory", keep=bool(asked.times))


@measures
def measure_times(run: Run) -> None:
    """Time the steps; of a single training always, in a sweep what it lacks."""
    _measure(run, SHARDED_OPTIMIZER, time_tasks(run.parameters.asked().times), "times")


def _measure(run: Run, section: Section, tasks: list[Task], what: str, keep: bool = False) -> None:
    resume = run.parameters.sweep != "shape"
    if tasks:
        harness.measure(run, section, tasks, what=what, resume=resume, keep_worker=keep)


def show_memory(run: Run) -> None:
    """Print the stored bytes of this run's parameters."""
    heads = ["", "moment", "rank", *PARTS.values(), "most", "reduced", "gathered", "broadcast", ""]
    for task, rows in _stored(run, SHARDED_OPTIMIZER_MEMORY, memory_tasks):
        says = f"{task.label}, MB: what each rank holds at the moments of a step, and sends in it."
        show_tables(table([_memory_line(row) for row in rows], heads, says))


def show_times(run: Run) -> None:
    """Print the stored times of this run's parameters."""
    columns = ("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_optimizer", "ms_host")
    columns += ("ms_rank_min", "ms_rank_median", "ms_rank_max")
    heads = ["", "step, ms", "p20", "p80", "n", "one GPU", "optimizer", "host"]
    heads += ["by rank: least", "median", "most", ""]
    for task, rows in _stored(run, SHARDED_OPTIMIZER, time_tasks):
        says = (
            f"{task.label}: batch {task.spec['batch']}, context {task.spec['context']},"
            f" {task.ranks.world_size} ranks of {task.ranks.backend}: the median step, and its"
            " optimizer."
        )
        body = [[_name(row), *(_cell(row[c]) for c in columns), _why(row)] for row in rows]
        show_tables(table(body, heads, says))


def draw(run: Run):
    """Bytes of the fullest rank at each moment, by what they are, as a matplotlib figure."""
    found = [(task, _fullest(rows)) for task, rows in _stored(run, SHARDED_OPTIMIZER_MEMORY,
                                                              memory_tasks)]  # fmt: skip
    found = [(task, rows) for task, rows in found if rows]
    if not found:
        return None
    most = max(len(rows) for _, rows in found)
    figure, axes = subplots(len(found), squeeze=False, figsize=(8, len(found) * (1.2 + most / 4)))
    for ax, (task, rows) in zip(axes[:, 0], found, strict=True):
        labels = [f"{_name(row)}, {row['moment']}" for row in rows]
        left = [0.0] * len(rows)
        for part, name in PARTS.items():
            widths = [(_part(row, part) or 0.0) / MB for row in rows]
            ax.barh(labels, widths, left=left, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.invert_yaxis()
        ax.set(title=task.label, xlabel="MB")
    axes[0, 0].legend(fontsize=7)
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "A sharded optimizer")


def _label(training: Training) -> str:
    return f"{training.label}, {training.precision}, {training.attention}"


def _stored(run: Run, section: Section, tasks_of) -> list[tuple[Task, list[Row]]]:
    asked = run.parameters.asked()
    every = tasks_of(asked.times if section is SHARDED_OPTIMIZER else asked.memory)
    stored = {identity(section, row): row for row in run.store(section).rows()}
    found = []
    for task in every:
        keys = [key for keys in task.rows.values() for key in keys]
        rows = [stored[k] for key in keys if (k := identity(section, key)) in stored]
        found.append((task, rows))
    return found


def _fullest(rows: list[Row]) -> list[Row]:
    """Of the three moments, that of the rank with most of the optimizer's state."""
    last = [row for row in rows if row["moment"] == "after" and row["status"] == "ok"]
    full = {}
    for row in sorted(last, key=lambda row: int(row["optimizer_bytes"])):
        full[_name(row)] = row["on_rank"]
    return [
        row for row in rows if row["moment"] != "step" and row["on_rank"] == full.get(_name(row))
    ]


def _name(row: Row) -> str:
    by = "copy engines" if row["carrier"] == "copy_engines" else row["wrapper"]
    return f"{row['optimizer']}, {by}"


def _memory_line(row: Row) -> list[str]:
    parts = [_part(row, part) for part in PARTS]
    sent = [row[f"{what}_bytes"] for what in ("reduced", "gathered", "broadcast")]
    most = [float(row["tensor_bytes"]) if row["tensor_bytes"] else None]
    values = [*parts, *most, *(float(x) if x else None for x in sent)]
    cells = ["-" if x is None else number(x / MB) for x in values]
    return [_name(row), row["moment"], row["on_rank"], *cells, _why(row)]


def _part(row: Row, part: str) -> float | None:
    """The bytes of a column; what no column names is the rest."""
    if part != "rest":
        return float(row[part]) if row[part] else None
    named = [_part(row, other) or 0.0 for other in PARTS if other != "rest"]
    return float(row["present_bytes"]) - sum(named) if row["present_bytes"] else None


def _why(row: Row) -> str:
    return row["note"] if row["status"] == "ok" else f"{row['status']} {row['note']}".strip()


def _cell(text: str) -> str:
    return number(float(text)) if text else "-"
