"""A data folder of its own for each test, and workers that speak the protocol without torch."""

import json
import sys

import pytest

from a2lib.measure import FLASH, Store, start_run

# Plays its part per implementation: dies, hangs, loses its device, takes its time, or measures.
PLAYER = """
import json, os, signal, sys, time
from pathlib import Path
from a2lib.measure import FLASH, Store
parts = json.loads(sys.argv[1])
def emit(**event):
    print(json.dumps(event), flush=True)
if parts.get("start") == "die":
    sys.exit("cannot start")
emit(ready=True)
for line in sys.stdin:
    task = json.loads(line)
    if task["do"] == "compile":
        part = parts.get(task["implementation"])
        if part == "die": os.kill(os.getpid(), signal.SIGABRT)
        if part == "hang": time.sleep(600)
        if part == "fail": emit(failed="no")
        time.sleep(parts.get("seconds", 0))
        with open(parts["log"], "a") as log:
            done = [task["implementation"], task["shape"]["seq_len"], os.getpid()]
            log.write(json.dumps(done) + "\\n")
        emit(done=True)
        continue
    store = Store(FLASH, task["slug"], data=Path(task["data"]))
    def put(name, pass_, **values):
        row = {"implementation": name, **task["shape"], "pass": pass_, "run": task["run"], **values}
        store.put(row)
        emit(row=row)
    if parts.get("turns") and task["in_turns"]:
        emit(begin=None)
        os.kill(os.getpid(), signal.SIGSEGV)
    for name, passes in task["wanted"].items():
        if task["until"] is not None and time.time() > task["until"]: break
        emit(begin=name)
        part = parts.get(name)
        if part == "full": emit(fatal="disk full"); os._exit(3)
        if part == "lost":
            for p in passes: put(name, p, status="error", note="CUDA error")
            emit(lost="CUDA error"); os._exit(3)
        for i, p in enumerate(passes):
            if part == "die" and i == 1: os.kill(os.getpid(), signal.SIGABRT)
            if part == "killed": os.kill(os.getpid(), signal.SIGKILL)
            if part == "killed once" and not os.path.exists(parts["log"]):
                open(parts["log"], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if part == "hang": time.sleep(600)
            time.sleep(parts.get("seconds", 0))
            put(name, p, status="ok", ms=1.0, ms_p20=1.0, ms_p80=1.0, n=3)
        if part == "end": os._exit(0)
    emit(done=True)
"""


@pytest.fixture
def play():
    """``play(**parts)`` is the command of a worker that plays them."""
    return lambda **parts: [sys.executable, "-c", PLAYER, json.dumps(parts)]


@pytest.fixture
def store(tmp_path):
    return Store(FLASH, "cpu", data=tmp_path / "data")


@pytest.fixture
def run(store):
    return start_run(command="test", parameters={}, device="cpu", data=store.data)
