"""Our attention with its techniques taken away one by one, from the library down to a tutorial's.

    with Rung("two_loops", "cuda"):
        o = flash_attention(q, k, v, is_causal=True)

A rung is the library with the techniques of the rungs after it taken away, by way of its tables and
of what chooses a form: no kernel is another than the library's, but for the masks of the lowest two
(``naive_masks``).
"""

import functools
from typing import Self

import torch

from a2lib.attention import hopper, launch, passes, plans, tiles
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
# Of Triton 3.6's tutorial 06 (its forward is tuned among several, of which this is one), but that
# its backward's two kernels are one: queries, keys, warps, stages.
TUTORIAL = {
    "forward": (128, 128, 8, 2),
    "backward_dq": (128, 32, 4, 5),
    "backward_dkdv": (32, 128, 4, 5),
}


class Rung:
    """The library as high as one of ``RUNGS``, within ``with rung``.

    It keeps what it has compiled, and others theirs. Raises UnsupportedError where the GPU has no
    such kernels.
    """

    def __init__(self, name: str, device: str) -> None:
        if name in HOPPER and not hopper._is_hopper(torch.device(device)):
            raise UnsupportedError("its kernels need a GPU of compute capability 9.0")
        self.swaps = _swaps(name)

    def __enter__(self) -> Self:
        self._kept = [getattr(module, name) for module, name, _ in self.swaps]
        for module, name, value in self.swaps:
            setattr(module, name, value)
        return self

    def __exit__(self, *_) -> None:
        for (module, name, _), value in zip(self.swaps, self._kept, strict=True):
            setattr(module, name, value)


def _swaps(rung: str) -> list[tuple[object, str, object]]:
    """Return (module, name, value) of all that is other than in the library; of two for one name
    the second counts."""
    names = list(RUNGS)
    techniques = _without()
    swaps = [(plans, "_plans", {}), (launch, "_compiled", {})]
    for above in reversed(names[names.index(rung) + 1 :]):
        swaps += techniques[above]
    return swaps


def _without() -> dict[str, list[tuple[object, str, object]]]:
    """Return what to swap in the library to have it without each technique."""
    return {
        "query_chunks": [(passes, "in_chunks", _none), (passes, "in_one_launch", _none)],
        "key_chunks": [(passes, "keys_per_chunk", _none)],
        "heads_in_l2": [(hopper, "_together", _all_heads)],
        "one_sweep": [(hopper, "serves_backward", _none)],
        "consumers": [(hopper, "hopper_forward", _one_consumer)],
        "one_consumer": [(hopper, "serves_forward", _none)],
        "tuned_tiles": [
            (passes, "WHEN_FEW", {}),
            (passes, "WHEN_SHORT", {}),
            (passes, "TILES", _tutorial_tiles()),
        ],
        "two_loops": [(passes, "_kernel", functools.partial(_naive_masks, every_tile=False))],
        "to_diagonal": [(passes, "_kernel", functools.partial(_naive_masks, every_tile=True))],
    }


def _none(*_) -> int:
    return 0


def _all_heads(bytes_per_head: int, n_heads: int, *_) -> int:
    return n_heads


def _one_consumer(*_) -> tuple[int, bool]:
    return 1, False


def _tutorial_tiles() -> dict:
    tutorial = {}
    for key, (_, *others) in tiles.TILES.items():
        if key[0] in TUTORIAL:
            tutorial[key] = (tiles.Tile(*TUTORIAL[key[0]]), *others)
    return tutorial


def _naive_masks(name: str, every_tile: bool):
    from a2lib.attention.naive_masks import kernel  # imports Triton

    return kernel(name, every_tile)
