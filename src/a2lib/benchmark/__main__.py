"""The command: ``python -m a2lib.benchmark --help``."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from a2lib.benchmark.config import Config, least_bytes
from a2lib.benchmark.result import Result
from a2lib.benchmark.run import check_here, run
from a2lib.command import Parser, Whole, add_name, add_number, output
from a2lib.lab import memory

PROGRAM = "python -m a2lib.benchmark"
PROGRESS_S = 10
DESCRIPTION = """\
Build the course's Transformer, give it a random batch, and time its steps.

A step is made of phases: forward, loss, backward, optimizer, as many as --mode has. The device is
idle when a step begins and when it ends. On a GPU CUDA events around each phase take its time on
the device, and the host's clock takes the whole step, the row "wall"; where the two part, the host
is the limit. Warm-up steps are timed as well, and kept apart. With --capture a step is one launch
of everything in it, and only the whole is timed: the GPU's own time, with no host in the way.
"""
EPILOG = """\
what it prints
  A table of the measured steps in milliseconds. With --json that table goes to standard error, and
  standard output is one line of JSON: status, config, parameters, flops, summary, every step of the
  warm-up and of the measurement, memory, versions. While it runs, a line on standard error every
  ten seconds; and before, on a GPU, where a step will not fit in its memory.

how it ends
  0    measured; or status "oom" (out of memory) or "unsupported" (this attention cannot run here,
       or the step cannot be captured), which are results: the steps before it count
  1    an error, with its traceback; or a file that could not be written, in one line
  2    an option that cannot be, or on the CPU a step that will not fit in memory, in one line
  130  interrupted; what was measured is printed, with status "interrupted"

examples
  without a GPU, in seconds
    python -m a2lib.benchmark --num-layers 2 --d-model 64 --d-ff 128 --num-heads 2 --context 32
  forward and backward at one context, as a table
    python -m a2lib.benchmark --size medium --context 256 --mode forward-backward
  the same without warm-up, to see what the first steps pay for
    python -m a2lib.benchmark --size medium --context 256 --mode forward-backward --warmup 0 --json
  the whole step as one CUDA graph, compiled
    python -m a2lib.benchmark --size medium --precision bf16 --attention flash --compile --capture
  under Nsight Systems, the measured steps alone
    nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \\
      --capture-range-end=stop -o report \\
      python -m a2lib.benchmark --size small --context 256 --steps 3 --nvtx phases --cuda-profiler
  the same by PyTorch's profiler, also without a GPU; draw it with
  python -c "from a2lib.report import traces; traces.strip('trace.json.gz').save('a.png')"
    python -m a2lib.benchmark --size small --context 256 --steps 3 --nvtx modules \\
      --torch-profile trace.json.gz
  where the memory goes, for pytorch.org/memory_viz
    python -m a2lib.benchmark --size 2.7B --context 128 --steps 1 --memory-history memory.pickle
"""


def parser() -> Parser:
    """One option for each field of Config, and --json."""
    made = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    for field in dataclasses.fields(Config):
        rules, option = field.metadata, "--" + field.name.replace("_", "-")
        if "minimum" in rules:
            kind = Whole(rules["minimum"], rules["maximum"])
            add_number(made, option, kind, rules["help"], field.default)
        elif isinstance(field.default, bool):
            made.add_argument(
                "--no-" + option[2:] if field.default else option,
                dest=field.name,
                action="store_false" if field.default else "store_true",
                help=rules["help"],
            )
        else:
            add_name(made, option, rules["help"], field.default)
    made.add_argument("--json", action="store_true", help="one JSON line on standard output")
    return made


def parse(arguments: Sequence[str]) -> tuple[Config, bool]:
    """The configuration, and whether JSON is wanted; SystemExit for options that cannot be."""
    made = parser()
    values = vars(made.parse_args(arguments))
    as_json = values.pop("json")
    try:
        config = Config(**values)
        check_here(config)
    except ValueError as error:
        made.error(str(error))
    return config, as_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config, as_json = parse(sys.argv[1:] if arguments is None else arguments)
    device = check_here(config)
    if why := memory.too_little(device, least_bytes(config, device), "at least"):
        if device == "cpu":  # which would swap, or kill the process
            parser().error(why)
        print(f"{PROGRAM}: {why}; it is tried", file=sys.stderr, flush=True)
    result = Result(config)
    code, failed = 0, ""
    try:
        with _progress(result):
            run(config, into=result)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.filename not in (config.memory_history, config.torch_profile):
            raise
        code, failed = 1, f"{PROGRAM}: {error.filename} could not be written: {error.strerror}"
    with output():
        print(result.table(), file=sys.stderr if as_json else sys.stdout)
        if as_json:
            print(json.dumps(result.as_dict(), allow_nan=False))
        if failed:
            print(failed, file=sys.stderr)
    return code


@contextlib.contextmanager
def _progress(result: Result) -> Iterator[None]:
    """A line on standard error every ``PROGRESS_S`` seconds, from a thread: a step may be long."""
    began, over, config = time.monotonic(), threading.Event(), result.config

    def say() -> None:
        while not over.wait(PROGRESS_S):
            print(
                f"{PROGRAM}: {time.monotonic() - began:.0f} s: {len(result.warmup)} of "
                f"{config.warmup} warm-up steps and {len(result.steps)} of {config.steps} measured",
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
