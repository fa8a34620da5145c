"""The flash experiment: what the cells of notebooks/flash.ipynb call.

``shapes`` says what is timed, ``comparison`` how; ``protocols``, ``accuracy`` and ``counting`` are
the tables beside it, of the leaderboard's sweep; ``ladder`` has one of its own.
"""

import dataclasses

from a2lib.experiments.ceilings import CEILINGS
from a2lib.experiments.flash import accuracy, comparison, counting, ladder, protocols
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness import Experiment, Plot, Run, Table, Task, view
from a2lib.experiments.harness import experiment as harness
from a2lib.experiments.harness.output import say_nothing
from a2lib.lab import FLASH, FLASH_ACCURACY, FLASH_COUNTERS, FLASH_LADDER, FLASH_PROTOCOL
from a2lib.theory.attention import PASSES, attention_flops

# What a cell asks to see: a column, and what it is. All but the time is of a GPU alone.
QUANTITIES = {
    "ms": ("ms", "median time, ms"),
    "GPU ms": ("ms_graph", "GPU's own time (CUDA graph), ms"),
    "host ms": ("ms_host", "host's time to issue a call, ms"),
    "TFLOP/s": ("TFLOP/s", "rate, TFLOP/s"),
    "MiB": ("peak_bytes", "peak memory"),
}


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each shape: the passes asked for of each implementation, in turns. The ladder has
    a table of its own."""
    made = []
    for shape in given.shapes(device) if given.sweep != "ladder" else ():
        rows = {
            name: tuple(shape.key(name, pass_) for pass_ in given.chosen_passes(name))
            for name in given.chosen_implementations(shape, device)
        }
        made.append(Task(str(shape), {"shape": dataclasses.asdict(shape)}, rows, in_turns=True))
    return made


def tflops(row: view.Row) -> float:
    """TFLOP/s of a row, by the operations of the FlashAttention papers."""
    batch, heads, n, d = (int(row[c]) for c in ("batch", "heads", "seq_len", "head_dim"))
    flops = attention_flops(batch, heads, n, n, d, row["causal"] == "true", row["pass"])
    return flops / float(row["ms"]) / 1e9


TIMES = Table(
    FLASH,
    tasks,
    says="Attention",
    shown=("ms",),
    across="implementation",
    derived={"TFLOP/s": tflops},
)
LADDER = Table(
    FLASH_LADDER,
    ladder.tasks,
    says="Our attention, one technique at a time: the GPU's own time",
    shown=("ms",),
    across="pass",
)
PROTOCOLS = Table(
    FLASH_PROTOCOL,
    protocols.tasks,
    says="Forward and backward by each protocol, of the sustained one second by second",
    shown=("ms", "ms_mean", "sm_mhz", "power_w"),
    keep_worker=True,
    parts=True,
)
ACCURACY = Table(
    FLASH_ACCURACY,
    accuracy.tasks,
    says="Errors of the output and the gradients against float64",
    shown=("error",),
    across="tensor",
)
COUNTERS = Table(
    FLASH_COUNTERS,
    counting.tasks,
    says="What each kernel moves, and what was busy",
    shown=("kernel", "device_bytes", "l2_bytes")
    + ("tensor_percent", "exp_percent", "issue_percent", "warps_percent"),
    parts=True,
)
EXPERIMENT = Experiment(
    Parameters, (TIMES, CEILINGS, LADDER, PROTOCOLS, ACCURACY, COUNTERS), "FlashAttention-2"
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
sweep, measure_ceilings = TIMES.measure, CEILINGS.measure_and_show
measure_protocols, measure_accuracy = PROTOCOLS.measure_and_show, ACCURACY.measure_and_show
count = COUNTERS.measure_and_show


def compile_ahead(run: Run) -> None:
    """Fill the compilation caches for what is pending, in parallel, where that pays."""
    pending = {Shape(**task.spec["shape"]): tuple(task.rows) for task in TIMES.pending(run)}
    harness.compile_ahead(run, comparison.compilations(pending), comparison.COMPILE)


def measure_ladder(run: Run) -> None:
    """Measure and show the ladder; on a GPU its kernels are compiled ahead, in parallel."""
    left = LADDER.pending(run)
    if left and run.device == "cuda":
        harness.compile_ahead(run, ladder.compilations(left), ladder.COMPILE)
    LADDER.measure_and_show(run)


def show_table(run: Run, quantity: str) -> None:
    """Show one of ``QUANTITIES`` of the stored rows that this run's parameters ask for."""
    column, what = QUANTITIES[quantity]
    rows = TIMES.rows(run)
    if rows and not any(row.get(column, "known") for row in rows) and column != "ms":
        say_nothing(f"Nothing here: {what}, is measured on a GPU alone.")
        return
    derived = {column: tflops} if column == "TFLOP/s" else {}
    view.show(rows, FLASH, f"Attention: {what}", (column,), TIMES.across, derived)
    if column == "TFLOP/s":
        CEILINGS.show(run)


def draw(run: Run):
    """The slowest pass asked for as a matplotlib figure: against the length, or for one shape as
    bars."""
    rows = TIMES.rows(run)
    last = max((row["pass"] for row in rows), key=PASSES.index, default="")
    # The batch follows from the length, and would make each of its points a line.
    rows = [{**row, "batch": ""} for row in rows if row["pass"] == last]
    panels = ("heads", "head_dim", "dtype", "causal")
    lengths = {row["seq_len"] for row in rows}
    return view.draw(rows, FLASH, Plot(x="seq_len" if len(lengths) > 1 else "", panels=panels))
