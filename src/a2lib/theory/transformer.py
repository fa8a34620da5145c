"""Parameters, operations and bytes of the course's Transformer, as exact integers.

The model: pre-norm RMSNorm, RoPE, SwiGLU with three d_model x d_ff matrices, an untied head, no
biases. ``GroupedShape`` is that of published models: several heads share their keys and values
(grouped-query attention, Ainslie et al., 2023), the head is the embedding (tied), a token goes to a
few of a block's experts (DeepSeekMoE, Dai et al., 2024), or keys and values come of a narrow latent
(multi-head latent attention, DeepSeek-AI, 2024).

Operations follow the convention of PaLM (Chowdhery et al., 2022, appendix B): two per multiply-add
of the matrix products alone, the embedding lookup is none, and a backward is twice its forward.
Nothing computed a second time counts, neither in attention nor under activation checkpointing.
"""

from dataclasses import dataclass
from functools import cached_property

from a2lib.theory.attention import attention_flops
from a2lib.theory.products import check_sizes, matmul_flops

LATENT = ("head_size", "q_rank", "kv_rank", "rope")


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
    vocab_size: int = 10_000
    # Of a ``GroupedShape`` alone.
    num_kv_heads, tied = None, False
    experts = top_k = shared = dense = nodes = 0
    head_size = q_rank = kv_rank = rope = 0

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "shared", "dense", "nodes", *LATENT):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{name} is {size!r}; allowed are whole numbers from 0")
        if (self.q_rank or self.rope) and not self.kv_rank:
            raise ValueError(
                f"q_rank {self.q_rank}, rope {self.rope} with kv_rank 0; allowed are 0, since both "
                "are of latent attention"
            )
        names = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
        sizes = {name: getattr(self, name) for name in names}
        check_sizes(**sizes, num_kv_heads=self.kv_heads)
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
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}; it must"
            )
        if self.kv_rank and self.kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads {self.kv_heads} with a latent; allowed is num_heads")
        found = self.top_k + self.shared
        if (self.experts or self.shared) and (not self.top_k or self.d_ff % found):
            raise ValueError(
                f"d_ff {self.d_ff} of {self.top_k} + {self.shared} experts; it must be a whole "
                "multiple of top_k + shared, with top_k from 1"
            )
        if self.top_k > self.experts or self.dense >= self.num_layers:
            raise ValueError(
                f"top_k {self.top_k} of {self.experts} experts, dense {self.dense} of "
                f"{self.num_layers} layers; allowed are at most the experts, and fewer than the "
                "layers"
            )

    @property
    def head_dim(self) -> int:
        """Of queries and keys; with a latent the mean of theirs, whose last ``rope`` turn, and of
        the values', which counts products and bytes of both as they are."""
        return (self.head_size or self.d_model // self.num_heads) + self.rope // 2

    @cached_property
    def q_width(self) -> int:
        """Width of the queries of a token, and of the heads' results."""
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @cached_property
    def kv_width(self) -> int:
        """Width of the keys of a token, and of its values."""
        return self.kv_heads * self.head_dim

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of a block's matrices of queries, output, keys and values."""
        d, h, n = self.d_model, self.num_heads, self.head_dim - self.rope // 2
        if not self.kv_rank:
            return d * (2 * self.q_width + 2 * self.kv_width)
        turned = n + self.rope
        queries = self.q_rank * (d + h * turned) if self.q_rank else d * h * turned
        return queries + d * (self.kv_rank + self.rope) + self.kv_rank * h * 2 * n + h * n * d

    @cached_property
    def block_matrices(self) -> int:
        """Parameters of the matrices of a block that a token meets: attention's, the FFN's three.
        Of experts ``top_k`` and the shared, ``d_ff`` wide together; the router's is beside."""
        return self.attention_matrices + 3 * self.d_model * self.d_ff

    @property
    def block_vectors(self) -> int:
        """Parameters of a block's norms: two, and those of latents."""
        return 2 * self.d_model + self.q_rank + self.kv_rank

    @cached_property
    def expert_matrices(self) -> int:
        """Parameters of one expert, 0 where there are none."""
        return 3 * self.d_model * self.d_ff // (self.top_k + self.shared) if self.experts else 0

    @property
    def router(self) -> int:
        """Parameters of a block's router: a row for each expert."""
        return self.d_model * self.experts


@dataclass(frozen=True)
class GroupedShape(Shape):
    """A ``Shape`` with fewer heads of keys and values than of queries, a tied head, experts in all
    layers but the first ``dense``, heads of ``head_size``, or latent attention.

    ``num_kv_heads`` of None is as many as ``num_heads``. A token goes to ``top_k`` of ``experts``
    and to the ``shared``; together they are ``d_ff`` wide, as a dense layer's FFN is, and a bias
    for each takes part in the choice. They lie in at most ``nodes`` machines, of 0 in any. Of a
    latent of ``kv_rank`` come keys and values of ``head_size``, with ``rope`` more that turn and
    are of all heads; of one of ``q_rank`` the queries. 0 is none. Counted by this module, saved.py
    and the planner; the library's model and the other counts have none of it. Raises ValueError as
    ``Shape``, for heads of keys that do not divide the heads, for experts that do not go together,
    and for a ``q_rank`` or ``rope`` without ``kv_rank``.
    """

    num_kv_heads: int | None = None
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    dense: int = 0
    nodes: int = 0
    head_size: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0


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
# A trial on a CPU, in seconds; its times are no result.
TINY = Shape(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=128)
MODELS = {"tiny": TINY, **SIZES}  # what the experiments and the leaderboard run
# Table 3 of "The Llama 3 Herd of Models" (Llama team, 2024); the vocabulary is that of the released
# weights, whose parameters these are to the digit.
PUBLISHED = {
    "Llama-3-8B": GroupedShape(4096, 14_336, 32, 32, 128_256, num_kv_heads=8),
    "Llama-3-70B": GroupedShape(8192, 28_672, 80, 64, 128_256, num_kv_heads=8),
    "Llama-3-405B": GroupedShape(16_384, 53_248, 126, 128, 128_256, num_kv_heads=8),
    # config.json of the released weights (DeepSeek-AI, 2024), without the layer that predicts a
    # second token: an expert is 2,048 wide, and a token's eight lie in at most four machines.
    "DeepSeek-V3": GroupedShape(7168, 18_432, 61, 128, 129_280, experts=256, top_k=8, shared=1,
                                dense=3, nodes=4, head_size=128, q_rank=1536, kv_rank=512, rope=64),
}  # fmt: skip
PRESETS = SIZES | PUBLISHED


def named_size(name: str, known: dict[str, Shape] = SIZES) -> Shape:
    """``known[name]``; raises ValueError naming the sizes there are."""
    if not isinstance(name, str) or name not in known:
        hint = "; 'xl' is xl25 in the 2025 handout, 2.7B in that of 2026" if name == "xl" else ""
        raise ValueError(f"size {name!r}: allowed are {', '.join(known)}{hint}")
    return known[name]


def more_of_experts(shape: Shape, n: float = 1) -> float:
    """Parameters that a block of experts cut over ``n`` devices has on one beside those that a
    token meets: the experts' less ``top_k``, the router's, and a bias for each expert."""
    each = shape.expert_matrices
    held = shape.experts * each // n if n == 1 else shape.experts * each / n
    return held - shape.top_k * each + shape.router + shape.experts


def parameter_count(shape: Shape) -> int:
    """Parameters of the whole model: embedding, blocks, the last norm, and a head of its own unless
    it is tied."""
    tables = (1 if shape.tied else 2) * shape.vocab_size * shape.d_model
    experts = (shape.num_layers - shape.dense) * more_of_experts(shape)
    return tables + shape.num_layers * block_parameter_count(shape) + experts + shape.d_model


def active_parameter_count(shape: Shape) -> int:
    """Those that one token meets: all but the experts that it does not go to."""
    idle = (shape.experts - shape.top_k) * shape.expert_matrices
    return parameter_count(shape) - (shape.num_layers - shape.dense) * idle


def block_parameter_count(shape: Shape) -> int:
    """Parameters of one dense block: four attention matrices, three of the FFN, two norms."""
    return shape.block_matrices + shape.block_vectors


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
    sizes = batch, shape.num_heads, context, context, shape.head_dim
    scores = attention_flops(*sizes, causal, "forward")
    routed = (layers - shape.dense) * 2 * tokens * shape.router
    return {
        "projections": layers * 2 * tokens * shape.attention_matrices,
        "attention": layers * scores,
        "ffn": layers * 3 * matmul_flops(tokens, shape.d_ff, shape.d_model) + routed,
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


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training keeps between steps, or during one: ``total`` is their sum."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(shape: Shape) -> StateBytes:
    """Bytes in fp32 of the parameters, of their gradients, and of AdamW's two moments; the counter
    of 4 bytes that ``torch.optim.AdamW`` keeps for each tensor is not among them."""
    one = 4 * parameter_count(shape)
    return StateBytes(one, one, 2 * one)
