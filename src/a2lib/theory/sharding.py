"""An optimizer whose state is divided over N data-parallel ranks: what each holds and moves.

With weights, gradients and AdamW's moments in fp32, 4, 4 and 8 bytes a parameter. Whole parameters
have one owner, which keeps their moments (``assign``):

    after the model is made     4 P
    before the first update     4 P + 4 P
    after it                    4 P + 4 P + 8 P_r        P_r of P parameters on rank r, about P / N

In the first stage of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5.1) weights and gradients
have 16 bits and the optimizer's part is K = 12 bytes, fp32 weights among them: 4 P + K P / N.

What a rank sends in a step, on rings, which send the least possible (Patarasuk and Yuan, 2009):

    all-reduce of gradients                        2 (N - 1) / N of their bytes
    all-gather of what the ranks updated             (N - 1) / N of the weights' bytes
    reduce-scatter in place of the all-reduce        (N - 1) / N of the gradients' bytes

So a step that averages gradients first and shares the update later sends half as much again as one
that only averages; ZeRO's, whose ranks sum only the gradients they will use, as much (section 7.2).
"""

from dataclasses import dataclass

from a2lib.parallel.owners import assign
from a2lib.theory.collectives import positive
from a2lib.theory.memory.step import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    WORKSPACE,
    StepMemory,
    peak,
)
from a2lib.theory.products import check_name, check_sizes

REST = "rest"
MOMENTS = ("init", "before", "after")
# Read of a weight, its gradient and both moments; written, all but the gradient: fp32.
UPDATE_BYTES = 28


@dataclass(frozen=True)
class Held:
    """Bytes on each of ``ranks`` in fp32, of which each makes a ``step`` of its own batch;
    ``sharded`` or with the whole state on every rank.

    Raises ValueError, in one line, for ranks that are not a positive integer.
    """

    step: StepMemory
    ranks: int
    sharded: bool

    def __post_init__(self) -> None:
        check_sizes(ranks=self.ranks)

    def state(self) -> list[int]:
        """Of the optimizer on each rank: two moments and a counter of 4 bytes a tensor."""
        sizes = list(self.step.parameters().values())
        if not self.sharded:
            return [2 * sum(sizes) + 4 * len(sizes)] * self.ranks
        owners = assign(sizes, [0] * self.ranks)
        return [
            sum(2 * size + 4 for size, owner in zip(sizes, owners, strict=True) if owner == rank)
            for rank in range(self.ranks)
        ]

    def at(self, moment: str) -> dict[str, int]:
        """Bytes by component on the fullest rank at one of ``MOMENTS``, on a GPU, where cuBLAS
        takes workspaces with its first products; ValueError for another moment."""
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
        """The most of a later step on the fullest rank: the step's tensors, with the state divided,
        and cuBLAS's workspaces."""
        fullest = peak(self.step)
        whole = fullest.by_category[OPTIMIZER]
        return fullest.total - whole + max(self.state()) + 2 * WORKSPACE


def zero_stage_1_bytes(ranks: int) -> float:
    """Bytes a parameter on each rank by the paper: 16-bit weights and gradients, K / N of the
    rest."""
    positive(ranks=ranks)
    return 4 + 12 / ranks


def sent(scheme: str, size, ranks) -> dict:
    """What a rank sends in a step of ``scheme`` for gradients and for weights of ``size`` bytes:
    "plain" (the gradients' mean alone), "sharded" (and then the weights that others updated), or
    "zero1" of the paper. Raises ValueError for another, and unless numbers are above 0."""
    positive(size=size, ranks=ranks)
    part = (ranks - 1) * size / ranks
    schemes = {"plain": (2 * part, 0), "sharded": (2 * part, part), "zero1": (part, part)}
    check_name("scheme", scheme, schemes)
    return dict(zip(("gradients", "weights"), schemes[scheme], strict=True))


def pipelined_s(update_s: float, gather_s: float, chunks: int) -> float:
    """Seconds in which ``chunks`` equal parts are updated one after another, each sent as soon as
    it is updated and one at a time: two machines in a row.

    The slower of the two is never idle once it has begun, and the other is exposed for one part.
    Raises ValueError unless the number is above 0.
    """
    check_sizes(chunks=chunks)
    return max(update_s, gather_s) + min(update_s, gather_s) / chunks
