"""The sizes of a Transformer: a shape, and those that have a name.

``Shape`` is the course's model: pre-norm RMSNorm, RoPE, SwiGLU with three d_model x d_ff matrices,
an untied head and no biases. ``GroupedShape`` describes published dense models as well: several
heads share their keys and values (grouped-query attention, Ainslie et al., 2023), the head is the
embedding (tied), or the feed-forward layer has no gate. ``a2lib.theory.transformer`` counts
parameters, FLOPs and bytes of either.
"""

from dataclasses import dataclass
from functools import cached_property

from a2lib.checks import check_sizes


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

    def __post_init__(self) -> None:
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

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.d_model // self.num_heads

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
        return 2 * self.d_model * (self.q_width + self.kv_width)

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward layer: three with a gate, two without."""
        return 3 if self.gated else 2

    @cached_property
    def block_matrices(self) -> int:
        """Parameters of the matrices of a block."""
        return self.attention_matrices + self.ffn_matrices * self.d_model * self.d_ff

    @property
    def block_vectors(self) -> int:
        """Parameters of a block's two norms."""
        return 2 * self.d_model


@dataclass(frozen=True)
class GroupedShape(Shape):
    """A ``Shape`` of a published model. The library's own model has none of these options.

    num_kv_heads: heads of keys and values; None: as many as ``num_heads``
    tied: whether the head is the embedding
    gated: whether the feed-forward layer has a gate
    """

    num_kv_heads: int | None = None
    tied: bool = False
    gated: bool = True


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
}
PRESETS = SIZES | PUBLISHED


def named_size(name: str, shapes: dict[str, Shape] = SIZES) -> Shape:
    """Return ``shapes[name]``. Raises ValueError, which lists the sizes, for another name."""
    if not isinstance(name, str) or name not in shapes:
        hint = "; 'xl' is xl25 in the 2025 handout, 2.7B in that of 2026" if name == "xl" else ""
        raise ValueError(f"size {name!r}: allowed are {', '.join(shapes)}{hint}")
    return shapes[name]
