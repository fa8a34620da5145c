"""What is measured: one dataclass, whose fields are the command's options as well; and what it
takes at least of a device's memory, counted before it is tried."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a2lib.theory import roofline
from a2lib.theory.memory.step import MODES as COUNTED
from a2lib.theory.memory.step import StepMemory, peak
from a2lib.theory.products import check_name
from a2lib.theory.roofline import NARROW
from a2lib.theory.transformer import SIZES, Shape, named_size, parameter_count

# The phases of a step in each mode, in order; each is timed apart.
PHASES = {
    "inference": ("forward",),
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "train-step": ("forward", "loss", "backward", "optimizer"),
    "overlapped-step": ("forward", "loss", "backward", "optimizer"),
}
MODES = tuple(PHASES)
PRECISIONS = (*roofline.PRECISIONS, NARROW)
DEVICES = ("cuda", "cpu")
RANGES = ("none", "phases", "modules")
WEIGHTS = ("drawn", "zero")
MOST_STEPS = 10**5  # the times of each are kept
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")


def _option(default: Any, help: str, **rules: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the benchmark.

    A size by name, of which single hyperparameters may be replaced; ``shape`` is what results.
    Raises ValueError, in one line that names the allowed values, for what can never be;
    ``a2lib.experiments.workload.check_here`` does so for what cannot be on this machine.
    """

    size: str = _option("small", f"a model by name: {', '.join(SIZES)}")
    d_model: int | None = _option(None, "in place of the size's own", minimum=1, maximum=2**17)
    d_ff: int | None = _option(None, "in place of the size's own", minimum=1, maximum=2**19)
    num_layers: int | None = _option(None, "in place of the size's own", minimum=1, maximum=10**4)
    num_heads: int | None = _option(None, "in place of the size's own", minimum=1, maximum=2**12)
    vocab_size: int | None = _option(None, "in place of the size's own", minimum=1, maximum=2**22)
    context: int = _option(512, "tokens in a sequence", minimum=1, maximum=2**20)
    batch: int = _option(4, "sequences in a batch", minimum=1, maximum=2**16)
    mode: str = _option(
        "train-step",
        "what a step is: inference (forward that keeps nothing), forward (keeping what backward "
        "would need), forward-backward, train-step (with AdamW), or overlapped-step (with "
        "a2lib.optim's AdamW, which updates each weight while the backward goes on)",
        choices=MODES,
    )
    warmup: int = _option(
        5, "steps before the measured; timed too, reported apart", minimum=0, maximum=MOST_STEPS
    )
    steps: int = _option(10, "measured steps", minimum=1, maximum=MOST_STEPS)
    precision: str = _option(
        "fp32",
        "fp32, tf32 (products of fp32 in TF32), bf16 (autocast; weights and moments stay fp32) or "
        "bf16_weights (autocast, with the products' weights and gradients in bf16; the optimizer, "
        "a2lib.optim's, keeps fp32 masters)",
        choices=PRECISIONS,
    )
    compile: bool = _option(
        False, "torch.compile the model as one graph, and the loss as another, with Inductor"
    )
    compile_blocks: bool = _option(
        False,
        "torch.compile one block for all of them, in seconds whatever the number of blocks, and "
        "the loss; what lies between stays eager",
    )
    capture: bool = _option(
        False,
        "capture the whole step in a CUDA graph and replay it; one replay is one step, so there "
        "are no times by phase. The last warm-up step is the first replay. With or without compile",
    )
    attention: str = _option(
        "eager",
        "eager, flash (this library's), sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math or flex",
    )
    checkpointing: str = _option(
        "none",
        "activations computed again in backward: none, half, block, segments:k of k blocks, "
        "nested:k, recursive, chain, selective:ops (linear, products or attention)",
    )
    autocast_cache: bool = _option(
        True, "autocast keeps no bf16 copy of a weight after its use (else until the loss)"
    )
    keep_gradients: bool = _option(
        False,
        "zero gradients between steps and keep their memory, in place of dropping them; the memory "
        "of accumulation over several batches",
    )
    device: str | None = _option(None, "cuda or cpu; the GPU if there is one", choices=DEVICES)
    seed: int = _option(0, "of weights and batch", minimum=0, maximum=2**63 - 1)
    weights: str = _option(
        "drawn",
        "drawn at random, or zero: as much work, for less of a GPU's power",
        choices=WEIGHTS,
    )
    nvtx: str = _option(
        "none", "NVTX ranges for a profiler: none, phases, or modules as well", choices=RANGES
    )
    cuda_profiler: bool = _option(
        False,
        "start and stop the CUDA profiler around the measured steps (nsys -c cudaProfilerApi)",
    )
    torch_profile: str | None = _option(
        None,
        "write a chrome trace of the measured steps by torch.profiler to this file (.gz packs it), "
        "the ranges of nvtx as its annotations; also without a GPU",
    )
    memory_history: str | None = _option(
        None,
        "write the history of a GPU's allocations to this file, a pickle for "
        "pytorch.org/memory_viz; the times of such a run are not for publishing",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        modules, compiled = self.nvtx == "modules", self.compile or self.compile_blocks
        if self.compile and self.compile_blocks:
            raise ValueError("compile and compile_blocks exclude each other; allowed is one")
        if self.capture and self.warmup < 2:
            raise ValueError(
                f"warmup is {self.warmup}; allowed with capture are whole numbers of at least 2, a "
                "step before the capture and the first replay"
            )
        if self.capture and modules:
            raise ValueError("nvtx 'modules' is lost in a replay; allowed is 'phases'")
        if self.capture and self.keep_gradients:
            raise ValueError(
                "keep_gradients: a captured step makes its gradients; allowed with capture is to "
                "leave it out"
            )
        if modules and compiled:
            raise ValueError("nvtx 'modules' is lost in a compiled graph; allowed is 'phases'")
        if modules and self.checkpointing != "none":
            raise ValueError(
                "nvtx 'modules' needs checkpointing 'none', since recomputation stops midway; "
                "allowed here is 'phases'"
            )
        if self.cuda_profiler and self.torch_profile is not None:
            raise ValueError(
                "cuda_profiler and torch_profile exclude each other: CUPTI has one reader at a time"
            )
        for name in ("memory_history", "torch_profile"):
            path = getattr(self, name)
            if path is not None and not Path(path).parent.is_dir():
                raise ValueError(f"{name} {path!r}: no such folder")
            if path is not None and Path(path).is_dir():
                raise ValueError(f"{name} {path!r} is a folder; allowed is a file")
        self.shape  # noqa: B018  raises for sizes that do not fit each other

    @property
    def shape(self) -> Shape:
        """The model's sizes."""
        given = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        return dataclasses.replace(named_size(self.size), **given)

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[self.mode]

    @property
    def overlaps(self) -> bool:
        return self.mode == "overlapped-step"

    def resolved(self) -> dict[str, Any]:
        """Every field with the shape's sizes filled in; ``size`` is None where the shape is no
        named one."""
        sizes = dataclasses.asdict(self.shape)
        size = next((name for name, shape in SIZES.items() if shape == self.shape), None)
        return {**dataclasses.asdict(self), "size": size, **sizes}


def _check(field: dataclasses.Field, value: Any) -> None:
    rules = field.metadata
    if value is None and field.default is None:
        return
    if "minimum" in rules:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not rules["minimum"] <= value <= rules["maximum"]:
            raise ValueError(
                f"{field.name} is {value!r}; allowed are whole numbers from {rules['minimum']} to "
                f"{rules['maximum']}"
            )
    elif isinstance(field.default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}; allowed are True and False")
    elif field.name == "size":
        named_size(value)
    elif "choices" in rules:
        check_name(field.name, value, rules["choices"])
    elif not isinstance(value, str) or not value:
        raise ValueError(f"{field.name} is {value!r}; allowed is text")


def least_bytes(config: Config, device: str = "cpu") -> int:
    """Bytes of tensors at the peak of a step, never more than there will be.

    Eager steps without checkpoints: the fullest moment that ``a2lib.theory.memory.step`` has, an
    attention that keeps no scores as ``flash``. Others: weights, gradients and the optimizer's
    state, or the weights and the logits.
    """
    known = not (config.compile or config.compile_blocks) and config.checkpointing == "none"
    if known and config.autocast_cache and config.mode in COUNTED and config.precision != NARROW:
        step = StepMemory(
            config.shape,
            config.batch,
            config.context,
            config.mode,
            config.precision if config.precision == "bf16" else "fp32",
            "eager" if config.attention == "eager" else "flash",
        )
        # A CPU makes one tensor of the scores' size less.
        less = step.sizes["scores"] if device == "cpu" and step.attention == "eager" else 0
        return peak(step).total - less
    narrow = config.precision == NARROW
    element = 2 if narrow else 4
    weights = element * parameter_count(config.shape)
    gradients = weights if "backward" in config.phases and not config.overlaps else 0
    # AdamW's moments, and fp32 masters of 16-bit weights; the tables and norms are fp32 as it is.
    state = 8 * parameter_count(config.shape) if "optimizer" in config.phases else 0
    logits = 2 * config.batch * config.context * config.shape.vocab_size
    return weights + max(gradients + state, logits)
