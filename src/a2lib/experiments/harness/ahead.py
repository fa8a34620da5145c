"""Compile in several processes what a sweep needs, so that measuring finds the code on disk.

A configuration costs seconds to minutes of one core in Dynamo, Inductor, Triton and ptxas, and a
sweep has hundreds of them. Nothing is lost where this fails: what is not in the caches is compiled
by the process that measures.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from a2lib.experiments.harness.process import Worker, WorkerDied
from a2lib.experiments.harness.process import command as worker_command

TIMEOUT_S = 300
# Fewer than this many compilations per process are sooner done than a process is started.
TASKS_PER_WORKER = 4
# CUDA context and loaded libraries of one process.
CONTEXT_BYTES = 2**30


@dataclass(frozen=True)
class Compilation:
    """``spec``, for JSON, is what its handler compiles; ``bytes`` the device memory that takes."""

    label: str
    spec: Mapping[str, object]
    bytes: int


@dataclass
class Outcome:
    """How many compilations were done, failed (with the reasons), or not started."""

    done: int = 0
    failed: list[tuple[Compilation, str]] = dataclasses.field(default_factory=list)
    left: int = 0


def worker_count(n_tasks: int, asked: int = 0) -> int:
    """Processes for ``n_tasks`` compilations; 0 where the measuring process may as well do it."""
    wanted = asked or min(max(1, len(os.sched_getaffinity(0)) - 1), n_tasks // TASKS_PER_WORKER)
    count = min(wanted, n_tasks)
    return count if count > 1 else 0


def compile_ahead(
    tasks: Sequence[Compilation],
    *,
    handler: str,
    device: str,
    workers: int,
    memory_bytes: int,
    until: float | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[Compilation], None] = lambda task: None,
    command: Sequence[str] = (),
) -> Outcome:
    """Have ``handler`` ("module:function") do each of ``tasks`` in one of ``workers`` processes.

    ``progress(task)`` is called after each. Together the running ones take at most ``memory_bytes``
    of device memory; what alone would take more is left. A process that dies, or takes longer than
    ``timeout_s`` for one task, is replaced and its task counts as failed. Nothing is started after
    ``until`` (``time.time()``), and what runs then is given up.
    """
    pool = _Pool(tasks, memory_bytes - workers * CONTEXT_BYTES, until)
    threads = [
        threading.Thread(
            target=pool.serve, args=(handler, device, timeout_s, progress, command), daemon=True
        )
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    finally:
        pool.stop()
        for thread in threads:
            thread.join()
    pool.outcome.left = len(tasks) - pool.outcome.done - len(pool.outcome.failed)
    return pool.outcome


class _Pool:
    def __init__(self, tasks, memory_bytes, until):
        # The largest first, while the memory is free, so that none is left alone at the end.
        fitting = [task for task in tasks if task.bytes <= memory_bytes]
        self.waiting = sorted(fitting, key=lambda task: -task.bytes)
        self.free, self.until = memory_bytes, until
        self.condition = threading.Condition()
        self.stopped = False
        self.workers: set[Worker] = set()
        self.outcome = Outcome()

    def serve(self, handler, device, timeout_s, progress, command):
        worker = None
        try:
            while task := self._take():
                reason = None
                try:
                    if worker is None:
                        worker = self._start(command or worker_command(handler))
                    request = {"do": handler, "spec": task.spec, "device": device, "seed": 0}
                    for event in worker.ask(request, self._patience(timeout_s)):
                        reason = event.get("failed", reason)
                except WorkerDied as died:
                    reason = str(died)
                    # It closed itself; pool.workers may keep it, since closing again does nothing.
                    worker = None
                self._give_back(task, reason, progress)
        finally:
            if worker is not None:
                worker.close()

    def stop(self):
        with self.condition:
            self.stopped = True
            self.condition.notify_all()
            for worker in self.workers:
                worker.close()

    def _start(self, command):
        worker = Worker(command)
        with self.condition:
            self.workers.add(worker)
            if self.stopped:
                worker.close()
        return worker

    def _take(self):
        """The largest task that fits the free memory; None when there is no more to do."""
        with self.condition:
            while self.waiting and not self.stopped and not self._late():
                for task in self.waiting:
                    if task.bytes <= self.free:
                        self.waiting.remove(task)
                        self.free -= task.bytes
                        return task
                self.condition.wait(1)
        return None

    def _give_back(self, task, reason, progress):
        with self.condition:
            self.free += task.bytes
            if reason is None:
                self.outcome.done += 1
            elif not self.stopped and not self._late():
                self.outcome.failed.append((task, reason))
            progress(task)
            self.condition.notify_all()

    def _late(self):
        return self.until is not None and time.time() > self.until

    def _patience(self, timeout_s):
        if self.until is None:
            return timeout_s
        return max(0.1, min(timeout_s, self.until - time.time()))
