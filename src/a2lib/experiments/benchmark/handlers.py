"""What a worker does for the sections of the benchmark: one task is one configuration.

A task of ``steps`` or ``first`` studies what a process does first, so its process ends with it.
"""

import contextlib
import functools
import statistics
import traceback
from collections.abc import Callable, Sequence

from a2lib.benchmark import run
from a2lib.experiments.benchmark.first import timed_parts
from a2lib.experiments.harness.worker import Job, Row
from a2lib.experiments.steps import Configuration
from a2lib.lab import StoreError, Timing
from a2lib.lab.device import Sensors, Watch
from a2lib.lab.failures import LostContext, classify
from a2lib.lab.timing import median_reading

FRESH = "what comes next is measured in a process of its own"


def alone(measure: Callable[[Job], None]) -> Callable[[Job], None]:
    """Make the handler ``measure`` the last of its process, also where it fails: its rows then say
    why, all of them, since what a failed process measured before is none of a whole."""

    @functools.wraps(measure)
    def handler(job: Job) -> None:
        try:
            measure(job)
        except StoreError:
            raise
        except Exception as error:
            traceback.print_exc()
            job.refuse(*classify(error))
        raise LostContext(FRESH)

    return handler


def summary(job: Job) -> None:
    """The times of a configuration, phase by phase."""
    if result := _result(job):
        job.put(*({**key, **summarised(job, result, key["phase"])} for key in job.keys))


def power(job: Job) -> None:
    """What the steps of a configuration take of energy, once clock and power have settled."""
    settled = job.spec["settled"]
    with contextlib.ExitStack() as watching:
        meter = Meter(settled, job.spec["steps"], watching)
        result = _result(job, before_step=meter)
    if result:
        samples = [step.time_of("wall") for step in result.steps[settled:]]
        for key in job.keys:
            job.put({**key, "status": "ok", **_times(job, samples), **meter.row()})


@alone
def steps(job: Job) -> None:
    """Every step of a fresh process, warm-up included."""
    if result := _result(job):
        every, rows = [*result.warmup, *result.steps], []
        for key in job.keys:
            step = every[key["step_number"]]
            ms, reserved = step.time_of(key["phase"]), step.reserved_bytes
            rows.append({**key, "status": "ok", "ms": ms, "n": 1, "reserved_bytes": reserved})
        job.put(*rows)


@alone
def first(job: Job) -> None:
    """The parts of the first step of a fresh process."""
    configuration = Configuration(**job.spec["configuration"])
    wanted = {key["part"]: key for key in job.keys}
    how = {name: job.spec[name] for name in ("prepared", "repeat")}
    for part, samples in timed_parts(configuration, device=job.device, seed=job.seed, **how):
        if part in wanted:
            job.put({**wanted[part], "status": "ok", **_times(job, samples)})


def summarised(job: Job, result, phase: str) -> Row:
    """The values of a row: of the measured steps of ``result``, which ended well."""
    row = {"status": "ok", **_times(job, [step.time_of(phase) for step in result.steps])}
    if result.device == "cuda" and phase != "wall":
        row["ms_host"] = statistics.median(step.host_of(phase) for step in result.steps)
    return row | {"peak_bytes": result.memory.get("peak_allocated_bytes")}


def _times(job: Job, samples: Sequence[float]) -> Row:
    row = Timing.from_samples(samples).row(job.store.section)
    return row if len(samples) > 1 else row | {"ms_p20": None, "ms_p80": None}


def _result(job: Job, before_step: Callable[[int], object] | None = None):
    """What came of the task's configuration; None after rows that say why nothing did."""
    configuration = Configuration(**job.spec["configuration"])
    if why := configuration.refusal(job.device):
        return job.refuse("oom", why)
    given = {name: job.spec[name] for name in ("warmup", "steps", "weights") if name in job.spec}
    config = configuration.config(job.device, **given, seed=job.seed)
    result = run(config, before_step=before_step)
    return result if result.status == "ok" else job.refuse(result.status, result.note)


class Meter:
    """Reads the driver's counter of energy before step ``settled`` and after step ``steps`` - 1,
    and clock and limit meanwhile, as long as ``watching`` is open.

    Steps run as they do: it reads where the device is idle anyway, and in a thread.
    """

    def __init__(self, settled: int, steps: int, watching: contextlib.ExitStack):
        self._settled, self._steps, self._watching = settled, steps, watching
        self._sensors, self._watch = Sensors(), Watch()
        self._joules: list[float | None] = []

    def __call__(self, step: int) -> None:
        """Before each step, with its number, and after the last."""
        if step == self._settled:
            self._watching.enter_context(self._watch)
        if step in (self._settled, self._steps):
            self._joules.append(self._sensors.energy_j())
        if step == self._steps:
            self._watching.close()

    def row(self) -> dict[str, object]:
        """The values of a row; None for what the driver does not tell."""
        first, last = self._joules
        known = first is not None and last is not None
        return {
            "joules": (last - first) / (self._steps - self._settled) if known else None,
            "power_limit_w": self._sensors.power_limit_w(),
            "capped_percent": self._watch.capped_percent(),
            "sm_mhz": median_reading(self._watch.mhz),
        }
