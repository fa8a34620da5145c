"""A shape of attention, a pass of it as a call, and the GPU's own time of that, replayed from a
CUDA graph. Importing this needs no torch."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from a2lib.experiments.harness.worker import Row
from a2lib.lab import failures, graphs
from a2lib.theory.attention import attention_flops
from a2lib.theory.eager import Eager

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes per element
# On CUDA cores or in several tensor-core products, fp32 costs about this many times bf16.
FP32_COST = 8


@dataclass(frozen=True)
class Shape:
    """Self-attention on ``(batch, heads, seq_len, head_dim)`` inputs; the fields are columns."""

    dtype: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool

    def key(self, implementation: str, pass_: str) -> dict[str, object]:
        """The key columns of one row of the flash section."""
        return {"implementation": implementation, **dataclasses.asdict(self), "pass": pass_}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of q, and of each other tensor of its shape."""
        return self.batch, self.heads, self.seq_len, self.head_dim

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype]

    @property
    def tensor_bytes(self) -> int:
        return math.prod(self.sizes) * self.element_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the N x N scores of all heads."""
        return self.batch * self.heads * self.seq_len**2 * self.element_bytes

    @property
    def eager(self) -> Eager:
        sizes = self.batch * self.heads, self.seq_len, self.head_dim
        return Eager(*sizes, self.causal, self.element_bytes)

    @property
    def cost(self) -> float:
        """Roughly how long it takes, in arbitrary units: the order of a sweep."""
        sizes = (self.batch, self.heads, self.seq_len, self.seq_len, self.head_dim)
        flops = attention_flops(*sizes, self.causal, "end_to_end")
        return flops * (FP32_COST if self.dtype == "fp32" else 1)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{'x'.join(map(str, self.sizes))} {self.dtype} {mask}"


def random(dtype: str, device: str, seed: int) -> dict[str, object]:
    """What ``torch.randn`` is given beside the sizes, the same for all tensors of a shape."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    generator = torch.Generator(device).manual_seed(seed)
    return {"device": device, "dtype": dtypes[dtype], "generator": generator}


def one_pass(
    forward: Callable, qkv: Sequence, do: object, pass_: str, *, anew: bool = False
) -> Callable[[], object]:
    """ "forward", "backward" or both ("end_to_end") of ``forward(q, k, v)`` as a call without
    arguments; the graph of a backward alone is made here, and kept.

    With ``anew`` its leaves are its own: autograd hands a leaf its gradient on the stream that
    first used it, and work on another than the captured stream ends a capture.
    """
    import torch

    if anew:
        qkv = [x.detach().requires_grad_() for x in qkv]
    if pass_ == "forward":
        return lambda: forward(*qkv)
    if pass_ == "end_to_end":
        return lambda: torch.autograd.grad(forward(*qkv), qkv, do)
    o = forward(*qkv)
    return lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)


def replayed(
    makers: Mapping[str, Callable], expected_ms: Mapping[str, float], **options: object
) -> tuple[dict[str, Row], bool]:
    """``ms_graph`` of each call of ``makers``, or the ``note`` why there is none, and whether the
    device is usable: if not, those not come to are missing. ``graphs.time_replays`` says how."""
    try:
        done = graphs.time_replays(makers, expected_ms, **options)
    except Exception as error:  # of the clock itself
        done = graphs.Replays(dict.fromkeys(makers, error))
    return {name: _values(result) for name, result in done.results.items()}, done.usable


def _values(result: object) -> Row:
    if isinstance(result, Exception):
        return {"note": failures.note(f"no graph: {failures.classify(result)[1]}")}
    return {"ms_graph": result.ms}
