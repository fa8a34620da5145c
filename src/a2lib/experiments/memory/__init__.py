"""The memory experiment: what the cells of notebooks/memory.ipynb call, top to bottom.

    parameters = memory.check(globals())
    run = memory.start(parameters)
    memory.measure_peaks(run)
    memory.measure_recordings(run)
    figure = memory.draw(run)
    memory.measure_blocks(run)
    memory.measure_sizes(run)
    memory.say_where(run)

``configurations`` says what is measured, ``handlers`` how a worker does it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import show_tables
from a2lib.experiments.memory import view
from a2lib.experiments.memory.configurations import STEPS, Case, Parameters
from a2lib.measure import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING, Section, bulk
from a2lib.measure.store import StoreError

NOTEBOOK = MEMORY.notebook
SECTIONS = (MEMORY, MEMORY_RECORDING, MEMORY_BLOCK)
NOT_ASKED = "Measured by the sweeps {0} and all (-p sweep {0})."


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on; raises as ``harness.run.start`` does."""
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=given.model == "auto")


@measures
def measure_peaks(run: Run) -> None:
    """Two steps of each configuration, and the peaks by phase; printed beside what is counted."""
    _measure_peaks(run, "table", keep=run.parameters.has("recordings"))


@measures
def measure_sizes(run: Run) -> None:
    """The same of the other models, in a sweep that has them."""
    _measure_peaks(run, "sizes")


def _measure_peaks(run: Run, sweep: str, keep: bool = False) -> None:
    tasks = peak_tasks(run.parameters, sweep, run.device)
    _measure(run, MEMORY, tasks, "peaks", sweep, keep)
    if tasks:
        show_tables(view.peaks(_stored(run, MEMORY, tasks), run.device))


@measures
def measure_recordings(run: Run) -> None:
    """Every allocation of two steps, as pictures and as the largest by line of code."""
    tasks = recording_tasks(run.parameters, run.device)
    _measure(run, MEMORY_RECORDING, tasks, "recordings", "recordings",
             keep=run.parameters.has("blocks"))  # fmt: skip
    if tasks:
        show_tables(view.recordings(_stored(run, MEMORY_RECORDING, tasks), run.device))


@measures
def measure_blocks(run: Run) -> None:
    """What one block keeps, by hooks, by the allocator and by formula."""
    tasks = block_tasks(run.parameters, run.device)
    _measure(run, MEMORY_BLOCK, tasks, "blocks", "blocks", keep=run.parameters.sweep == "all")
    if tasks:
        show_tables(view.blocks(_stored(run, MEMORY_BLOCK, tasks)))


def peak_tasks(given: Parameters, sweep: str, device: str) -> list[Task]:
    """A task for each configuration, every phase of both steps."""
    made = []
    for case in given.cases(sweep, device):
        keys = tuple(
            {**case.key(), "step_number": step, "phase": phase}
            for step in STEPS
            for phase in case.phases()
        )
        made.append(_task(case, str(case), keys))
    return made


def recording_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, both steps."""
    return [
        _task(case, f"recording {case}",
              tuple({**case.key(), "step_number": step} for step in STEPS))
        for case in given.cases("recordings", device)
    ]  # fmt: skip


def block_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each block."""
    columns = MEMORY_BLOCK.key
    return [
        _task(case, f"a block of {case}", ({c: case.key()[c] for c in columns},))
        for case in given.cases("blocks", device)
    ]


def _task(case: Case, label: str, keys: tuple) -> Task:
    return Task(label, {"case": case.key()}, {label: keys})


def _measure(run: Run, section: Section, tasks: list[Task], what: str, sweeps: str,
             keep: bool = False) -> None:  # fmt: skip
    if not tasks:
        say_nothing(NOT_ASKED.format(sweeps))
        return
    resume = run.parameters.sweep != "shape"
    harness.measure(run, section, tasks, what=what, resume=resume, keep_worker=keep)


def _stored(run: Run, section: Section, tasks: list[Task]) -> list[dict[str, str]]:
    """The stored rows of ``section`` that ``tasks`` ask for, in their order."""
    rows = {identity(section, row): row for row in run.store(section).rows()}
    wanted = [identity(section, key) for t in tasks for keys in t.rows.values() for key in keys]
    return [rows[key] for key in wanted if key in rows]


def draw(run: Run):
    """The second step of the first recording asked for, as a matplotlib figure."""
    rows = []
    for case in run.parameters.cases("recordings", run.device)[:1]:
        try:
            rows = bulk.read("memory", run.slug, f"{case.picture}-{STEPS[-1]}", run.data).rows
        except StoreError as error:
            print(error)
    return view.figure(rows)


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Where the memory goes")
