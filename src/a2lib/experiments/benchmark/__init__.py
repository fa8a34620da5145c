"""The benchmark experiment: what the cells of notebooks/benchmark.ipynb call.

``configurations`` says what is measured, ``handlers`` how a worker does it through
``a2lib.benchmark``, ``first`` how a first step is taken apart.
"""

import dataclasses
from collections.abc import Sequence

from a2lib import lab
from a2lib.experiments.benchmark import configurations
from a2lib.experiments.benchmark.configurations import STEPS, WARMUP, Parameters
from a2lib.experiments.benchmark.first import cache, parts
from a2lib.experiments.harness import Experiment, Run, Table, view
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.view import Plot, Row
from a2lib.experiments.steps import Configuration, refuse
from a2lib.lab import BENCHMARK, BENCHMARK_FIRST, BENCHMARK_STEPS, Section, Timing

# All steps of one configuration, of which the worker says nothing until the last is done.
SILENCE_S = 1800


def table_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, all phases at once."""
    return [
        Task.whole(
            str(one),
            _spec(one, warmup=given.warmup, steps=given.steps),
            one.keys(BENCHMARK, warmup=[given.warmup], phase=one.phases),
        )
        for one in given.configurations(device)
    ]


def warmup_tasks(given: Parameters, device: str) -> list[Task]:
    """A task, and so a process, for each configuration and number of warm-up steps."""
    made = []
    for one in configurations.warmups(device) if given.has("warmup") else ():
        for warmup in configurations.WARMUPS[device]:
            steps = {"warmup": [warmup], "step_number": range(warmup + STEPS)}
            keys = one.keys(BENCHMARK_STEPS, **steps, phase=one.phases)
            spec = _spec(one, warmup=warmup, steps=STEPS)
            made.append(Task.whole(f"{one}, {warmup} steps of warm-up", spec, keys))
    return made


def first_tasks(given: Parameters, device: str) -> list[Task]:
    """A task, and so a process, for each configuration, preparation and repetition."""
    made = []
    for repeat in range(configurations.REPEATS[device] if given.has("first") else 0):
        for one, prepared in configurations.firsts(device):
            found = {"repeat": [repeat], "part": parts(prepared, device)}
            keys = one.keys(BENCHMARK_FIRST, prepared=[prepared], **found)
            spec = _spec(one, prepared=prepared, repeat=repeat)
            made.append(Task.whole(f"{one}, {prepared} prepared, {repeat}", spec, keys))
    return made


def power_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration whose energy is measured."""
    asked = configurations.powers(device) if given.has("power") else ()
    return [_energy(lab.BENCHMARK_POWER, one, device) for one in asked]


def load_tasks(given: Parameters, device: str) -> list[Task]:
    """As ``power_tasks``, with weights as drawn and with zeros, one after the other."""
    asked = configurations.loads(device) if given.has("power") else ()
    return [_energy(lab.BENCHMARK_LOAD, one, device, weights=w) for one, w in asked]


def _energy(section: Section, one: Configuration, device: str, **how: str) -> Task:
    settled, steps = configurations.SETTLED[device]
    label = ", ".join([str(one), *(f"{value} {name}" for name, value in how.items())])
    spec = _spec(one, warmup=WARMUP, steps=settled + steps, settled=settled, **how)
    return Task.whole(label, spec, [one.key(section) | how])


def _spec(configuration: Configuration, **how: object) -> dict[str, object]:
    return {"configuration": dataclasses.asdict(configuration), **how}


def refilling(tasks: Sequence[Task], pending: Sequence[Task]) -> list[Task]:
    """Those of ``tasks`` to measure once more, for the cache that they leave: a pending one wants
    it, and rows may come from another machine, which has kept it."""

    def repeats(found: Sequence[Task], prepared: str) -> set[int]:
        return {
            t.spec["repeat"]
            for t in found
            if t.spec["prepared"] == prepared and t.spec["configuration"]["compile"] != "none"
        }

    wanted = {repeat for repeat in repeats(pending, "cached") if not cache(repeat).is_dir()}
    wanted -= repeats(pending, "nothing")
    return [task for task in tasks if repeats([task], "nothing") & wanted]


def means(rows: Sequence[Row]) -> list[Row]:
    """Rows as those of the table, mean and deviation, of the steps after each warm-up."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if int(row["step_number"]) >= int(row["warmup"]):
            found.setdefault(identity(BENCHMARK, row), []).append(row)
    made = []
    for mine in found.values():
        times = [float(row["ms"]) for row in mine if row["ms"]]
        timing = Timing.from_samples(times) if times else None
        values = {c: timing and getattr(timing, c) or "" for c in ("ms_mean", "ms_std")}
        made.append(mine[0] | values)
    return made


def _watts(row: Row) -> float | None:
    return 1000 * float(row["joules"]) / float(row["ms_mean"]) if row["joules"] else None


TIMES = Table(
    BENCHMARK,
    table_tasks,
    says="Mean and deviation of each phase of a step, after the steps of warm-up",
    shown=("mean", "ms_host", "peak_bytes"),
    derived={"mean": view.mean},
    across="phase",
    silence_s=SILENCE_S,
)
SINGLE_STEPS = Table(
    BENCHMARK_STEPS,
    warmup_tasks,
    says="Every step of a process",
    shown=("ms",),
    silence_s=SILENCE_S,
)
FIRST = Table(
    BENCHMARK_FIRST,
    first_tasks,
    says="The first step and what comes before it, by what was prepared, in ms",
    shown=("ms",),
    across="part",
    silence_s=SILENCE_S,
)
POWER = Table(
    lab.BENCHMARK_POWER,
    power_tasks,
    says="Time, energy and power of a step, and the driver's limit",
    shown=("ms", "joules", "W", "power_limit_w", "capped_percent", "sm_mhz"),
    derived={"W": _watts},
    silence_s=SILENCE_S,
)
LOAD = dataclasses.replace(
    POWER,
    section=lab.BENCHMARK_LOAD,
    tasks=load_tasks,
    says="The same with all weights zero, as much work on less of a load",
)
EXPERIMENT = Experiment(
    Parameters, (TIMES, SINGLE_STEPS, FIRST, POWER, LOAD), "How long is a training step?", refuse
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_table, show_table = TIMES.measure, TIMES.show


def measure_power(run: Run) -> None:
    """Measure and show the energy of steps, in a sweep that has it, and that of the same on
    zeros."""
    POWER.measure_and_show(run)
    LOAD.measure_and_show(run)


def measure_warmup(run: Run) -> None:
    """Measure every step of fresh processes, in a sweep that has it, and show the mean that each
    number of warm-up steps gives."""
    SINGLE_STEPS.measure(run)
    if rows := SINGLE_STEPS.rows(run):
        says = "Mean and deviation of a step after so many steps of warm-up"
        view.show(means(rows), BENCHMARK, says, ("mean",), "phase", {"mean": view.mean})


def measure_first(run: Run) -> None:
    """Take the first step apart, a process for each preparation, in a sweep that has it."""
    tasks = FIRST.tasks(run.parameters, run.device)
    if again := refilling(tasks, FIRST.pending(run)):
        dataclasses.replace(FIRST, tasks=lambda *_: again, always=True).measure(run)
    FIRST.measure_and_show(run)


def draw(run: Run):
    """The steps of the warm-up's processes by the host's clock, as a matplotlib figure."""
    rows = [row for row in SINGLE_STEPS.rows(run) if row["phase"] == "wall"]
    return view.draw(rows, BENCHMARK_STEPS, Plot(x="step_number", panels=("model", "context")))
