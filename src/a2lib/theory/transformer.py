"""Parameters, FLOPs and bytes of the course's Transformer, as exact integers.

``a2lib.shapes`` describes the model, and has the sizes with a name.

FLOPs follow PaLM (Chowdhery et al., 2022, appendix B): two per multiply-add of matmuls, none for
the embedding lookup, and twice the forward for the backward. Recomputation does not count, neither
in attention nor under activation checkpointing.
"""

from a2lib.checks import check_sizes
from a2lib.shapes import Shape
from a2lib.theory.attention import attention_flops
from a2lib.theory.products import matmul_flops


def parameter_count(shape: Shape) -> int:
    """Return the parameters of the whole model: embedding, blocks, the last norm, and a head unless
    it is tied."""
    tables = (1 if shape.tied else 2) * shape.vocab_size * shape.d_model
    return tables + shape.num_layers * block_parameter_count(shape) + shape.d_model


def block_parameter_count(shape: Shape) -> int:
    """Return the parameters of one block: attention's matrices, the FFN's, two norms."""
    return shape.block_matrices + shape.block_vectors


def forward_flops_by_part(
    shape: Shape, batch: int, context: int, *, causal: bool = False
) -> dict[str, int]:
    """Return the FLOPs of one forward by part: projections, attention, ffn, lm_head.

    ``attention`` is q k^T and p v of every block. By default it counts all ``context**2`` scores,
    as an attention computes them that masks afterwards; with ``causal`` half of them, as
    ``a2lib.theory.attention`` does. Raises ValueError for sizes that are not positive integers.
    """
    check_sizes(batch=batch, context=context)
    tokens, layers = batch * context, shape.num_layers
    sizes = batch, shape.num_heads, context, context, shape.head_dim
    scores = attention_flops(*sizes, causal, "forward")
    return {
        "projections": layers * 2 * tokens * shape.attention_matrices,
        "attention": layers * scores,
        "ffn": layers * 2 * tokens * shape.ffn_matrices * shape.d_model * shape.d_ff,
        "lm_head": matmul_flops(tokens, shape.vocab_size, shape.d_model),
    }


def forward_flops(shape: Shape, batch: int, context: int, *, causal: bool = False) -> int:
    """Return the FLOPs of one forward over ``batch`` sequences of ``context`` tokens, with the
    conventions and errors of ``forward_flops_by_part``."""
    return sum(forward_flops_by_part(shape, batch, context, causal=causal).values())


def step_flops(shape: Shape, batch: int, context: int, *, causal: bool = False) -> int:
    """Return the FLOPs of forward and backward: three times the forward's.

    This is the numerator of MFU (model FLOPs utilization). The optimizer's few FLOPs per parameter
    do not count, nor does recomputation. Conventions and errors as ``forward_flops_by_part``.
    """
    return 3 * forward_flops(shape, batch, context, causal=causal)
