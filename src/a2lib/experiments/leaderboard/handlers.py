"""What each rank does for the leaderboard's section: one task is one way to take the step."""

from __future__ import annotations

import contextlib

from a2lib.experiments.compile import inductor
from a2lib.experiments.data_parallel import traces
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.harness.worker import free_memory
from a2lib.leaderboard import Step, run
from a2lib.measure import LEADERBOARD, trace


def measure(job: RankJob) -> None:
    """Measure the one way of this task."""
    ((culprit, (key,)),) = job.wanted.items()
    if job.expired():
        return
    job.begin(culprit)
    free_memory(job.device)
    step, cold = Step.of(job.spec["step"]), job.spec["cold"]
    with contextlib.ExitStack() as held:
        held.callback(inductor.forget)
        if cold:  # caches that are empty, of this rank alone
            held.enter_context(inductor.caches_in(held.enter_context(inductor.empty_folder())))
        timing, row, training = run.measure(step, job.device, job.rank, job.seed, job.everyone)
        # Last: a profiler leaves a process slower.
        traces.store(
            job,
            training,
            key,
            (key["way"], f"{key['layers']}-layers"),
            lambda found: trace.kernel_rows(found.kernels),
            training.step,
            table="kernels",
            steps=1,
        )
        if not cold:
            row["ms_ready"] = None
        job.put({**key, "status": "ok", **row, **timing.row(LEADERBOARD)})
