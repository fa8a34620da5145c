"""The command: ``python -m a2lib.leaderboard --help``."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence

from a2lib.command import Parser, Whole, add_name, add_number, output
from a2lib.lab.inductor import empty_folder
from a2lib.leaderboard import BATCH, CONTEXT, LADDER, SIZE, Step, ways
from a2lib.parallel import LaunchError, launch
from a2lib.theory.devices import DEVICES
from a2lib.theory.transformer import MODELS, named_size, parameter_count

PROGRAM = "python -m a2lib.leaderboard"
LONGEST_S = 3600
DESCRIPTION = """\
Take the leaderboard's step: forward, loss, backward and AdamW of an 8B model, in processes that
this command starts: on GPUs where there are any, one for each and bf16; else on the CPU, in fp32.

Steps are timed as triton.testing.do_bench does, for 30 s after a warm-up of 10 s, the L2 cache
cleared before each, of the slower rank; on the CPU for a hundredth of that. The learning rate is 0.
The compilers' caches are empty at first, and ready is the end of the first step from there.
"""
EPILOG = """\
the ways, of which each changes one thing of the one before
  recomputed      PyTorch's parts: FSDP2, cuDNN's attention, blocks and head computed again
  attention_kept  of a block all but attention is computed again
  fused_head      the loss in the head, whose gradients are made with it
  own_fsdp        this library's FSDP
  products_kept   as many results of multiplies stay as there is memory for
  offloaded       the others wait on the host, as many as the link carries meanwhile
  own_attention   this library's attention; on GPUs alone

how it ends
  0    measured; with --json standard output is one line of JSON, and the table on standard error
  1    a process failed: its traceback, which says where it is memory that did not suffice
  2    an option that cannot be, or on the CPU a step that will not fit in memory, in one line
  130  interrupted

examples
  the board's, on two GPUs; then PyTorch's parts
    python -m a2lib.leaderboard
    python -m a2lib.leaderboard --way recomputed
  a part of it on one
    python -m a2lib.leaderboard --processes 1 --num-layers 8
  without a GPU, in seconds
    python -m a2lib.leaderboard --size tiny
"""


def parser() -> Parser:
    made = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    add_name(made, "--way", "one of those below (the last that runs here)")
    add_name(made, "--size", ", ".join(MODELS), SIZE)
    add_number(made, "--num-layers", Whole(1, 10**4), "blocks, in place of the size's own")
    tokens = f"tokens in a sequence ({CONTEXT['cuda']} on GPUs, {CONTEXT['cpu']} without)"
    add_number(made, "--context", Whole(1, 2**20), tokens)
    add_number(made, "--batch", Whole(1, 2**16), "sequences of a process", BATCH)
    add_number(made, "--processes", Whole(1, 1024), "each with its own GPU, if there are any", 2)
    add_number(made, "--seed", Whole(0, 2**63 - 1), "of weights and batches", 0)
    made.add_argument("--json", action="store_true", help="one JSON line on standard output")
    return made


def parse(arguments: Sequence[str]) -> tuple[Step, str, argparse.Namespace]:
    """The step, its device, and the options; SystemExit for what cannot be here."""
    import torch

    made = parser()
    given = made.parse_args(arguments)
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    here = ways(device)
    name = given.way or list(here)[-1]
    if name not in here:
        where = "" if name not in {way.name for way in LADDER} else " without a GPU"
        made.error(f"way {name!r}: allowed{where} are {', '.join(here)}")
    if device == "cuda" and given.processes > gpus:
        made.error(f"processes is {given.processes}; allowed are from 1 to {gpus}, the GPUs here")
    try:
        shape = named_size(given.size, MODELS)
    except ValueError as error:
        made.error(str(error))
    step = Step.on(device, here[name], shape, given.num_layers, given.context, batch=given.batch)
    if device == "cpu":
        from a2lib.leaderboard.run import too_large

        if why := too_large(step, device, given.processes):  # which would swap, or be killed
            made.error(why)
    return step, device, given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    step, device, given = parse(sys.argv[1:] if arguments is None else arguments)
    begun = time.monotonic()

    def say(rank: int, event: Mapping[str, str]) -> None:
        seconds = time.monotonic() - begun
        print(f"{PROGRAM}: {seconds:.0f} s: {event['moment']}", file=sys.stderr, flush=True)

    try:
        with empty_folder() as empty:
            row, *_ = launch(
                "a2lib.leaderboard.run:take",
                {"spec": dataclasses.asdict(step), "device": device, "seed": given.seed},
                processes=given.processes,
                time_limit_s=LONGEST_S,
                device=device,
                on_progress=say,
                on_output=lambda rank, line: None,  # an error has the last lines
                env={f"{who}_CACHE_DIR": f"{empty}/{who}" for who in ("TORCHINDUCTOR", "TRITON")},
            )
    except LaunchError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rates = of_peak(step, row)
    with output():
        print(table(step, row, rates, given), file=sys.stderr if given.json else sys.stdout)
        if given.json:
            told = {**dataclasses.asdict(step), "processes": given.processes, "seed": given.seed}
            print(json.dumps({**told, **row, **rates}, allow_nan=False))
    return 0


def of_peak(step: Step, row: Mapping) -> dict[str, float | None]:
    """``tflops``, 10**12 operations a second of a rank, and ``mfu``, their share of the peak that
    the device's maker states in bf16; None where that is not known."""
    tflops = step.flops / row["ms"] / 1e9
    peak = {known.slug: known.flops for known in DEVICES.values()}.get(row["slug"])
    return {"tflops": tflops, "mfu": peak and 1e12 * tflops / peak}


def table(step: Step, row: Mapping, rates: Mapping, given: argparse.Namespace) -> str:
    """A few lines for people."""
    tokens = given.processes * step.tokens
    share = "no peak of this device is known"
    if rates["mfu"] is not None:
        share = f"{rates['mfu']:.1%} of the stated peak (MFU)"
    lines = [
        f"{given.size}: {parameter_count(step.shape):,} parameters "
        f"(num_layers {step.shape.num_layers})",
        f"{step.way.name}: batch {step.batch} a process, context {step.context}, {step.dtype}, "
        f"attention {step.attention}",
        f"{row['device']}; processes {given.processes}, timed steps {row['n']}",
        "",
        f"{'ms':<10}{'median':>11}{'mean':>11}{'min':>11}{'20 %':>11}{'80 %':>11}",
        f"{'step':<10}"
        + "".join(f"{row[c]:11.3f}" for c in ("ms", "ms_mean", "ms_min", "ms_p20", "ms_p80")),
        *(f"{name:<10}{row[f'ms_{name}']:11.3f}" for name in ("forward", "backward", "optimizer")),
        f"{rates['tflops']:.3g} TFLOP/s of a process, {share}; "
        f"{1e3 * tokens / row['ms']:,.0f} tokens/s",
        "",
        f"ready after {row['ms_ready'] / 1e3:.1f} s",
    ]
    if "allocated_bytes" in row:
        peak, reserved = row["allocated_bytes"] / 1e9, row["reserved_bytes"] / 1e9
        lines.append(f"peak memory {peak:.2f} GB ({reserved:.2f} GB reserved)")
    moved, again = row["host_bytes"] / 1e9, row.get("products_again")
    lines.append(
        f"{moved:.2f} GB of a step wait on the host; "
        + ("blocks" if again is None else f"{again} multiplies of blocks")
        + " are computed again"
    )
    lines.append(f"loss {row['loss']:.6f}, norm of the gradients {row['gradient_norm']:.6f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
