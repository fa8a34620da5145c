"""What a plan is for: a model, its batch, a device, and what the training computes with."""

from dataclasses import dataclass
from functools import cached_property

from a2lib.theory.devices import Device
from a2lib.theory.memory.saved import block_saved
from a2lib.theory.memory.step import ATTENTIONS, PRECISIONS
from a2lib.theory.products import NARROW, WIDE, check_name, check_sizes
from a2lib.theory.transformer import Shape

ACTIVATIONS = ("library", "fused")
# Of an optimizer: bytes a parameter that it keeps from step to step.
OPTIMIZERS = {"adamw": 8, "adamw-8bit": 2, "momentum": 4, "sgd": 0}
# Of the maker's peak, what products of feed-forward layers reach on an H200 (rows of section
# parallelism).
EFFICIENCY = 0.65
# How the names of what a block keeps end that is of the residual stream and of norms.
WHOLE = ("x0", "y0", "/root", "/normal", "/norm", ".x")


@dataclass(frozen=True)
class Job:
    """What is to be trained on what: at most ``devices`` of ``device``, which may be used but for
    the share ``headroom`` of their memory; ``batch`` sequences of ``context`` tokens a step.

    ``precision`` and ``attention`` are as in step.py, ``optimizer`` one of ``OPTIMIZERS``,
    ``efficiency`` the share of the maker's peak at which products run, and ``activations`` what a
    block keeps: as this library's does, or as fused kernels on a residual stream in the width of
    computation, as in Megatron-LM. ``frozen`` is the share of each matrix that is not trained.
    Raises ValueError, in one line, for sizes that are not positive integers, for a headroom or a
    frozen share that is not from 0 to below 1, an efficiency not above 0 or above 1, another name,
    and for fp32 where the maker states no rate.
    """

    shape: Shape
    device: Device
    devices: int
    batch: int
    context: int
    headroom: float = 0.1
    precision: str = "bf16"
    attention: str = "flash"
    optimizer: str = "adamw"
    efficiency: float = EFFICIENCY
    activations: str = "library"
    frozen: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(devices=self.devices, batch=self.batch, context=self.context)
        for name in ("headroom", "frozen"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {share!r}; allowed are numbers from 0 to < 1")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency!r}; allowed are numbers above 0 to 1")
        check_name("precision", self.precision, PRECISIONS)
        check_name("attention", self.attention, ATTENTIONS)
        check_name("optimizer", self.optimizer, OPTIMIZERS)
        check_name("activations", self.activations, ACTIVATIONS)
        if self.precision == "fp32" and self.device.fp32 is None:
            raise ValueError(
                f"precision fp32: allowed is bf16 on {self.device.slug}, whose maker states no "
                "rate in fp32"
            )

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may use."""
        return (1 - self.headroom) * self.device.memory

    @property
    def peak(self) -> float:
        """Operations a second that the maker states for this precision."""
        return self.device.flops if self.precision == "bf16" else self.device.fp32

    @property
    def flops(self) -> float:
        """Operations a second at which products run."""
        return self.efficiency * self.peak

    @property
    def element(self) -> int:
        """Bytes of a number that is computed with, or sent."""
        return NARROW if self.precision == "bf16" else WIDE

    @property
    def residual(self) -> int:
        """Bytes of a number of the residual stream."""
        return WIDE if self.activations == "library" else self.element

    @cached_property
    def saved(self) -> tuple[int, int, int]:
        """Bytes that a token of one block leaves: whole on, and cut over, the devices of plain
        tensor parallelism, but for scores; and of scores. Eager's mask is not in them."""
        shape, e = self.shape, self.element
        # A copy for each expert, and latents in and out of their norms.
        more = e * (shape.top_k * shape.d_model + 2 * (shape.q_rank + shape.kv_rank))
        if self.activations == "fused":
            sums = 0 if self.scores else WIDE * shape.num_heads
            heads = e * (2 * shape.q_width + 2 * shape.kv_width)
            whole = 4 * e * shape.d_model + 2 * WIDE
            return whole + more, heads + sums + 3 * e * shape.d_ff, e * self.scores
        whole = cut = scores = 0
        found = block_saved(shape, 1, self.context, self.attention, self.precision)
        for name, size in found.items():
            if name.endswith(WHOLE):
                whole += size // self.context
            elif "/prob" in name:
                scores += size // self.context
            elif not name.endswith((".16", "/mask")):
                cut += size // self.context
        return whole + more, cut, scores

    @property
    def update_bytes(self) -> int:
        """What the optimizer reads of a parameter, its gradient and its state, and writes again."""
        return 3 * WIDE + 2 * OPTIMIZERS[self.optimizer]

    @property
    def scores(self) -> int:
        """Scores that a token of one block has, if attention forms them in memory."""
        return self.shape.num_heads * self.context if self.attention == "eager" else 0
