"""What a training step takes: the peak of its tensors, and of the allocator's blocks for them.

    step = StepMemory(SIZES["2.7B"], batch=4, context=512)
    peak(step).total                   # of tensors; .by_category
    asked(step)                        # with cuBLAS's workspaces
    replay(step).peak                  # what torch.cuda.max_memory_allocated() says of that step
    replay(step, capacity=80 * 10**9)  # OutOfMemory if that is too few

``StepMemory`` is of ``tensors.py``, which has every tensor; beyond them a GPU holds cuBLAS's
workspaces, and what is left of a block that is not worth splitting (``allocator.py``). Steps with
checkpoints are those of ``strategies.py``.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from a2lib.theory.memory.allocator import Allocator
from a2lib.theory.memory.operations import FIRST_PRODUCTS
from a2lib.theory.memory.tape import OTHER
from a2lib.theory.memory.tensors import StepMemory
from a2lib.theory.products import check_name

WORKSPACE = 32 * 2**20  # of cuBLAS for one thread and stream, on Hopper


@dataclass(frozen=True)
class Peak:
    """The first moment of most bytes: its phase, bytes by category, and the tensors that the step
    has made and not dropped, name -> bytes. To be read only: who asks again gets the same."""

    phase: str
    by_category: dict[str, int]
    made: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@lru_cache(maxsize=512)
def peak(step: StepMemory, phase: str | None = None) -> Peak:
    """The peak of what tensors hold, of the whole step or of one phase. Raises ValueError, naming
    those there are, for a phase that the step does not have."""
    events = step.events()
    totals = list(accumulate(e.bytes if e.made else -e.bytes for e in events))
    allowed = (i for i, e in enumerate(events) if e.made and phase in (None, e.phase))
    at = max(allowed, key=totals.__getitem__, default=None)
    if at is None:
        check_name("phase", phase, dict.fromkeys(e.phase for e in events if e.phase))
    now, live = step.standing(), {}
    for event in events[: at + 1]:
        now[event.category] += event.bytes if event.made else -event.bytes
        if event.made:
            live[event.name] = event.bytes
        else:
            del live[event.name]
    return Peak(event.phase, now, live)


@lru_cache(maxsize=512)
def asked(step: StepMemory) -> int:
    """Bytes that a GPU's allocator has been asked for at the peak: those of tensors and of cuBLAS's
    workspaces, one for each thread that has multiplied by then, whatever the precision: the
    backward's comes behind the gradient of the logits, which may be the peak of a first step. A
    process that has captured a step keeps as many for the capture's stream."""
    threads = ["forward"] if step.mode in ("inference", "forward") else ["forward", "backward"]
    multiplied = set() if step.first else set(threads)
    total, most = sum(step.standing().values()), 0
    for event in step.events():
        if event.made and event.name in FIRST_PRODUCTS:
            multiplied.add(event.phase)
        total += event.bytes if event.made else -event.bytes
        most = max(most, total + len(multiplied) * WORKSPACE)
    return most


def replay(step: StepMemory, steps: int = 2, capacity: int = 2**62) -> Allocator:
    """A run of so many steps, block by block: the model is built, then each step is played.

    The allocator's ``peak`` is that of the last step, cuBLAS's workspaces among it. Raises
    allocator.OutOfMemory, with the segment ``wanted``, where ``capacity`` bytes are too few.
    """
    device = Allocator(capacity)
    for name, size in step.parameters().items():
        device.allocate(name, size)
    for size in step.parameters().values():
        if size > 4 * step.shape.d_model:  # drawn in a tensor of its own, then copied
            device.allocate("drawn", size)
            device.free("drawn")
    device.allocate("tables", 4 * step.context * step.shape.head_dim)
    device.allocate("batch", step.standing()[OTHER])
    multiplied: set[str] = set()  # the phases whose threads have their workspaces
    for number in range(steps):
        device.peak = device.allocated
        for event in dataclasses.replace(step, first=number == 0).events():
            if not event.made:
                device.free(event.name)
                continue
            device.allocate(event.name, event.bytes)
            if event.name in FIRST_PRODUCTS and event.phase not in multiplied:
                multiplied.add(event.phase)
                device.allocate(f"workspace of {event.phase}", WORKSPACE)
    return device
