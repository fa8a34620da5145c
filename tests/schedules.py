"""Schedules event by event: what the closed forms say of overlap, run on a clock.

A task runs on one stream, which takes its tasks one after another in the order they are given, and
starts when the tasks it waits for have ended. Streams are what runs at the same time: a device's
computation and its links.
"""

from dataclasses import dataclass

COMPUTE, LINKS = "compute", "links"


@dataclass(frozen=True)
class Task:
    """``seconds`` of work on ``stream`` that starts after the tasks named in ``after``."""

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


def seconds_of(tasks: list[Task]) -> float:
    """Return when the last of ``tasks`` ends, those of a stream in their order."""
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task.stream, []).append(task)
    free = dict.fromkeys(queues, 0.0)
    end: dict[str, float] = {}
    while len(end) < len(tasks):
        before = len(end)
        for stream, queue in queues.items():
            while queue and end.keys() >= set(queue[0].after):
                task = queue.pop(0)
                ready = free[stream]
                for name in task.after:
                    ready = max(ready, end[name])
                end[task.name] = free[stream] = ready + task.seconds
        assert len(end) > before, "tasks that wait for each other"
    return max(end.values())


def data_parallel_backward(layers: int, compute_s: float, reduce_s: float) -> list[Task]:
    """Return data parallelism's backward: a layer's gradients are all-reduced while the next
    computes."""
    tasks = []
    for i in range(layers):
        tasks.append(Task(f"compute {i}", COMPUTE, compute_s))
        tasks.append(Task(f"reduce {i}", LINKS, reduce_s, (f"compute {i}",)))
    return tasks


def fsdp(
    layers: int, compute_s: float, gather_s: float, scatter_s: float | None = None, ahead: int = 2
) -> list[Task]:
    """Return FSDP's forward, or with ``scatter_s`` its backward. A layer is gathered before it
    computes, at most ``ahead`` layers early; its gradients are scattered after the next gather."""
    tasks = []
    for i in range(layers):
        freed = (f"compute {i - ahead}",) if i >= ahead else ()
        tasks.append(Task(f"gather {i}", LINKS, gather_s, freed))
        tasks.append(Task(f"compute {i}", COMPUTE, compute_s, (f"gather {i}",)))
        if scatter_s is not None and i:
            tasks.append(Task(f"scatter {i - 1}", LINKS, scatter_s, (f"compute {i - 1}",)))
    if scatter_s is not None:
        tasks.append(Task(f"scatter {layers - 1}", LINKS, scatter_s, (f"compute {layers - 1}",)))
    return tasks


def tensor(
    layers: int, compute_s: float, reduce_s: float, parts: int, weights_s: float = 0
) -> list[Task]:
    """Return a pass of tensor parallelism over a batch in ``parts``.

    A part's all-reduce must end before its next layer begins; meanwhile another part computes. In
    a backward no layer waits for the gradients of the weights, which take ``weights_s``.
    """
    tasks = []
    for i in range(layers):
        for p in range(parts):
            before = (f"reduce {i - 1} {p}",) if i else ()
            tasks.append(Task(f"compute {i} {p}", COMPUTE, compute_s / parts, before))
            tasks.append(Task(f"reduce {i} {p}", LINKS, reduce_s / parts, (f"compute {i} {p}",)))
            if weights_s:
                tasks.append(Task(f"weights {i} {p}", COMPUTE, weights_s / parts))
    return tasks
