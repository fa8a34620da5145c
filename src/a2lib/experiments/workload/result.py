"""What was measured: every step's times, their summary, and a table for people."""

import dataclasses
import functools
import statistics
from dataclasses import dataclass, field
from typing import Any

from a2lib.experiments.workload.config import Config
from a2lib.lab.runs import versions
from a2lib.theory.transformer import forward_flops, parameter_count, step_flops


@dataclass(frozen=True)
class StepTimes:
    """One step, in milliseconds.

    ``ms`` has each phase by the device's clock: CUDA events on a GPU, the host's clock on the CPU.
    ``host_ms`` has the host's time in each phase, which on a GPU ends when the work is queued.
    ``total_ms`` runs from the first phase's start to the last one's end on the device; ``wall_ms``
    is the host's clock from an idle device to an idle device.
    A replayed step has no phases: ``ms`` is empty, and ``host_ms`` has "replay" alone, the launch
    of the graph. ``loss`` is None where there is none that is finite; the bytes, after the step,
    are None on the CPU.
    """

    ms: dict[str, float]
    host_ms: dict[str, float]
    total_ms: float
    wall_ms: float
    loss: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    def time_of(self, phase: str) -> float:
        """The time of a phase by the device's clock, of the whole "step" by that, or by the host's
        as "wall", in ms."""
        return {**self.ms, "step": self.total_ms, "wall": self.wall_ms}[phase]

    def host_of(self, phase: str) -> float:
        """What the host took to issue a phase, or the whole "step", in ms."""
        return sum(self.host_ms.values()) if phase == "step" else self.host_ms[phase]


@dataclass(frozen=True)
class Summary:
    """Of ``n`` samples in milliseconds; ``std`` divides by n - 1 and is None for a single one."""

    mean_ms: float
    std_ms: float | None
    median_ms: float
    min_ms: float
    max_ms: float
    n: int


@dataclass
class Result:
    """One configuration's measurement, complete or as far as it came.

    ``status`` is ok, oom (out of memory), unsupported (this attention cannot run here, or the step
    cannot be captured) or interrupted, and ``note`` says where and why. ``memory`` has bytes of the
    CUDA device: before the measured steps, at their peak (allocated: tensors; reserved: with the
    allocator's cache) and the device's total; it is empty on the CPU. A captured step's memory is
    taken when it is captured, and that is where it is counted.
    """

    config: Config
    device: str = ""
    device_name: str = ""
    status: str = "ok"
    note: str = ""
    warmup: list[StepTimes] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return parameter_count(self.config.shape)

    @property
    def flops(self) -> int:
        """Model operations of one step, of its matrix products alone, with every score of attention
        counted; see ``a2lib.theory.transformer``."""
        count = step_flops if "backward" in self.config.phases else forward_flops
        return count(self.config.shape, self.config.batch, self.config.context)

    def summary(self) -> dict[str, Summary]:
        """Of the measured steps: each phase and ``total`` by the device's clock, ``wall`` by the
        host's. Replayed steps have no phases. Empty where no step was measured."""
        if not self.steps:
            return {}
        samples = {name: [step.ms[name] for step in self.steps] for name in self.steps[0].ms}
        samples["total"] = [step.total_ms for step in self.steps]
        samples["wall"] = [step.wall_ms for step in self.steps]
        found = {}
        for name, ms in samples.items():
            std = statistics.stdev(ms) if len(ms) > 1 else None
            mean, median = statistics.fmean(ms), statistics.median(ms)
            found[name] = Summary(mean, std, median, min(ms), max(ms), len(ms))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {
            "status": self.status,
            "note": self.note,
            "config": {**self.config.resolved(), "device": self.device},
            "device_name": self.device_name,
            "parameters": self.parameters,
            "flops": self.flops,
            "summary": {n: dataclasses.asdict(s) for n, s in self.summary().items()},
            "warmup": [dataclasses.asdict(step) for step in self.warmup],
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "memory": self.memory,
            "versions": _versions(),
        }

    def table(self) -> str:
        """A few lines for people."""
        config = self.config.resolved()
        shape = ("d_model", "d_ff", "num_layers", "num_heads")
        sizes = ", ".join(f"{name} {config[name]}" for name in shape)
        how = "compiled" if self.config.compile else "eager"
        how = "blocks compiled" if self.config.compile_blocks else how
        how += ", captured (one replay is one step)" if self.config.capture else ""
        lines = [
            f"{config['size'] or 'no named size'}: {self.parameters:,} parameters ({sizes})",
            f"{config['mode']}, batch {config['batch']}, context {config['context']}, "
            f"{config['precision']}, {how}, attention {config['attention']}, "
            f"checkpointing {config['checkpointing']}",
            f"{self.device_name or self.device}; {len(self.warmup)} warm-up and {len(self.steps)} "
            "measured steps",
        ]
        if self.steps:
            lines += ["", *self._times()]
        if self.memory:
            peak, total = self.memory["peak_allocated_bytes"], self.memory["total_bytes"]
            reserved = self.memory["peak_reserved_bytes"]
            lines += ["", f"peak memory {_gb(peak)} ({_gb(reserved)} reserved) of {_gb(total)}"]
        if self.status != "ok":
            lines += ["", f"{self.status}: {self.note}"]
        return "\n".join(lines)

    def _times(self) -> list[str]:
        summary = self.summary()
        lines = [f"{'ms':<10}{'mean':>11}{'std':>11}{'median':>11}{'min':>11}{'max':>11}"]
        for name, s in summary.items():
            cells = (s.mean_ms, s.std_ms, s.median_ms, s.min_ms, s.max_ms)
            shown = "".join("          -" if cell is None else f"{cell:11.3f}" for cell in cells)
            lines.append(f"{name:<10}{shown}")
        rate = self.flops / summary["wall"].mean_ms / 1e9
        tokens = self.config.batch * self.config.context / summary["wall"].mean_ms * 1e3
        lines.append(f"{rate:.3g} TFLOP/s, {tokens:,.0f} tokens/s by the mean wall time")
        return lines


# As they were when first asked for; it starts git and nvidia-smi, which most processes need not.
_versions = functools.cache(versions)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
