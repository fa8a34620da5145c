"""Collectives on a ring: their times in closed form, and the same rings run step by step.

The model is that of the handout of 2026: N devices in a ring, each of which can send W bytes a
second and receive as many at the same time; a message costs its bytes over W and no latency. Sizes
are bytes of the *whole* tensor: what an all-gather ends with, a reduce-scatter starts with, and an
all-reduce has on every device. Thakur, Rabenseifner and Gropp (2005) and Patarasuk and Yuan (2009)
give the ring algorithms and show that no all-reduce sends fewer than 2 (N - 1) / N of the tensor.

The formulas are arithmetic alone, so that they take sympy's symbols as well as numbers.
"""

from collections.abc import Sequence


def positive(**given) -> None:
    """Raise ValueError for a number that is not above 0; what is no number passes unseen."""
    for name, value in given.items():
        if isinstance(value, int | float) and (isinstance(value, bool) or not value > 0):
            raise ValueError(f"{name} is {value!r}; allowed are numbers above 0")


def all_gather_s(size, n, bandwidth):
    """Seconds of a ring all-gather that ends with ``size`` bytes on each of ``n`` devices, which
    send ``bandwidth`` bytes a second; of a reduce-scatter, which is its rounds in reverse; and of
    an all-to-all, in which each sends an equal part of its ``size`` bytes to every other, over a
    switch or links between all pairs. Raises ValueError unless all are above 0."""
    positive(size=size, n=n, bandwidth=bandwidth)
    return (n - 1) * size / (n * bandwidth)


def all_reduce_s(size, n, bandwidth):
    """Seconds of a ring all-reduce of ``size`` bytes: a reduce-scatter, then an all-gather."""
    return 2 * all_gather_s(size, n, bandwidth)


def copied_bytes(elements, n, width, sent):
    """Bytes read and written in the memory of each of ``n`` GPUs by an all-reduce through copy
    engines (parallel/copy_engines.py) of gradients of ``width`` bytes an element, which travel in
    ``sent``: by the parts written to their owners, the means written to all, and kernels.
    """
    positive(elements=elements, n=n, width=width, sent=sent)
    own, others = elements / n, elements * (n - 1) / n
    travels = 2 * others * sent  # read here and written there; as much comes from there
    summed = own * width + others * sent + own * sent
    # There and back, where gradients travel in another dtype.
    casts = 2 * others * (width + sent) + own * width if sent != width else 0
    return 2 * travels + summed + casts


def alternate_all_reduce_s(size, n, bandwidth):
    """Seconds of the handout's other ring: whole tensors go round, N - 1 rounds of ``size``."""
    positive(size=size, n=n, bandwidth=bandwidth)
    return (n - 1) * size / bandwidth


class RingRun:
    """What a ring of ``n`` mailboxes did: the tensor each device ended with (``results``), elements
    that each ``sent``, and ``rounds``, in which each hands a message to the device after it.

    ``elements`` is the number of elements that pass one link one after another, the longest
    message of each round; times bytes an element over the bandwidth it is the time.
    """

    def __init__(self, n: int):
        self.n, self.sent, self.rounds, self.elements = n, [0] * n, 0, 0
        self.results: list[list] = []

    def pass_on(self, messages: Sequence[Sequence]) -> list[list]:
        """What each device receives when device i sends ``messages[i]`` to device i + 1."""
        for i, message in enumerate(messages):
            self.sent[i] += len(message)
        self.rounds += 1
        self.elements += max(map(len, messages))
        return [list(messages[i - 1]) for i in range(self.n)]


def _equal_tensors(tensors: Sequence[Sequence]) -> int:
    """The number of devices; raises ValueError unless every device has as many elements."""
    if not tensors or len({len(t) for t in tensors}) != 1 or not tensors[0]:
        raise ValueError("allowed are one or more tensors of one length above 0, one per device")
    return len(tensors)


def run_all_reduce(tensors: Sequence[Sequence]) -> RingRun:
    """The ring all-reduce of one tensor per device, in chunks: reduce-scatter, then all-gather.

    Chunks differ by one element at most where the length is no multiple of the devices. Raises
    ValueError for tensors of unequal lengths.
    """
    n = _equal_tensors(tensors)
    ring, length = RingRun(n), len(tensors[0])
    bounds = [length * k // n for k in range(n + 1)]
    chunks = [[list(t[bounds[k] : bounds[k + 1]]) for k in range(n)] for t in tensors]
    for t in range(n - 1):  # device i ends with the sum of chunk i + 1
        received = ring.pass_on([chunks[i][(i - t) % n] for i in range(n)])
        for i, message in enumerate(received):
            k = (i - 1 - t) % n
            chunks[i][k] = [a + b for a, b in zip(chunks[i][k], message, strict=True)]
    for t in range(n - 1):
        received = ring.pass_on([chunks[i][(i + 1 - t) % n] for i in range(n)])
        for i, message in enumerate(received):
            chunks[i][(i - t) % n] = message
    ring.results = [[x for chunk in own for x in chunk] for own in chunks]
    return ring


def run_alternate(tensors: Sequence[Sequence]) -> RingRun:
    """The handout's other ring: each device passes on the tensor it received last, its own first,
    and adds what comes in. Raises ValueError for tensors of unequal lengths."""
    n = _equal_tensors(tensors)
    ring = RingRun(n)
    sums = [list(t) for t in tensors]
    held = [list(t) for t in tensors]
    for _ in range(n - 1):
        held = ring.pass_on(held)
        sums = [[a + b for a, b in zip(y, x, strict=True)] for y, x in zip(sums, held, strict=True)]
    ring.results = sums
    return ring
