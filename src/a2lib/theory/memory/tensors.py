"""Every tensor of a training step, in the order in which PyTorch makes and drops it.

The step is that of ``a2lib.benchmark``: this library's eager model and fused AdamW;
``operations.py`` goes through it. A test holds all of it against what PyTorch does on a CPU. There
CUDA differs in one tensor, which ``cuda`` adds: its kernel for the softmax's gradient makes another
matrix of scores for a moment. ``step.py`` has what follows.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from a2lib.theory.attention import cut_in_chunks, in_one_sweep, tiled_memory
from a2lib.theory.memory.operations import Operations
from a2lib.theory.memory.tape import CATEGORIES, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, Event
from a2lib.theory.products import INDEX, WIDE, check_name, check_sizes
from a2lib.theory.roofline import Kernel
from a2lib.theory.transformer import Shape

ATTENTIONS, PRECISIONS = ("eager", "flash"), ("fp32", "bf16")
MODES = ("inference", "forward", "forward-backward", "train-step")


@dataclass(frozen=True)
class StepMemory:
    """One step of a model of ``shape``: ``mode`` of ``MODES``, ``attention`` of ``ATTENTIONS``,
    ``precision`` as ``saved.py`` has it.

    ``first`` is the first step of a process, which makes the optimizer's state; ``cuda`` False is
    a CPU's. Gradients are made by each backward and dropped with the step, or, if not ``fresh``,
    there already: a backward adds to them (after a ``first`` step, which makes them). Of a
    ``GroupedShape`` only what a forward saves is meant. Raises ValueError, in one line, for other
    names and sizes.
    """

    shape: Shape
    batch: int = 4
    context: int = 512
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    first: bool = False
    cuda: bool = True
    fresh: bool = True

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context)
        check_name("mode", self.mode, MODES)
        check_name("precision", self.precision, PRECISIONS)
        check_name("attention", self.attention, ATTENTIONS)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes in float32 of the residual ``stream``, (B, T, D), the FFN's ``hidden``, (B, T, F),
        the ``scores``, (B, H, T, T), the ``logits``, (B, T, V), ``rows`` of one number, ``q`` and
        ``k``, which is as wide as v."""
        s, rows = self.shape, WIDE * self.batch * self.context
        widths = {"stream": s.d_model, "hidden": s.d_ff, "rows": 1, "logits": s.vocab_size}
        widths |= {"scores": s.num_heads * self.context, "q": s.q_width, "k": s.kv_width}
        return {name: rows * width for name, width in widths.items()}

    def tiled(self, pass_: str) -> dict[str, int]:
        """Name -> bytes of what the library's attention makes in a pass, on a Hopper GPU."""
        s, n, size = self.shape, self.context, 2 if self.precision == "bf16" else WIDE
        heads, d = self.batch * s.num_heads, s.head_dim
        forms = in_one_sweep(n, heads, d, size), cut_in_chunks(n, n, heads, d, True, size)
        return tiled_memory(1, heads, n, n, d, size, pass_, *forms, terms=size == WIDE)

    def parameters(self) -> dict[str, int]:
        """Name -> bytes of each parameter, in the order of the state dict."""
        s = self.shape
        D = WIDE * s.d_model
        widths = {"q": s.q_width, "k": s.kv_width, "v": s.kv_width, "output": s.q_width}
        attention = {f"attn.{name}_proj": D * width for name, width in widths.items()}
        ffn = {f"ffn.{name}": D * s.d_ff for name in ("w1", "w2", "w3")}
        block = {"ln1": D, **attention, "ln2": D, **ffn}
        found = {"token_embeddings": D * s.vocab_size}
        for i in range(s.num_layers):
            found |= {f"layers.{i}.{name}": size for name, size in block.items()}
        return found | {"ln_final": D, "lm_head": D * s.vocab_size}

    def state(self) -> dict[str, int]:
        """Name -> bytes of what the optimizer keeps: two moments, and a counter for each tensor."""
        found = {}
        for name, size in self.parameters().items():
            found |= {f"{name}.step": 4, f"{name}.m": size, f"{name}.v": size}
        return found

    @property
    def adds(self) -> bool:
        """Whether a backward adds to gradients that are there."""
        return self.mode in ("forward-backward", "train-step") and not (self.fresh or self.first)

    def standing(self) -> dict[str, int]:
        """Bytes by category that are there when the step begins: parameters with RoPE's two tables,
        the optimizer's state, the batch and its targets."""
        found, parameters = dict.fromkeys(CATEGORIES, 0), sum(self.parameters().values())
        found[PARAMETERS] = parameters + WIDE * self.context * self.shape.head_dim
        if self.mode == "train-step" and not self.first:
            found[OPTIMIZER] = sum(self.state().values())
        if self.adds:
            found[GRADIENTS] = parameters
        found[OTHER] = 2 * self.batch * self.context * INDEX
        return found

    def of_a_block(self, mode: str) -> Self:
        """The same of a model of one block."""
        dense = {"dense": 0} if self.shape.dense else {}
        return replace(self, shape=replace(self.shape, num_layers=1, **dense), mode=mode)

    def kernels(self) -> list[Kernel]:
        """What the step launches on CUDA, but for the optimizer's, each with the name of the tensor
        that it makes; of tiled attention its forward alone, "tiled"."""
        return Operations(self.of_a_block(self.mode), self.shape.num_layers).kernels

    def events(self) -> tuple[Event, ...]:
        """The step from its beginning until all that it made, but the state, is dropped."""
        return _events(self)


@lru_cache(maxsize=8)  # what is asked of a step comes one after another
def _events(step: StepMemory) -> tuple[Event, ...]:
    return Operations(step).events()
