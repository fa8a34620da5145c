"""What a configuration takes at least of a device's memory, counted before it is tried."""

from a2lib.benchmark.config import Config
from a2lib.measure import memory
from a2lib.theory.memory.step import peak
from a2lib.theory.memory.tensors import MODES, StepMemory
from a2lib.theory.roofline import NARROW
from a2lib.theory.transformer import parameter_count


def least_bytes(config: Config, device: str = "cpu") -> int:
    """Bytes of tensors at the peak of a step, never more than there will be.

    Eager steps without checkpoints: every tensor, as ``a2lib.theory.memory.step`` has them, an
    attention that keeps no scores as ``flash``. Others: weights, gradients and the optimizer's
    state, or the weights and the logits.
    """
    known = not (config.compile or config.compile_blocks) and config.checkpointing == "none"
    if known and config.autocast_cache and config.mode in MODES and config.precision != NARROW:
        step = StepMemory(
            config.shape,
            config.batch,
            config.context,
            config.mode,
            config.precision if config.precision == "bf16" else "fp32",
            "eager" if config.attention == "eager" else "flash",
            cuda=device == "cuda",
        )
        return peak(step).total
    narrow = config.precision == NARROW
    element = 2 if narrow else 4
    weights = element * parameter_count(config.shape)
    gradients = weights if "backward" in config.phases and not config.overlaps else 0
    # AdamW's moments, and fp32 masters of 16-bit weights; the tables and norms are fp32 as it is.
    state = 8 * parameter_count(config.shape) if "optimizer" in config.phases else 0
    logits = 2 * config.batch * config.context * config.shape.vocab_size
    return weights + max(gradients + state, logits)


def too_large(config: Config, device: str) -> str:
    """Why the configuration will not fit, in words; "" where it may."""
    return memory.too_little(device, least_bytes(config, device), "at least")
