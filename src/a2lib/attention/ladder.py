"""Take the techniques of our attention away one by one, from the library down to a tutorial's.

    with Rung("two_loops", "cuda"):
        o = flash_attention(q, k, v, is_causal=True)

A rung is the library with the techniques of the rungs after it taken away, by a switch of its table
(``dispatch.without``): no kernel is another than the library's. On the lowest two it masks every
tile (``dispatch.masks``).
"""

from typing import Self

import torch

from a2lib.attention import dispatch, forms
from a2lib.errors import UnsupportedError

# From the lowest to the highest, which is the library.
RUNGS = {
    "every_tile": "plain Triton, a mask in every tile, all tiles visited, tiles of a tutorial",
    "to_diagonal": "no tile above the diagonal",
    "two_loops": "those below it in a loop of their own, unmasked, whose loads are pipelined",
    "tuned_tiles": "tiles chosen by measurement",
    "one_consumer": "forward for Hopper: one warp loads by TMA, one group of warps multiplies",
    "consumers": "two or three groups, one's exponentials beside another's products",
    "one_sweep": "backward for Hopper: five products a tile for seven, dQ added up across programs",
    "heads_in_l2": "of both: as many heads at a time as the L2 cache holds",
    "key_chunks": "forward of few tiles: programs share the keys of a query",
    "query_chunks": "backward of few tiles: programs share the queries of a key: the library",
}
HOPPER = ("one_consumer", "consumers", "one_sweep", "heads_in_l2")


class Rung:
    """Put the library on one of ``RUNGS``, within ``with rung``.

    All threads of the process are then on the rung. Raises UnsupportedError where the GPU has no
    such kernels.
    """

    def __init__(self, name: str, device: str) -> None:
        if name in HOPPER and not forms.is_hopper(torch.device(device)):
            raise UnsupportedError("its kernels need a GPU of compute capability 9.0")
        names = list(RUNGS)
        self.without = frozenset(names[names.index(name) + 1 :])

    def __enter__(self) -> Self:
        self._outside, dispatch.without = dispatch.without, self.without
        return self

    def __exit__(self, *_) -> None:
        dispatch.without = self._outside
