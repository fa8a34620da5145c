"""The Transformer language model that every chapter measures, and the sizes that have a name.

    model = TransformerLM.from_size("small", context_length=512, attention="eager", seed=0)
    loss = cross_entropy(model(token_ids), targets)      # (batch, tokens) each
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

The optimizer is PyTorch's own, or ``a2lib.optim``'s. Counts of parameters, operations and bytes,
without torch, are in ``a2lib.theory.transformer``.
"""

from a2lib.model.attention import ATTENTIONS, CausalMultiHeadSelfAttention, causal_attention
from a2lib.model.head import linear_cross_entropy, linear_cross_entropy_plain
from a2lib.model.layers import (
    Embedding,
    Linear,
    RMSNorm,
    RotaryPositionalEmbedding,
    SwiGLU,
    cross_entropy,
)
from a2lib.model.transformer import TransformerBlock, TransformerLM
from a2lib.shapes import SIZES

__all__ = [
    "ATTENTIONS",
    "SIZES",
    "CausalMultiHeadSelfAttention",
    "Embedding",
    "Linear",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "SwiGLU",
    "TransformerBlock",
    "TransformerLM",
    "causal_attention",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_plain",
]
