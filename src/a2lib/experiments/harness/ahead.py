"""Compile in several processes what a sweep needs, so that measuring finds the code on disk.

A configuration costs seconds to minutes of one core in Dynamo, Inductor, Triton and ptxas, and a
sweep has hundreds of them. Nothing is lost where this fails: what is not in the caches is compiled
by the process that measures.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from a2lib.experiments.harness.process import Worker, WorkerDied
from a2lib.experiments.launching.launcher import cores

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


def worker_count(n_tasks: int, asked: int = 0) -> int:
    """Processes for ``n_tasks`` compilations; 0 where the measuring process may as well do it."""
    wanted = asked or min(max(1, cores() - 1), n_tasks // TASKS_PER_WORKER)
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
) -> list[tuple[Compilation, str]]:
    """Have ``handler`` ("module:function") do each of ``tasks`` in one of ``workers`` processes;
    those that failed, with the reasons.

    ``progress(task)`` is called after each. Together the running ones take at most ``memory_bytes``
    of device memory; what alone would take more is left. A process that dies, or takes longer than
    ``timeout_s`` for one task, is replaced and its task counts as failed. Nothing is started after
    ``until`` (``time.time()``), and what runs then is given up.
    """
    pool = _Pool(handler, device, memory_bytes - workers * CONTEXT_BYTES, until, timeout_s)
    # The largest first, so that none is left alone at the end.
    fitting = sorted((t for t in tasks if t.bytes <= pool.free), key=lambda t: -t.bytes)
    failed = []
    with ThreadPoolExecutor(workers) as threads, contextlib.closing(pool):
        running = {threads.submit(pool.compile, task): task for task in fitting}
        for done in as_completed(running):
            task, reason = running[done], done.result()
            if reason is None:
                continue
            if reason:
                failed.append((task, reason))
            progress(task)
    return failed


class _Pool:
    """Processes that compile, each used by one thread at a time, within ``free`` bytes."""

    def __init__(self, handler: str, device: str, free: int, until: float | None, timeout_s: float):
        self.handler, self.device, self.free = handler, device, free
        self.until, self.timeout_s = until or float("inf"), timeout_s
        self.changed = threading.Condition()
        self.workers: set[Worker] = set()
        self.idle: list[Worker] = []
        self.over = False

    def compile(self, task: Compilation) -> str | None:
        """Why it failed, or ""; None where it was given up or not started."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= task.bytes or self._is_over())
            if self._is_over():
                return None
            self.free -= task.bytes
            worker = self.idle.pop() if self.idle else Worker(self.handler)
            self.workers.add(worker)
        reason = ""
        request = {"do": self.handler, "spec": task.spec, "device": self.device, "seed": 0}
        patience_s = max(0.1, min(self.timeout_s, self.until - time.time()))
        try:
            for event in worker.ask(request, patience_s):
                reason = event.get("raised", reason)
        except WorkerDied as died:
            reason = None if self._is_over() else reason or str(died)
        with self.changed:
            if not worker.closed:
                self.idle.append(worker)
            self.free += task.bytes
            self.changed.notify_all()
        return reason

    def close(self) -> None:
        """Give up what runs, and start nothing more."""
        with self.changed:
            self.over = True
            self.changed.notify_all()
            for worker in self.workers:
                worker.close()

    def _is_over(self) -> bool:
        return self.over or time.time() > self.until
