"""A step of a model, as every experiment that measures one describes it. No torch.

one = Configuration("2.7B", 512, mode="forward", compile="blocks")
one.key(BENCHMARK), one.config("cuda"), one.refusal("cuda")
Configuration.named(parameters, "cuda", {"cuda": 512, "cpu": 16})
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from a2lib.experiments.harness.parameters import ParameterError, filled
from a2lib.experiments.workload import PHASES, Config
from a2lib.experiments.workload.config import least_bytes
from a2lib.lab import Section, memory
from a2lib.theory.transformer import MODELS, SIZES, Shape, forward_flops

BATCH = 4
MODES = ("forward", "forward-backward", "train-step")
OVERLAPPED = "overlapped-step"
TOO_LARGE = "10B"  # for a train-step on an H200
NEEDS_A_GPU = {"capture": True, "precision": "tf32", "profiler": "nsys"}


@dataclass(frozen=True)
class Configuration:
    """One configuration of a step; the fields are key columns of its rows."""

    model: str
    context: int
    batch: int = BATCH
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    compile: str = "none"
    capture: bool = False

    def __str__(self) -> str:
        how = [self.precision, self.attention]
        how += [f"compiled {self.compile}"] if self.compile != "none" else []
        how += ["captured"] if self.capture else []
        return f"{self.model} {self.context} {self.mode} {' '.join(how)}"

    @classmethod
    def named(
        cls, given: Any, device: str, contexts: Mapping[str, int], usual: str = "small"
    ) -> Self:
        """The one that a notebook's parameters name on ``device`` ("cuda" or "cpu"), where auto is
        ``usual`` or tiny, and no context that of ``contexts``."""
        fields = dataclasses.fields(cls)
        values = {f.name: getattr(given, f.name) for f in fields if hasattr(given, f.name)}
        model = {"cuda": usual, "cpu": "tiny"}[device]
        return cls(**values | filled(given, {"model": model, "context": contexts[device]}))

    @classmethod
    def every(cls, **values: Iterable[Any]) -> list[Self]:
        """One for each combination of the fields' ``values``, the last named changing first; a
        value that is a mapping is of several fields."""
        found = []
        for chosen in itertools.product(*values.values()):
            given: dict[str, Any] = {}
            for name, value in zip(values, chosen, strict=True):
                given |= value if isinstance(value, Mapping) else {name: value}
            found.append(cls(**given))
        return found

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that are timed: of a replay the whole step alone."""
        return (*(() if self.capture else PHASES[self.mode]), "step", "wall")

    def key(self, section: Section) -> dict[str, object]:
        """The key columns of a row of ``section`` that say what step it is of."""
        return {c: v for c, v in dataclasses.asdict(self).items() if c in section.key}

    def keys(self, section: Section, **columns: Iterable[object]) -> list[dict[str, object]]:
        """``key`` with each combination of values of further ``columns``."""
        own, found = self.key(section), itertools.product(*columns.values())
        return [{**own, **dict(zip(columns, values, strict=True))} for values in found]

    def config(self, device: str, **others: object) -> Config:
        """What ``workload.run`` takes; raises ValueError for what can never be."""
        sizes = {"size": self.model} if self.model in SIZES else dataclasses.asdict(self.shape)
        names = ("context", "batch", "mode", "precision", "attention", "capture")
        given = {name: getattr(self, name) for name in names}
        given |= {"compile": self.compile == "model", "compile_blocks": self.compile == "blocks"}
        return Config(**{**sizes, **given, "device": device, **others})

    def refusal(self, device: str) -> str:
        """Why it is not tried on ``device``, which certainly has too little memory; "" if it is."""
        least, there = least_bytes(self.config(device), device), memory.total_bytes(device)
        if least <= there:
            return ""
        return f"not tried: needs at least {least / 1e9:.1f} GB of {there / 1e9:.1f} GB"

    def work(self) -> int:
        """Operations that a step has at least: what it is ordered by."""
        forward = forward_flops(self.shape, self.batch, self.context)
        return forward if self.mode == "forward" else 3 * forward


def refuse(given: Any, device: str) -> None:
    """Raise ParameterError where a notebook's parameters ask for what needs a GPU and there is
    none."""
    for name, value in NEEDS_A_GPU.items() if device == "cpu" else ():
        if getattr(given, name, None) == value:
            raise ParameterError(f"{name} = {value!r} needs a GPU; leave {name} out here")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Make a ValueError, which refuses what can never be, a ParameterError."""
    try:
        yield
    except ValueError as error:
        raise ParameterError(str(error)) from None
