"""A notebook's experiment: what its cells call, made of its parameters and its tables.

TIMES = Table(TOY, tasks, says="A step.", shown=("ms", "n"), plot=Plot(x="size"))
EXPERIMENT = Experiment(Parameters, (TIMES,), "the chapter")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
"""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from a2lib import paths
from a2lib.errors import OneLine
from a2lib.experiments.harness import output, parameters, view
from a2lib.experiments.harness.process import Worker
from a2lib.experiments.harness.sweep import Sweep, Task, gpus_of, identity, plan
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.harness.worker import store_of
from a2lib.lab import DeviceLock, Section, Store, device_kind, device_slug, read_runs, start_run
from a2lib.lab.csv_file import StoreError

_HEAD = ("run", "torch", "triton", "cuda", "cudnn", "driver", "python", "git", "command")


@dataclass
class Run:
    """One execution of ``notebook`` on ``device`` ("cuda" or "cpu"), under run id ``id``.

    Rows go to ``data``, to the files of the device ``slug``. ``until`` is when nothing more is
    started (``time.time()``), ``left`` how many rows that has left. ``worker`` is one that was kept
    for the next sweep.
    """

    parameters: object
    notebook: str
    device: str
    id: str
    slug: str
    data: Path
    until: float | None = None
    left: int = 0
    worker: Worker | None = None

    def store(self, section: Section) -> Store:
        return store_of(section, self.slug, self.data)


class Interrupted(OneLine, KeyboardInterrupt):
    """A step was interrupted; the message says what is kept and how to go on."""


@contextlib.contextmanager
def measuring(run: Run) -> Iterator[None]:
    """Hold the lock of the run's device.

    Raises ParameterError where the notebook has other parameters by now than the run, DeviceBusy
    where another process measures there, and Interrupted for a KeyboardInterrupt.
    """
    parameters.check_current(run.parameters)
    with DeviceLock(run.device).held(f"run {run.id}"):
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(
                "every row measured so far is stored; to go on, run this cell again or start the"
                " same command again"
            ) from None


@dataclass(frozen=True)
class Table:
    """One ``section`` of a notebook: what it asks for, and what it shows of the rows.

    ``tasks(parameters, device)`` are what is to be measured, none where it is not asked for. A
    table has the columns ``shown``, and those ``derived`` from a row, last or where ``shown`` names
    them; with ``across``, a key column, its values are columns of the first. ``says`` is what
    stands above. What is silent for ``silence_s`` seconds is ended; with ``keep_worker`` the
    process stays for the next table: starting one, with its CUDA context, takes seconds. ``always``
    measures in every run what a sweep would skip; with ``parts`` a row that is asked for comes with
    others, and all that are stored are shown.
    """

    section: Section
    tasks: Callable[[object, str], list[Task]]
    says: str
    shown: tuple[str, ...]
    across: str = ""
    derived: view.Derived = field(default_factory=dict)
    plot: Plot | None = None
    silence_s: float | None = None
    keep_worker: bool = False
    always: bool = False
    parts: bool = False

    def measure(self, run: Run) -> None:
        """Measure what is asked for: one shape always, of a sweep what is not stored yet. Prints
        how much that is, and what the time limit has left."""
        tasks = self.tasks(run.parameters, run.device)
        if not tasks:
            output.say_nothing("Nothing of this is asked for (-p sweep all has it).")
        with measuring(run):
            self._measure(run, tasks)

    def _measure(self, run: Run, tasks: list[Task]) -> None:
        """Measure what is pending of ``tasks``, under a bar; rows are stored one by one."""
        pending = self._pending(run, tasks)
        total = sum(task.size for task in pending)
        known = sum(task.size for task in tasks) - total
        if known:
            print(f"{known} rows are stored already (-p remeasure True measures them again)")
        if not total:
            if run.worker and not self.keep_worker:
                run.worker.close()
            return
        bar = output.Progress(total, self.section.name, unit="rows")

        def begin(task: Task, culprit: str | None) -> None:
            who = culprit or ("in turns" if task.in_turns else "")
            bar.say(task.label if who == task.label else f"{task.label} {who}".strip())

        how = {"seed": run.parameters.seed, "until": run.until, "silence_s": self.silence_s}
        how |= {"worker": run.worker, "keep": self.keep_worker, "begin": begin}
        sweep = Sweep(
            run.store(self.section), run.id, run.device, row=lambda row: bar.step(), **how
        )
        try:
            left = sweep.measure(pending)
        finally:
            run.worker = sweep.worker
            bar.close()
        run.left += left
        if left:
            print(
                f"Time limit reached: {left} rows are left. To go on, run the same command again:"
            )
            print(f"  {command(run.notebook, run.parameters)}")

    def pending(self, run: Run) -> list[Task]:
        """What ``measure`` is going to measure."""
        return self._pending(run, self.tasks(run.parameters, run.device))

    def _pending(self, run: Run, tasks: list[Task]) -> list[Task]:
        resume = not self.always and getattr(run.parameters, "sweep", None) != "shape"
        how = {"resume": resume, "remeasure": run.parameters.remeasure}
        return plan(tasks, run.store(self.section), **how)

    def measure_and_show(self, run: Run) -> None:
        """``measure``, then ``show``, where it is asked for."""
        self.measure(run)
        if self.tasks(run.parameters, run.device):
            self.show(run)

    def rows(self, run: Run) -> list[dict[str, str]]:
        """The stored rows that the run's parameters ask for, in their order."""
        stored = {identity(self.section, row): row for row in run.store(self.section).rows()}
        tasks = self.tasks(run.parameters, run.device)
        asked = dict.fromkeys(identity(self.section, key) for task in tasks for key in task.keys)
        return [stored[key] for key in asked if key in stored]

    def show(self, run: Run) -> None:
        """Show the stored rows of the run's parameters as a table."""
        rows = run.store(self.section).rows() if self.parts else self.rows(run)
        view.show(rows, self.section, self.says, self.shown, self.across, self.derived)

    def draw(self, run: Run):
        """The same rows as a matplotlib figure; None where none has what is drawn."""
        return view.draw(self.rows(run), self.section, self.plot, self.derived)


@dataclass(frozen=True)
class Experiment:
    """A notebook with the parameters ``Parameters`` and ``tables``, for ``chapter`` of the book.

    ``refuse(parameters, device)`` raises ParameterError for what this machine cannot do.
    """

    Parameters: type
    tables: tuple[Table, ...]
    chapter: str
    refuse: Callable[[object, str], None] = lambda given, device: None

    @property
    def sections(self) -> tuple[Section, ...]:
        return tuple(dict.fromkeys(table.section for table in self.tables))

    def check(self, namespace: Mapping) -> object:
        """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
        return parameters.check(namespace, self.Parameters)

    def start(self, given: object) -> Run:
        """Record the run and print what it runs on.

        Raises, before anything is measured, ParameterError for what this machine cannot do or where
        the notebook has other parameters by now, StoreError where rows could not be stored and
        DeviceBusy where another process measures on the device.
        """
        device, notebook = device_kind(), self.sections[0].notebook
        self.refuse(given, device)
        gpus = gpus_of(task for table in self.tables for task in table.tasks(given, device))
        output.quiet_at_the_end()
        parameters.check_current(given)
        DeviceLock(device).check()
        data, slug = data_folder(device), device_slug()
        for section in self.sections:
            Store(section, slug, data).check_writable()
        asked = {"command": command(notebook, given), "parameters": asdict(given)}
        run_id = start_run(**asked, device=slug, n_devices=gpus, data=data)
        until = time.time() + given.time_limit_s if given.time_limit_s else None
        if device == "cuda":
            import torch

            print(torch.cuda.get_device_name())
        else:
            print("CPU: its times say nothing about a GPU")
        (known,) = (row for row in read_runs(data) if row["run"] == run_id)
        for column in _HEAD:
            if known[column]:
                print(f"  {column:8}{known[column]}")
        return Run(given, notebook, device, run_id, slug, data, until)

    def say_where(self, run: Run) -> None:
        """Print where the rows are and how they get into the book."""
        stored = [run.store(section).path for section in self.sections]
        files = " and ".join(shown(path) for path in stored if path.exists())
        print(f"Rows: {files or 'none'}; run {run.id}")
        if run.left:
            again = command(run.notebook, run.parameters)
            print(f"{run.left} rows are left; run again: {again}")
        print(f"Book: `make book` rebuilds the report with them; the chapter is {self.chapter}.")


def command(notebook: str, given: object) -> str:
    """The papermill command that runs ``notebook`` with the parameters ``given``."""
    changed = parameters.changed(given).items()
    options = [f"-p {name} {shlex.quote(str(value))}" for name, value in changed]
    return " ".join(["papermill", f"notebooks/{notebook}.ipynb", *options])


def data_folder(device: str) -> Path:
    """Where rows of ``device`` ("cuda" or "cpu") go: $A2LIB_DATA if set, else data/ for a GPU.

    Those of a CPU go to build/data, which the report reads too: data/ is committed, and a trial of
    the notebook leaves it as it was.

    Raises StoreError where the package was installed as a copy, beside which nothing is kept.
    """
    if not (paths.ROOT / "notebooks").is_dir():
        raise StoreError(
            "a2lib is installed without its repository, where rows and compiled code are kept:"
            " in a clone run `pip install -e '.[book]'`, then this again"
        )
    if device == "cpu" and not os.environ.get("A2LIB_DATA"):
        return paths.build_dir() / "data"
    return paths.data_dir()


def shown(path: Path) -> str:
    """``path`` without the folders of this machine: they would be published with the notebook."""
    if path.is_relative_to(paths.ROOT):
        return str(path.relative_to(paths.ROOT))
    return str(Path("$A2LIB_DATA") / path.relative_to(paths.data_dir()))
