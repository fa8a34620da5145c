"""The leaderboard's step: what notebooks/leaderboard.ipynb calls. What is measured is the ladder of
``a2lib.leaderboard``."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Experiment, Plot, RankJob, Ranks, Table, Task, parameters
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.experiments.steps import MODELS
from a2lib.lab import LEADERBOARD, inductor, trace
from a2lib.lab.memory import free_memory
from a2lib.leaderboard import BATCH, CONTEXT, LADDER, REP_MS, SIZE, WARMUP_MS, Step, ways
from a2lib.theory.transformer import step_flops

WAYS = tuple(way.name for way in LADDER)
# On the CPU every path in seconds. None: what ``Step.on`` takes for it.
_DEFAULTS = {
    "cuda": {"model": SIZE, "layers": None, "attention": None, "room_percent": None},
    "cpu": {"model": "tiny", "layers": 4, "attention": None, "room_percent": 75},
}


@dataclass(frozen=True)
class Asked:
    """A step that is asked for, of the blocks of ``model``."""

    ranks: Ranks
    model: str
    step: Step

    def key(self) -> dict[str, object]:
        step = self.step
        known = {**vars(step), **vars(self.ranks), "model": self.model}
        known |= {"way": step.way.name, "layers": step.shape.num_layers}
        return {column: known[column] for column in LEADERBOARD.key}


@dataclass(frozen=True)
class Parameters(parameters.OnRanks):
    ways: str = parameter(
        "all", "all, or names from above, commas between", choices=("all",), many=WAYS
    )
    model: str = step_parameters.model(SIZE, "GPUs")
    layers: int | None = count(None, "blocks; None: the model's own, 4 on the CPU", 1024)
    batch: int = count(BATCH, "sequences a rank", 2**16)
    context: int | None = step_parameters.context(
        CONTEXT["cuda"], CONTEXT["cpu"], "tokens of a sequence", "GPUs"
    )
    attention: str = parameter(
        "auto",
        "by whom; auto: sdpa_cudnn on GPUs, sdpa_flash on the CPU",
        choices=("auto", *step_parameters.ATTENTIONS),
    )
    room_percent: int | None = count(
        None, "what may stay of what blocks could keep; None: what there is room for", 100
    )
    warmup_ms: int = count(WARMUP_MS, "of steps before the timed ones, on GPUs", 10**6)
    rep_ms: int = count(REP_MS, "of timed steps, on GPUs", 10**6)
    cold: bool = parameter(
        True, "begin each way with nothing in the compilers' caches, and time that"
    )

    def asked(self) -> list[Asked]:
        """The steps, in the order of the ladder; on the CPU without our attention, which runs on a
        GPU alone. Raises ParameterError for what these ranks cannot do."""
        ranks = self.ranks()
        wanted = WAYS if self.ways == "all" else names(self.ways)
        here = ways(ranks.device)
        if wanted != WAYS and (elsewhere := [name for name in wanted if name not in here]):
            raise ParameterError(f"ways = {elsewhere[0]!r}: allowed on GPUs, where it runs")
        how = parameters.filled(self, _DEFAULTS[ranks.device])
        model = how.pop("model")
        how |= {name: getattr(self, name) for name in ("context", "batch", "warmup_ms", "rep_ms")}
        return [
            Asked(ranks, model, Step.on(ranks.device, way, MODELS[model], **how))
            for way in here.values()
            if way.name in wanted
        ]


def tasks(given: Parameters) -> list[Task]:
    """A task for each way: one that runs out of memory ends its processes alone."""
    made = []
    for one in given.asked():
        name, spec = one.step.way.name, {"step": dataclasses.asdict(one.step), "cold": given.cold}
        made.append(Task(name, spec, {name: (one.key(),)}, ranks=one.ranks))
    return made


def time_way(job: RankJob) -> None:
    """What each rank does: measure the one way of this task."""
    from a2lib.experiments.data_parallel import traces
    from a2lib.leaderboard import run

    ((culprit, (key,)),) = job.wanted.items()
    if job.expired():
        return
    job.begin(culprit)
    free_memory(job.device)
    step, cold = Step.from_spec(job.spec["step"]), job.spec["cold"]
    with contextlib.ExitStack() as held:
        held.callback(inductor.forget)
        if cold:  # caches that are empty, of this rank alone
            held.enter_context(inductor.caches_in(held.enter_context(inductor.empty_folder())))
        timing, row, training = run.measure(step, job.device, job.seed)
        # Last: a profiler leaves a process slower.
        words = key["way"], f"{key['layers']}-layers"
        how = {"step": training.step, "steps": 1, "table": "kernels"}
        traces.store(job, training, key, words, lambda f: trace.kernel_rows(f.kernels), **how)
        if not cold:
            row["ms_ready"] = None
        job.put({**key, "status": "ok", **row, **timing.row(LEADERBOARD)})


def tflops(row: Mapping[str, str]) -> float:
    """10**12 operations a second of a GPU that the step needs: the model's, by forward and
    backward, causal attention half, and nothing that is computed again."""
    shape = dataclasses.replace(MODELS[row["model"]], num_layers=int(row["layers"]))
    flops = step_flops(shape, int(row["batch"]), int(row["context"]), causal=True)
    return flops / float(row["ms"]) / 1e9


TIMES = Table(
    LEADERBOARD,
    lambda given, device: tasks(given),
    says="The median step; a rate counts what a step needs, not what is computed again",
    shown=("ms", "ms_mean", "n", "ms_forward", "ms_backward", "ms_optimizer", "allocated_bytes")
    + ("kept_bytes", "host_bytes", "products_again", "ms_ready", "loss", "gradient_norm"),
    derived={"TFLOP/s": tflops},
    plot=Plot(),
    silence_s=600,  # making and sharding a model, compiling its blocks, or all timed steps
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "the leaderboard's step")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
