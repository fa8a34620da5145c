"""A history of allocations that a person can add up, in the form of torch.cuda.memory._snapshot."""

from a2lib.lab.snapshot import Owner, Phase, read

PHASES = [
    Phase("step 0/forward", 5, 35),
    Phase("step 0/backward", 36, 60),
    Phase("step 0", 5, 61),
]
OWNERS = [
    Owner("parameters", 0, "w", 6),
    Owner("saved for backward", 2048, "ffn", 34),
    Owner("gradients", 1024, "w", 59),
    Owner("parameters", 0, "w", 59),
]


def frame(path: str, line: int, name: str) -> dict:
    return {"filename": path, "line": line, "name": name}


def snapshot() -> dict:
    """Weights of 1000 bytes from before the history; 400 for a moment of the forward, 600 that
    backward needs, then 300 at the address of the 400: 2000 at the most, 1300 at the end."""
    inside = [
        frame("??", 0, "CUDACachingAllocator::allocate(unsigned long)"),
        frame("/x/torch/nn/functional.py", 5, "linear"),
        frame("/home/someone/model/layers.py", 40, "forward"),
    ]
    table = [
        ("segment_alloc", 0, 4096, 9, []), ("alloc", 1024, 400, 10, inside),
        ("alloc", 2048, 600, 20, inside), ("free_requested", 1024, 400, 30, []),
        ("free_completed", 1024, 400, 30, []), ("alloc", 1024, 300, 40, []),
        ("free_requested", 2048, 600, 50, []), ("free_completed", 2048, 600, 51, []),
    ]  # fmt: skip
    names = ("action", "addr", "size", "time_us", "frames")
    trace = [dict(zip(names, event, strict=True)) for event in table]
    blocks = [
        {"address": 0, "state": "active_allocated", "requested_size": 1000},
        {"address": 1024, "state": "active_allocated", "requested_size": 300},
        {"address": 1536, "state": "inactive", "requested_size": 0},
        {"address": 2048, "state": "inactive", "requested_size": 0},
    ]
    return {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [trace, []]}


def recorded():
    return read(snapshot(), PHASES, OWNERS)
