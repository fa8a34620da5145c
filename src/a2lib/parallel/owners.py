"""Who owns which parameter of a sharded optimizer, and in how many parts it is exchanged. Without
torch: the formulas of ``a2lib.theory.sharding`` count by the same."""

from collections.abc import Iterable

# Parts in which the update and the exchange of our optimizer follow each other. More of them expose
# less of the update u and cost the overhead o of a message each: least at sqrt(u / o), about here.
CHUNKS = 8


def assign(sizes: Iterable[int], loads: list[int]) -> list[int]:
    """Return the rank for each size, largest first to the least loaded; adds to ``loads``, one a
    rank.

    Ties go to the lower index and the lower rank, so all ranks agree without talking. From empty
    loads the largest is at most (4/3 - 1/(3W)) times the least possible (Graham, 1969), and never
    more than the mean plus the largest size.
    """
    sizes = list(sizes)
    ranks = [0] * len(sizes)
    largest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    for i in largest_first:
        ranks[i] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[ranks[i]] += sizes[i]
    return ranks
