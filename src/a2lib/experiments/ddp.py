"""The experiment on data parallelism: what notebooks/ddp.ipynb calls."""

import dataclasses
from dataclasses import dataclass

from a2lib.experiments.data_parallel import configurations as shared
from a2lib.experiments.data_parallel.configurations import BEST_MB, TORCH_MB, UPDATING, Asked, Way
from a2lib.experiments.harness import Experiment, Plot, Table, parameters
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.experiments.step_parameters import ATTENTIONS, COMPILES
from a2lib.lab import DDP
from a2lib.theory.roofline import PRECISIONS

OURS = ("naive", "flat", "overlapped", "bucketed", UPDATING)
PEERS = ("torch_ddp", "torch_ddp_view")
WRAPPERS = (*OURS, *PEERS)
CARRIED = ("bucketed", UPDATING)
CARRIERS = ("backend", "copy_engines")
# Plain by model: a sweep each, so that it ends with its timelines.
SWEEPS = ("essential", "xl25", "2.7B", "plain-xl25", "plain-2.7B", "all")
HANDOUT_MB = (1, 10, 100, 1000)
MORE_MB = (25, 400)

_HANDOUT = (*map(Way, OURS[:3]), *(Way("bucketed", mb) for mb in HANDOUT_MB))
_TORCH = tuple(Way(peer, TORCH_MB) for peer in PEERS)
_BEST = (Way("bucketed", BEST_MB, "copy_engines"), Way("bucketed", BEST_MB))
_BF16 = tuple(dataclasses.replace(way, sent_dtype="bf16") for way in _BEST)
_UPDATING = tuple(dataclasses.replace(way, wrapper=UPDATING) for way in (*_BEST, _BF16[0]))
_MORE = tuple(Way("bucketed", mb) for mb in MORE_MB)


@dataclass(frozen=True)
class Parameters(shared.Asking):
    wrappers: str = parameter(
        "ours", f"ours, or {','.join(WRAPPERS)}", choices=("ours",), many=WRAPPERS
    )
    bucket_mb: int = count(TORCH_MB, "of bucketed, updating and torch_ddp, 2**20 bytes each", 2**16)
    carrier: str = parameter(
        "backend", "what carries the gradients of bucketed, updating", choices=CARRIERS
    )
    sent_dtype: str = parameter(
        "fp32", "that gradients of bucketed, updating travel in", choices=tuple(shared.SENT_DTYPES)
    )
    precision: str = shared.chosen("precision", "fp32, tf32 or bf16", PRECISIONS)
    attention: str = shared.chosen("attention", "eager, flash or PyTorch's", ATTENTIONS)
    compile: str = shared.chosen("compile", "none, blocks or model", COMPILES)
    sweep: str = parameters.sweep(SWEEPS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("carrier", "sent_dtype"):
            if name in parameters.changed(self) and not set(self._wrappers) <= set(CARRIED):
                raise ParameterError(
                    f"{name} = {getattr(self, name)!r}: allowed with wrappers "
                    f"{' and '.join(CARRIED)} alone"
                )

    @property
    def _wrappers(self) -> tuple[str, ...]:
        return OURS if self.wrappers == "ours" else names(self.wrappers)

    def asked(self) -> Asked:
        """The settings, each with its ways; raises ParameterError for what cannot be."""
        how = dict.fromkeys(PEERS, (self.bucket_mb,))
        how |= dict.fromkeys(CARRIED, (self.bucket_mb, self.carrier, self.sent_dtype))
        ways = [Way(wrapper, *how.get(wrapper, ())) for wrapper in self._wrappers]
        return shared.asked(self, ways, _sweep)


def _sweep(name: str, usual: shared.Usual) -> shared.Steps:
    if name in ("essential", "xl25", "all"):
        yield usual(model="xl25", capture=True), (*_BEST, _BF16[0], *_UPDATING)
        yield usual(model="xl25"), (*_HANDOUT, *_TORCH[:1])
    if name in ("xl25", "all"):
        yield usual(model="xl25", capture=True), (*_HANDOUT, *_MORE, *_BF16)
        yield usual(model="xl25"), (*_BEST, _UPDATING[0], *_MORE, *_BF16, *_TORCH)
        yield usual(model="xl25"), (Way(PEERS[0], TORCH_MB, sent_dtype="bf16"),)
    if name in ("2.7B", "all"):
        yield usual(model="2.7B"), (*_HANDOUT, *_TORCH[:1])
        yield usual(model="2.7B", capture=True), (*_BEST, _UPDATING[0], Way("overlapped"))
    for model in ("xl25", "2.7B"):
        if name in (f"plain-{model}", "all"):
            yield usual(model=model, **shared.PLAIN), _HANDOUT


TIMES = Table(
    DDP,
    lambda given, device: shared.tasks(DDP, given.asked()),
    says="The median step, and the same step without communication",
    shown=("ms", "ms_p20", "ms_p80", "n", "ms_without", "ms_communication", "ms_backward_without")
    + ("ms_host", "ms_rank_min", "ms_rank_median", "ms_rank_max"),
    derived={"exposed": lambda row: float(row["ms"]) - float(row["ms_without"])},
    plot=Plot(panels=("model", "capture", "precision")),
    silence_s=shared.SILENCE_S,
)
EXPERIMENT = Experiment(Parameters, (TIMES,), "Distributed data parallel")
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure, show, draw = TIMES.measure, TIMES.show, TIMES.draw
