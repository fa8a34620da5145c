"""The memory experiment: its parameters, what the sweeps measure, and what the cells of
notebooks/memory.ipynb call. ``handlers`` is how a worker measures it.
"""

import dataclasses
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Experiment, Run, Table, Task, parameters, view
from a2lib.experiments.harness.parameters import WithSweep, parameter
from a2lib.experiments.steps import BATCH, Configuration
from a2lib.experiments.workload import PHASES
from a2lib.lab import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING, StoreError, bulk
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import (
    ATTENTIONS,
    CATEGORIES,
    MODES,
    PRECISIONS,
    StepMemory,
    asked,
    peak,
)

SWEEPS = ("table", "recordings", "blocks", "sizes", "all")
STEPS = (0, 1)  # the first makes the optimizer's state, the second is as all later ones
# The handouts' contexts first.
LARGEST = {"cuda": "2.7B", "cpu": "tiny"}
CONTEXTS = {"cuda": (128, 512, 2048, 256, 1024), "cpu": (16, 32)}
ASKED = ("inference", "forward", "train-step")
BLOCK = "block"  # the mode of a recording of one block, its forward and backward
OTHERS = {"cuda": ("small", "medium", "large", "xl25", "10B"), "cpu": ()}


def picture(one: Configuration) -> str:
    """How the bulk tables of a configuration are named."""
    return "-".join([one.model, str(one.context), one.mode, one.precision, one.attention])


def phases(one: Configuration) -> tuple[str, ...]:
    """Those that have rows."""
    return (*PHASES[one.mode], "step")


def counted(one: Configuration, step: int = 1) -> StepMemory:
    """A configuration by the theory; raises ValueError for ``BLOCK``."""
    return StepMemory(
        one.shape, one.batch, one.context, one.mode, one.precision, one.attention, first=step == 0
    )


def table(device: str) -> list[Configuration]:
    """The handouts' model at every context, forward alone and a whole step, in either precision;
    and a step with our attention, which has no scores."""
    model = LARGEST[device]
    sizes = {"model": [model], "context": CONTEXTS[device]}
    found = Configuration.every(**sizes, mode=ASKED, precision=PRECISIONS)
    ours = {"precision": "bf16", "attention": "flash"}
    return found + (Configuration.every(**sizes, way=[ours]) if device == "cuda" else [])


def sizes(device: str) -> list[Configuration]:
    """The other models' forward and step."""
    modes = "inference", "train-step"
    sizes = {"model": OTHERS[device], "context": CONTEXTS[device]}
    return Configuration.every(**sizes, mode=modes, precision=PRECISIONS)


def recordings(device: str) -> list[Configuration]:
    """Steps whose every allocation is recorded: the one the chapter shows first, blocks last."""
    found = [(512, "train-step"), (512, "inference"), (128, "train-step")]
    found += [(512, "train-step", "bf16"), (2048, "inference")]
    found += [(2048, "train-step", "bf16", "flash"), (512, "forward"), (128, "inference")]
    found += [(256, "train-step"), (2048, BLOCK), (128, BLOCK)]
    if device == "cpu":
        found = [(CONTEXTS[device][0], mode) for mode in ("inference", "train-step", BLOCK)]
    return [Configuration(LARGEST[device], context, BATCH, *way) for context, *way in found]


def blocks(device: str) -> list[Configuration]:
    """One block, by context, precision and attention; the mode is not used."""
    one = {"model": [LARGEST[device]], "mode": ["forward-backward"]}
    if device == "cpu":
        return Configuration.every(**one, context=[16])
    ways = {"precision": PRECISIONS, "attention": ATTENTIONS}
    return Configuration.every(**one, context=(2048, 128, 512, 256, 1024), **ways)


@dataclass(frozen=True)
class Parameters(WithSweep):
    model: str = step_parameters.model()
    context: int | None = step_parameters.context(512, 16)
    batch: int = step_parameters.batch()
    mode: str = step_parameters.mode(MODES)
    precision: str = parameter("fp32", "fp32 or bf16 (autocast)", choices=PRECISIONS)
    attention: str = parameter("eager", "eager or flash (ours)", choices=ATTENTIONS)
    sweep: str = parameters.sweep(SWEEPS)

    def configurations(self, sweep: str, device: str) -> list[Configuration]:
        """Those of one part of what is asked for, in order; a single one where no sweep is."""
        if self.sweep == "shape" and sweep != "sizes":
            return [Configuration.named(self, device, {"cuda": 512, "cpu": 16})]
        wanted = {"table": table, "sizes": sizes, "recordings": recordings, "blocks": blocks}
        return wanted[sweep](device) if self.has(sweep) else []


def peak_tasks(given: Parameters, device: str, sweep: str = "table") -> list[Task]:
    """A task for each configuration, every phase of both steps."""
    return [
        _task(one, "", one.keys(MEMORY, step_number=STEPS, phase=phases(one)))
        for one in given.configurations(sweep, device)
    ]


def recording_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, both steps."""
    return [
        _task(one, "recording ", one.keys(MEMORY, step_number=STEPS))
        for one in given.configurations("recordings", device)
    ]


def block_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each block."""
    return [
        _task(one, "a block of ", [one.key(MEMORY_BLOCK)])
        for one in given.configurations("blocks", device)
    ]


def _task(configuration: Configuration, what: str, keys: list) -> Task:
    return Task.whole(f"{what}{configuration}", dataclasses.asdict(configuration), keys)


def _of(row: view.Row) -> Configuration:
    words = {c: row[c] for c in ("model", "mode", "precision", "attention") if c in row}
    return Configuration(context=int(row["context"]), batch=int(row["batch"]), **words)


def _counted(row: view.Row) -> int | None:
    """The bytes that the theory has for a step: what it asks of a GPU's allocator, or of a CPU."""
    if row.get("phase", "step") != "step" or row["mode"] == BLOCK:
        return None
    step = counted(_of(row), int(row["step_number"]))
    return peak(step).total if "-cpu-" in row["run"] else asked(step)


def _formula(row: view.Row) -> int:
    one = _of(row)
    return block_saved_bytes(one.shape, one.batch, one.context, one.attention, one.precision)


PEAKS = Table(
    MEMORY,
    peak_tasks,
    says="The peak of tensors in each phase; of a step what is counted, and what an allocator took",
    shown=("tensor_bytes", "counted_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes"),
    derived={"counted_bytes": _counted},
    across="phase",
    keep_worker=True,
)
RECORDINGS = Table(
    MEMORY_RECORDING,
    recording_tasks,
    says="The allocations of a step: their peak, and what explains it",
    shown=("allocations", "tensor_bytes", "counted_bytes", "unexplained_bytes"),
    derived={"counted_bytes": _counted},
    keep_worker=True,
)
BLOCKS = Table(
    MEMORY_BLOCK,
    block_tasks,
    says="What a block keeps for its backward pass, by hooks, by formula and by the allocator",
    shown=("saved_bytes", "formula_bytes", "grown_bytes", "gradient_bytes"),
    derived={"formula_bytes": _formula},
    keep_worker=True,
)
SIZES = dataclasses.replace(
    PEAKS, tasks=lambda given, device: peak_tasks(given, device, "sizes"), keep_worker=False
)
EXPERIMENT = Experiment(Parameters, (PEAKS, RECORDINGS, BLOCKS, SIZES), "Where the memory goes")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_peaks, measure_recordings = PEAKS.measure_and_show, RECORDINGS.measure_and_show
measure_blocks, measure_sizes = BLOCKS.measure_and_show, SIZES.measure_and_show


def draw(run: Run):
    """The second step of the first recording asked for, its bytes by category, as a matplotlib
    figure; None where it is not stored."""
    found = run.parameters.configurations("recordings", run.device)
    if not found:
        return None
    try:
        rows = bulk.read("memory", run.slug, f"{picture(found[0])}-{STEPS[-1]}", run.data).rows
    except StoreError as error:
        return print(error)
    figure, ax = view.subplots(figsize=(8, 3.6))
    times = [(row["time_us"] - rows[0]["time_us"]) / 1e3 for row in rows]
    levels = [[row[c] / 1e9 for row in rows] for c in CATEGORIES]
    ax.stackplot(times, levels, labels=CATEGORIES, step="post")
    ax.set(xlabel="host time (ms)", ylabel="GB")
    ax.legend(fontsize=7, loc="lower center")
    return figure
