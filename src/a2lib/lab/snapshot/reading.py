"""Read the allocator's pickle into allocations with a beginning, an end and a category."""

import functools
import io
import math
import pickle
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from a2lib.errors import OneLine
from a2lib.theory.memory.step import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, SAVED, TEMPORARIES

NOTES = "a2lib"  # key of the recorder's notes in the pickle's dictionary
# What belongs to what, most certain first: a tensor that is known by its address; then what was
# freed in the phase that allocated it; then the rest (inputs, workspaces, what nobody named).
_OWNED = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED)


class SnapshotError(OneLine, ValueError):
    """The file is no snapshot of PyTorch's allocator; the message is one line and says why."""


@dataclass
class Allocation:
    """Bytes from ``start_us`` to ``end_us``, Unix microseconds: -inf where they were there before
    the recording, inf where they are there at its end. ``first`` and ``last`` are the numbers of
    those events, which tell the order within one microsecond.

    ``phase`` is that of the allocation, "" where unknown; ``name`` of a parameter, or of the module
    that saved it. ``line`` is the line of code nearest to the allocation outside of PyTorch, as
    ``model/layers.py:140 forward``; "" in backward's own thread, which runs no Python.
    """

    address: int
    bytes: int
    start_us: float
    end_us: float = math.inf
    category: str = OTHER
    phase: str = ""
    name: str = ""
    line: str = ""
    first: int = -1
    last: float = math.inf


@dataclass(frozen=True)
class Phase:
    """A stretch of the recording by name, in Unix microseconds; one may lie inside another."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Snapshot:
    """``allocations`` in the order in which they were made. ``unexplained_bytes`` is how much more
    (or less) the allocator's blocks hold at the end than the allocations do: 0, unless the history
    lost its beginning."""

    allocations: list[Allocation]
    phases: list[Phase]
    unexplained_bytes: int

    def phase_at(self, time_us: float) -> str:
        """The innermost phase at that time; "" outside of all."""
        inside = [p for p in self.phases if p.start_us <= time_us <= p.end_us]
        return min(inside, key=lambda p: p.end_us - p.start_us).name if inside else ""


def read(path: str | Path) -> Snapshot:
    """The snapshot in ``path``, of the device with the most events.

    The pickle is read without running code: one that asks for any is refused. Raises SnapshotError
    for what is no snapshot or lost its beginning, OSError where there is no such file.
    """
    content = Path(path).read_bytes()
    try:
        return _snapshot(_unpickled(content))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        reason = error
        if not isinstance(error, SnapshotError):
            lacks = "it lacks " if isinstance(error, KeyError) else ""
            reason = f"no snapshot of PyTorch's allocator: {lacks}{error}"
        raise SnapshotError(f"{path}: {reason}") from None


class _Plain(pickle.Unpickler):
    """Containers, text and numbers alone; anything else in a pickle is a function to call."""

    def find_class(self, module: str, name: str):
        raise SnapshotError(f"asks for {module}.{name}; a snapshot holds plain data alone")


def _unpickled(content: bytes) -> object:
    try:
        return _Plain(io.BytesIO(content)).load()
    except SnapshotError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        kind = type(error).__name__
        raise SnapshotError(f"no pickle, or one cut short ({kind})") from None


def _snapshot(found) -> Snapshot:
    traces = found["device_traces"]
    if not traces or not any(traces):
        raise SnapshotError("no event was recorded; call _record_memory_history first")
    device = max(range(len(traces)), key=lambda i: len(traces[i]))
    notes = found.get(NOTES, {})
    events, most = traces[device], notes.get("max_entries")
    if most is not None and len(events) >= most:
        raise SnapshotError(f"the history is full ({most} entries) and has lost its beginning")
    segments = [s for s in found["segments"] if s.get("device", device) == device]
    blocks = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    allocations, open_bytes = _replay(events, blocks)
    if not allocations:
        raise SnapshotError("no allocation was recorded; call _record_memory_history first")
    phases = [Phase(str(name), float(a), float(b)) for name, a, b in notes.get("phases", ())]
    snapshot = Snapshot(
        allocations, phases, sum(block["requested_size"] for block in blocks) - open_bytes
    )
    _categorise(snapshot, notes.get("owners", ()))
    return snapshot


def _replay(events: list[dict], blocks: list[dict]) -> tuple[list[Allocation], int]:
    """The allocations, and the bytes of those without an end."""
    made: list[Allocation] = []
    before: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    for number, event in enumerate(events):
        action = event["action"]
        if action == "alloc":
            one = Allocation(event["addr"], event["size"], float(event["time_us"]))
            one.first, one.line = number, _line(event.get("frames", ()))
            made.append(one)
            alive[one.address] = one
        # A block that another stream still uses is freed at "free_completed"; nobody holds it then.
        elif action == "free_requested":
            one = alive.pop(event["addr"], None)
            if one is None:
                one = Allocation(event["addr"], event["size"], -math.inf)
                before.append(one)
            one.end_us, one.last = float(event["time_us"]), number
    for block in blocks:
        if block["address"] not in alive:
            one = Allocation(block["address"], block["requested_size"], -math.inf)
            one.line = _line(block.get("frames", ()))
            before.append(one)
            alive[one.address] = one
    return before + made, sum(one.bytes for one in alive.values())


def _line(frames) -> str:
    """The innermost frame of Python code that is neither PyTorch's nor without a file."""
    for frame in frames:
        if file := _own_file(str(frame["filename"])):
            return f"{file}:{frame['line']} {frame['name']}"
    return ""


@functools.lru_cache(maxsize=65_536)
def _own_file(name: str) -> str:
    """The last two parts of the path of such code, "" for other."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.suffix == ".py" and "torch" not in path.parts and "contextlib.py" != path.name:
        return "/".join(path.parts[-2:])
    return ""


def _categorise(snapshot: Snapshot, owners) -> None:
    """By the recorder's notes: (category, address, name, when it was seen there)."""
    seen: dict[int, list[tuple[float, str, str]]] = defaultdict(list)
    for category, address, name, time_us in owners:
        seen[address].append((float(time_us), category, str(name)))
    for notes in seen.values():
        notes.sort()
    for one in snapshot.allocations:
        one.phase = snapshot.phase_at(one.start_us)
        notes = seen.get(one.address, [])
        first = bisect_left(notes, (one.start_us,))
        held = [note for note in notes[first:] if note[0] <= one.end_us]
        if held:
            _, one.category, one.name = min(held, key=lambda note: _OWNED.index(note[1]))
        elif any(
            p.name == one.phase and p.start_us <= one.start_us and one.end_us <= p.end_us
            for p in snapshot.phases
        ):
            one.category = TEMPORARIES
