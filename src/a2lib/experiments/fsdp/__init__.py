"""The experiment on fully sharded data parallel: what the cells of notebooks/fsdp.ipynb call, top
to bottom.

    parameters = fsdp.check(globals())
    run = fsdp.start(parameters)
    fsdp.measure_memory(run)
    fsdp.measure_times(run)
    figure = fsdp.draw(run)
    fsdp.say_where(run)

``configurations`` says what is measured, ``wrappers`` who shards, ``handlers`` what each rank does
with it, ``gathers`` whether each all-gather was in time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping

from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.fsdp.configurations import Parameters, Way, held
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.ranks import gpus_of
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Key, Task, identity
from a2lib.experiments.harness.tables import number, show_tables, table
from a2lib.measure import FSDP, FSDP_MEMORY, Section

NOTEBOOK = FSDP.notebook
SECTIONS = (FSDP, FSDP_MEMORY)
# Making, sharding and compiling a model, or capturing a step of one.
SILENCE_S = 240
PARTS = ("parameter", "gradient", "optimizer", "whole", "travelling")
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


def time_tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training, each way its own culprit."""
    return [
        _task(training, {way.label: (training.key(way),) for way in ways})
        for training, ways in asked.items()
    ]


def memory_tasks(asked: Mapping[Training, list[Way]]) -> list[Task]:
    """A task for each training and way, launched, so that one is in its processes alone."""
    made: dict[tuple[Training, Way], Task] = {}
    for training, ways in asked.items():
        launched = dataclasses.replace(training, capture=False)
        for way in ways:
            made[launched, way] = _task(launched, {way.label: held(launched, way)})
    return list(made.values())


def _task(training: Training, rows: Mapping[str, tuple[Key, ...]]) -> Task:
    spec, ranks = training.spec(), training.ranks
    return Task(training.label, spec, rows, ranks=ranks, silence_s=SILENCE_S)


@measures
def measure_memory(run: Run) -> None:
    """What a rank holds at the moments of a step; printed."""
    tasks = memory_tasks(run.parameters.asked())
    _measure(run, FSDP_MEMORY, tasks, "memory", keep=True)
    heads = ["", "model", "step", "moment", *PARTS, "in all"]
    says = "What the fullest rank holds at the moments of a step."
    show_tables(table([_memory_line(row) for row in _stored(run, FSDP_MEMORY, tasks)], heads, says))


@measures
def measure_times(run: Run) -> None:
    """Time the steps, and look at their all-gathers; printed."""
    tasks = time_tasks(run.parameters.asked())
    _measure(run, FSDP, tasks, "steps")
    heads = ["", "", "step, ms", "p20", "p80", "n", "one GPU", "waited", "host",
             "by rank: least", "median", "most", ""]  # fmt: skip
    says = "The median step, beside that of one GPU with the model whole."
    show_tables(table([_time_line(row) for row in _stored(run, FSDP, tasks)], heads, says))


def draw(run: Run):
    """Each step beside that of one GPU, as a matplotlib figure."""
    rows = [row for row in _stored(run, FSDP, time_tasks(run.parameters.asked())) if row["ms"]]
    if not rows:
        return None
    figure, ax = subplots(figsize=(8, 1.4 + len(rows) / 2))
    labels = [" ".join(_named(row)) for row in rows]
    places = range(len(rows))
    ax.barh([y - 0.2 for y in places], [float(r["ms_without"]) for r in rows], 0.4,
            color="#bbbbbb", label="one GPU, the model whole")  # fmt: skip
    ax.barh([y + 0.2 for y in places], [float(r["ms"]) for r in rows], 0.4,
            color="#0072b2", label="sharded")  # fmt: skip
    ax.set_yticks(list(places), labels)
    ax.invert_yaxis()
    ax.set_xlabel("ms a step")
    ax.legend(fontsize=7)
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Fully sharded data parallel")


def _measure(run: Run, section: Section, tasks: list[Task], what: str, keep: bool = False) -> None:
    """A single training always, of a sweep what it lacks. The ranks are kept for the times."""
    resume = run.parameters.sweep != "shape"
    harness.measure(run, section, tasks, what=what, resume=resume, keep_worker=keep)


def _stored(run: Run, section: Section, tasks: Iterable[Task]) -> list[Row]:
    rows = {identity(section, row): row for row in run.store(section).rows()}
    wanted = [identity(section, key) for t in tasks for keys in t.rows.values() for key in keys]
    return [rows[key] for key in wanted if key in rows]


def _named(row: Row) -> list[str]:
    return [row["wrapper"], f"{row['model']} {_way(row)}"]


def _way(row: Row) -> str:
    return "captured" if row["capture"] == "true" else "launched"


def _time_line(row: Row) -> list[str]:
    columns = ("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_waited", "ms_host", "ms_rank_min",
               "ms_rank_median", "ms_rank_max")  # fmt: skip
    cells = [_cell(row[c]) for c in columns]
    return [*_named(row), *(cells if row["status"] == "ok" else [row["status"], *[""] * 9]),
            row["note"]]  # fmt: skip


def _memory_line(row: Row) -> list[str]:
    line = [row["wrapper"], row["model"], row["step_number"], row["moment"]]
    if row["status"] != "ok":
        return [*line, row["status"], *[""] * len(PARTS)]
    sizes = [row[f"{part}_bytes"] for part in PARTS]
    return [*line, *map(_size, (*sizes, row["tensor_bytes"] or row["present_bytes"]))]


def _cell(text: str) -> str:
    return number(float(text)) if text else "-"


def _size(text: str) -> str:
    """Of a rank on a GPU in GB, of a tiny model in KB."""
    if not text:
        return "-"
    size = float(text)
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e3:.3g} KB"
