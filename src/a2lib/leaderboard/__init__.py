"""The course's leaderboard of 2026: a training step of an 8B model on two GPUs, 32,768 tokens each.

    python -m a2lib.leaderboard                       # --help has the ways and the sizes

``LADDER`` has the ways to take it, of which each changes one thing of the one before. ``training``
is the step, ``run`` the board's protocol. Importing this needs no torch; running does.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from a2lib.theory.memory.keeping import CHUNK, STAY, block_always, working_bytes
from a2lib.theory.transformer import Shape, parameter_count, step_flops

OURS, PEER = "fsdp", "fsdp2"
CHUNKS, FUSED = "chunks", "fused"


@dataclass(frozen=True)
class Way:
    """``wrapper`` shards, ``head`` is by ``CHUNKS`` under checkpoints or ``FUSED``; ``attention``
    None is that of the step. What ``keeps`` says stays of a block: its "input"; "attention"'s
    results too; as many products as are "fitting" the device; and of those that are not, "moved",
    as many as the link to the host hides."""

    name: str
    wrapper: str
    head: str
    keeps: str
    attention: str | None = None


LADDER = (
    Way("recomputed", PEER, CHUNKS, "input"),
    Way("attention_kept", PEER, CHUNKS, "attention"),
    Way("fused_head", PEER, FUSED, "attention"),
    Way("own_fsdp", OURS, FUSED, "attention"),
    Way("products_kept", OURS, FUSED, "fitting"),
    Way("offloaded", OURS, FUSED, "moved"),
    Way("own_attention", OURS, FUSED, "moved", "flash"),
)
# The board's, and how long it takes steps before it times them, and while it does.
SIZE, BATCH = "8B", 1
CONTEXT = {"cuda": 32_768, "cpu": 32}
WARMUP_MS, REP_MS = 10_000, 30_000
DTYPE = {"cuda": "bf16", "cpu": "fp32"}
ATTENTION = {"cuda": "sdpa_cudnn", "cpu": "sdpa_flash"}


def ways(device: str) -> dict[str, Way]:
    """Those of the ladder that run on ``device``, by name: our attention runs on "cuda" alone."""
    return {way.name: way for way in LADDER if device == "cuda" or way.attention is None}


@dataclass(frozen=True)
class Step:
    """A step of ``way`` on ``batch`` sequences of each rank, of ``context`` tokens.

    ``dtype`` is what it computes in, "bf16" or "fp32". ``room_percent`` is how much may stay of
    what blocks could keep; None: what there is room for.
    """

    way: Way
    shape: Shape
    batch: int
    context: int
    attention: str
    dtype: str
    room_percent: int | None = None
    warmup_ms: int = WARMUP_MS
    rep_ms: int = REP_MS

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """That of which ``spec`` is ``dataclasses.asdict``."""
        return cls(**{**spec, "way": Way(**spec["way"]), "shape": Shape(**spec["shape"])})

    @classmethod
    def on(
        cls,
        device: str,
        way: Way,
        shape: Shape,
        layers: int | None = None,
        context: int | None = None,
        attention: str | None = None,
        *,
        batch: int = BATCH,
        **others: int | None,
    ) -> Self:
        """That of ``device``, "cuda" or "cpu", but for what is given."""
        shape = dataclasses.replace(shape, num_layers=layers or shape.num_layers)
        attention = way.attention or attention or ATTENTION[device]
        return cls(
            way, shape, batch, context or CONTEXT[device], attention, DTYPE[device], **others
        )

    @property
    def tokens(self) -> int:
        """Of a rank."""
        return self.batch * self.context

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def flops(self) -> int:
        """Operations that a rank's step needs: the model's, by forward and backward, causal
        attention half, and nothing that is computed again."""
        return step_flops(self.shape, self.batch, self.context, causal=True)

    def rank_bytes(self, ranks: int) -> int:
        """Memory of one of ``ranks``, by arithmetic: the sharded masters and moments, what its
        blocks keep at the least, and the work. It is the measured peak within some per cent."""
        always = block_always(self.shape, self.tokens, self.element_bytes)
        blocks = STAY if self.way.keeps == "moved" else self.shape.num_layers
        kept = min(blocks, self.shape.num_layers) * (
            always[0] if self.way.keeps == "input" else sum(always)
        )
        work = working_bytes(self.shape, self.tokens, CHUNK, self.element_bytes)
        return 12 * parameter_count(self.shape) // ranks + kept + work
