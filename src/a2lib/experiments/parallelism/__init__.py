"""The experiment on parallelism: what notebooks/parallelism.ipynb calls.

What is measured is a stack of feed-forward layers, spread over ranks in one way or another.
``schemes`` says how, ``peers`` has PyTorch's own, ``handlers`` what each rank does with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from a2lib.experiments.harness import Experiment, Plot, Ranks, Table, Task, parameters
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.lab import PARALLELISM

SCHEMES = ("dp", "fsdp", "tp", "fsdp_tp")
IMPLEMENTATIONS = ("a2lib", "torch")
DTYPES = {"bf16": 2, "fp32": 4}
# PyTorch's passes cannot be had one without the other.
PASSES = {"a2lib": ("forward", "backward", "end_to_end"), "torch": ("end_to_end",)}
SWEEPS = ("batch", "width", "peers", "all")
# y is about quadratic in x and nothing normalises it: with more layers numbers leave their range.
MOST_LAYERS = 6
# Parts of the batch under tensor parallelism: one computes while the other's sum travels.
PARTS = 2

# On GPUs the FFN of the 8B model; on the CPU one whose nine products and whose messages take about
# as long at a batch in the middle.
_DEFAULTS = {
    "cuda": {"d_model": 4096, "d_ff": 11008, "layers": 4, "dtype": "bf16"},
    "cpu": {"d_model": 256, "d_ff": 1024, "layers": 3, "dtype": "fp32"},
}
# Tokens of a rank, to either side of where communication should stop to bind: of two ranks half of
# C / W, which is some thousand operations a byte on GPUs and far fewer on a CPU.
PER_RANK = {"cuda": (256, 512, 1024, 2048, 4096, 8192, 16384), "cpu": (8, 32, 128, 256, 512, 1024)}
# Of these a single shape, which is to take seconds without a GPU.
SHAPE_PER_RANK = {"cuda": PER_RANK["cuda"], "cpu": (8, 32, 128, 512)}
# Of tensor parallelism the width decides: columns of a rank, and the batch for them.
WIDTH_PER_RANK = {"cuda": (128, 256, 512, 1024, 2048, 4096), "cpu": (8, 32, 128, 512)}
WIDTH_TOKENS = {"cuda": 16384, "cpu": 256}


@dataclass(frozen=True)
class Setting:
    """``layers`` feed-forward layers under ``scheme`` on ``mesh``, ranks along data by ranks along
    tensor; the key of its rows but for batch and pass."""

    scheme: str
    implementation: str
    mesh: tuple[int, int]
    ranks: Ranks
    dtype: str
    layers: int
    d_model: int
    d_ff: int

    @property
    def label(self) -> str:
        by = "PyTorch's " if self.implementation == "torch" else ""
        return f"{by}{self.scheme} {mesh_name(self.mesh)}, d_ff {self.d_ff}"

    def spec(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "ranks"}

    def key(self, tokens: int, pass_: str) -> dict[str, object]:
        known = {**vars(self), **vars(self.ranks), "mesh": mesh_name(self.mesh)}
        known |= {"tokens": tokens, "pass": pass_}
        return {column: known[column] for column in PARALLELISM.key}

    def check(self, tokens: int) -> None:
        """Raise ParameterError unless every rank has an equal part of everything."""
        along_data, along_tensor = self.mesh
        weights = 3 * self.d_model * self.d_ff
        for name, value, parts in (
            ("tokens", tokens, along_data * (PARTS if along_tensor > 1 else 1)),
            ("d_ff", self.d_ff, along_tensor),
            ("3 * d_model * d_ff", weights, along_data * along_tensor),
        ):
            if value % parts:
                raise ParameterError(
                    f"{name} = {value} for {self.scheme} on {mesh_name(self.mesh)}: allowed are "
                    f"multiples of {parts}"
                )


def mesh_name(mesh: tuple[int, int]) -> str:
    """As the rows have it: ranks along data x ranks along tensor."""
    return "x".join(map(str, mesh))


def meshes(scheme: str, world_size: int) -> list[tuple[int, int]]:
    """The meshes of ``scheme`` on so many ranks: of fsdp_tp every split that has both axes, the one
    of more data first."""
    if scheme != "fsdp_tp":
        return [(1, world_size) if scheme == "tp" else (world_size, 1)]
    return [(n, world_size // n) for n in range(world_size - 1, 1, -1) if world_size % n == 0]


@dataclass(frozen=True)
class Parameters(parameters.OnRanks, parameters.WithSweep):
    beside = parameters.OF_RANKS

    schemes: str = parameter(
        "all", f"all, or from {', '.join(SCHEMES)}", choices=("all",), many=SCHEMES
    )
    implementation: str = parameter(
        "a2lib", "written out with collectives, or PyTorch's own", choices=IMPLEMENTATIONS
    )
    tokens: int | None = count(
        None, "of the batch over all ranks; None: a few around the predicted threshold", 2**24
    )
    d_model: int | None = count(None, "width of a layer; None: 4096 on GPUs, 256 on the CPU", 2**17)
    d_ff: int | None = count(
        None, "width of its hidden; None: 11008 on GPUs, 1024 on the CPU", 2**19
    )
    layers: int | None = count(None, "in a row; None: 4 on GPUs, 3 on the CPU", MOST_LAYERS)
    dtype: str = parameter(
        "auto", "bf16 or fp32; auto: bf16 on GPUs, fp32 on the CPU", choices=("auto", *DTYPES)
    )
    sweep: str = parameters.sweep(SWEEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size < 2:
            raise ParameterError(f"world_size = {self.world_size}: allowed are 2 and more")
        wanted = SCHEMES if self.schemes == "all" else names(self.schemes)
        if not any(meshes(scheme, self.world_size) for scheme in wanted):
            raise ParameterError(
                f"schemes = {self.schemes!r} with world_size = {self.world_size}: fsdp_tp needs a "
                "number of ranks that is a product, such as 4"
            )

    def asked(self) -> dict[Setting, list[int]]:
        """The settings, and the batches of each, in the order of measuring.

        Raises ParameterError for what these ranks cannot do.
        """
        ranks = self.ranks()
        found: dict[Setting, list[int]] = {}
        for setting, batches in self._asked(ranks):
            known = found.setdefault(setting, [])
            known += [tokens for tokens in batches if tokens not in known]
            for tokens in batches:
                setting.check(tokens)
        return found

    def _asked(self, ranks: Ranks) -> Iterator[tuple[Setting, list[int]]]:
        """What answers most questions first: ours by batch, by width, then PyTorch's."""
        device, n = ranks.device, ranks.world_size
        given = _DEFAULTS[device]
        batches = [n * own for own in PER_RANK[device]]

        def settings(schemes: tuple[str, ...], implementation: str, **over) -> Iterator[Setting]:
            for scheme in schemes:
                for mesh in meshes(scheme, n):
                    yield Setting(scheme, implementation, mesh, ranks, **{**given, **over})

        if self.sweep == "shape":
            given = parameters.filled(self, given)
            schemes = SCHEMES if self.schemes == "all" else names(self.schemes)
            few = [n * own for own in SHAPE_PER_RANK[device]]
            for setting in settings(schemes, self.implementation):
                yield setting, few if self.tokens is None else [self.tokens]
        if self.has("batch"):
            for setting in settings(SCHEMES, "a2lib"):
                yield setting, batches
        if self.has("width"):
            for own in WIDTH_PER_RANK[device]:
                for setting in settings(("tp",), "a2lib", d_ff=n * own):
                    yield setting, [WIDTH_TOKENS[device]]
        if self.has("peers"):
            for setting in settings(SCHEMES, "torch"):
                yield setting, batches


def tasks(asked: Mapping[Setting, list[int]]) -> list[Task]:
    """A task for each setting, each batch its own culprit."""
    made = []
    for setting, batches in asked.items():
        passes = PASSES[setting.implementation]
        rows = {f"{n} tokens": tuple(setting.key(n, one) for one in passes) for n in batches}
        label = f"{setting.label}, {setting.ranks.backend} {setting.ranks.world_size}"
        made.append(Task(label, setting.spec(), rows, ranks=setting.ranks))
    return made


def hidden(row: Mapping[str, str]) -> float | None:
    """The part of the shorter of computation and messages that the other one hides."""
    if not row["ms_communication"]:
        return None
    ms, alone, sent = (float(row[c]) for c in ("ms", "ms_without", "ms_communication"))
    return (alone + sent - ms) / min(alone, sent)


TIMES = Table(
    PARALLELISM,
    lambda given, device: tasks(given.asked()),
    says="The median pass, and its computation and messages by themselves",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_communication"),
    derived={"hidden": hidden},
    plot=Plot(x="tokens", beside=("ms_without", "ms_communication"), panels=("scheme", "mesh")),
    silence_s=180,  # making the layers and the groups of a mesh, or timing one batch
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "Do the formulas hold?")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
