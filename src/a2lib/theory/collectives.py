"""Collectives on a ring: their times in closed form.

The model is that of the handout of 2026: N devices in a ring, each of which can send W bytes per
second and receive as many at the same time; a message costs its bytes over W and no latency. Sizes
are bytes of the *whole* tensor: that of every device after an all-gather, before a reduce-scatter,
and in an all-reduce. Thakur, Rabenseifner and Gropp (2005) and Patarasuk and Yuan (2009)
give the ring algorithms and show that no all-reduce sends fewer than 2 (N - 1) / N of the tensor.

The formulas are arithmetic alone, so that they take sympy's symbols as well as numbers.
"""


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
