"""Activation checkpointing: which activations of the blocks are kept for backward.

A strategy is a function ``run(blocks, x) -> x`` that calls the blocks in order on ``x``; the plain
one keeps everything. ``strategy(text, num_layers)`` makes one of its name, with an argument after a
colon where it takes one:

    none          keep everything
    block         keep each block's input and compute the block again in backward
    segments:k    the same for k blocks at a time (the last segment may have fewer)

Another strategy is another entry of ``STRATEGIES``.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """The plain strategy: ``x`` through each block in order."""
    for block in blocks:
        x = block(x)
    return x


def _segments(k: int) -> Run:
    def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        blocks = list(blocks)
        for start in range(0, len(blocks), k):
            x = checkpoint(
                run_blocks,
                blocks[start : start + k],
                x,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing here draws random numbers
            )
        return x

    return run


# Name to (what it takes, None for nothing; how it is made from that and the number of blocks).
STRATEGIES: dict[str, tuple[str | None, Callable[[int], Run]]] = {
    "none": (None, lambda _: run_blocks),
    "block": (None, lambda _: _segments(1)),
    "segments": ("k", _segments),
}
ALLOWED = ", ".join(
    name + (f":{takes}" if takes else "") for name, (takes, _) in STRATEGIES.items()
)


def strategy(text: str, num_layers: int) -> Run:
    """The strategy that ``text`` names, for a model of ``num_layers`` blocks.

    Raises ValueError, in one line, for another name, and for an argument that is missing, not asked
    for, or outside 1 to num_layers.
    """
    name, colon, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
    takes, make = STRATEGIES.get(name, (None, None))
    if make is None or bool(takes) != bool(colon):
        raise ValueError(f"checkpointing {text!r}: allowed are {ALLOWED}")
    if not takes:
        return make(0)
    size = int(argument) if argument.isascii() and argument.isdigit() else 0
    if not 1 <= size <= num_layers:
        raise ValueError(
            f"checkpointing {text!r}: {takes} must be a whole number from 1 to {num_layers}, "
            "the number of blocks"
        )
    return make(size)
