"""The leaderboard's step: what the cells of notebooks/leaderboard.ipynb call, top to bottom.

    parameters = leaderboard.check(globals())
    run = leaderboard.start(parameters)
    leaderboard.measure(run)
    leaderboard.show(run)
    figure = leaderboard.draw(run)
    leaderboard.say_where(run)

``configurations`` has the ladder of ways, ``training`` the step, ``handlers`` what each rank does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.ranks import gpus_of
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import number, show_tables, table
from a2lib.experiments.leaderboard.configurations import Parameters, Step
from a2lib.measure import LEADERBOARD
from a2lib.theory.devices import DEVICES
from a2lib.theory.transformer import step_flops

NOTEBOOK = LEADERBOARD.notebook
SECTIONS = (LEADERBOARD,)
# Making and sharding a model, compiling its blocks, or all timed steps.
SILENCE_S = 600
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises ParameterError for what these ranks cannot do, and what ``harness.run.start`` does.
    """
    gpus = gpus_of(step.ranks for step in given.asked())
    return harness.start(given, NOTEBOOK, SECTIONS, gpus=gpus)


def tasks(given: Parameters) -> list[Task]:
    """A task for each way: one that runs out of memory ends its processes alone."""
    return [
        Task(step.way.name, given.spec(step), {step.way.name: (step.key(),)}, ranks=step.ranks,
             silence_s=SILENCE_S)
        for step in given.asked()
    ]  # fmt: skip


@measures
def measure(run: Run) -> None:
    """Time the ways that are not stored yet."""
    harness.measure(run, LEADERBOARD, tasks(run.parameters), what="leaderboard")


def show(run: Run) -> None:
    """Print the stored rows of this run's parameters."""
    heads = ["", "attention", "ms", "mean", "n", "forward", "backward", "optimizer", "TFLOP/s",
             "MFU, %", "peak, GB", "left by forward", "to the host", "products again", "ready, s",
             "loss", "norm", ""]  # fmt: skip
    says = "The median step; a rate counts what a step needs, not what is computed again."
    known = {device.slug: device.flops for device in DEVICES.values()}
    peak = known.get(run.slug)
    show_tables(table([_line(step, row, peak) for step, row in _rows(run)], heads, says))


def draw(run: Run):
    """The steps, a bar for each change, as a matplotlib figure."""
    rows = [(step, row) for step, row in _rows(run) if row["ms"]]
    if not rows:
        return None
    figure, ax = subplots(figsize=(7, 1.2 + 0.35 * len(rows)))
    names = [step.way.name.replace("_", " ") for step, _ in rows]
    ax.barh(names, [float(row["ms"]) for _, row in rows], color="#0072b2")
    ax.invert_yaxis()
    ax.set_xlabel("ms a step")
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "the leaderboard's step")


def rate(step: Step, ms: float) -> float:
    """Operations a second of a GPU: the model's, by forward and backward, causal attention half."""
    return step_flops(step.shape, step.batch, step.context, causal=True) / (ms / 1e3)


def _rows(run: Run) -> Iterable[tuple[Step, Row]]:
    stored = {identity(LEADERBOARD, row): row for row in run.store(LEADERBOARD).rows()}
    found = (
        (step, stored.get(identity(LEADERBOARD, step.key()))) for step in run.parameters.asked()
    )
    return [(step, row) for step, row in found if row is not None]


def _line(step: Step, row: Row, peak: float | None) -> list[str]:
    line = [step.way.name, row["attention"]]
    if row["status"] != "ok":
        return [*line, row["status"], *[""] * 14, row["note"]]
    flops = rate(step, float(row["ms"]))
    share = number(100 * flops / peak) if peak else "-"
    times = [_cell(row[c]) for c in ("ms", "ms_mean", "n", "ms_forward", "ms_backward")]
    sizes = [_cell(row[c], 1e9) for c in ("allocated_bytes", "kept_bytes", "host_bytes")]
    return [*line, *times, _cell(row["ms_optimizer"]), number(flops / 1e12), share, *sizes,
            row["products_again"] or "-", _cell(row["ms_ready"], 1e3), _cell(row["loss"]),
            _cell(row["gradient_norm"]), row["note"]]  # fmt: skip


def _cell(text: str, unit: float = 1.0) -> str:
    return number(float(text) / unit) if text else "-"
