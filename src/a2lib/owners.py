"""Who owns which parameter of a sharded optimizer, and in how many parts it is exchanged. Without
torch: the formulas of ``a2lib.theory.sharding`` count by the same."""

from collections.abc import Iterable, Sequence

# Parts in which a2lib's optimizer updates and sends. More of them expose less of the update u, and
# each costs the overhead o of a collective: the sum is least at sqrt(u / o), which is about this.
CHUNKS = 8


def assign(sizes: Iterable[int], loads: list[int]) -> list[int]:
    """Return a rank for each size, the largest first to the rank with the least load; add the sizes
    to ``loads``, one per rank.

    Ties go to the lower index and the lower rank, so all ranks agree without communication. From
    empty loads the largest is at most (4/3 - 1/(3W)) times the least possible (Graham, 1969), and
    never more than the mean plus the largest size.
    """
    sizes = list(sizes)
    ranks = [0] * len(sizes)
    for i in largest_first(sizes):
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += sizes[i]
    return ranks


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the places of the sizes, the largest first; of equal ones the first first."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])  # a sort of Python's keeps the order
