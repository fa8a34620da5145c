"""An optimizer whose state is sharded over N data-parallel ranks: bytes that a rank holds.

Weights, gradients and AdamW's moments in fp32 have 4, 4 and 8 bytes per parameter. Each parameter
has one owner, which keeps its moments (``assign``):

    after the model is made     4 P
    before the first update     4 P + 4 P
    after it                    4 P + 4 P + 8 P_r        P_r of P parameters on rank r, about P / N
"""

from a2lib.checks import check_name
from a2lib.owners import assign
from a2lib.theory.memory.step import OTHER, PARAMETERS, WORKSPACE, StepMemory, optimizer_bytes

MOMENTS = ("init", "before", "after")
# An update reads a weight, its gradient and both moments, and writes all but the gradient, in fp32.
UPDATE_BYTES = 28


def held_bytes(step: StepMemory, ranks: int, sharded: bool, moment: str) -> int:
    """Return the bytes at one of ``MOMENTS`` of the first step, on the rank that holds most.

    Each rank trains in fp32, on a ``step`` of its own batch, on a GPU, where cuBLAS allocates
    workspaces with its first matmuls. Raises ValueError for another moment.
    """
    check_name("moment", moment, MOMENTS)
    standing = step.standing()
    held = standing[PARAMETERS] + standing[OTHER]
    if moment != "init":
        gradients = sum(step.parameters().values())
        loss = 4  # which is held until the step is over
        held += gradients + 2 * WORKSPACE + loss
    if moment == "after":
        held += largest_state(step, ranks) if sharded else optimizer_bytes(step)
    return held


def largest_state(step: StepMemory, ranks: int) -> int:
    """Return the largest of the ranks' parts of the optimizer's state: two moments, and a counter
    of 4 bytes per tensor."""
    sizes = list(step.parameters().values())
    state = [0] * ranks
    for size, owner in zip(sizes, assign(sizes, [0] * ranks), strict=True):
        state[owner] += 2 * size + 4
    return max(state)
