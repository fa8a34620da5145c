"""Tensors as they are made and dropped, each with what a memory snapshot would call it, and the
kernels that make them."""

from dataclasses import dataclass

from a2lib.theory.roofline import Kernel

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, TEMPORARIES, OTHER = "saved for backward", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES, OTHER)
STATE = (".grad", ".m", ".v", ".step")  # how the names end of what outlives a step


@dataclass(slots=True)
class Event:
    """A tensor of so many ``bytes`` is made in ``phase``, or dropped if not ``made``. ``category``
    is what a snapshot would call it (``a2lib.lab.snapshot``), ``kernel`` the part of a block's
    backward that the event belongs to."""

    made: bool
    name: str
    bytes: int
    phase: str
    category: str
    kernel: str


class Tape:
    """Tensors made and dropped. A name is one of ``where`` the step is ("0a": the attention of
    block 0), but that of a parameter and of what a half of a block hands on is the model's.

    Kernels are kept where ``blocks`` is not 0: those of a ``block``, with which the names of its
    parameters begin, are so many. ``given`` has the bytes of what they read beside tensors.
    """

    def __init__(self, saves: bool, blocks: int = 0) -> None:
        self.saves, self.phase, self.where, self.kernel = saves, "forward", "", ""
        self.alive: dict[str, Event] = {}  # as they were made
        self._played: list[Event] = []
        self.blocks, self.block, self.part = blocks, "", "elementwise"
        self.given: dict[str, int] = {}
        self.kernels: list[Kernel] = []

    def make(self, names: str, of: str | None, size: int, drop: str = "", **how: int) -> None:
        """Tensors of ``size`` bytes each, in a kernel each unless ``of`` is None; then ``drop``."""
        each = of and of.split(", ")
        for i, name in enumerate(names.split()):
            one = each[i % len(each)] if each else of
            self.make_of_model(f"{self.where}/{name}", one, size, **how)
        self.drop(drop)

    def make_of_model(
        self,
        name: str,
        of: str | None,
        size: int,
        drop: str = "",
        *,
        saved: bool = False,
        flops: int = 0,
    ) -> None:
        """One, which autograd may have ``saved``, of a product of so many ``flops``."""
        if of is not None:
            self.launch(name, of, size, flops)
        category = SAVED if saved and self.saves else OTHER
        if name.endswith(STATE):
            category = GRADIENTS if name.endswith(".grad") else OPTIMIZER
        made = self.alive[name] = Event(True, name, size, self.phase, category, self.kernel)
        self._played.append(made)
        self.drop(drop)

    def launch(self, name: str, of: str, written: int, flops: int = 0) -> None:
        """A kernel that reads what it is ``of``, and writes so many bytes."""
        if not self.blocks:
            return
        part = "products" if flops and self.part == "elementwise" else self.part
        moved = sum(map(self.bytes, of.split())), written
        count, name = self.blocks if self.block else 1, name.rpartition("/")[2]
        self.kernels.append(Kernel(self.phase, part, name, *moved, flops, count))

    def bytes(self, name: str) -> int:
        made = self.alive.get(f"{self.where}/{name}") or self.alive.get(name)
        return made.bytes if made else self.given.get(name) or self.given[self.block + name]

    def drop(self, names: str) -> None:
        """The last use of those that are there; some are made in 16 bits alone."""
        alive, phase = self.alive, self.phase
        for name in names.split():
            here = f"{self.where}/{name}"
            name = here if here in alive else name
            made = alive.get(name)
            if made and not (made.category == SAVED and phase in ("forward", "loss")):
                if made.category == OTHER and made.phase == phase:
                    made.category = TEMPORARIES
                self._end(alive.pop(name), phase, self.kernel)

    def _end(self, made: Event, phase: str, kernel: str) -> None:
        self._played.append(Event(False, made.name, made.bytes, phase, made.category, kernel))

    def events(self) -> tuple[Event, ...]:
        # What is left goes when Python lets go of the step's result.
        for name, made in self.alive.items():
            if not name.endswith(STATE):
                self._end(made, "", "")
        return tuple(self._played)
