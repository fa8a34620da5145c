"""The course's decoder-only Transformer: blocks of attention and FFN between embedding and head."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from a2lib.checks import check_sizes
from a2lib.model.attention import CausalMultiHeadSelfAttention
from a2lib.model.checkpointing import Run, strategy
from a2lib.model.head import linear_cross_entropy
from a2lib.model.layers import Embedding, Linear, RMSNorm, RotaryPositionalEmbedding, SwiGLU
from a2lib.shapes import Shape, named_size

ROPE_THETA = 10_000.0


class TransformerBlock(nn.Module):
    """Compute ``x + attn(ln1(x))`` and then, of the result, ``x + ffn(ln2(x))`` (pre-norm).

    The arguments are those of CausalMultiHeadSelfAttention, and ``d_ff``, the hidden width.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryPositionalEmbedding | None = None,
        attention: str = "eager",
        device=None,
        dtype=None,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.ln1 = RMSNorm(d_model, **place)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, rope, attention, **place)
        self.ln2 = RMSNorm(d_model, **place)
        self.ffn = SwiGLU(d_model, d_ff, **place)

    def forward(self, x: Tensor, each: tuple[Callable, Callable] | None = None) -> Tensor:
        """Return ``(B, T, d_model)`` of x ``(B, T, d_model)``.

        ``each``, if given, calls the two halves, attention and FFN with their residuals, as
        ``each[i](half, x)``: a checkpoint can stand there.
        """
        for i, half in enumerate((self._attention, self._ffn)):
            x = half(x) if each is None else each[i](half, x)
        return x

    def _attention(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln1(x))

    def _ffn(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Map token ids to the logits of each next token: a decoder-only Transformer.

    Arguments:

    - ``vocab_size`` V, ``context_length`` (the most tokens of a sequence), ``d_model`` D,
      ``num_layers``, ``num_heads``, ``d_ff`` F, and ``rope_theta``, the base of RoPE;
    - ``attention``: a name of ``a2lib.model.ATTENTIONS``;
    - ``checkpointing``: a strategy of ``a2lib.model.checkpointing``;
    - ``device``, ``dtype``: those of the weights (default: PyTorch's). On "meta" the weights take
      no memory; ``model.to_empty(device=...)`` and ``model.reset_parameters(seed)`` make them;
    - ``seed``: gives the same weights in every dtype on one type of device. Without one they come
      from PyTorch's global generator.

    The state dict is the same for every attention and strategy. Each name ends in ``.weight``:

    - ``token_embeddings`` (V, D), ``ln_final`` (D,), ``lm_head`` (V, D);
    - of block i, after ``layers.{i}.``: ``ln1`` and ``ln2`` (D,); ``attn.q_proj``, ``attn.k_proj``,
      ``attn.v_proj`` and ``attn.output_proj`` (D, D); ``ffn.w1`` and ``ffn.w3`` (F, D), ``ffn.w2``
      (D, F).

    Raises ValueError for sizes that are no positive integers or do not fit each other, and for
    unknown names.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = ROPE_THETA,
        *,
        attention: str = "eager",
        checkpointing: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        self.shape = Shape(d_model, d_ff, num_layers, num_heads, vocab_size)
        check_sizes(context_length=context_length)
        self.context_length = context_length
        self.use_checkpointing(checkpointing)
        device = torch.get_default_device() if device is None else torch.device(device)
        place = {"device": "meta", "dtype": dtype}
        rope = RotaryPositionalEmbedding(rope_theta, self.shape.head_dim, context_length, **place)
        self.token_embeddings = Embedding(vocab_size, d_model, **place)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, rope, attention, **place)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, **place)
        self.lm_head = Linear(d_model, vocab_size, **place)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(seed)

    @classmethod
    def from_size(cls, size: str | Shape, context_length: int, **options) -> Self:
        """Return the model of a shape, or of a named size of ``a2lib.model.SIZES``.

        ``options`` are the constructor's arguments from ``rope_theta`` on.
        """
        shape = size if isinstance(size, Shape) else named_size(size)
        return cls(
            shape.vocab_size,
            context_length,
            shape.d_model,
            shape.num_layers,
            shape.num_heads,
            shape.d_ff,
            **options,
        )

    def use_checkpointing(self, name: str | Run) -> None:
        """Change the strategy of activation checkpointing, from the next forward on.

        ``name`` is that of a strategy, or a function ``run(blocks, x) -> x``. Raises ValueError for
        an unknown name.
        """
        self._run_blocks = name if callable(name) else strategy(name, self.shape.num_layers)
        self.checkpointing = name

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw every weight anew, in the order of the state dict. Does nothing on "meta"."""
        device = self.lm_head.weight.device
        generator = None
        if seed is not None and device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Embedding | Linear | RMSNorm):
                module.reset_parameters(generator)

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of token ids, or their loss.

        Arguments:

        - ``token_ids``: ``(B, T)``, int64 or int32;
        - ``targets``: ``(B, T)``, int64, or None.

        Returns: the logits ``(B, T, V)``; with targets the mean loss instead, a scalar, by
        ``linear_cross_entropy``.

        Raises ValueError for another shape or dtype, and for T outside 1 to context_length, which
        RoPE has tables for.
        """
        if token_ids.dim() != 2:
            raise ValueError(f"token ids must be (batch, tokens); got {tuple(token_ids.shape)}")
        x = self._run_blocks(self.layers, self.token_embeddings(token_ids))
        if targets is None:
            return self.lm_head(self.ln_final(x))
        return self.loss(self.ln_final(x), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of x, which comes out of ``ln_final``."""
        return linear_cross_entropy(x, self.lm_head.weight, targets)
