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

MIXTURE = ("experts", "top_k", "shared", "expert_ff", "dense", "nodes")
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
    num_kv_heads, tied, gated = None, False, True
    experts = top_k = shared = expert_ff = dense = nodes = 0
    head_size = q_rank = kv_rank = rope = 0

    def __post_init__(self) -> None:
        for name in (*MIXTURE, *LATENT):
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
        if (self.experts or self.shared) and not (self.top_k and self.expert_ff):
            raise ValueError(
                f"experts {self.experts}, shared {self.shared} with top_k {self.top_k}, expert_ff "
                f"{self.expert_ff}; allowed are a top_k and an expert_ff, an expert's width, from 1"
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

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward layer: three with a gate, two without."""
        return 3 if self.gated else 2

    @property
    def routed_ff(self) -> int:
        """Width of all experts that a token meets in a block of experts."""
        return (self.top_k + self.shared) * self.expert_ff

    @property
    def mixtures(self) -> int:
        """Blocks whose feed-forward layer is experts."""
        return self.num_layers - self.dense if self.experts else 0

    @cached_property
    def block_matrices(self) -> int:
        """Parameters of the matrices of a dense block."""
        return self.attention_matrices + self.ffn_matrices * self.d_model * self.d_ff

    @cached_property
    def mixture_matrices(self) -> int:
        """Parameters of the matrices of a block of experts that a token meets, the router's beside
        them."""
        return self.attention_matrices + self.ffn_matrices * self.d_model * self.routed_ff

    @property
    def block_vectors(self) -> int:
        """Parameters of a block's norms: two, and those of latents."""
        return 2 * self.d_model + self.q_rank + self.kv_rank

    @property
    def expert_matrices(self) -> int:
        """Parameters of one expert."""
        return self.ffn_matrices * self.d_model * self.expert_ff

    @property
    def router(self) -> int:
        """Parameters of a block's router: a row for each expert."""
        return self.d_model * self.experts


@dataclass(frozen=True)
class GroupedShape(Shape):
    """A ``Shape`` with fewer heads of keys and values than of queries, a tied head, a feed-forward
    layer without a gate, experts in all layers but the first ``dense``, heads of ``head_size``, or
    latent attention.

    ``num_kv_heads`` of None is as many as ``num_heads``. A token goes to ``top_k`` of ``experts``
    and to all ``shared``, each ``expert_ff`` wide (``moe_intermediate_size`` of a config.json, or
    its ``intermediate_size`` where all layers have experts); ``d_ff`` is of the dense layers, and a
    bias for each expert takes part in the choice. The experts of a token lie in at most ``nodes``
    machines, of 0 in any. Of a latent of ``kv_rank`` come keys and values of ``head_size``, with
    ``rope`` more that turn and are of all heads; of one of ``q_rank`` the queries. 0 is none.
    Counted by this module and the evaluator of layouts; the library's model has none of it.
    """

    num_kv_heads: int | None = None
    tied: bool = False
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    expert_ff: int = 0
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
    # second token: a token's eight experts lie in at most four machines.
    "DeepSeek-V3": GroupedShape(7168, 18_432, 61, 128, 129_280, experts=256, top_k=8, shared=1,
                                expert_ff=2048, dense=3, nodes=4, head_size=128, q_rank=1536,
                                kv_rank=512, rope=64),
}  # fmt: skip
PRESETS = SIZES | PUBLISHED


def named_size(name: str, known: dict[str, Shape] = SIZES) -> Shape:
    """``known[name]``; raises ValueError naming the sizes there are."""
    if not isinstance(name, str) or name not in known:
        hint = "; 'xl' is xl25 in the 2025 handout, 2.7B in that of 2026" if name == "xl" else ""
        raise ValueError(f"size {name!r}: allowed are {', '.join(known)}{hint}")
    return known[name]


def parameter_count(shape: Shape) -> int:
    """Return the parameters of the whole model: embedding, blocks, the last norm, and a head unless
    it is tied."""
    tables = (1 if shape.tied else 2) * shape.vocab_size * shape.d_model
    dense = (shape.num_layers - shape.mixtures) * block_parameter_count(shape)
    return tables + dense + shape.mixtures * mixture_parameter_count(shape) + shape.d_model


def active_parameter_count(shape: Shape) -> int:
    """Return the parameters that one token meets: all but those of experts it does not go to."""
    idle = (shape.experts - shape.top_k) * shape.expert_matrices
    return parameter_count(shape) - shape.mixtures * idle


def block_parameter_count(shape: Shape) -> int:
    """Return the parameters of one dense block: attention's matrices, the FFN's, two norms."""
    return shape.block_matrices + shape.block_vectors


def mixture_parameter_count(shape: Shape) -> int:
    """Return the parameters of one block of experts: all of them, the router, and a bias each."""
    experts = (shape.experts + shape.shared) * shape.expert_matrices
    beside = shape.attention_matrices + shape.block_vectors
    return beside + experts + shape.router + shape.experts


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
    dense = (layers - shape.mixtures) * shape.d_ff
    ffn_width = dense + shape.mixtures * shape.routed_ff
    ffn = 2 * tokens * shape.ffn_matrices * shape.d_model * ffn_width
    return {
        "projections": layers * 2 * tokens * shape.attention_matrices,
        "attention": layers * scores,
        "ffn": ffn + shape.mixtures * 2 * tokens * shape.router,
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
