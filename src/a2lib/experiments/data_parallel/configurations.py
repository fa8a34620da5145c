"""A training step that several ranks take together, as the tasks and the rows have it. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from a2lib.experiments.harness.parameters import ParameterError, count, parameter
from a2lib.experiments.harness.ranks import Ranks

Way = TypeVar("Way")

# On a GPU what trains fastest, on the CPU a trial.
DEFAULTS = {
    "cuda": {"model": "xl25", "batch": 4, "context": 512, "precision": "bf16",
             "attention": "flash", "compile": "blocks"},
    "cpu": {"model": "tiny", "batch": 2, "context": 16, "precision": "fp32",
            "attention": "eager", "compile": "none"},
}  # fmt: skip
HOW = ("precision", "attention", "compile")


def unusual(spec: Mapping[str, object], device: str) -> str:
    """What of ``HOW`` a training has that others on ``device`` have not, in words."""
    found = [str(spec[name]) for name in HOW if spec[name] != DEFAULTS[device][name]]
    return " ".join("uncompiled" if value == "none" else value for value in found)


@dataclass(frozen=True)
class Training:
    """A training step that every one of ``ranks`` takes on a batch of its own."""

    ranks: Ranks
    model: str
    batch: int
    context: int
    precision: str
    attention: str
    compile: str
    capture: bool

    @classmethod
    def usual(cls, ranks: Ranks, **given: object) -> Training:
        """That of the ranks' device, launched, with what is ``given`` and not None in place."""
        named = {name: value for name, value in given.items() if value is not None}
        return cls(ranks, **{"capture": False, **DEFAULTS[ranks.device], **named})

    @classmethod
    def asked(cls, given: Any, ranks: Ranks) -> Training:
        """The one that the fields ``model``, ``batch``, ``context`` and ``capture`` of a notebook's
        parameters name, and those of ``HOW`` if it has them. Raises ParameterError for a capture on
        the CPU."""
        if given.capture and ranks.device != "cuda":
            raise ParameterError("capture = True: allowed with nccl, since a CUDA graph is a GPU's")
        fields = ("model", "batch", "context", "capture", *HOW)
        named = {name: getattr(given, name, None) for name in fields}
        return cls.usual(ranks, **{n: value for n, value in named.items() if value != "auto"})

    def spec(self) -> dict[str, object]:
        given = dataclasses.asdict(self)
        del given["ranks"]
        return given

    def key(self, way: object) -> dict[str, object]:
        ranks = {"backend": self.ranks.backend, "world_size": self.ranks.world_size}
        return {**dataclasses.asdict(way), **self.spec(), **ranks}

    @property
    def label(self) -> str:
        how = "captured" if self.capture else "launched"
        return f"{self.model} {how} {unusual(self.spec(), self.ranks.device)}".rstrip()


def batch() -> Any:
    """The field ``batch`` of a notebook's parameters: that of a rank."""
    return count(None, "sequences a rank; None: 4 on GPUs, 2 on the CPU", 2**16)


def chosen(name: str, what: str, names: Sequence[str]) -> Any:
    """A field of ``HOW``, one of ``names``; ``what`` goes before the usual ones in its comment."""
    usual = f"auto: {DEFAULTS['cuda'][name]} on GPUs, {DEFAULTS['cpu'][name]} on the CPU"
    return parameter("auto", f"{what}; {usual}", kind=str, choices=("auto", *names))


def capture() -> Any:
    """The field ``capture``."""
    return parameter(False, "replay each step from a CUDA graph", kind=bool)


def refuse_a_sweep(name: str, ranks: Ranks) -> None:
    """Raise ParameterError unless ``ranks`` can do the sweep ``name``."""
    if ranks.device != "cuda" or ranks.world_size < 2:
        raise ParameterError(f"sweep = {name!r}: allowed on two GPUs or more; shape is anywhere")


def merged(found: Iterable[tuple[Training, Iterable[Way]]]) -> dict[Training, list[Way]]:
    """Each training once, its ways in order of their first mention."""
    known: dict[Training, dict[Way, None]] = {}
    for training, ways in found:
        known.setdefault(training, {}).update(dict.fromkeys(ways))
    return {training: list(ways) for training, ways in known.items()}
