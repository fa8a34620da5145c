"""The mixed-precision experiment: what the cells of notebooks/mixed_precision.ipynb call.

    parameters = mixed_precision.check(globals())
    run = mixed_precision.start(parameters)
    mixed_precision.accumulate(run)
    mixed_precision.observe(run)
    mixed_precision.normalise(run)
    figure = mixed_precision.draw(run)
    mixed_precision.say_where(run)

``handlers`` has what a worker does. Times of whole models in each precision are the benchmark's.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.parameters import parameter
from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import show_tables, table
from a2lib.experiments.mixed_precision.settings import AUTOCAST, TENSORS, layernorm_keys
from a2lib.measure import ACCUMULATION, AUTOCAST_DTYPES, LAYERNORM, Section
from a2lib.theory.floating import Loop, decimal, handout_loops, loops_of

NOTEBOOK = ACCUMULATION.notebook
SECTIONS = (ACCUMULATION, AUTOCAST_DTYPES, LAYERNORM)


@dataclass(frozen=True)
class Parameters:
    """What notebooks/mixed_precision.ipynb can be asked for."""

    terms: int = parameter(
        None,
        "numbers that a loop adds, each 10 / terms; None: the handout's 1000, and 10000",
        kind=int,
        minimum=1,
        maximum=50_000,
        optional=True,
    )
    features: int = parameter(
        2560, "numbers that a layer norm normalises", kind=int, minimum=2, maximum=65_536
    )
    remeasure: bool = parameters.remeasure("measure again what is stored already")
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed()

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The accumulation loops asked for."""
        if self.terms is None:
            return handout_loops()
        return loops_of(self.terms, repr(10 / self.terms))


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on; raises as ``harness.run.start`` does."""
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=False)


def loop_key(loop: Loop) -> dict[str, object]:
    """The key columns of ``loop``'s row."""
    return {
        "sum_dtype": loop.sum,
        "addend_dtype": loop.addend,
        "cast": loop.cast,
        "terms": loop.terms,
        "addend": loop.step,
    }


def tasks(section: Section, given: Parameters) -> list[Task]:
    """What a worker is asked for in ``section``, one task of SECTIONS after another."""
    if section is ACCUMULATION:
        return [_task(_name(loop), {}, [loop_key(loop)]) for loop in given.loops]
    if section is AUTOCAST_DTYPES:
        return [
            _task(f"autocast {low}", {}, [{"autocast": low, "quantity": t} for t in TENSORS])
            for low in AUTOCAST
        ]
    keys = layernorm_keys(given.features)
    dtypes = dict.fromkeys(key["dtype"] for key in keys)
    return [
        _task(f"layer norm in {dtype}", {}, [key for key in keys if key["dtype"] == dtype])
        for dtype in dtypes
    ]


@measures
def accumulate(run: Run) -> None:
    """Run the accumulation loops, and print each result beside what arithmetic predicts."""
    rows = _measure(run, ACCUMULATION)
    body = []
    for loop in run.parameters.loops:
        row = rows.get(identity(ACCUMULATION, loop_key(loop)))
        got = row["computed"] or row["status"] if row else "-"
        expected = decimal(loop.result())
        same = "yes" if got == expected else "no"
        body.append([_name(loop), got, expected, same, decimal(loop.result() - loop.exact)])
    says = "What each loop comes to, what is predicted, and how far that is from the exact sum."
    show_tables(table(body, ["loop", "result", "predicted", "equal", "off by"], says))


@measures
def observe(run: Run) -> None:
    """Run the toy model under autocast, and print the dtype of every tensor."""
    rows = _measure(run, AUTOCAST_DTYPES)
    cells = {
        key: (row["observed"] if row["status"] == "ok" else row["status"])
        for key, row in rows.items()
    }
    body = [[name, *(cells.get((low, name), "-") for low in AUTOCAST)] for name in TENSORS]
    show_tables(table(body, ["tensor", *AUTOCAST], "The dtype of each tensor under autocast."))


@measures
def normalise(run: Run) -> None:
    """Compute the parts of a layer norm in each dtype, and print them beside float64."""
    rows = _measure(run, LAYERNORM, last=True)
    body = []
    for key in layernorm_keys(run.parameters.features):
        row = rows.get(identity(LAYERNORM, key))
        if row is not None:
            names = [str(key[c]) for c in ("quantity", "setting", "dtype")]
            body.append([*names, row["computed"] or row["status"], row["truth"]])
    says = "The parts of a layer norm in each dtype, beside float64."
    show_tables(table(body, ["quantity", "input", "dtype", "result", "float64"], says))


def draw(run: Run):
    """Every loop's running sum, as predicted, less the exact one: a matplotlib figure."""
    figure, ax = subplots(figsize=(8, 4))
    for loop in run.parameters.loops:
        if not loop.cast:
            sums = loop.partial_sums()
            share = [(i + 1) / loop.terms for i in range(loop.terms)]
            ax.plot(share, [float(s) for s in sums], label=_name(loop))
    ax.set_xlabel("share of the additions")
    ax.set_ylabel("running sum")
    ax.legend()
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Mixed precision")


def _measure(run: Run, section: Section, last: bool = False) -> dict[tuple, dict[str, str]]:
    """Measure what is pending of ``section``; every stored row by its key."""
    asked = tasks(section, run.parameters)
    harness.measure(run, section, asked, what=section.name, keep_worker=not last)
    return {identity(section, row): row for row in run.store(section).rows()}


def _task(label: str, spec: dict, keys: list[dict]) -> Task:
    return Task(label, spec, {label: tuple(keys)})


def _name(loop: Loop) -> str:
    addend = f"{loop.addend}, cast" if loop.cast else loop.addend
    return f"{loop.terms} x {loop.step}: {loop.sum} += {addend}"
