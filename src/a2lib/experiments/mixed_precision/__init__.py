"""The mixed-precision experiment: its parameters, what is looked at, and what the cells of
notebooks/mixed_precision.ipynb call. ``handlers`` is how a worker looks. Times of whole models in
each precision are the benchmark's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.experiments.harness import Experiment, Run, Table, Task, view
from a2lib.experiments.harness.parameters import Common, count
from a2lib.lab import ACCUMULATION, AUTOCAST_DTYPES, LAYERNORM
from a2lib.theory.floating import Loop, decimal, handout_loops, loops_of

AUTOCAST = ("none", "fp16", "bf16")
DTYPES = ("fp32", "fp16", "bf16")
# In the order in which a training step makes them.
TENSORS = (
    *("fc1.weight", "fc1 output", "relu output", "ln output", "logits"),
    *("loss: cross-entropy", "loss: mean of the logits"),
    *("gradient of the logits", "gradient of the ln output", "gradient of the fc1 output"),
    *("gradient of fc1.weight", "gradient of ln.weight", "gradient of fc2.weight"),
)
MEANS = (0, 1, 10, 100, 300)
SCALES = ("0.0001", "0.01", "1", "100", "300")
EPSILONS = ("1e-05", "1e-06", "1e-08", "1e-12")
# quantity -> the inputs it is computed for; what each is, is in ``handlers``.
VARIANCES = (
    *("variance of the stored input", "variance, one pass", "variance, two passes"),
    *("variance, one pass in fp32", "variance, two passes in fp32"),
)
ERRORS = ("layer_norm's largest error", "largest error, by hand")
QUANTITIES = {
    **{name: tuple(f"mean {m}" for m in MEANS) for name in VARIANCES},
    "mean, added one by one": ("mean 1",),
    "mean of squares": tuple(f"scale {s}" for s in SCALES),
    "eps": EPSILONS,
    "constant input, normalised": EPSILONS,
    **{name: tuple(f"mean {m}" for m in MEANS) for name in ERRORS},
}


@dataclass(frozen=True)
class Parameters(Common):
    terms: int = count(
        None,
        "numbers that a loop adds, each 10 / terms; None: the handout's 1000, and 10000",
        50_000,
    )
    features: int = count(2560, "numbers that a layer norm normalises", 65_536, 2)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The accumulation loops asked for."""
        return loops_of(self.terms, repr(10 / self.terms)) if self.terms else handout_loops()


def loop_key(loop: Loop) -> dict[str, object]:
    """The key columns of ``loop``'s row."""
    dtypes = {"sum_dtype": loop.sum, "addend_dtype": loop.addend, "cast": loop.cast}
    return dtypes | {"terms": loop.terms, "addend": loop.step}


def loop_of(row: Mapping[str, object]) -> Loop:
    """The loop of a row, asked for or stored."""
    cast = row["cast"] in (True, "true")
    return Loop(row["sum_dtype"], row["addend_dtype"], int(row["terms"]), row["addend"], cast)


def name_of(loop: Loop) -> str:
    """A loop in a line of code."""
    addend = f"{loop.addend}, cast" if loop.cast else loop.addend
    return f"{loop.terms} x {loop.step}: {loop.sum} += {addend}"


def sum_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each loop."""
    return [Task.whole(name_of(loop), {}, [loop_key(loop)]) for loop in given.loops]


def dtype_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each autocast, every tensor of the toy model."""
    return [
        Task.whole(f"autocast {low}", {}, [{"autocast": low, "quantity": t} for t in TENSORS])
        for low in AUTOCAST
    ]


def part_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each dtype, every part of a layer norm in the order of QUANTITIES."""
    made = []
    for dtype in DTYPES:
        keys = (
            {"quantity": quantity, "setting": setting, "dtype": dtype, "features": given.features}
            for quantity, settings in QUANTITIES.items()
            for setting in settings
            if not (dtype == "fp32" and quantity.endswith("in fp32"))
        )
        made.append(Task.whole(f"layer norm in {dtype}", {}, keys))
    return made


SUMS = Table(
    ACCUMULATION,
    sum_tasks,
    says="What each loop comes to, what is predicted, and how far that is from the exact sum",
    shown=(),
    derived={
        "result": lambda row: row["computed"],  # every digit of it
        "predicted": lambda row: decimal(loop_of(row).result()),
        "equal": lambda row: "yes" if row["computed"] == decimal(loop_of(row).result()) else "no",
        "off by": lambda row: decimal(loop_of(row).result() - loop_of(row).exact),
    },
    keep_worker=True,
)
DTYPES_SEEN = Table(
    AUTOCAST_DTYPES,
    dtype_tasks,
    says="The dtype of each tensor under autocast",
    shown=("observed",),
    across="autocast",
    keep_worker=True,
)
PARTS = Table(
    LAYERNORM,
    part_tasks,
    says="The parts of a layer norm in each dtype, beside float64",
    shown=("computed", "truth"),
)
EXPERIMENT = Experiment(Parameters, (SUMS, DTYPES_SEEN, PARTS), "Mixed precision")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
accumulate, observe = SUMS.measure_and_show, DTYPES_SEEN.measure_and_show
normalise = PARTS.measure_and_show


def draw(run: Run):
    """Every loop's running sum, as predicted, as a matplotlib figure."""
    figure, ax = view.subplots(figsize=(8, 4))
    for loop in run.parameters.loops:
        if not loop.cast:
            share = [(i + 1) / loop.terms for i in range(loop.terms)]
            ax.plot(share, [float(s) for s in loop.partial_sums()], label=name_of(loop))
    ax.set(xlabel="share of the additions", ylabel="running sum")
    ax.legend()
    return figure
