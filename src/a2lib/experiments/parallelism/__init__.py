"""The experiment on parallelism: what the cells of notebooks/parallelism.ipynb call, top to bottom.

    parameters = parallelism.check(globals())
    run = parallelism.start(parameters)
    parallelism.measure(run)
    parallelism.show(run)
    figure = parallelism.draw(run)
    parallelism.say_where(run)

``configurations`` says what is measured, ``schemes`` how the layers are spread, ``peers`` has
PyTorch's ways of it, ``handlers`` what each rank does with them.
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
from a2lib.experiments.parallelism.configurations import PASSES, Parameters, Stack
from a2lib.measure import PARALLELISM

NOTEBOOK = PARALLELISM.notebook
SECTIONS = (PARALLELISM,)
# Making the layers and the groups of a mesh, or timing one batch.
SILENCE_S = 180
ACROSS = 2  # panels of the figure
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises ParameterError for what these ranks cannot do, and what ``harness.run.start`` does.
    """
    gpus = gpus_of(stack.ranks for stack in given.asked())
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=False, gpus=gpus)


def tasks(asked: Mapping[Stack, list[int]]) -> list[Task]:
    """A task for each stack, each batch its own culprit."""
    return [
        Task(
            f"{stack.label}, {stack.ranks.backend} {stack.ranks.world_size}",
            stack.spec(),
            {
                f"{tokens} tokens": tuple(
                    stack.key(tokens, pass_) for pass_ in PASSES[stack.implementation]
                )
                for tokens in batches
            },
            ranks=stack.ranks,
            silence_s=SILENCE_S,
        )
        for stack, batches in asked.items()
    ]


@measures
def measure(run: Run) -> None:
    """Time the passes; a single shape always, a sweep what it lacks."""
    resume = run.parameters.sweep != "shape"
    asked = tasks(run.parameters.asked())
    harness.measure(run, PARALLELISM, asked, what="parallelism", resume=resume)


def show(run: Run) -> None:
    """Print the stored rows of this run's parameters."""
    heads = ["", "tokens", "pass", "ms", "p20", "p80", "n", "computation", "messages", "hidden", ""]
    for stack, rows in _rows(run):
        says = (
            f"{stack.label}, d_model {stack.d_model}, {stack.layers} layers, {stack.dtype},"
            f" {stack.ranks.world_size} ranks of {stack.ranks.backend}: the median pass, and its"
            " computation and messages by themselves."
        )
        show_tables(table([_line(row) for row in rows], heads, says))


def draw(run: Run):
    """Forward and backward by batch and by width, together and apart, as a matplotlib figure: a
    panel for each scheme, mesh and what is swept, with PyTorch's beside ours."""
    panels = _panels([row for _, rows in _rows(run) for row in rows])
    if not panels:
        return None
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure, axes = subplots(down, across, squeeze=False, figsize=(3.2 * across, 2.8 * down))
    for ax, ((title, along), lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            ax.plot(*zip(*sorted(points), strict=True), marker=".", label=name)
        ax.set(title=title, xlabel=along, ylabel="ms", yscale="log")
        ax.set_xscale("log", base=2)
        ax.legend(fontsize=6)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    return figure


def _panels(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, list[tuple[int, float]]]]:
    """(scheme and mesh, tokens or d_ff) -> line -> its points. The width of most rows is the one
    that batches are swept for."""
    timed = [row for row in rows if row["ms"] and row["pass"] == "end_to_end"]
    widths = [row["d_ff"] for row in timed]
    panels: dict = {}
    for row in timed:
        along = "tokens" if row["d_ff"] == max(widths, key=widths.count) else "d_ff"
        lines = panels.setdefault((f"{row['scheme']} {row['mesh']}", along), {})
        ways = {"together": "ms", "computation": "ms_without", "messages": "ms_communication"}
        if row["implementation"] == "torch":
            ways = {"PyTorch's": "ms"}
        for name, column in ways.items():
            if row[column]:
                lines.setdefault(name, []).append((int(row[along]), float(row[column])))
    return panels


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Do the formulas hold?")


def _rows(run: Run) -> list[tuple[Stack, list[Row]]]:
    stored = {identity(PARALLELISM, row): row for row in run.store(PARALLELISM).rows()}
    found = []
    for stack, batches in run.parameters.asked().items():
        keys = [stack.key(tokens, pass_) for tokens in batches
                for pass_ in PASSES[stack.implementation]]  # fmt: skip
        known = [stored.get(identity(PARALLELISM, key)) for key in keys]
        found.append((stack, [row for row in known if row is not None]))
    return found


def _line(row: Row) -> list[str]:
    start = [row["implementation"], row["tokens"], row["pass"]]
    if row["status"] != "ok":
        return [*start, row["status"], *[""] * 6, row["note"]]
    ms, alone, sent = (float(row[c]) if row[c] else None
                       for c in ("ms", "ms_without", "ms_communication"))  # fmt: skip
    hidden = f"{(alone + sent - ms) / min(alone, sent):.0%}" if sent else "-"
    times = [number(ms), *(number(float(row[c])) for c in ("ms_p20", "ms_p80")), row["n"]]
    return [*start, *times, *("-" if t is None else number(t) for t in (alone, sent)), hidden,
            row["note"]]  # fmt: skip
