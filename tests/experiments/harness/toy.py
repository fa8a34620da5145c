"""A section of its own, measured by a worker that plays a part: dies, hangs, or measures.

A row is one ``size`` of one ``operation``, which is the culprit. ``parts`` says what becomes of an
operation, ``together`` what becomes of several in turns.
"""

import os
import signal
import subprocess
import time

from a2lib.experiments.harness.sweep import Task
from a2lib.lab import Section, StoreError
from a2lib.lab.failures import LostContext

HERE = "experiments.harness.toy"
TOY = Section("toy", ("operation", "size"), ("note",), handler=f"{HERE}:measure", notebook="toy")
# Errors in place of a time, as some sections have them.
UNTIMED = Section(
    "untimed", ("operation", "size"), ("error", "note"), False, handler=f"{HERE}:measure"
)
SIZES = (1, 2, 3)
SIGNALS = {"die": signal.SIGABRT, "die late": signal.SIGABRT, "killed": signal.SIGKILL}
ERRORS = {
    "no memory": MemoryError(),
    "raise": ValueError("one\ntwo"),
    "lost": LostContext("CUDA error"),
    "full": StoreError("disk full"),
}
OK = {"status": "ok", "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 3}


def task(*operations, label="toy", sizes=SIZES, in_turns=False, **spec):
    """A task of all ``sizes`` of each operation; its other arguments say how it goes."""
    rows = {name: tuple({"operation": name, "size": n} for n in sizes) for name in operations}
    return Task(label, spec, rows, in_turns)


def measure(job):
    """Measure what is wanted, or play the part."""
    if "together" in job.spec and job.in_turns:
        if len(job.wanted) > 1:
            job.begin(None)
        _play(job.spec["together"], job)
    for operation, keys in job.wanted.items():
        if job.expired():
            return
        job.begin(operation)
        part = job.spec.get("parts", {}).get(operation)
        for i, key in enumerate(keys):
            if part == "silent":
                continue
            if part != "die late" or i > 0:
                _play(part, job)
            time.sleep(job.spec.get("seconds", 0))
            values = OK if job.store.section.timed else {"status": "ok", "error": 0.5}
            job.put({**key, **values, "note": str(os.getpid())})
        if part == "end":
            os._exit(0)


def compile_(job):
    """Write down what is compiled, or play the part."""
    _play(job.spec.get("part"), job)
    time.sleep(job.spec.get("seconds", 0))
    with open(job.spec["log"], "a") as log:
        log.write(f"{job.spec['name']} {os.getpid()}\n")


def start(job):
    """Start a process, as a compiler is one, and report its id."""
    job.emit({"pid": subprocess.Popen(["sleep", "600"]).pid, "worker": os.getpid()})
    time.sleep(job.spec["seconds"])


def _play(part, job):
    if part in SIGNALS:
        os.kill(os.getpid(), SIGNALS[part])
    if part in ERRORS:
        raise ERRORS[part]
    if part == "hang":
        time.sleep(600)
