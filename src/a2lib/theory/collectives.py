"""Collectives on a ring: their times in closed form, and the same rings run round by round.

The model is that of the handout of 2026: N devices in a ring, each of which can send W bytes per
second and receive as many at the same time; a message costs its bytes over W and no latency. Sizes
are bytes of the *whole* tensor: that of every device after an all-gather, before a reduce-scatter,
and in an all-reduce. Thakur, Rabenseifner and Gropp (2005) and Patarasuk and Yuan (2009)
give the ring algorithms and show that no all-reduce sends fewer than 2 (N - 1) / N of the tensor.

The formulas are arithmetic alone, so that they take sympy's symbols as well as numbers.
"""

from collections.abc import Sequence
from itertools import pairwise


def positive(**numbers) -> None:
    """Raise ValueError for a number that is not above 0. Other values (symbols) pass."""
    for name, value in numbers.items():
        if isinstance(value, int | float) and (isinstance(value, bool) or not value > 0):
            raise ValueError(f"{name} is {value!r}; allowed are numbers above 0")


def all_gather_s(size, n, bandwidth):
    """Return the seconds of a ring all-gather that ends with ``size`` bytes on each of ``n``
    devices, which send ``bandwidth`` bytes per second.

    A reduce-scatter takes as long, and so does an all-to-all in which each device sends an equal
    part of its ``size`` bytes to every other, over links between all pairs. Raises ValueError
    unless all three are above 0.
    """
    positive(size=size, n=n, bandwidth=bandwidth)
    return (n - 1) * size / (n * bandwidth)


def all_reduce_s(size, n, bandwidth):
    """Return the seconds of a ring all-reduce of ``size`` bytes: a reduce-scatter, then an
    all-gather."""
    return 2 * all_gather_s(size, n, bandwidth)


def alternate_all_reduce_s(size, n, bandwidth):
    """Return the seconds of the handout's other ring, in which whole tensors travel: N - 1 rounds
    of ``size`` bytes."""
    positive(size=size, n=n, bandwidth=bandwidth)
    return (n - 1) * size / bandwidth


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


def _equal_tensors(tensors: Sequence[Sequence]) -> int:
    """Return the number of devices. Raises ValueError unless every device has as many elements."""
    if not tensors or len({len(t) for t in tensors}) != 1 or not tensors[0]:
        raise ValueError("allowed are one or more tensors of one length above 0, one per device")
    return len(tensors)


def run_all_reduce(tensors: Sequence[Sequence]) -> RingRun:
    """Run the ring all-reduce of one tensor per device, in chunks: reduce-scatter, all-gather.

    Chunks differ by one element at most where the length is no multiple of the devices. Raises
    ValueError for tensors of unequal lengths.
    """
    n = _equal_tensors(tensors)
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
    own first, and adds what comes in. Raises ValueError for tensors of unequal lengths."""
    n = _equal_tensors(tensors)
    ring = RingRun(n)
    sums = [list(t) for t in tensors]
    held = [list(t) for t in tensors]
    for _ in range(n - 1):
        held = ring.pass_on(held)
        for i, received in enumerate(held):
            sums[i] = [a + b for a, b in zip(sums[i], received, strict=True)]
    ring.results = sums
    return ring
