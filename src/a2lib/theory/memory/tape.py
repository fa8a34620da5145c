"""Tensors as they are made and dropped, each with what a memory snapshot would call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, TEMPORARIES, OTHER = "saved for backward", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES, OTHER)


class Event(NamedTuple):
    """A tensor of so many ``bytes`` is made in ``phase``, or dropped if not ``made``. ``category``
    is what a snapshot would call it (``a2lib.measure.snapshot``), ``kernel`` the part of a block's
    backward that the event belongs to."""

    made: bool
    name: str
    bytes: int
    phase: str
    category: str
    kernel: str


@dataclass
class _Tensor:
    bytes: int
    saved: bool
    phase: str
    ended: str | None = None  # the phase of its last use

    def category(self, name: str) -> str:
        if name.endswith(".grad"):
            return GRADIENTS
        if name.endswith((".m", ".v", ".step")):
            return OPTIMIZER
        if self.saved:
            return SAVED
        return TEMPORARIES if self.ended == self.phase else OTHER


class Tape:
    """Tensors made and dropped. A name is one of ``where`` the step is ("0a": the attention of
    block 0), but that of a parameter and of what a half of a block hands on is the model's."""

    def __init__(self, saves: bool) -> None:
        self.saves, self.phase, self.where, self.kernel = saves, "forward", "", ""
        self.alive: dict[str, _Tensor] = {}
        self._played: list[tuple[bool, str, _Tensor, str, str]] = []

    def make(self, names: str, size: int, drop: str = "", *, saved: bool = False) -> None:
        """Tensors of ``size`` bytes each, which autograd may have ``saved``; then ``drop``."""
        for name in names.split():
            self.make_of_model(f"{self.where}/{name}", size, saved=saved)
        self.drop(drop)

    def make_of_model(self, name: str, size: int, drop: str = "", *, saved: bool = False) -> None:
        tensor = self.alive[name] = _Tensor(size, saved and self.saves, self.phase)
        self._played.append((True, name, tensor, self.phase, self.kernel))
        self.drop(drop)

    def drop(self, names: str) -> None:
        """The last use of those that are there; some are made in 16 bits alone."""
        for name in names.split():
            name = f"{self.where}/{name}" if f"{self.where}/{name}" in self.alive else name
            tensor = self.alive.get(name)
            if tensor and not (tensor.saved and self.phase in ("forward", "loss")):
                del self.alive[name]
                tensor.ended = self.phase
                self._played.append((False, name, tensor, self.phase, self.kernel))

    def events(self) -> tuple[Event, ...]:
        # What is left goes when Python lets go of the step's result.
        for name, tensor in self.alive.items():
            if not name.endswith((".m", ".v", ".step", ".grad")):
                self._played.append((False, name, tensor, "", ""))
        return tuple(
            Event(made, name, tensor.bytes, phase, tensor.category(name), kernel)
            for made, name, tensor, phase, kernel in self._played
        )
