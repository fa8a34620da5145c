"""An optimizer whose state is sharded over N data-parallel ranks: bytes that each holds.

Weights, gradients and AdamW's moments in fp32 have 4, 4 and 8 bytes per parameter. Each parameter
has one owner, which keeps its moments (``assign``):

    after the model is made     4 P
    before the first update     4 P + 4 P
    after it                    4 P + 4 P + 8 P_r        P_r of P parameters on rank r, about P / N

In the first stage of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5.1) weights and gradients
have 16 bits and the optimizer's part is K = 12 bytes, with fp32 weights: 4 P + K P / N.
"""

from dataclasses import dataclass

from a2lib.checks import check_name, check_sizes
from a2lib.parallel.owners import assign
from a2lib.theory.memory.step import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    WORKSPACE,
    StepMemory,
    optimizer_bytes,
)

REST = "rest"
MOMENTS = ("init", "before", "after")
# An update reads a weight, its gradient and both moments, and writes all but the gradient, in fp32.
UPDATE_BYTES = 28


@dataclass(frozen=True)
class Held:
    """Bytes of each of ``ranks``, which train in fp32, each with a ``step`` of its own batch. The
    optimizer's state is ``sharded``, or else replicated.

    Raises ValueError for ranks that are not a positive integer.
    """

    step: StepMemory
    ranks: int
    sharded: bool

    def __post_init__(self) -> None:
        check_sizes(ranks=self.ranks)

    def state(self) -> list[int]:
        """Return the bytes of the optimizer's state on each rank: two moments, and a counter of 4
        bytes per tensor."""
        if not self.sharded:
            return [optimizer_bytes(self.step)] * self.ranks
        sizes = list(self.step.parameters().values())
        owners = assign(sizes, [0] * self.ranks)
        state = [0] * self.ranks
        for size, owner in zip(sizes, owners, strict=True):
            state[owner] += 2 * size + 4
        return state

    def at(self, moment: str) -> dict[str, int]:
        """Return the bytes by component at one of ``MOMENTS``, on the rank that holds most.

        It is on a GPU, where cuBLAS allocates workspaces with its first matmuls. Raises ValueError
        for another moment.
        """
        check_name("moment", moment, MOMENTS)
        standing, size = self.step.standing(), sum(self.step.parameters().values())
        rest = standing[PARAMETERS] - size + standing[OTHER]
        return {
            PARAMETERS: size,
            GRADIENTS: 0 if moment == "init" else size,
            OPTIMIZER: max(self.state()) if moment == "after" else 0,
            # The loss is held until the step is over.
            REST: rest + (0 if moment == "init" else 2 * WORKSPACE + 4),
        }
