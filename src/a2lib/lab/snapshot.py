"""Where a step's memory goes: every allocation of a GPU, by category and phase.

    with Recorder() as recorder:                        # before the model is built
        model = build()
        recorder.watch(model, optimizer)
        with recorder.phase("step 0"):
            with recorder.phase("forward"): ...
    recording = recorder.recording
    timeline_rows(recording, "step 0", 1500)    # the bytes of each category over time
    peak(recording, "step 0")                   # the same at the moment of most bytes
    line_rows(recording, "step 0", 20)          # the largest of what each line of code asked for

The history is PyTorch's own (``torch.cuda.memory._snapshot``); the recorder adds what belongs to
whom. Sizes are those that tensors asked for; the allocator rounds them up (``requested_bytes`` of
its statistics is the same sum). Times are the host's: it allocates ahead of the GPU. Recording
slows a process for good: take no times in it. For a picture of any program's own, PyTorch has
``torch.cuda.memory._dump_snapshot`` and pytorch.org/memory_viz.
"""

import contextlib
import math
import re
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple, Self

from a2lib.theory.memory.step import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    SAVED,
    TEMPORARIES,
)

MAX_ENTRIES = 1_000_000
SAVING = ("forward", "loss")  # phases that build a graph
# What belongs to what, most certain first: a tensor that is known by its address; then what was
# freed in the phase that allocated it; then the rest (inputs, workspaces, what nobody named).
OWNED = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED)


class Phase(NamedTuple):
    """A stretch of the recording, in Unix microseconds; "step 0/forward" lies inside "step 0"."""

    name: str
    start_us: float
    end_us: float


NOWHERE = Phase("", -math.inf, -math.inf)


class Owner(NamedTuple):
    """Whose the storage at an address was at some time."""

    category: str
    address: int
    name: str
    time_us: float


@dataclass
class Allocation:
    """Bytes from ``start_us`` to ``end_us``: -inf where they were there before the recording, inf
    where they are there at its end.

    ``phase`` is that of the allocation, "" where unknown; ``name`` of a parameter, or of the module
    that saved it. ``line`` is the line of code nearest to the allocation outside of PyTorch, as
    ``model/layers.py:140 forward``; "" in backward's own thread, which runs no Python.
    """

    address: int
    bytes: int
    start_us: float = -math.inf
    end_us: float = math.inf
    category: str = OTHER
    phase: str = ""
    name: str = ""
    line: str = ""


class Change(NamedTuple):
    """The begin of an allocation, or the end, whose bytes are negative."""

    time_us: float
    allocation: Allocation
    bytes: int


@dataclass(frozen=True)
class Recording:
    """``allocations`` in the order in which they were made, ``changes`` in that of their events.
    ``phases`` come in the order of their ends, inner ones first. ``unexplained_bytes`` is how much
    more (or less) the allocator's blocks hold at the end than the allocations do: 0, unless the
    history lost its beginning."""

    allocations: list[Allocation]
    changes: list[Change]
    phases: list[Phase]
    unexplained_bytes: int

    def phase_at(self, time_us: float) -> Phase:
        """Return the innermost phase at that time; outside of all one without a name."""
        for phase in self.phases:
            if phase.start_us <= time_us <= phase.end_us:
                return phase
        return NOWHERE


class Recorder:
    """Record the allocations of this process's GPU from ``with`` to its end, as ``recording``.

    Enter it before the model is built. ``watch`` names a model's parameters and an optimizer's
    state; ``phase(name)`` brackets a stretch of the step, and what autograd saves in one of
    ``SAVING`` is known as saved for backward. What a checkpoint computes again in backward is
    temporary, as it is freed there.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._phases: list[Phase] = []
        self._owners: list[Owner] = []
        self._model = self._optimizer = None
        self._modules: list[str] = []  # inside of which the forward is
        self._inside: list[str] = []  # phases that are open
        self._kept: list[tuple[str, weakref.ref]] = []

    def __enter__(self) -> Self:
        from torch.cuda import memory

        memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        return self

    def __exit__(self, *failure) -> None:
        from torch.cuda import memory

        snapshot = memory._snapshot()
        memory._record_memory_history(enabled=None)
        self._model = self._optimizer = None  # a run gives its memory back
        self.recording = read(snapshot, self._phases, self._owners)

    def watch(self, model, optimizer=None) -> None:
        """Know what this model and this optimizer hold, from now on at the end of every phase; what
        is saved has the name of its module, by hooks on each."""
        self._model, self._optimizer = model, optimizer
        follow(model, self._modules)
        self._look()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        self._inside.append(name)
        path, start = "/".join(self._inside), _now()
        try:
            with contextlib.ExitStack() as stack:
                if self._model is not None and name in SAVING:
                    stack.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
                yield
                self._look()
        finally:
            self._inside.pop()
            self._phases.append(Phase(path, start, _now()))

    def _saved(self, tensor):
        # Looked at when the phase ends: holding the tensor would change what is measured.
        name = self._modules[-1] if self._modules else ""
        self._kept.append((name, weakref.ref(tensor.untyped_storage())))
        # Without its graph: where no backward comes, a result that its own operation keeps would
        # never be freed.
        return tensor.detach()

    def _own(self, category: str, name: str, storage) -> None:
        if storage.nbytes():
            self._owners.append(Owner(category, storage.data_ptr(), name, _now()))

    def _look(self) -> None:
        if self._model is None:
            return
        for name, reference in self._kept:
            storage = reference()
            if storage is not None:
                self._own(SAVED, name, storage)
        self._kept.clear()
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        for name, tensor in tensors:
            self._own(PARAMETERS, name, tensor.untyped_storage())
            if tensor.grad is not None:
                self._own(GRADIENTS, name, tensor.grad.untyped_storage())
        if self._optimizer is None:
            return
        names = {tensor: name for name, tensor in tensors}
        for parameter, state in self._optimizer.state.items():
            for key, tensor in state.items():
                if hasattr(tensor, "untyped_storage"):
                    name = f"{names.get(parameter, '')} {key}".strip()
                    self._own(OPTIMIZER, name, tensor.untyped_storage())


def _now() -> int:
    return time.time_ns() // 1000


def follow(model, inside: list[str]) -> list:
    """Hooks by which ``inside`` has the names of the modules that are being called, the innermost
    last; to be removed by the caller."""

    def leave(*_) -> None:
        inside.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
            module.register_forward_hook(leave, always_call=True),
        ]
    return hooks


def read(snapshot: dict, phases: Iterable[Phase] = (), owners: Iterable[Owner] = ()) -> Recording:
    """Return the allocations in what ``torch.cuda.memory._snapshot`` gives, of the device with the
    most events, with the categories that ``owners`` tell. Raises ValueError for a history that lost
    its beginning."""
    traces = snapshot["device_traces"]
    device = max(range(len(traces)), key=lambda i: len(traces[i]))
    events = traces[device]
    if len(events) >= MAX_ENTRIES:
        raise ValueError(f"the history is full ({MAX_ENTRIES} entries) and has lost its beginning")
    blocks = []
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            blocks += [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    recording = _replay(events, blocks, list(phases))
    _categorise(recording, owners)
    return recording


def _replay(events: list[dict], blocks: list[dict], phases: list[Phase]) -> Recording:
    """Return what was allocated and freed, of no category yet."""
    before: list[Allocation] = []
    recorded: list[Allocation] = []
    changes: list[Change] = []
    alive: dict[int, Allocation] = {}
    for event in events:
        address, time_us = event["addr"], float(event["time_us"])
        if event["action"] == "alloc":
            allocation = Allocation(address, event["size"], time_us)
            allocation.line = _line(event.get("frames", ()))
            recorded.append(allocation)
            alive[address] = allocation
            changes.append(Change(time_us, allocation, allocation.bytes))
        # A block that another stream still uses is freed at "free_completed"; nobody holds it then.
        elif event["action"] == "free_requested":
            allocation = alive.pop(address, None)
            if allocation is None:
                allocation = Allocation(address, event["size"])
                before.append(allocation)
            allocation.end_us = time_us
            changes.append(Change(time_us, allocation, -allocation.bytes))
    unexplained = 0
    for block in blocks:
        allocation = alive.get(block["address"])
        if allocation is None:
            allocation = Allocation(block["address"], block["requested_size"])
            allocation.line = _line(block.get("frames", ()))
            before.append(allocation)
            alive[allocation.address] = allocation
        unexplained += block["requested_size"]
    for allocation in alive.values():
        unexplained -= allocation.bytes
    return Recording(before + recorded, changes, phases, unexplained)


def _line(frames: Iterable[dict]) -> str:
    """Return the innermost frame of Python code that is neither PyTorch's nor without a file."""
    for frame in frames:
        path = PurePosixPath(frame["filename"])
        is_torchs = "torch" in path.parts or path.name == "contextlib.py"
        if path.suffix == ".py" and not is_torchs:
            return f"{'/'.join(path.parts[-2:])}:{frame['line']} {frame['name']}"
    return ""


def _categorise(recording: Recording, owners: Iterable[Owner]) -> None:
    seen: dict[int, list[Owner]] = defaultdict(list)
    for owner in owners:
        seen[owner.address].append(owner)
    for address_owners in seen.values():
        address_owners.sort(key=lambda owner: (OWNED.index(owner.category), owner.time_us))
    for allocation in recording.allocations:
        phase = recording.phase_at(allocation.start_us)
        allocation.phase = phase.name
        if allocation.end_us <= phase.end_us:
            allocation.category = TEMPORARIES
        for owner in seen[allocation.address]:
            if allocation.start_us <= owner.time_us <= allocation.end_us:
                allocation.category, allocation.name = owner.category, owner.name
                break


class State(NamedTuple):
    """Bytes by category at a time."""

    time_us: float
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def _states(recording: Recording) -> list[State]:
    """Return the state before the first change, and that after each."""
    now = dict.fromkeys(CATEGORIES, 0)
    for allocation in recording.allocations:
        if allocation.start_us == -math.inf:
            now[allocation.category] += allocation.bytes
    start_us = recording.changes[0].time_us if recording.changes else 0.0
    states = [State(start_us, dict(now))]
    for change in recording.changes:
        now[change.allocation.category] += change.bytes
        states.append(State(change.time_us, dict(now)))
    return states


def _inside(recording: Recording, states: list[State], name: str) -> list[State]:
    """Return the states of the phase, from what was there when it began."""
    [phase] = [phase for phase in recording.phases if phase.name == name]
    before, inside = [], []
    for state in states:
        if state.time_us < phase.start_us:
            before = [state._replace(time_us=phase.start_us)]
        elif state.time_us <= phase.end_us:
            inside.append(state)
    return before + inside


def peak(recording: Recording, phase: str) -> dict[str, int]:
    """Return the bytes of each of `CATEGORIES` at the moment of most bytes in a phase, "step 0" or
    "step 0/forward"; the first of equals."""
    states = _inside(recording, _states(recording), phase)
    return max(states, key=lambda state: state.total).bytes


def timeline_rows(recording: Recording, phase: str, points: int) -> list[dict[str, object]]:
    """Return the bytes of each of `CATEGORIES` over time in a phase, as rows of the bulk table
    `memory`: at most `points` in order of time, from the recording's first event, the true peak
    among them.

    Events are cut into bins of equal number, of which the first, the least, the most and the last
    state is kept.
    """
    every = _states(recording)
    start = every[0].time_us
    states = _inside(recording, every, phase)
    size = max(1, math.ceil(len(states) / (points // 4)))
    rows = []
    for first in range(0, len(states), size):
        numbers = range(first, min(first + size, len(states)))
        least = min(numbers, key=lambda i: states[i].total)
        most = max(numbers, key=lambda i: states[i].total)
        for i in sorted({numbers[0], least, most, numbers[-1]}):
            time_us = states[i].time_us
            row = {"time_us": round(time_us - start), "phase": recording.phase_at(time_us).name}
            rows.append(row | states[i].bytes)
    return rows


def line_rows(recording: Recording, phase: str, n: int) -> list[dict[str, object]]:
    """Return the n largest of what a phase (and those inside it) asked for, as rows of the bulk
    table `lines`: equal sizes of one line of code, category and phase in one row. Where backward's
    thread has no line, what saved it or owns it tells them apart, blocks taken together.
    """
    counts: Counter[tuple] = Counter()
    for a in recording.allocations:
        if f"{a.phase}/".startswith(f"{phase}/"):
            innermost = a.phase.rpartition("/")[2]
            name = re.sub(r"\b\d+\b", "*", a.name)
            counts[a.bytes, a.category, innermost, name, a.line] += 1
    ranked = sorted(counts.items(), key=lambda item: (-item[0][0], -item[1], item[0][2:]))
    rows = []
    for (size, category, innermost, name, line), count in ranked[:n]:
        row = {"bytes": size, "count": count, "category": category}
        rows.append(row | {"phase": innermost, "name": name, "line": line})
    return rows
