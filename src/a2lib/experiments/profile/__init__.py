"""The profile experiment: its parameters, what the sweeps trace, and what the cells of
notebooks/profile.ipynb call. ``handlers`` is how a worker traces it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.benchmark import PHASES
from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Experiment, Run, Table, Task, parameters, view
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.parameters import ParameterError, WithSweep, parameter
from a2lib.experiments.steps import MODES, Configuration, refusals
from a2lib.experiments.steps import refuse as refuse_without_gpu
from a2lib.lab import PROFILE, StoreError, bulk, nsight
from a2lib.lab.trace import STEP

NSYS, TORCH = "nsys", "torch"
# The smallest size and the largest whose train-step fits at every context, traced in every way, and
# those between, whose plain steps are; the handouts' contexts.
TRACED = {"cuda": ("small", "2.7B"), "cpu": ("tiny",)}
OTHERS = {"cuda": ("medium", "large", "xl25"), "cpu": ()}
CONTEXTS = {"cuda": (512, 128, 1024, 256), "cpu": (16, 32)}
# Where one context tells what is asked.
CONTEXT = {"cuda": 512, "cpu": 16}
PLAIN: Mapping[str, str] = {}
COMPILED = {"compile": "blocks"}
AUTOCAST = {"precision": "bf16"}
OURS = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
SWEEPS = ("steps", "forward", "witness", "compiled", "bf16", "modes", "all")
# Without the profiler, then with it.
WARMUP, STEPS, TRACED_STEPS = 3, 5, 3


@dataclass(frozen=True)
class Traced(Configuration):
    """A configuration of ``a2lib.benchmark``, and who traces it: ``nsys`` or ``torch``."""

    profiler: str = TORCH

    def __str__(self) -> str:
        return f"{super().__str__()} by {self.profiler}"

    @property
    def picture(self) -> str:
        """The name of its bulk tables."""
        return "-".join(map(str, self.key(PROFILE).values()))

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that have rows."""
        return (*PHASES[self.mode], STEP)

    @property
    def ranges(self) -> str:
        """Those of ``a2lib.benchmark`` that it is traced with: of a train-step all that there are,
        so that its kernels can be told apart; else those of phases, which take little of the
        host's time, so that the times are nearly those without a profiler."""
        known = self.mode == "train-step" and self.compile == "none"
        return "modules" if known else "phases"


def sweep_of(name: str, device: str, profiler: str) -> list[Traced]:
    """What a sweep traces on ``device``, what answers most first, each once."""

    def traced(modes, contexts, *ways, by=profiler, models=TRACED[device]) -> list[Traced]:
        return Traced.every(context=contexts, way=ways, mode=modes, model=models, profiler=[by])

    whole, one, every = ("train-step",), (CONTEXT[device],), CONTEXTS[device]
    gpu, sizes = device == "cuda", (*TRACED[device], *OTHERS[device])
    found = {
        "steps": traced(whole, every, PLAIN, models=sizes),
        "forward": traced(("forward",), every, PLAIN, models=sizes),
        # Another reader of the same counters, which must agree.
        "witness": traced(whole, one, PLAIN, by=TORCH) if profiler == NSYS else [],
        "compiled": traced(whole, every, COMPILED) if gpu else [],
        "bf16": traced(whole, one, AUTOCAST, *([OURS] if gpu else [])),
        "modes": traced(MODES[:2], every, PLAIN, *([COMPILED] if gpu else [])),
    }
    if name != "all":
        return found[name]
    # A context has its whole answer before the next one is begun.
    parts = [*found["steps"], *found["forward"], *found["witness"]]
    first = [one for context in every for one in parts if one.context == context]
    return list(dict.fromkeys([*first, *(one for part in found.values() for one in part)]))


@dataclass(frozen=True)
class Parameters(WithSweep):
    beside = ("profiler",)

    model: str = step_parameters.model()
    context: int | None = step_parameters.context(512, 16)
    batch: int = step_parameters.batch()
    mode: str = step_parameters.mode(MODES)
    precision: str = step_parameters.any_precision()
    attention: str = step_parameters.attention()
    compile: str = step_parameters.compiled()
    profiler: str = parameter(
        "auto", "nsys, torch, or auto: nsys where there is one", choices=("auto", NSYS, TORCH)
    )
    sweep: str = parameters.sweep(SWEEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        with refusals():
            self._one("cuda", TORCH).config("cuda")

    def traced(self, device: str) -> list[Traced]:
        """What is traced on ``device``, "cuda" or "cpu", in order."""
        by, one = profiler(self, device), self.sweep == "shape"
        return [self._one(device, by)] if one else sweep_of(self.sweep, device, by)

    def _one(self, device: str, profiler: str) -> Traced:
        return dataclasses.replace(Traced.named(self, device, CONTEXT), profiler=profiler)


MOST = 12  # kernels that are shown


def profiler(given: Parameters, device: str) -> str:
    """Who traces: ``nsys`` or ``torch``."""
    if given.profiler != "auto":
        return given.profiler
    return NSYS if device == "cuda" and nsight.find() else TORCH


def refuse(given: Parameters, device: str) -> None:
    """Raise ParameterError for what this machine cannot do."""
    refuse_without_gpu(given, device)
    if given.profiler == NSYS and nsight.find() is None:
        raise ParameterError(
            f"profiler = 'nsys': not found on the path; ${nsight.VARIABLE} can name it"
        )


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, all phases at once."""
    return [
        Task.whole(str(one), dataclasses.asdict(one), one.keys(PROFILE, phase=one.phases))
        for one in given.traced(device)
    ]


def _unfiled(row: view.Row) -> str:
    shares = ("no_launch_percent", "no_range_percent", "no_class_percent")
    return "/".join(f"{float(row[c]):.2g}" for c in shares)


TRACES = Table(
    PROFILE,
    tasks,
    says="Each phase by the timer, and by what the profiler saw",
    shown=("ms_timer", "ms_traced", "ms", "ms_busy", "ms_range", "us_queued", "launches"),
    derived={"unfiled, %": _unfiled},
    silence_s=1800,  # the timer's steps, then a child process and its export
)
EXPERIMENT = Experiment(Parameters, (TRACES,), "A step, kernel by kernel", refuse)
check = EXPERIMENT.check
measure, show = TRACES.measure, TRACES.show


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on, and who traces; raises as ``EXPERIMENT.start``."""
    run = EXPERIMENT.start(given)
    who = {NSYS: "Nsight Systems", TORCH: "torch.profiler"}[profiler(given, run.device)]
    print(f"  traced by {who}{': operators, no kernels' if run.device == 'cpu' else ''}")
    return run


def kernels(run: Run) -> None:
    """Show the kernels of the first configuration asked for that take the most time."""
    one, found = _kernels(run)
    if found is None:
        say_nothing("No kernels of what is asked for are stored.")
        return
    found = found.groupby(["phase", "kind", "kernel"], as_index=False)[["calls", "ms", "share"]]
    view.show_frame(f"{one}: what takes the most time", found.sum().nlargest(MOST, "ms"))


def draw(run: Run):
    """The kernel time of that configuration's phases, made of classes, as a matplotlib figure."""
    one, found = _kernels(run)
    if found is None:
        return None
    figure, ax = view.subplots(figsize=(8, 1 + 0.5 * found["phase"].nunique()))
    sums = found.pivot_table("ms", "phase", "kind", "sum", sort=False)
    sums.plot.barh(stacked=True, ax=ax, title=str(one), xlabel="kernel time of a step, ms")
    ax.invert_yaxis()
    return figure


def _kernels(run: Run):
    """The first configuration asked for whose kernels are stored, and they as a DataFrame."""
    import pandas as pd

    stored = bulk.pictures("kernels", run.data)
    for one in run.parameters.traced(run.device):
        if (run.slug, one.picture) in stored:
            try:
                return one, pd.DataFrame(bulk.read("kernels", run.slug, one.picture, run.data).rows)
            except StoreError as error:
                print(error)
    return None, None


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    EXPERIMENT.say_where(run)
    print(
        "What the profiler wrote itself is in build/traces: nsys-ui opens a .nsys-rep, "
        "ui.perfetto.dev a .json.gz."
    )
