"""Where a training step's memory goes: what the allocator recorded, read by category and phase.

    with Recorder("memory.pickle", "cuda") as recorder:        # before the model is built
        model = build()
        recorder.watch(model, optimizer)
        with recorder.phase("forward"): ...

    snapshot = read("memory.pickle")
    timeline_rows(snapshot)             # some thousand points: time, phase, bytes by category
    largest_rows(peak(snapshot))        # what was alive at the peak, with the line that made it

``python -m a2lib.benchmark --memory-history memory.pickle`` records so; the file is also one that
pytorch.org/memory_viz shows. A pickle of PyTorch's own ``_dump_snapshot`` is read too: it knows no
phases, so that its bytes are "other" unless a line of code gives them away. On a CPU the recorder
counts the storages of tensors and writes the same form. Reading needs no torch.

Sizes are those that tensors asked for; the allocator rounds them up (``requested_bytes`` of its
statistics is the same sum). Times are the host's: it allocates ahead of the GPU.
"""

from a2lib.lab.snapshot.reading import Snapshot, SnapshotError, read
from a2lib.lab.snapshot.recording import Recorder
from a2lib.lab.snapshot.timeline import largest_rows, line_rows, peak, timeline_rows
from a2lib.theory.memory.step import CATEGORIES

__all__ = [
    "CATEGORIES",
    "Recorder",
    "Snapshot",
    "SnapshotError",
    "largest_rows",
    "line_rows",
    "peak",
    "read",
    "timeline_rows",
]
