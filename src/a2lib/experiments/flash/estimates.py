"""How much memory attention takes: roughly on a GPU, and at most on a CPU, where trying would end
the process."""

from __future__ import annotations

from a2lib.experiments.flash import sanity
from a2lib.experiments.flash.shapes import ASKED, Shape

_LIBRARIES = 2**26  # what PyTorch's own libraries set up for a product of another size
_ROW_TENSORS = 8


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
    check and the pass itself. Within about a factor of two where that is much."""
    rows = shape.batch * shape.heads * shape.seq_len
    # In float64: k, v, dk, dv and what these are compared with; scores of the checked rows.
    check = 8 * rows * (8 * shape.head_dim + _ROW_TENSORS * sanity.ROWS)
    if implementation in ("eager", "compile"):
        own = shape.eager.total("forward" if pass_ == "forward" else "backward")
    else:
        own = 4 * shape.tensor_bytes + needed_bytes(implementation, shape, pass_)
    return _LIBRARIES + check + own
