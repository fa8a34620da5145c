"""A model's steps, compiled and eager, through ``a2lib.experiments.workload``: what a worker does.

Each way has two runs, in turns: eager, then compiled from an empty cache, then eager and compiled
again, from the cache that the first run filled; or the first alone, of as many steps, where that
second compilation is not worth its minutes. The steps after the warm-up of all runs are one row's
samples; the first step of each run is what compiling took, phase by phase.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path

from a2lib.experiments.compile import STEPS, WARMUP, Steps
from a2lib.experiments.compile.attention import counts
from a2lib.experiments.harness.worker import Job, Row
from a2lib.experiments.steps import Configuration
from a2lib.experiments.workload import PHASES, Result, run
from a2lib.lab import Timing, inductor

RUNS = ("cold", "warm")


def measure(job: Job) -> None:
    """The wanted ways of one model: in turns, or each by itself."""
    steps = Steps(**{**job.spec, "plain": Configuration(**job.spec["plain"])})
    inductor.prime(job.device)
    for group in job.groups():
        _in_turns(job, steps, group)


def _in_turns(job: Job, steps: Steps, ways: list[str]) -> None:
    results: dict[str, list] = {way: [] for way in ways}
    graphs: dict[str, list[inductor.Graph]] = {}
    with contextlib.ExitStack() as stack:
        folders = {way: stack.enter_context(inductor.empty_folder()) for way in ways}
        runs = RUNS if steps.cached else RUNS[:1]
        for kind in runs:
            for way in list(results):
                job.begin(way)
                each = STEPS * len(RUNS) // len(runs)
                result, compiled = _run(job, steps.compiled(way), folders[way], each)
                if result.status != "ok":
                    del results[way]
                    job.refuse(result.status, result.note, job.wanted[way])
                    continue
                results[way].append(result)
                if kind == "cold":
                    graphs[way] = compiled
    for way, both in results.items():
        together = dataclasses.replace(both[-1], steps=[s for one in both for s in one.steps])
        blocks = steps.plain.shape.num_layers if way == "blocks" else 1
        made = by_phase(graphs[way], blocks, steps.plain.mode) if way != "none" else {}
        for key in job.wanted[way]:
            phase = key["phase"]
            row = {**key, **summarised(job, together, phase), **made.get(phase, {})}
            firsts = [one.warmup[0].time_of(phase) for one in both]
            job.put(row | dict(zip(("ms_cold", "ms_warm"), firsts, strict=False)))


def summarised(job: Job, result: Result, phase: str) -> Row:
    """Return the values of a row: of the measured steps of `result`, which ended well."""
    samples = [step.time_of(phase) for step in result.steps]
    row: Row = {"status": "ok", **Timing.from_samples(samples).row(job.store.section)}
    if len(samples) == 1:
        row |= {"ms_p20": None, "ms_p80": None}
    if result.device == "cuda" and phase != "wall":
        row["ms_host"] = statistics.median(step.host_of(phase) for step in result.steps)
    return row | {"peak_bytes": result.memory.get("peak_allocated_bytes")}


def _run(job: Job, configuration: Configuration, folder: Path, measured: int):
    """One run of the benchmark; out of memory and unsupported are its result's status."""
    config = configuration.config(job.device, warmup=WARMUP, steps=measured, seed=job.seed)
    if why := configuration.refusal(job.device):
        return Result(config, device=job.device, status="oom", note=why), []
    with inductor.caches_in(folder), inductor.watching() as compiled:
        return run(config), compiled


def by_phase(
    graphs: list[inductor.Graph], blocks: int, mode: str = "train-step"
) -> dict[str, Mapping[str, object]]:
    """What Inductor made, by phase. The loss, if the ``mode`` has one, is compiled last of the
    forwards, and its backward first; the rest is the model, or a block that stands for ``blocks``
    of them."""
    forward = [graph for graph in graphs if not graph.backward]
    backward = [graph for graph in graphs if graph.backward]
    if "loss" not in PHASES[mode]:
        model = counts(forward, max(1, blocks // len(forward))) if forward else {}
        return dict.fromkeys(("forward", "step", "wall"), model)
    if len(forward) < 2 or len(backward) < 2:
        return {}
    times = max(1, blocks // (len(forward) - 1))
    model, loss = counts(forward[:-1], times), counts(forward[-1:])
    back = _sum([counts(backward[:1]), counts(backward[1:], times)])
    whole = _sum([model, loss, back])
    return {"forward": model, "loss": loss, "backward": back, "step": whole, "wall": whole}


def _sum(parts: list[Mapping[str, object]]) -> dict[str, object]:
    found = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: None if None in values else sum(values) for name, values in found.items()}
