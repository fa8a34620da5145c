"""Ranks that have left a step half way meet, through the store of their process group.

Where collectives are paired by order, as FSDP's all-gathers of a forward are, a rank that begins
another step while the others are within the last one sends its first message to where they wait for
a later one: sums of other tensors, or a hang. So a rank that begins anew waits until all have left
the step as well, and says by its number that it did, where they have not. No message of a backend
could carry that.
"""

import itertools
from datetime import timedelta

import torch.distributed as dist

from a2lib.parallel.group import everyone, member

# How long a rank waits for the others: longer than their ways to one exception differ.
LIMIT_S = 60.0

_numbers = itertools.count()


class Meeting:
    """Where the ranks of ``group`` meet; made by all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._rank, self._size = member(group)
        # One name for the ranks of this group, and of no other wrapper.
        first, number = everyone((dist.get_rank(), next(_numbers)), group)[0]
        self._name = f"a2lib meeting {number} of rank {first}"
        self._count = 0
        self._failed = ""

    def meet(self) -> None:
        """Wait until every rank has given up the step, as this one has.

        Raises RuntimeError with this rank's number where others have not after ``LIMIT_S``.
        """
        if self._failed:
            raise RuntimeError(self._failed)
        store = _store()
        keys = [f"{self._name}, {self._count}: {rank}" for rank in range(self._size)]
        store.set(keys[self._rank], "")
        try:
            store.wait(keys, timedelta(seconds=LIMIT_S))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            others = " and ".join(f"rank {rank}" for rank in missing)
            self._failed = (
                f"rank {self._rank} gave up a step that {others} did not give up within "
                f"{LIMIT_S:g} s: what one rank skips every rank skips, by reset()"
            )
            self.tell(self._failed)
            raise RuntimeError(self._failed) from None
        self._count += 1
        if store.check([self._note_of(self._rank)]):
            store.delete_key(self._note_of(self._rank))

    def tell(self, text: str) -> None:
        """Leave for the other ranks why this one is going to be missing."""
        _store().set(self._note_of(self._rank), text)

    def notes(self) -> str:
        """Return what ranks have told, "" where nobody has."""
        store, texts = _store(), []
        for rank in range(self._size):
            if store.check([self._note_of(rank)]):
                texts.append(store.get(self._note_of(rank)).decode())
        return "; ".join(texts)

    def _note_of(self, rank: int) -> str:
        return f"{self._name}, note of {rank}"


def _store() -> dist.Store:
    # The store that the ranks have met by has no public name.
    return dist.distributed_c10d._get_default_store()
