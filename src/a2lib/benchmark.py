"""Time a training step of the course's Transformer: `python -m a2lib.benchmark --help`."""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence

from a2lib.lab import steps
from a2lib.lab.device import device_kind
from a2lib.lab.failures import classify
from a2lib.lab.memory import available_bytes
from a2lib.lab.ranges import annotate
from a2lib.shapes import MODELS, named_size
from a2lib.theory.transformer import parameter_count

DESCRIPTION = """\
Build the course's Transformer, give it a random batch, and time its steps: --warmup of them, then
--steps that count. A step has the phases of its --mode. The device is idle when it begins and when
it ends; within it nothing waits. "step" and the phases are by the device's clock (CUDA events; on a
CPU the host's), "wall" is the host's. Running out of memory is a result.
"""
EPILOG = """\
examples
  python -m a2lib.benchmark --size tiny --context 32                 # without a GPU, in seconds
  python -m a2lib.benchmark --size medium --mode forward-backward --warmup 0
  python -m a2lib.benchmark --precision bf16 --attention flash --compile blocks --capture
  nsys profile --capture-range=cudaProfilerApi -o report python -m a2lib.benchmark --nvtx modules
"""
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
RANGES = ("none", "phases", "modules")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command = argparse.ArgumentParser(
        prog="python -m a2lib.benchmark",
        usage="%(prog)s [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--size", default="small", help=f"{', '.join(MODELS)} (%(default)s)")
    for name in SHAPE:
        add(f"--{name.replace('_', '-')}", type=int, help="in place of the size's own")
    add("--context", type=int, default=512, help="tokens in a sequence (%(default)s)")
    add("--batch", type=int, default=4, help="sequences in a batch (%(default)s)")
    add("--mode", default="train-step", help=f"{', '.join(steps.PHASES)} (%(default)s)")
    add("--warmup", type=int, default=5, help="steps before those that count (%(default)s)")
    add("--steps", type=int, default=10, help="steps that count (%(default)s)")
    add("--precision", default="fp32", help=f"{', '.join(steps.PRECISIONS)} (%(default)s)")
    add("--attention", default="eager", help="eager, flash (this library's), or one of PyTorch's")
    add("--compile", default="none", help="torch.compile: none, each of the blocks, the model")
    add("--capture", action="store_true", help="replay a CUDA graph: the GPU's own time")
    strategies = "none, block, segments:k, nested:k, selective:ops (%(default)s)"
    add("--checkpointing", default="none", help=strategies)
    ranges = "NVTX ranges, and the profiler on for the steps that count (%(default)s)"
    add("--nvtx", default="none", choices=RANGES, help=ranges)
    add("--seed", type=int, default=0, help="of weights and batch (%(default)s)")
    add("--json", action="store_true", help="one line of JSON instead of a table")
    return command


def parse(arguments: Sequence[str] | None):
    """Return the options and the step that they describe; SystemExit where it cannot be here."""
    command = parser()
    options = command.parse_args(arguments)
    from a2lib.model import causal_attention
    from a2lib.model.checkpointing import strategy

    sizes = {}
    for name in SHAPE:
        size = getattr(options, name)
        if size is not None:
            sizes[name] = size
    try:
        shape = dataclasses.replace(named_size(options.size, MODELS), **sizes)
        config = steps.StepConfig.of({**vars(options), "model": shape})
        causal_attention(config.attention)
        strategy(config.checkpointing, shape.num_layers)
    except ValueError as error:
        command.error(str(error))
    is_plain = config.compile == config.checkpointing == "none" and not config.capture
    if options.nvtx == "modules" and not is_plain:
        command.error("nvtx 'modules' is for a plain step; allowed here are none and phases")
    if device_kind() == "cpu":
        if config.precision == "tf32" or config.capture or options.nvtx != "none":
            command.error("tf32, capture and nvtx need a GPU; leave them out here")
        least = 16 * parameter_count(shape)  # weights, gradients and two moments
        if least > available_bytes():  # which would swap, or kill the process
            command.error(f"a step takes {least / 1e9:.0f} GB at least; allowed is what fits")
    return options, config


def measure(options, config: steps.StepConfig) -> tuple[list, list]:
    """Run the steps; return the times of those of warm-up, and of those that count."""
    import torch

    within = torch.cuda.nvtx.range

    def ranges_of(number: int) -> steps.Phase:
        if options.nvtx == "none":
            return contextlib.nullcontext
        return lambda name: within(f"step {number}" if name == "step" else name)

    with steps.graph_stream(config), contextlib.ExitStack() as stack:
        step = steps.TrainingStep(config, device_kind(), options.seed)
        if options.nvtx == "modules":
            annotate(step.model, within)
        warmup, counted = [], []
        for _ in range(max(options.warmup, config.capture)):  # a capture needs one
            warmup.append(steps.timed(step))
        if config.capture:
            step = steps.captured(step)
        if options.nvtx != "none":
            stack.enter_context(torch.cuda.profiler.profile())
        for number in range(options.steps):
            counted.append(steps.timed(step, ranges_of(number)))
        return warmup, counted


def table(counted: list[steps.StepTimes]) -> str:
    """Return the statistics of each phase, in ms, a line each."""
    lines = [f"{'ms':<10}{'mean':>11}{'std':>11}{'median':>11}{'min':>11}{'max':>11}"]
    for name in counted[0].ms if counted else ():
        ms = [times.ms[name] for times in counted]
        deviation = statistics.stdev(ms) if len(ms) > 1 else 0.0
        line = f"{name:<10}"
        for number in (statistics.fmean(ms), deviation, statistics.median(ms), min(ms), max(ms)):
            line += f"{number:11.3f}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options, config = parse(arguments)
    status, note = "ok", ""
    warmup, counted = [], []
    try:
        warmup, counted = measure(options, config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        status, note = classify(error)
        if status == "error":
            raise
    import torch

    peak = torch.cuda.max_memory_allocated()  # 0 on a CPU
    if options.json:
        answer = {"status": status, "note": note, "peak_bytes": peak}
        answer["warmup"] = list(map(dataclasses.asdict, warmup))
        answer["steps"] = list(map(dataclasses.asdict, counted))
        print(json.dumps(answer))
    else:
        print(f"{parameter_count(config.shape):,} parameters, {config}")
        print(table(counted))
        print(f"{status} {note}", f"peak memory {peak / 1e9:.2f} GB" if peak else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
