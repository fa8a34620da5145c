"""How much memory attention takes: roughly on a GPU, and at most on a CPU, where trying would end
the process."""

from __future__ import annotations

from a2lib.experiments.flash import sanity
from a2lib.experiments.flash.shapes import ASKED, Shape

_MARGIN = 1.25
_LIBRARIES = 2**26  # what PyTorch's own libraries set up for a product of another size
_ROW_TENSORS = 8
TILE = 64  # of attention.tiled, which needs torch


def needed_bytes(implementation: str, shape: Shape, pass_: str) -> int:
    """An estimate of the memory one pass needs beside its inputs: for planning, never reported.

    Eager attention keeps the scores, their scaled and masked copies and the weights for its
    backward, which adds the gradients of two of them.
    """
    linear = (2 if pass_ == "forward" else 6) * shape.tensor_bytes
    recomputed = implementation == ASKED and pass_ != "forward"
    if implementation not in ("eager", "compile") and not recomputed:
        return linear
    return linear + (4 if pass_ == "forward" else 6) * shape.matrix_bytes


def host_bytes(implementation: str, shape: Shape, pass_: str) -> int:
    """An upper bound of what measuring one pass on the CPU takes, all told: the inputs, the float64
    check and the pass itself. Within about a factor of two where that is much.

    Terms are counted in the order in which ``comparison`` holds them, and what is counted is what
    ``sanity`` and PyTorch's operators allocate; ``_MARGIN`` is for the allocator and threads.
    """
    size, rows = shape.element_bytes, shape.batch * shape.heads * shape.seq_len
    elements = rows * shape.head_dim
    inputs = 4 * size * elements
    # In float64: k, v, dk, dv and one square of them; the scores of the checked rows, some times.
    making = inputs + (size + 5 * 8) * elements + _ROW_TENSORS * sanity.ROWS * 8 * rows
    kept = inputs + (size + 2 * 8) * elements
    running = 3 * size * elements  # o, what the forward saves, and where o is finite
    if pass_ != "forward":
        # The gradients, summed in float32, and one of them beside its right value in float64.
        running += (3 * max(size, 4) + size + 3 * 8) * elements
    if implementation in ("eager", "compile"):
        matrix = shape.batch * shape.heads * shape.seq_len**2
        running += ((2 if pass_ == "forward" else 3) * size + 1) * matrix  # and the mask
    elif implementation == "tiled":
        tiles = 5 if pass_ == "forward" else 8
        running += tiles * 4 * shape.batch * shape.heads * TILE**2
    return int(_MARGIN * max(making, kept + running)) + _LIBRARIES
