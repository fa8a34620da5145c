"""Time a training step of the course's Transformer: `python -m a2lib.benchmark --help`."""

import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence

from a2lib.checks import check_name
from a2lib.command import Parser, Whole, add_name, add_number, output
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


def parser() -> Parser:
    """Return the command's parser."""
    command = Parser(prog="python -m a2lib.benchmark", description=DESCRIPTION, epilog=EPILOG)
    add_name(command, "--size", f"{', '.join(MODELS)}", "small")
    for name in SHAPE:
        option = f"--{name.replace('_', '-')}"
        add_number(command, option, Whole(1, 2**22), "in place of the size's own")
    add_number(command, "--context", Whole(1, 2**20), "tokens in a sequence", 512)
    add_number(command, "--batch", Whole(1, 2**16), "sequences in a batch", 4)
    add_name(command, "--mode", ", ".join(steps.PHASES), "train-step")
    add_number(command, "--warmup", Whole(0, 10**5), "steps before those that count", 5)
    add_number(command, "--steps", Whole(1, 10**5), "steps that count", 10)
    add_name(command, "--precision", ", ".join(steps.PRECISIONS), "fp32")
    add_name(command, "--attention", "eager, flash (this library's), or one of PyTorch's", "eager")
    add_name(command, "--compile", "torch.compile: none, each of the blocks, the model", "none")
    words = "replay the step from a CUDA graph: the GPU's own time"
    command.add_argument("--capture", action="store_true", help=words)
    add_name(command, "--checkpointing", "none, block, segments:k, nested:k, selective:ops", "none")
    words = "NVTX ranges, and the profiler on for the steps that count: none, phases, modules"
    add_name(command, "--nvtx", words, "none")
    add_number(command, "--seed", Whole(0, 2**63 - 1), "of weights and batch", 0)
    command.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    return command


def parse(arguments: Sequence[str] | None):
    """Return the options and the step that they describe; SystemExit where it cannot be here."""
    command = parser()
    options = command.parse_args(arguments)
    from a2lib.model import causal_attention
    from a2lib.model.checkpointing import strategy

    sizes = {name: getattr(options, name) for name in SHAPE if getattr(options, name)}
    try:
        shape = dataclasses.replace(named_size(options.size, MODELS), **sizes)
        config = steps.StepConfig.of({**vars(options), "model": shape})
        causal_attention(config.attention)
        strategy(config.checkpointing, shape.num_layers)
        check_name("nvtx", options.nvtx, RANGES)
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
        before = max(options.warmup, config.capture)  # a capture needs one
        warmup = [steps.timed(step) for _ in range(before)]
        if config.capture:
            step = steps.captured(step)
        if options.nvtx != "none":
            stack.enter_context(torch.cuda.profiler.profile())
        return warmup, [steps.timed(step, ranges_of(number)) for number in range(options.steps)]


def table(counted: list[steps.StepTimes]) -> str:
    """Return the statistics of each phase, in ms, a line each."""
    lines = [f"{'ms':<10}{'mean':>11}{'std':>11}{'median':>11}{'min':>11}{'max':>11}"]
    for name in counted[0].ms if counted else ():
        ms = [times.ms[name] for times in counted]
        deviation = statistics.stdev(ms) if len(ms) > 1 else 0.0
        cells = (statistics.fmean(ms), deviation, statistics.median(ms), min(ms), max(ms))
        lines.append(f"{name:<10}" + "".join(f"{cell:11.3f}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options, config = parse(arguments)
    status, note = "ok", ""
    warmup, counted = [], []
    try:
        warmup, counted = measure(options, config)
    except Exception as error:
        status, note = classify(error)
        if status == "error":
            raise
    import torch

    peak = torch.cuda.max_memory_allocated()  # 0 on a CPU
    with output():
        if options.json:
            answer = {"status": status, "note": note, "peak_bytes": peak}
            answer["warmup"] = [dataclasses.asdict(times) for times in warmup]
            answer["steps"] = [dataclasses.asdict(times) for times in counted]
            print(json.dumps(answer))
        else:
            print(f"{parameter_count(config.shape):,} parameters, {config}")
            print(table(counted))
            print(f"{status} {note}", f"peak memory {peak / 1e9:.2f} GB" if peak else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
