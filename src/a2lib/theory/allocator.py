"""What PyTorch's caching allocator reserves for a sequence of tensors, block by block.

After ``c10/cuda/CUDACachingAllocator.cpp``: a request above 1 MiB takes the smallest free block
that holds it, and what is left of that block over 1 MiB stays free as a block of its own. Where
there is none it takes a new segment from the device: 20 MiB for up to 10 MiB, else a multiple of 2
MiB. If the device has none left, segments that are free as a whole go back first. Smaller tensors
are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MIB = 2**20
SMALL, MIDDLE, BUFFER, ROUND = MIB, 10 * MIB, 20 * MIB, 2 * MIB


class OutOfMemory(MemoryError):
    """The device has no segment of the size wanted."""


class Allocator:
    """A device of ``capacity`` bytes, all of it free."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        # A segment is its blocks in order: [size, name of the tensor or None].
        self._segments: list[list[list]] = []

    def allocate(self, name: str, size: int) -> None:
        """Make the tensor ``name``. Raises OutOfMemory."""
        if size <= SMALL:
            return
        found = self._best(size)
        if found is None:
            found = self._segment(size), 0
        blocks, place = found
        rest = blocks[place][0] - size
        if rest > SMALL:
            blocks[place : place + 1] = [[size, name], [rest, None]]
        else:
            blocks[place][1] = name

    def free(self, name: str) -> None:
        """Drop the tensor ``name``, and merge its block with free neighbours."""
        for blocks in self._segments:
            for place, block in enumerate(blocks):
                if block[1] == name:
                    block[1] = None
                    for at in (place, place - 1):
                        if 0 <= at < len(blocks) - 1 and not (blocks[at][1] or blocks[at + 1][1]):
                            blocks[at][0] += blocks.pop(at + 1)[0]
                    return

    def _best(self, size: int) -> tuple[list[list], int] | None:
        fitting = [
            (block[0], number, place)
            for number, blocks in enumerate(self._segments)
            for place, block in enumerate(blocks)
            if block[1] is None and block[0] >= size
        ]
        if not fitting:
            return None
        _, number, place = min(fitting)
        return self._segments[number], place

    def _segment(self, size: int) -> list[list]:
        taken = BUFFER if size < MIDDLE else -(-size // ROUND) * ROUND
        if self.reserved + taken > self.capacity:
            idle = [blocks for blocks in self._segments if len(blocks) == 1 and not blocks[0][1]]
            for blocks in idle:
                self.reserved -= blocks[0][0]
                self._segments.remove(blocks)
        if self.reserved + taken > self.capacity:
            raise OutOfMemory(f"{taken} bytes wanted, {self.capacity - self.reserved} left")
        self.reserved += taken
        self._segments.append([[taken, None]])
        return self._segments[-1]


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
