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


class Allocator:
    """A device of ``capacity`` bytes, all of it free.

    ``reserved`` is what was taken of it, ``allocated`` what the blocks of tensors hold, ``peak``
    the most of that so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak = 0
        self._segments: list[int] = []  # their sizes
        # (size, segment, begin) of each free block, smallest first, the earlier segment before; and
        # each by (segment, begin), and by (segment, end).
        self._free: list[tuple[int, int, int]] = []
        self._begins: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._ends: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._held: dict[str, tuple[int, int, int] | tuple[int]] = {}

    def allocate(self, name: str, size: int) -> None:
        """Make the tensor ``name``. Raises OutOfMemory."""
        size = rounded(size)
        self._held[name] = held = self._block(size) if size > SMALL else (size,)
        self.allocated += held[0]
        self.peak = max(self.peak, self.allocated)

    def free(self, name: str) -> None:
        """Drop the tensor ``name``, and merge its block with free neighbours."""
        size, *place = self._held.pop(name, (0,))
        self.allocated -= size
        if not place:
            return
        segment, begin = place
        if after := self._begins.get((segment, begin + size)):
            size += self._take(after)
        if before := self._ends.get((segment, begin)):
            begin -= before[0]
            size += self._take(before)
        self._put(size, segment, begin)

    def _block(self, size: int) -> tuple[int, int, int]:
        """A block for a tensor: the smallest that holds it, or the begin of a new segment."""
        at = bisect.bisect_left(self._free, (size,))
        found, segment, begin = self._free[at] if at < len(self._free) else self._segment(size)
        self._take((found, segment, begin))
        if found - size <= SMALL:
            return found, segment, begin
        self._put(found - size, segment, begin + size)
        return size, segment, begin

    def _put(self, *block: int) -> tuple[int, int, int]:
        size, segment, begin = block
        bisect.insort(self._free, block)
        self._begins[segment, begin] = self._ends[segment, begin + size] = block
        return block

    def _take(self, block: tuple[int, int, int]) -> int:
        size, segment, begin = block
        del self._free[bisect.bisect_left(self._free, block)]
        del self._begins[segment, begin], self._ends[segment, begin + size]
        return size

    def _segment(self, size: int) -> tuple[int, int, int]:
        taken = BUFFER if size < MIDDLE else -(-size // ROUND) * ROUND
        if self.reserved + taken > self.capacity:
            for block in [one for one in self._free if one[0] == self._segments[one[1]]]:
                self.reserved -= self._take(block)
        if self.reserved + taken > self.capacity:
            raise OutOfMemory(taken, self.capacity - self.reserved)
        self.reserved += taken
        self._segments.append(taken)
        return self._put(taken, len(self._segments) - 1, 0)


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
