"""The sizes of a Transformer: a shape, and those that have a name.

``Shape`` is the course's model: pre-norm RMSNorm, RoPE, SwiGLU with three d_model x d_ff matrices,
an untied head and no biases. ``GroupedShape`` describes published models as well: several heads
share their keys and values (grouped-query attention, Ainslie et al., 2023), the head is the
embedding (tied), a token goes to a few of a block's experts (DeepSeekMoE, Dai et al., 2024), or
keys and values come from a narrow latent (multi-head latent attention, DeepSeek-AI, 2024).
``a2lib.theory.transformer`` counts parameters, FLOPs and bytes of either.
"""

from dataclasses import dataclass
from functools import cached_property

from a2lib.checks import check_sizes

MIXTURE = ("experts", "top_k", "shared", "expert_ff", "dense", "nodes")
LATENT = ("head_size", "q_rank", "kv_rank", "rope")


@dataclass(frozen=True)
class Shape:
    """The sizes that fix a model's parameters; see ``SIZES`` for those with a name.

    Raises ValueError for a size that is not a positive integer, and for heads that do not divide
    d_model or that leave an odd head_dim, which RoPE cannot rotate in pairs.
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
        """Size of a head. With a latent it is the mean of that of queries and keys, which RoPE
        extends by ``rope``, and that of values, so that FLOPs and bytes of both are right."""
        return (self.head_size or self.d_model // self.num_heads) + self.rope // 2

    @cached_property
    def q_width(self) -> int:
        """Width of a token's queries, and of its heads' results."""
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @cached_property
    def kv_width(self) -> int:
        """Width of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of a block's projections: queries, keys, values and output."""
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
        """Width of all experts that a token uses in a block of experts."""
        return (self.top_k + self.shared) * self.expert_ff

    @property
    def mixtures(self) -> int:
        """Number of blocks that have experts."""
        return self.num_layers - self.dense if self.experts else 0

    @cached_property
    def block_matrices(self) -> int:
        """Parameters of the matrices of a dense block."""
        return self.attention_matrices + self.ffn_matrices * self.d_model * self.d_ff

    @cached_property
    def mixture_matrices(self) -> int:
        """Parameters of the matrices that a token uses in a block of experts, without the
        router."""
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
    """A ``Shape`` of a published model. The library's own model has none of these options.

    num_kv_heads: heads of keys and values; None: as many as ``num_heads``
    tied: whether the head is the embedding
    gated: whether the feed-forward layer has a gate
    experts, top_k, shared: experts of a block, those that a token goes to, those that all go to
    expert_ff: width of an expert (``moe_intermediate_size`` of a config.json, or its
        ``intermediate_size`` where all layers have experts); ``d_ff`` is that of dense layers
    dense: the first layers, which have no experts
    nodes: nodes that the experts of a token lie in at most; 0: any number
    head_size: size of a head; 0: d_model / num_heads
    q_rank, kv_rank: widths of the latents of queries, and of keys and values; 0: none
    rope: width that latent attention adds to queries and keys for RoPE, shared by all heads
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
# For trials on a CPU, which take seconds.
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


def named_size(name: str, shapes: dict[str, Shape] = SIZES) -> Shape:
    """Return ``shapes[name]``. Raises ValueError, which lists the sizes, for another name."""
    if not isinstance(name, str) or name not in shapes:
        hint = "; 'xl' is xl25 in the 2025 handout, 2.7B in that of 2026" if name == "xl" else ""
        raise ValueError(f"size {name!r}: allowed are {', '.join(shapes)}{hint}")
    return shapes[name]
