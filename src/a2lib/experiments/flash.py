"""The flash experiment: what the cells of notebooks/flash.ipynb call, top to bottom.

    parameters = flash.check(globals())
    run = flash.start(parameters)
    flash.measure_ceilings(run)
    flash.compile_ahead(run)
    flash.sweep(run)
    flash.show_table(run, "ms")
    figure = flash.draw(run)
    flash.measure_protocols(run)
    flash.measure_accuracy(run)
    flash.say_where(run)

Rows go to the result store the moment they are measured. ``comparison`` says what is timed and how,
``sweep`` what is left to do, ``worker`` why another process does it; ``protocols`` and ``accuracy``
are the two tables beside it.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from a2lib import paths
from a2lib.experiments import (
    accuracy,
    memory,
    parameters,
    precompile,
    protocols,
    tables,
    units,
    view,
)
from a2lib.experiments.process import Worker, WorkerDied
from a2lib.experiments.progress import Progress
from a2lib.experiments.shapes import Parameters, Shape
from a2lib.experiments.sweep import SILENCE_S, Sweep, plan
from a2lib.measure import (
    CEILING,
    FLASH,
    FLASH_ACCURACY,
    FLASH_PROTOCOL,
    Section,
    Store,
    StoreError,
    device_slug,
    read_runs,
    start_run,
)

NOTEBOOK = "notebooks/flash.ipynb"
# Share of the free device memory that compiling ahead may take.
COMPILE_SHARE = 0.8
CEILING_SILENCE_S = 300


@dataclass
class Run:
    """One execution of the notebook on ``device`` ("cuda" or "cpu"), under run id ``id``.

    ``until`` is when nothing more is started (``time.time()``), ``left`` how many rows that has
    left.
    """

    parameters: Parameters
    device: str
    id: str
    store: Store
    ceilings: Store
    until: float | None
    left: int = 0
    worker: Worker | None = None


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def command(given: Parameters) -> str:
    """The papermill command that repeats a run."""
    options = [f"-p {name} {shlex.quote(str(value))}" for name, value in given.changed().items()]
    return " ".join(["papermill", NOTEBOOK, *options])


def data_folder(device: str) -> Path:
    """Where rows of ``device`` ("cuda" or "cpu") go: $A2LIB_DATA if set, else data/ for a GPU.

    Those of a CPU go to build/data, which the report reads too: data/ is committed, and a trial of
    the notebook leaves it as it was.
    """
    if device == "cpu" and not os.environ.get("A2LIB_DATA"):
        return paths.build_dir() / "data"
    return paths.data_dir()


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises StoreError, before anything is measured, where rows could not be stored.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = data_folder(device)
    store, ceilings = (Store(section, device_slug(), data) for section in (FLASH, CEILING))
    store.check_writable()
    ceilings.check_writable()
    run_id = start_run(
        command=command(given),
        parameters=dataclasses.asdict(given),
        device=store.device,
        data=data,
    )
    until = time.time() + given.time_limit_s if given.time_limit_s else None
    if device == "cuda":
        print(torch.cuda.get_device_name())
    elif given.sweep != "shape" or given.seq_len is None:
        print("CPU: tiny sizes, which say nothing about a GPU")
    else:
        print("CPU")
    (known,) = (row for row in read_runs(store.data) if row["run"] == run_id)
    for column in ("run", "torch", "triton", "cuda", "cudnn", "driver", "python", "git", "command"):
        if known[column]:
            print(f"  {column:8}{known[column]}")
    return Run(given, device, run_id, store, ceilings, until)


def measure_ceilings(run: Run) -> None:
    """Measure and print what the device does at best: matrix products and a copy."""
    request = {
        "do": "ceilings",
        "device": run.device,
        "slug": run.store.device,
        "data": str(run.store.data),
        "run": run.id,
    }
    # Kept for the sweep: starting a process and its CUDA context takes seconds.
    if run.worker is None or run.worker.closed:
        run.worker = Worker()
    try:
        for event in run.worker.ask(request, CEILING_SILENCE_S):
            if "fatal" in event:
                raise StoreError(event["fatal"])
            print(view.ceiling_line(event["row"]))
    except WorkerDied as died:
        if not run.worker.ready:
            raise
        print(f"Ceilings not measured: {died}")


def compile_ahead(run: Run) -> None:
    """Fill the compilation caches for what is pending, in parallel, where that pays."""
    pending = {
        task.shape: tuple(task.wanted) for task in plan(run.parameters, run.device, run.store)
    }
    tasks = precompile.compilations(pending)
    workers = precompile.worker_count(len(tasks), run.parameters.compile_workers)
    if not workers:
        print("Nothing to compile ahead: what needs compiling is compiled when it is measured.")
        return
    bar = Progress(len(tasks), "compile", unit="kernels")
    outcome = precompile.compile_ahead(
        tasks,
        device=run.device,
        workers=workers,
        memory_bytes=int(COMPILE_SHARE * memory.free_bytes(run.device)),
        until=run.until,
        progress=lambda task: bar.step(text=f"{task.implementation} {task.shape}"),
    )
    bar.close(f"{workers} processes")
    for task, reason in outcome.failed:
        print(f"  not compiled ahead: {task.implementation} {task.shape}: {reason}")


def sweep(run: Run) -> None:
    """Measure what is pending, with a progress bar; rows are stored one by one."""
    tasks = plan(run.parameters, run.device, run.store)
    total = sum(task.size for task in tasks)
    stored = _wanted(run.parameters, run.device) - total
    if stored:
        print(f"{stored} rows are stored already (-p remeasure True measures them again)")
    if not total:
        return
    bar = Progress(total, "measure", unit="rows")

    def begin(shape: Shape, implementation: str | None) -> None:
        bar.say(f"{shape} {implementation or 'in turns'}")

    measuring = Sweep(
        run.store,
        run.id,
        run.device,
        seed=run.parameters.seed,
        until=run.until,
        row=lambda row: bar.step(),
        begin=begin,
    )
    try:
        run.left = measuring.measure(tasks, run.worker)
    finally:
        bar.close()
    if run.left:
        print(
            f"Time limit reached: {run.left} rows are left. To go on, run the same command again:"
        )
        print(f"  {command(run.parameters)}")


def show_table(run: Run, quantity: str) -> None:
    """Print the stored rows of this run's parameters: "ms", "TFLOP/s" or "MiB" (peak memory)."""
    print(view.tables(rows(run), quantity, run.ceilings.rows(), run.parameters.sweep == "shape"))


def draw(run: Run):
    """The stored rows of this run's parameters as a matplotlib figure."""
    return view.figure(
        rows(run), run.ceilings.rows(), run.parameters.sweep == "shape", _device(run)
    )


def measure_protocols(run: Run) -> None:
    """Measure the leaderboard's shape by three protocols and print them, in a sweep that has it."""
    asked = protocols.units(run.parameters, run.device)
    _measure_units(run, asked, "protocols", FLASH_PROTOCOL, tables.protocols)


def measure_accuracy(run: Run) -> None:
    """Measure the errors against float64 and print them, in a sweep that has them."""
    asked = accuracy.units(run.parameters, run.device)
    _measure_units(run, asked, "accuracy", FLASH_ACCURACY, tables.accuracy)


def _measure_units(run: Run, asked: list, do: str, section: Section, show: Callable) -> None:
    if not asked:
        print("Measured by the sweeps leaderboard and all (-p sweep leaderboard).")
        return
    store = Store(section, run.store.device, run.store.data)
    store.check_writable()
    pending = units.pending(asked, store, remeasure=run.parameters.remeasure)
    if len(pending) < len(asked):
        print(f"{len(asked) - len(pending)} of {len(asked)} are stored already")
    if pending:
        bar = Progress(len(pending), do, unit="measurements")
        try:
            left = units.measure(
                pending,
                do=do,
                store=store,
                run=run.id,
                device=run.device,
                seed=run.parameters.seed,
                silence_s=SILENCE_S[run.device],
                until=run.until,
                begin=lambda unit: bar.say(unit["title"]),
                step=lambda unit: bar.step(),
            )
        finally:
            bar.close()
        run.left += left
        if left:
            print(f"Time limit reached: {left} rows are left. To go on, run the same again:")
            print(f"  {command(run.parameters)}")
    print(show(store.rows()))
    print(f"Rows: {_shown(store.path)}")


def rows(run: Run) -> list[dict[str, str]]:
    """The stored rows that this run's parameters ask for, measured now or earlier."""
    asked = run.parameters
    names = {s: asked.chosen_implementations(s, run.device) for s in asked.shapes(run.device)}
    return [
        row
        for row in run.store.rows()
        if row["implementation"] in names.get(view.shape_of(row), ())
        and row["pass"] in asked.chosen_passes()
    ]


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    print(f"Rows: {_shown(run.store.path)} and {_shown(run.ceilings.path)}; run {run.id}")
    if run.left:
        print(f"{run.left} rows are left; run again: {command(run.parameters)}")
    print("Book: `make book` rebuilds the report with them; the chapter is FlashAttention-2.")


def _wanted(given: Parameters, device: str) -> int:
    per_shape = (len(given.chosen_implementations(s, device)) for s in given.shapes(device))
    return sum(per_shape) * len(given.chosen_passes())


def _device(run: Run) -> str:
    return "CPU" if run.device == "cpu" else run.store.device


def _shown(path: Path) -> str:
    """``path`` without the folders of this machine: they would be published with the notebook."""
    if path.is_relative_to(paths.ROOT):
        return str(path.relative_to(paths.ROOT))
    return str(Path("$A2LIB_DATA") / path.relative_to(paths.data_dir()))
