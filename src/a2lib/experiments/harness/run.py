"""One execution of a notebook: what its steps in ``experiment.py`` share, and compiling ahead.

The parameters are a section's own dataclass; those every sweep has are read from it here:
``remeasure``, ``time_limit_s``, ``seed`` and, for compiling ahead, ``compile_workers``.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from a2lib import paths
from a2lib.errors import OneLine
from a2lib.experiments.harness import ahead, output, parameters
from a2lib.experiments.harness.process import Worker
from a2lib.experiments.harness.worker import store_of
from a2lib.measure import DeviceLock, Section, Store
from a2lib.measure.memory import free_bytes

# Share of the free device memory that compiling ahead may take.
COMPILE_SHARE = 0.8


@dataclass
class Run:
    """One execution of ``notebook`` on ``device`` ("cuda" or "cpu"), under run id ``id``.

    Rows go to ``data``, to the files of the device ``slug``. ``until`` is when nothing more is
    started (``time.time()``), ``left`` how many rows that has left. ``worker`` is one that was kept
    for the next sweep; with ``keep_worker`` also by tables that would not.
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
    keep_worker: bool = False

    def store(self, section: Section) -> Store:
        return store_of(section, self.slug, self.data)


def command(notebook: str, given: object) -> str:
    """The papermill command that runs ``notebook`` with the parameters ``given``."""
    changed = parameters.changed(given).items()
    options = [f"-p {name} {shlex.quote(str(value))}" for name, value in changed]
    return " ".join(["papermill", f"notebooks/{notebook}.ipynb", *options])


def data_folder(device: str) -> Path:
    """Where rows of ``device`` ("cuda" or "cpu") go: $A2LIB_DATA if set, else data/ for a GPU.

    Those of a CPU go to build/data, which the report reads too: data/ is committed, and a trial of
    the notebook leaves it as it was.
    """
    if device == "cpu" and not os.environ.get("A2LIB_DATA"):
        return paths.build_dir() / "data"
    return paths.data_dir()


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


def compile_ahead(run: Run, tasks: Sequence[ahead.Compilation], handler: str) -> None:
    """Fill the compilation caches with ``tasks``, in parallel, where that pays."""
    with measuring(run):
        workers = ahead.worker_count(len(tasks), run.parameters.compile_workers)
        if not workers:
            print("Nothing to compile ahead: what needs compiling is compiled when it is measured.")
            return
        bar = output.Progress(len(tasks), "compile", unit="kernels")
        try:
            how = {"handler": handler, "device": run.device, "workers": workers, "until": run.until}
            how["memory_bytes"] = int(COMPILE_SHARE * free_bytes(run.device))
            how["progress"] = lambda task: bar.step(text=task.label)
            failed = ahead.compile_ahead(tasks, **how)
        finally:
            bar.close(f"{workers} processes")
    for task, reason in failed:
        print(f"  not compiled ahead: {task.label}: {reason}")


def shown(path: Path) -> str:
    """``path`` without the folders of this machine: they would be published with the notebook."""
    if path.is_relative_to(paths.ROOT):
        return str(path.relative_to(paths.ROOT))
    return str(Path("$A2LIB_DATA") / path.relative_to(paths.data_dir()))
