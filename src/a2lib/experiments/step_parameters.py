"""Parameters that every experiment on a training step has, each with its rule. No torch.

    model: str = step_parameters.model()
    context: int | None = step_parameters.context(512, 16)

``harness/parameters.py`` makes those that every experiment has.
"""

from collections.abc import Sequence
from typing import Any

from a2lib.experiments.harness.parameters import count, parameter
from a2lib.experiments.steps import BATCH, MODELS
from a2lib.theory.roofline import NARROW, PRECISIONS

ATTENTIONS = ("eager", "flash", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex")
COMPILES = ("none", "blocks", "model")


def model(usual: str = "small", where: str = "a GPU") -> Any:
    """The field ``model``, one of MODELS: auto is ``usual`` on ``where``, tiny on the CPU."""
    return parameter(
        "auto",
        f"a size by name; auto: {usual} on {where}, tiny on the CPU",
        choices=("auto", *MODELS),
    )


def context(gpu: int, cpu: int, what: str = "tokens per sequence", where: str = "a GPU") -> Any:
    """The field ``context``, which is None for the usual one of the device."""
    return count(None, f"{what}; None: {gpu} on {where}, {cpu} on the CPU", 2**20)


def batch() -> Any:
    return count(BATCH, "sequences in a batch", 2**16)


def mode(names: Sequence[str]) -> Any:
    return parameter("train-step", f"one of {', '.join(names)}", choices=tuple(names))


def precision(usual: str = "fp32", what: str = "fp32, tf32 or bf16 (autocast)") -> Any:
    return parameter(usual, what, choices=PRECISIONS)


def any_precision() -> Any:
    """The field ``precision`` of an experiment that has 16-bit weights too."""
    what = "fp32, tf32, bf16 (autocast) or bf16_weights"
    return parameter("fp32", what, choices=(*PRECISIONS, NARROW))


def attention() -> Any:
    """The field ``attention`` of an experiment that takes all of the model's."""
    what = "eager, flash (ours), or one of PyTorch's"
    return parameter("eager", what, choices=ATTENTIONS)


def compiled() -> Any:
    return parameter("none", "torch.compile: none, blocks or model", choices=COMPILES)
