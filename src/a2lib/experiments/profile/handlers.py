"""What a worker does for the profile: time a configuration, then trace it in a child process.

The child is ``python -m a2lib.benchmark`` under Nsight Systems, or with torch.profiler in it. It is
a process of its own since CUPTI has one reader at a time and a profiler leaves a process slower.
"""

import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Mapping

from a2lib.benchmark import Config, StepTimes, run
from a2lib.experiments.harness.worker import Job, Row
from a2lib.experiments.profile import NSYS, STEPS, TRACED_STEPS, WARMUP, Traced
from a2lib.lab import PROFILE, nsight, program, trace
from a2lib.lab.failures import LostContext, note
from a2lib.lab.trace import Kernel, Trace, TraceError, busy, kernel_rows, strip_rows
from a2lib.lab.trace.classes import shorten
from a2lib.paths import build_dir

TIMEOUT_S = 400  # below the silence that a worker is allowed
NS = 1e-6  # milliseconds
UNFILED = ("launch", "range", "class")
# Of what Nsight notes down, the rest being that it has started and the like.
ALARMING = re.compile(r"lost|drop|overflow|incomplete|not all|fail|error", re.I)


def measure(job: Job) -> None:
    """The rows of one configuration, a phase each, and its bulk tables."""
    traced = Traced(**job.spec)
    if why := traced.refusal(job.device):
        return job.refuse("oom", why)
    given = {"seed": job.seed, "warmup": WARMUP}
    timer = run(traced.config(job.device, steps=STEPS, **given))
    if timer.status != "ok":
        return job.refuse(timer.status, timer.note)
    config = traced.config(job.device, steps=TRACED_STEPS, nvtx=traced.ranges, **given)
    try:
        found, under = record(traced, config)
    except program.ProgramError as error:
        job.refuse("error", str(error))
        if error.stuck:
            # What the child started ends with this process.
            raise LostContext("a traced process does not end") from None
        return None
    if under["status"] != "ok":
        return job.refuse(under["status"], under["note"])
    _store_tables(job, traced, found)
    times = trace.phase_times(found)
    for key in job.keys:
        job.put({**key, **values(key["phase"], found, times, timer, under)})
    return None


def record(traced: Traced, config: Config) -> tuple[Trace, Mapping]:
    """The trace of ``config`` in a child process, and what its benchmark said of itself.

    The trace's file stays in build/traces. Raises ProgramError where none comes of it.
    """
    folder = build_dir() / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / traced.picture.replace(".", "_")  # what nsys might take for a suffix
    if traced.profiler == NSYS:
        config = dataclasses.replace(config, cuda_profiler=True)
        path, printed = nsight.record(command(config), path, timeout_s=TIMEOUT_S)
    else:
        path = path.with_name(f"{path.name}.json.gz")
        config = dataclasses.replace(config, torch_profile=str(path))
        printed = program.run("the traced process", command(config), TIMEOUT_S)
    return trace.read(path), _said(printed)


def command(config: Config) -> list[str]:
    """``python -m a2lib.benchmark`` with the options that ``config`` has other than by default."""
    words = [sys.executable, "-m", "a2lib.benchmark", "--json"]
    for field in dataclasses.fields(config):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def values(phase: str, found: Trace, times: Mapping, timer, under: Mapping[str, object]) -> Row:
    """The values of a row: the steps of the trace ``found``, with ``times`` from it, beside those
    of the ``timer`` (a Result) and the timer's of the traced process, ``under``."""
    mine = [phases[phase] for phases in times.values() if phase in phases]
    if not mine:
        return {"status": "error", "note": f"the trace has no {phase}"}

    def median(name: str) -> float | None:
        # The store has no time of zero.
        return statistics.median(getattr(one, name) for one in mine) * NS or None

    spans = sorted(one.span_ns * NS for one in mine)
    on_cpu = found.source == "chrome, cpu"
    # Of a step the whole trace, since what is in no range is in no step.
    shares = trace.coverage([k for k in found.kernels if phase in (trace.STEP, k.phase)])
    said = []
    if phase == trace.STEP:
        said += [differing(found), *filter(ALARMING.search, found.notes)][:2]
    said += [f"no class: {shorten(name, 60)}" for name in shares.unknown[:2]]
    return {
        "status": "ok",
        "ms": statistics.median(spans),
        "ms_p20": spans[0],
        "ms_p80": spans[-1],
        "n": len(spans),
        "ms_timer": statistics.median(step.time_of(phase) for step in timer.steps),
        "ms_traced": statistics.median(StepTimes(**step).time_of(phase) for step in under["steps"]),
        **{f"ms_{c}": median(f"{c}_ns") for c in ("busy", "range", "launching", "waiting")},
        "ms_host": None if on_cpu else statistics.median(s.host_of(phase) for s in timer.steps),
        "us_queued": None if on_cpu else statistics.median(o.queued_ns for o in mine) / 1e3,
        "launches": None if on_cpu else int(statistics.median_low(o.kernels for o in mine)),
        **{f"no_{c}_percent": 100 * getattr(shares, f"no_{c}") for c in UNFILED},
        "note": note("; ".join(filter(None, said))),
    }


def _store_tables(job: Job, traced: Traced, found: Trace) -> None:
    """The kernels of the median step, and windows as long as a block."""
    step = median_step(found)
    about = traced.key(PROFILE) | {"source": found.source, "steps": 1}
    job.picture("kernels", traced.picture, kernel_rows(step), about)
    if traced.mode != "train-step":
        return
    for phase, rows in block_windows(found, step, traced.shape.num_layers).items():
        job.picture("strip", f"{traced.picture}-{phase}", rows, about | {"phase": phase})


def _said(printed: str) -> Mapping[str, object]:
    """The benchmark's line of JSON, among what nsys prints."""
    for line in printed.splitlines():
        if line.startswith('{"status"'):
            return json.loads(line)
    raise program.ProgramError("the traced process printed no result")


def median_step(found: Trace) -> list[Kernel]:
    """The kernels of the step whose busy time is the median one (the lower of two).

    Raises TraceError where the trace names no step.
    """
    steps = sorted(found.steps().values(), key=lambda kernels: busy(kernels)[1])
    if not steps:
        raise TraceError("the trace names no step")
    return steps[(len(steps) - 1) // 2]


def differing(found: Trace) -> str:
    """What to say where steps that do the same have another number of kernels, or of ranges; ""
    where not. A profiler that lost records shows so."""
    steps = found.steps()
    around = [span for span in found.spans if span.name in steps]
    counts = {
        "kernels": [len(kernels) for kernels in steps.values()],
        # Of all threads: the backward pushes its own.
        "ranges": [
            sum(step.start_ns <= span.start_ns < step.end_ns for span in found.spans)
            for step in around
        ],
    }
    return "; ".join(
        f"steps of {min(n)} to {max(n)} {what}" for what, n in counts.items() if len(set(n)) > 1
    )


def block_windows(found: Trace, step: list[Kernel], layers: int) -> dict[str, list]:
    """Phase -> rows of the bulk table ``strip``: the block in the middle, forward and backward.

    It is found by its range. Where blocks have none, since they are compiled, the window is as long
    as one of ``layers`` equal parts in the middle of the phase.
    """
    windows = {}
    for phase, suffix in (("forward", ""), ("backward", ".bwd")):
        mine = [k for k in step if k.phase == phase]
        if not mine:
            continue
        block = f"layers.{layers // 2}{suffix}"
        inside = [k for k in mine if block in k.path]
        start = min(k.start_ns for k in inside or mine)
        length = max(k.end_ns for k in inside or mine) - start
        if not inside:
            length //= layers
            start += (layers // 2) * length
        if rows := strip_rows(found.kernels, start, length):
            windows[phase] = rows
    return windows
