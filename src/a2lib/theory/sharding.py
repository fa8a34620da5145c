"""An optimizer whose state is sharded over N data-parallel ranks: bytes that each holds and sends.

Weights, gradients and AdamW's moments in fp32 have 4, 4 and 8 bytes per parameter. Each parameter
has one owner, which keeps its moments (``assign``):

    after the model is made     4 P
    before the first update     4 P + 4 P
    after it                    4 P + 4 P + 8 P_r        P_r of P parameters on rank r, about P / N

In the first stage of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5.1) weights and gradients
have 16 bits and the optimizer's part is K = 12 bytes, with fp32 weights: 4 P + K P / N.

Bytes that a rank sends in a step, on rings, which send the least possible (Patarasuk and Yuan,
2009):

    all-reduce of gradients                        2 (N - 1) / N of their bytes
    all-gather of the updated weights                (N - 1) / N of the weights' bytes
    reduce-scatter instead of the all-reduce         (N - 1) / N of the gradients' bytes

So a step that all-reduces gradients and then all-gathers weights sends half as much again as data
parallelism. ZeRO's, which reduce-scatters the gradients, sends as much as that (section 7.2).
"""

from dataclasses import dataclass

from a2lib.checks import check_name, check_sizes
from a2lib.parallel.owners import assign
from a2lib.theory.collectives import positive
from a2lib.theory.memory.step import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    WORKSPACE,
    StepMemory,
    optimizer_bytes,
    peak,
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

    def peak(self) -> int:
        """Return the largest peak of any rank in a later step: the step's tensors, with this state,
        and cuBLAS's workspaces."""
        whole_step = peak(self.step)
        other_tensors = whole_step.total - whole_step.by_category[OPTIMIZER]
        return other_tensors + max(self.state()) + 2 * WORKSPACE


def sent(scheme: str, size, ranks) -> dict:
    """Return the bytes that a rank sends per step, for gradients and for weights of ``size`` bytes.

    scheme "plain": gradients are all-reduced
    scheme "sharded": and then the updated weights are all-gathered
    scheme "zero1": gradients are reduce-scattered and weights all-gathered, as in the paper

    Raises ValueError for another scheme, and unless numbers are above 0.
    """
    positive(size=size, ranks=ranks)
    part = (ranks - 1) * size / ranks
    schemes = {"plain": (2 * part, 0), "sharded": (2 * part, part), "zero1": (part, part)}
    check_name("scheme", scheme, schemes)
    return dict(zip(("gradients", "weights"), schemes[scheme], strict=True))


def pipelined_s(update_s: float, gather_s: float, chunks: int) -> float:
    """Return the seconds of an update in ``chunks`` equal parts, each sent when it is updated.

    Parts are updated, and sent, one at a time. The slower of update and communication is never idle
    once it has begun, and the other is exposed for one part. Raises ValueError unless ``chunks`` is
    a positive integer.
    """
    check_sizes(chunks=chunks)
    return max(update_s, gather_s) + min(update_s, gather_s) / chunks
