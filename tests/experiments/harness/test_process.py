"""A worker ends with whoever started it, and so does what it started itself."""

import contextlib
import gc
import os
import signal
import weakref

from waiting import until

from a2lib.experiments.harness.process import Worker
from a2lib.experiments.harness.worker import settle
from a2lib.experiments.launching.lifeline import is_alive

START = "experiments.harness.toy:start"


def test_closing_a_worker_ends_what_it_started():
    worker = Worker(START)
    (event,) = worker.ask({"do": START, "spec": {"seconds": 0}, "device": "cpu", "seed": 0}, 60)
    assert is_alive(event["pid"])
    worker.close()
    assert_ended([event["pid"]])


def test_what_a_task_leaves_is_garbage_from_the_next_ones_end_on(request):
    request.addfinalizer(gc.unfreeze)
    left = [set()]
    left.append(left)
    seen = weakref.ref(left[0])
    settle()
    del left
    gc.collect()  # within the next task, which looks through what that has made
    assert seen() is not None
    made = [set()]
    made.append(made)
    new = weakref.ref(made[0])
    del made
    gc.collect()
    assert new() is None
    settle()
    assert seen() is None


PARENT = f"""
from a2lib.experiments.harness.process import Worker
worker = Worker({START!r})
task = {{"do": {START!r}, "spec": {{"seconds": 100}}, "device": "cpu", "seed": 0}}
for event in worker.ask(task, 120):
    print(event["worker"], event["pid"], flush=True)
"""


def test_neither_a_worker_nor_what_it_started_outlives_a_killed_parent(python):
    parent = python(PARENT)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    assert_ended(pids)


def assert_ended(pids):
    """Within some seconds, by themselves."""
    try:
        assert until(lambda: not any(map(is_alive, pids)), 10)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
