"""What PyTorch's caching allocator reserves for a sequence of tensors, block by block.

After ``c10/cuda/CUDACachingAllocator.cpp``: a request above 1 MiB takes the smallest free block
that holds it, and what is left of that block over 1 MiB stays free as a block of its own; less is
part of the tensor's block, and counts as allocated. Where there is none it takes a new segment from
the device: 20 MiB for up to 10 MiB, else a multiple of 2 MiB. If the device has none left, segments
that are free as a whole go back first. Smaller tensors take no block here; they count in steps of
512 bytes.
"""

import bisect
from collections.abc import Iterable, Mapping

MIB = 2**20
SMALL, MIDDLE, BUFFER, ROUND = MIB, 10 * MIB, 20 * MIB, 2 * MIB
STEP = 512  # sizes are rounded up to a multiple


def rounded(size: int) -> int:
    """Bytes as the allocator counts them."""
    return -(-size // STEP) * STEP


class OutOfMemory(MemoryError):
    """The device has no segment of ``wanted`` bytes."""

    def __init__(self, wanted: int, left: int) -> None:
        super().__init__(f"{wanted} bytes wanted, {left} left")
        self.wanted = wanted


class _Block:
    """A stretch of a segment, between its neighbours there."""

    __slots__ = ("size", "place", "free", "before", "after")

    def __init__(self, size: int, place: tuple[int, int], before=None, after=None):
        self.size, self.place, self.free = size, place, True
        self.before, self.after = before, after


class Allocator:
    """A device of ``capacity`` bytes, all of it free.

    ``reserved`` is what was taken of it, ``allocated`` what the blocks of tensors hold, ``peak``
    the most of that so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak = 0
        # (size, place) of each free block, smallest first, the earlier segment before.
        self._free: list[tuple[int, tuple[int, int]]] = []
        self._at: dict[tuple[int, int], _Block] = {}
        self._held: dict[str, tuple[int, _Block | None]] = {}
        self._segments = 0

    def allocate(self, name: str, size: int) -> None:
        """Make the tensor ``name``. Raises OutOfMemory."""
        size = rounded(size)
        block = None
        if size > SMALL:
            block = self._best(size) or self._segment(size)
            rest = block.size - size
            if rest > SMALL:
                start, offset = block.place
                block.size = size
                after = _Block(rest, (start, offset + size), block, block.after)
                if block.after is not None:
                    block.after.before = after
                block.after = after
                self._put(after)
            block.free, size = False, block.size
        self._held[name] = size, block
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def free(self, name: str) -> None:
        """Drop the tensor ``name``, and merge its block with free neighbours."""
        size, block = self._held.pop(name, (0, None))
        self.allocated -= size
        if block is None:
            return
        block.free = True
        for other in (block.after, block.before):
            if other is not None and other.free:
                self._take(other)
                first, second = (block, other) if other is block.after else (other, block)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block)

    def _best(self, size: int) -> _Block | None:
        at = bisect.bisect_left(self._free, (size, (0, 0)))
        return self._at.pop(self._free.pop(at)[1]) if at < len(self._free) else None

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free, (block.size, block.place))
        self._at[block.place] = block

    def _take(self, block: _Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.size, block.place))]
        del self._at[block.place]

    def _segment(self, size: int) -> _Block:
        taken = BUFFER if size < MIDDLE else -(-size // ROUND) * ROUND
        if self.reserved + taken > self.capacity:
            idle = [b for b in self._at.values() if b.before is None and b.after is None]
            for block in idle:
                self.reserved -= block.size
                self._take(block)
        if self.reserved + taken > self.capacity:
            raise OutOfMemory(taken, self.capacity - self.reserved)
        self.reserved += taken
        self._segments += 1
        return _Block(taken, (self._segments, 0))


def fits(capacity: int, moments: Iterable[Mapping[str, int]]) -> bool:
    """Whether tensors that live as ``moments`` say, name to bytes during each step, all get blocks:
    a step first drops what does not live in it, then makes in order what is new."""
    device, live = Allocator(capacity), {}
    try:
        for moment in moments:
            for name in live.keys() - moment.keys():
                device.free(name)
            for name, size in moment.items():
                if name not in live:
                    device.allocate(name, size)
            live = dict(moment)
    except OutOfMemory:
        return False
    return True
