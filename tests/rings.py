"""Rings of devices that are run round by round, beside which the closed forms are held."""

from collections.abc import Sequence
from itertools import pairwise


class RingRun:
    """A ring of ``n`` devices, run round by round.

    results: the tensor with which each device ended
    sent: elements that each device sent
    rounds: rounds, in each of which every device hands a message to the next
    elements: elements that passed one link, counting the longest message of each round; times
        the bytes per element over the bandwidth this is the time
    """

    def __init__(self, n: int):
        self.n, self.sent, self.rounds, self.elements = n, [0] * n, 0, 0
        self.results: list[list] = []

    def pass_on(self, messages: Sequence[Sequence]) -> list[list]:
        """Send ``messages[i]`` from device i to device i + 1; return what each device receives."""
        for i, message in enumerate(messages):
            self.sent[i] += len(message)
        self.rounds += 1
        self.elements += max(map(len, messages))
        return [list(messages[i - 1]) for i in range(self.n)]


def run_all_reduce(tensors: Sequence[Sequence]) -> RingRun:
    """Run the ring all-reduce of one tensor per device, in chunks: reduce-scatter, all-gather.

    Chunks differ by one element at most where the length is no multiple of the devices.
    """
    n = len(tensors)
    ring, length = RingRun(n), len(tensors[0])
    bounds = [length * k // n for k in range(n + 1)]
    chunks = []
    for tensor in tensors:
        chunks.append([list(tensor[start:end]) for start, end in pairwise(bounds)])
    # The reduce-scatter: device i ends with the sum of chunk i + 1.
    for step in range(n - 1):
        received = ring.pass_on([chunks[i][(i - step) % n] for i in range(n)])
        for i, message in enumerate(received):
            k = (i - 1 - step) % n
            chunks[i][k] = [a + b for a, b in zip(chunks[i][k], message, strict=True)]
    # The all-gather.
    for step in range(n - 1):
        received = ring.pass_on([chunks[i][(i + 1 - step) % n] for i in range(n)])
        for i, message in enumerate(received):
            chunks[i][(i - step) % n] = message
    for of_device in chunks:
        ring.results.append([x for chunk in of_device for x in chunk])
    return ring


def run_alternate(tensors: Sequence[Sequence]) -> RingRun:
    """Run the handout's other ring: each device passes on the tensor that it received last, its
    own first, and adds what comes in."""
    n = len(tensors)
    ring = RingRun(n)
    sums = [list(t) for t in tensors]
    held = [list(t) for t in tensors]
    for _ in range(n - 1):
        held = ring.pass_on(held)
        for i, received in enumerate(held):
            sums[i] = [a + b for a, b in zip(sums[i], received, strict=True)]
    ring.results = sums
    return ring
