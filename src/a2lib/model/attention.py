"""Multi-head self-attention by a named implementation, and no other than that.

name              what runs
eager             ``attention_reference``: scores in full, the definition
flash             ``flash_attention``: this library's Triton kernels
sdpa_flash        PyTorch's scaled_dot_product_attention held to one backend: FlashAttention-2,
sdpa_cudnn        cuDNN,
sdpa_efficient    memory-efficient,
sdpa_math         or the definition in C++
flex              FlexAttention with a causal block mask, compiled
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from a2lib.attention import UnsupportedError, attention_reference, flash_attention
from a2lib.checks import check_name, check_sizes
from a2lib.model.layers import Linear, RotaryPositionalEmbedding, side_by_side

CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, is_causal=True)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, is_causal=True)


def _sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # With one backend admitted PyTorch runs it or raises; with several it picks without a word.
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        raise UnsupportedError(f"flex needs a CUDA GPU for its backward, and q is on {q.device}")
    mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
    return compiled_flex()(q, k, v, block_mask=mask)


@functools.cache
def compiled_flex() -> Callable:
    """Return FlexAttention compiled; uncompiled it computes the scores in full, with a warning."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache(maxsize=8)
def causal_mask(n_queries: int, n_keys: int, device: torch.device):
    """Return FlexAttention's description of the causal mask; the last few are kept."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, n_queries, n_keys, device)


def _sees(batch, head, query, key):
    return query >= key


# Functions that pickle, as a model that is saved whole wants: PyTorch's SDPBackend does not.
ATTENTIONS: dict[str, CausalAttention] = {
    "eager": _eager,
    "flash": _flash,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "sdpa_math": functools.partial(_sdpa, "MATH"),
    "flex": _flex,
}


def causal_attention(name: str) -> CausalAttention:
    """Return the attention ``attention(q, k, v) -> o`` of a name of ``ATTENTIONS``.

    q, k, v and o are ``(B, H, T, d)``. The attention itself raises where it cannot run its inputs:
    UnsupportedError (flash, flex) or RuntimeError (a backend of PyTorch).

    Raises ValueError for an unknown name.
    """
    check_name("attention", name, ATTENTIONS)
    return ATTENTIONS[name]


class CausalMultiHeadSelfAttention(nn.Module):
    """Attend from every token to itself and those before it, in ``num_heads`` heads.

    Arguments:

    - ``d_model``: the width D; ``num_heads`` divides it.
    - ``rope``: rotates queries and keys; the blocks of a model share one. None: no rotation.
    - ``attention``: a name of ``ATTENTIONS``; the attribute of that name is its function.

    Under autocast q, k and v are in 16 bits. RoPE rotates in float32 and rounds back. On a GPU,
    ``eager`` saves the probabilities twice, in float32 and in 16 bits, because autocast runs
    softmax in float32.

    Raises ValueError for heads that do not divide d_model, and for a rope of another head size.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryPositionalEmbedding | None = None,
        attention: str = "eager",
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_sizes(d_model=d_model, num_heads=num_heads)
        if d_model % num_heads:
            raise ValueError(
                f"num_heads {num_heads} does not divide d_model {d_model}; "
                "d_model must be a whole multiple of num_heads"
            )
        if rope is not None and rope.d_k != d_model // num_heads:
            raise ValueError(
                f"rope turns d_k = {rope.d_k}; head_dim is {d_model // num_heads} here "
                f"(d_model {d_model} / num_heads {num_heads})"
            )
        self.num_heads = num_heads
        self.attention = causal_attention(attention)
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, d_model, device, dtype)
        self.v_proj = Linear(d_model, d_model, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(B, T, d_model)`` of x ``(B, T, d_model)``."""
        # No name holds the projections: rotated queries and keys take their memory's place.
        q, k, v = map(self._by_head, side_by_side(x, self.q_proj, self.k_proj, self.v_proj))
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        o = self.attention(q, k, v)
        return self.output_proj(o.transpose(-3, -2).flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        """Return ``(B, H, T, d)`` of x ``(B, T, d_model)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
