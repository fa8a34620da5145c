"""What the experiment on data parallelism measures: a training, and the ways to send its gradients.
No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from a2lib.experiments import step_parameters
from a2lib.experiments.benchmark.configurations import MODELS
from a2lib.experiments.data_parallel import configurations as data_parallel
from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.step_parameters import ATTENTIONS, COMPILES
from a2lib.theory.roofline import PRECISIONS

# Bucketed, and AdamW's update of each bucket once it is the mean, while later ones travel.
UPDATING = "updating"
OURS = ("naive", "flat", "overlapped", "bucketed", UPDATING)
# torch_ddp_view is PyTorch's with gradient_as_bucket_view.
PEERS = ("torch_ddp", "torch_ddp_view")
WRAPPERS = (*OURS, *PEERS)
CARRIED = ("bucketed", UPDATING)
BUCKETED = (*CARRIED, *PEERS)
CARRIERS = ("backend", "copy_engines")
SENT_DTYPES = {"fp32": 4, "bf16": 2}
# In plain fp32, as the handouts have them: a sweep a model, so that it ends with its timelines.
PLAIN = {"precision": "fp32", "attention": "eager", "compile": "none"}
SWEEPS = ("essential", "xl25", "2.7B", "plain-xl25", "plain-2.7B", "all")
HANDOUT_MB = (1, 10, 100, 1000)
MORE_MB = (25, 400)
TORCH_MB = 25  # PyTorch's own
BEST_MB = 100


@dataclass(frozen=True)
class Way:
    """How gradients are averaged. ``bucket_mb`` is 0 where there are no buckets."""

    wrapper: str
    bucket_mb: int = 0
    carrier: str = "backend"
    sent_dtype: str = "fp32"

    @property
    def label(self) -> str:
        parts = [self.wrapper, f"{self.bucket_mb} MB" * bool(self.bucket_mb)]
        parts += [self.carrier * (self.carrier != "backend")]
        parts += [self.sent_dtype * (self.sent_dtype != "fp32")]
        return " ".join(filter(None, parts))


_PLAIN = (Way("naive"), Way("flat"), Way("overlapped"))
_HANDOUT = (*_PLAIN, *(Way("bucketed", mb) for mb in HANDOUT_MB))
_TORCH = tuple(Way(peer, TORCH_MB) for peer in PEERS)
_BEST = (Way("bucketed", BEST_MB, "copy_engines"), Way("bucketed", BEST_MB))
_BF16 = (
    Way("bucketed", BEST_MB, "copy_engines", "bf16"),
    Way("bucketed", BEST_MB, "backend", "bf16"),
)
_UPDATING = tuple(dataclasses.replace(way, wrapper=UPDATING) for way in (*_BEST, _BF16[0]))
_MORE = tuple(Way("bucketed", mb) for mb in MORE_MB)


@dataclass(frozen=True)
class Parameters:
    """The parameters of notebooks/ddp.ipynb, in the order of its cell."""

    wrappers: str = parameter(
        "ours",
        f"ours, or {','.join(WRAPPERS)}",
        kind=str,
        choices=("ours",),
        many=WRAPPERS,
    )
    bucket_mb: int = count(TORCH_MB, "of bucketed, updating and torch_ddp, 2**20 bytes each", 2**16)
    carrier: str = parameter(
        "backend", "what carries the gradients of bucketed, updating", kind=str, choices=CARRIERS
    )
    sent_dtype: str = parameter(
        "fp32",
        "that gradients of bucketed, updating travel in",
        kind=str,
        choices=tuple(SENT_DTYPES),
    )
    model: str = step_parameters.model(MODELS, "xl25", "GPUs")
    batch: int | None = data_parallel.batch()
    context: int | None = step_parameters.context(512, 16, "tokens of a sequence", "GPUs")
    capture: bool = data_parallel.capture()
    precision: str = data_parallel.chosen("precision", "fp32, tf32 or bf16", PRECISIONS)
    attention: str = data_parallel.chosen("attention", "eager, flash or PyTorch's", ATTENTIONS)
    compile: str = data_parallel.chosen("compile", "none, blocks or model", COMPILES)
    world_size: int = parameters.world_size()
    backend: str = parameters.backend()
    sweep: str = parameters.sweep(SWEEPS)
    remeasure: bool = parameters.remeasure()
    time_limit_s: int = parameters.time_limit_s()
    seed: int = parameters.seed("of weights and batches")

    def __post_init__(self) -> None:
        fixed = ("wrappers", "bucket_mb", "carrier", "sent_dtype", "model", "batch", "context")
        parameters.refuse_beside_sweep(self, (*fixed, "capture", *data_parallel.HOW))
        asked = self._wrappers
        for name in ("carrier", "sent_dtype"):
            if name in parameters.changed(self) and not set(asked) <= set(CARRIED):
                raise ParameterError(
                    f"{name} = {getattr(self, name)!r}: allowed with wrappers "
                    f"{' and '.join(CARRIED)} alone"
                )
        if self.capture and set(asked) & set(PEERS):
            raise ParameterError("capture = True: allowed without torch_ddp, which is launched")

    @property
    def _wrappers(self) -> tuple[str, ...]:
        return OURS if self.wrappers == "ours" else names(self.wrappers)

    def asked(self) -> dict[Training, list[Way]]:
        """The trainings, and the ways of each, in the order of measuring.

        Raises ParameterError for what these ranks cannot do.
        """
        ranks = parameters.ranks(self)
        if self.sweep != "shape":
            data_parallel.refuse_a_sweep(self.sweep, ranks)
            return data_parallel.merged(_sweep(self.sweep, ranks))
        return {Training.asked(self, ranks): list(self._ways())}

    def _ways(self) -> Iterator[Way]:
        for wrapper in self._wrappers:
            mb = self.bucket_mb if wrapper in BUCKETED else 0
            if wrapper in CARRIED:
                yield Way(wrapper, mb, self.carrier, self.sent_dtype)
            else:
                yield Way(wrapper, mb)


def _sweep(name: str, ranks: Ranks) -> Iterator[tuple[Training, Iterable[Way]]]:
    """What answers most questions first."""

    def training(model: str, capture: bool) -> Training:
        return Training.usual(ranks, model=model, capture=capture)

    if name in ("essential", "xl25", "all"):
        yield training("xl25", True), (*_BEST, _BF16[0], *_UPDATING)
        yield training("xl25", False), (*_HANDOUT, *_TORCH[:1])
    if name in ("xl25", "all"):
        yield training("xl25", True), (*_HANDOUT, *_MORE, *_BF16)
        yield training("xl25", False), (*_BEST, _UPDATING[0], *_MORE, *_BF16, *_TORCH)
        yield training("xl25", False), (Way(PEERS[0], TORCH_MB, sent_dtype="bf16"),)
    if name in ("2.7B", "all"):
        yield training("2.7B", False), (*_HANDOUT, *_TORCH[:1])
        yield training("2.7B", True), (*_BEST, _UPDATING[0], Way("overlapped"))
    for model in ("xl25", "2.7B"):
        if name in (f"plain-{model}", "all"):
            yield Training.usual(ranks, model=model, **PLAIN), _HANDOUT
