"""Parameters, operations and bytes of the course's Transformer, as exact integers.

The model: pre-norm RMSNorm, RoPE, SwiGLU with three d_model x d_ff matrices, an untied head, no
biases.

Operations follow the convention of PaLM (Chowdhery et al., 2022, appendix B): two per multiply-add
of the matrix products alone, the embedding lookup is none, and a backward is twice its forward.
Nothing computed a second time counts, neither in attention nor under activation checkpointing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from a2lib.theory.attention import attention_flops
from a2lib.theory.products import check_sizes, matmul_flops

VOCAB_SIZE = 10_000


@dataclass(frozen=True)
class Shape:
    """The sizes that fix a model's parameters; see ``SIZES`` for those that have a name.

    Raises ValueError, in one line, for a size that is not a positive integer, and for heads that do
    not divide d_model or leave an odd head_dim, which RoPE cannot turn in pairs.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        check_sizes(**dataclasses.asdict(self))
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide d_model {self.d_model}; "
                "d_model must be a whole multiple of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / num_heads "
                f"{self.num_heads}); RoPE turns pairs, so head_dim must be even"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


# The handout's table of Spring 2025 calls xl25 "xl"; that of Spring 2026 calls 2.7B "xl". The 8B
# model is that of the 2026 leaderboard.
SIZES = {
    "small": Shape(768, 3072, 12, 12),
    "medium": Shape(1024, 4096, 24, 16),
    "large": Shape(1280, 5120, 36, 20),
    "xl25": Shape(1600, 6400, 48, 25),
    "2.7B": Shape(2560, 10240, 32, 32),
    "8B": Shape(4096, 11008, 34, 32, vocab_size=151_936),
    "10B": Shape(4608, 12288, 50, 36),
}


def named_size(name: str) -> Shape:
    """``SIZES[name]``; raises ValueError naming the sizes there are."""
    if not isinstance(name, str) or name not in SIZES:
        hint = "; 'xl' is xl25 in the 2025 handout, 2.7B in that of 2026" if name == "xl" else ""
        raise ValueError(f"size {name!r}: allowed are {', '.join(SIZES)}{hint}")
    return SIZES[name]


def parameters_by_part(shape: Shape) -> dict[str, int]:
    """Parameters of the embedding, of all blocks' attention, ffn and norms (the last one included),
    and of the head."""
    table = shape.vocab_size * shape.d_model
    return {
        "token_embeddings": table,
        "attention": shape.num_layers * 4 * shape.d_model**2,
        "ffn": shape.num_layers * 3 * shape.d_model * shape.d_ff,
        "norms": (2 * shape.num_layers + 1) * shape.d_model,
        "lm_head": table,
    }


def parameter_count(shape: Shape) -> int:
    """Parameters of the whole model."""
    return sum(parameters_by_part(shape).values())


def block_parameter_count(shape: Shape) -> int:
    """Parameters of one block: four attention matrices, three of the FFN, two norms."""
    return 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model


def forward_flops_by_part(
    shape: Shape, batch: int, context: int, *, causal: bool = False
) -> dict[str, int]:
    """Floating-point operations of one forward pass: projections, attention, ffn, lm_head.

    ``attention`` is q k^T and p v of every block. By default it counts all ``context**2`` scores,
    which is what an attention that masks them afterwards computes; with ``causal`` half of them,
    as ``a2lib.theory.attention`` does. Raises ValueError for sizes that are not positive integers.
    """
    check_sizes(batch=batch, context=context)
    tokens, layers = batch * context, shape.num_layers
    scores = attention_flops(
        batch, shape.num_heads, context, context, shape.head_dim, causal, "forward"
    )
    return {
        "projections": layers * 4 * matmul_flops(tokens, shape.d_model, shape.d_model),
        "attention": layers * scores,
        "ffn": layers * 3 * matmul_flops(tokens, shape.d_ff, shape.d_model),
        "lm_head": matmul_flops(tokens, shape.vocab_size, shape.d_model),
    }


def forward_flops(shape: Shape, batch: int, context: int, *, causal: bool = False) -> int:
    """Floating-point operations of one forward pass over ``batch`` sequences of ``context`` tokens;
    conventions and errors as ``forward_flops_by_part``."""
    return sum(forward_flops_by_part(shape, batch, context, causal=causal).values())


def step_flops(shape: Shape, batch: int, context: int, *, causal: bool = False) -> int:
    """Floating-point operations of forward and backward: three times the forward.

    This is the numerator of model FLOPs utilisation. The optimizer's few operations per parameter
    do not count, nor do recomputed ones. Conventions and errors as ``forward_flops_by_part``.
    """
    return 3 * forward_flops(shape, batch, context, causal=causal)


def flops_per_token(shape: Shape, context: int, *, causal: bool = False) -> int:
    """Forward operations per token of a sequence of ``context`` tokens. Exact, since every part is
    a whole multiple of the tokens."""
    return forward_flops(shape, 1, context, causal=causal) // context


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training keeps between steps, or during one: ``total`` is their sum."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    shape: Shape, element_bytes: int = 4, moment_bytes: int | None = None
) -> StateBytes:
    """Bytes of the parameters, of their gradients, and of AdamW's two moments.

    ``element_bytes`` is the size of a parameter, which a gradient shares; ``moment_bytes`` of a
    moment, by default the same, as in ``torch.optim.AdamW``. That also keeps a step counter of 4
    bytes for each tensor, which is not counted. Raises ValueError for sizes that are not positive
    integers.
    """
    moment_bytes = element_bytes if moment_bytes is None else moment_bytes
    check_sizes(element_bytes=element_bytes, moment_bytes=moment_bytes)
    n = parameter_count(shape)
    return StateBytes(n * element_bytes, n * element_bytes, 2 * n * moment_bytes)


def block_gradient_bytes(shape: Shape, element_bytes: int = 4) -> int:
    """Bytes of the gradients of one block's parameters."""
    check_sizes(element_bytes=element_bytes)
    return block_parameter_count(shape) * element_bytes


def residual_stream_bytes(shape: Shape, batch: int, context: int, element_bytes: int = 4) -> int:
    """Bytes of one residual-stream tensor, ``(batch, context, d_model)``."""
    check_sizes(batch=batch, context=context, element_bytes=element_bytes)
    return batch * context * shape.d_model * element_bytes
