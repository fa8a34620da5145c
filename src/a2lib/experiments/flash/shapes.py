"""What the flash experiment measures: its parameters, and the shapes of its sweeps. No torch."""

from dataclasses import dataclass

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import WithSweep, names, parameter
from a2lib.experiments.passes import DTYPES, Shape
from a2lib.theory.attention import PASSES

# `tiled` is plain PyTorch, tile by tile: the algorithm on a machine without a GPU, too slow on one.
PUBLISHED = ("a2lib", "eager", "compile", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex")
# Our forward and the backward that the handout asks for, in its sweep alone; its forward is ours.
ASKED = "compiled_backward"
IMPLEMENTATIONS = (*PUBLISHED, ASKED, "tiled")
SWEEPS = ("handout", "leaderboard", "fa3", "ladder", "all")
_DEFAULTS = {"cuda": {"dtype": "bf16", "seq_len": 16384}, "cpu": {"dtype": "fp32", "seq_len": 128}}
# Tile by tile in Python takes minutes beyond this on a CPU, so it is then measured only if asked
# for.
TILED_SEQ_LEN = 4096


@dataclass(frozen=True)
class Parameters(WithSweep):
    beside = ("dtype", "implementations", "passes", "compile_workers")

    seq_len: int | None = parameters.count(
        None, "tokens per sequence; None: 16384 on a GPU, 128 on the CPU", 2**24
    )
    head_dim: int = parameters.count(64, "size of a head", 2**14)
    heads: int = parameters.count(1, "heads per sequence", 2**16)
    batch: int = parameters.count(1, "sequences", 2**20)
    dtype: str = parameter(
        "auto",
        "bf16, fp16 or fp32; auto: bf16 on a GPU, fp32 on the CPU",
        choices=("auto", *DTYPES),
    )
    causal: bool = parameter(True, "whether a query sees no later key")
    implementations: str = parameter(
        "auto",
        "comma list such as a2lib,sdpa_cudnn; auto: all that run here",
        choices=("auto",),
        many=IMPLEMENTATIONS,
    )
    passes: str = parameter(
        "all", f"all, or a comma list of {', '.join(PASSES)}", choices=("all",), many=PASSES
    )
    compile_workers: int = parameters.count(
        0, "processes that compile a sweep ahead of its timing; 0: by the cores", 1024, 0
    )
    sweep: str = parameters.sweep(SWEEPS)

    def chosen_passes(self, implementation: str) -> tuple[str, ...]:
        """The passes to measure of one implementation."""
        chosen = PASSES if self.passes == "all" else names(self.passes)
        return tuple(p for p in chosen if implementation != ASKED or p != "forward")

    def chosen_implementations(self, shape: Shape, device: str) -> tuple[str, ...]:
        """What to measure at ``shape`` on ``device``, "cuda" or "cpu": asked for, or all it has."""
        if self.implementations != "auto":
            return names(self.implementations)
        if device == "cuda":
            return (*PUBLISHED, ASKED) if shape.batch == shape.heads == 1 else PUBLISHED
        tiled = ("tiled",) if shape.seq_len <= TILED_SEQ_LEN else ()
        return ("eager", *tiled, "sdpa_flash")

    def shapes(self, device: str) -> list[Shape]:
        """The shapes to measure on ``device``, in order; of a sweep all, or those of a dtype."""
        if self.sweep != "shape":
            shapes = sweep_shapes(self.sweep, tiny=device == "cpu")
            return [shape for shape in shapes if self.dtype in ("auto", shape.dtype)]
        how = parameters.filled(self, _DEFAULTS[device])
        sizes = {name: getattr(self, name) for name in ("batch", "heads", "head_dim", "causal")}
        return [Shape(**how, **sizes)]


def sweep_shapes(sweep: str, *, tiny: bool = False) -> list[Shape]:
    """The shapes of ``sweep``: the leaderboard's first, then from cheap to dear, each once.

    handout: batch 1, one head, causal, 2^7 to 2^16 tokens, heads of 16 to 128, bf16 and fp32.
    leaderboard: 16 heads of 64, 16,384 tokens, causal, bf16 (the course's leaderboard of 2025).
    fa3: 16,384 tokens in all, hidden size 2048, heads of 64 and 128 (FlashAttention-3, section
    4.1). ladder: the leaderboard's, the same with heads of 128, and one head of 4,096 tokens, the
    dearest first, which is compiled first. ``tiny`` shrinks lengths, tokens and hidden size to what
    a CPU does in minutes.
    """
    if sweep == "ladder":
        few = Shape("bf16", 1, 1, 128 if tiny else 4096, 64, True)
        return [few] if tiny else [Shape("bf16", 1, 16, 16384, d, True) for d in (128, 64)] + [few]
    leaderboard = [Shape("bf16", 1, *((2, 256) if tiny else (16, 16384)), 64, True)]
    handout = [
        Shape(dtype, 1, 1, 2**power, head_dim, True)
        for power in range(7, 9 if tiny else 17)
        for head_dim in (16, 32, 64, 128)
        for dtype in ("bf16", "fp32")
    ]
    tokens, hidden = (512, 256) if tiny else (16384, 2048)
    fa3 = [
        Shape("bf16", tokens // seq_len, hidden // head_dim, seq_len, head_dim, causal)
        for seq_len in ((128, 256, 512) if tiny else (512, 1024, 2048, 4096, 8192, 16384))
        for head_dim in (64, 128)
        for causal in (True, False)
    ]
    chosen = {"handout": handout, "leaderboard": [], "fa3": fa3, "all": handout + fa3}[sweep]
    first = leaderboard if sweep in ("leaderboard", "all") else []
    return list(dict.fromkeys([*first, *sorted(chosen, key=lambda shape: shape.cost)]))
