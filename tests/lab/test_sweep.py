"""A sweep resumes where it stopped, and nothing that a configuration does stops it."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from tables import by, values
from waiting import until

from a2lib.lab import Table, guard, read_runs, sweep
from a2lib.lab.notebook import Run
from a2lib.lab.processes import Group, WorkerError
from a2lib.lab.sweep import Interrupted, _pending

cloudpickle.register_pickle_by_value(sys.modules[__name__])
OK = {"ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "n": 3}


@pytest.fixture
def table(tmp_path):
    return Table("toy", "cpu", tmp_path / "data", key="part size", values="")


@pytest.fixture
def run():
    return Run("toy", {}, {}, "cpu", "cpu")


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """Keep the temporary folders of a sweep where the test sees them; none may be left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert until(lambda: not list(folder.glob("a2lib-sweep-*")))


def keys(*parts, sizes=(1, 2)):
    return [{"part": part, "size": size} for part, size in itertools.product(parts, sizes)]


def one_key_each(*parts):
    """Return a task of one key for each part."""
    return [keys(part, sizes=(1,)) for part in parts]


def measure(asked):
    """Play the part that a key names; its note is the process that did."""
    for key in asked:
        play(key["part"])
        if key["part"] == "more":
            yield {**key, **OK, "part": "beside"}
        if key["part"] != "silent":
            yield {**key, **OK, "note": str(os.getpid())}


def play(part):
    if part == "abort":
        os.abort()
    if part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "exit":
        sys.exit()
    if part == "raise":
        raise ValueError("first line\nsecond line")
    if part == "lost":
        raise RuntimeError("CUDA error: device-side assert triggered")
    if part == "no memory":
        raise MemoryError
    if part == "unsupported":
        raise NotImplementedError("no kernel here")
    if part == "hang":
        time.sleep(600)
    if part == "slow":
        time.sleep(0.4)
    if part == "grandchild":
        subprocess.Popen(["sleep", "601"], start_new_session=True)


def statuses(table):
    found = {}
    for row in table.rows():
        found.setdefault(row["part"], []).append(row["status"])
    return found


def notes(table, *parts):
    found = table.frame()
    return set(found.loc[found["part"].isin(parts), "note"])


def test_rows_are_stored_by_one_process_and_name_their_run(table, run):
    assert sweep(table, [keys("a", "b"), keys("c")], measure, run) == 0
    assert statuses(table) == {"a": ["ok"] * 2, "b": ["ok"] * 2, "c": ["ok"] * 2}
    assert len(notes(table, "a", "b", "c")) == 1
    [recorded] = read_runs(table.data)
    assert set(values(table.rows(), "run")) == {recorded["run"]}
    assert recorded["command"] == "papermill notebooks/toy.ipynb"
    assert set(json.loads(recorded["source"])) == {"measure"}


def measure_and_raise(asked):
    yield from measure(asked)
    raise ValueError("no picture of it")


def test_what_fails_behind_the_rows_is_said(table, run, capsys):
    sweep(table, [keys("a"), keys("b", sizes=(1,))], measure_and_raise, run)
    assert statuses(table) == {"a": ["ok"] * 2, "b": ["ok"]}
    assert capsys.readouterr().out.count("no picture of it") == 2


FAILING = {
    "abort": ("error", "its process was killed by SIGABRT"),
    "raise": ("error", "ValueError: first line"),
    "no memory": ("oom", "out of memory"),
    "unsupported": ("unsupported", "no kernel here"),
    "exit": ("error", "its process ended, with exit code 0, before the task did"),
    "silent": ("error", "measure yielded no row for this key"),
    "killed": ("error", "ended from outside, twice: its process was killed by SIGKILL"),
}


def test_what_fails_alone_is_a_row_and_the_rest_is_measured(table, run):
    _, *others = FAILING
    tasks = [keys("a", "abort", "b"), *one_key_each(*others), keys("c")]
    assert sweep(table, tasks, measure, run) == 0
    found = statuses(table)
    assert found["a"] == found["b"] == found["c"] == ["ok"] * 2
    for part, (status, note) in FAILING.items():
        assert set(found[part]) == {status} and notes(table, part) == {note}


def test_behind_a_lost_device_another_process_goes_on(table, run):
    sweep(table, one_key_each("a", "raise", "b", "lost", "c"), measure, run)
    assert notes(table, "a") == notes(table, "b") != notes(table, "c")
    assert notes(table, "lost") == {"RuntimeError: CUDA error: device-side assert triggered"}


def test_what_hangs_is_ended_and_the_row_says_where_it_was(table, run):
    sweep(table, [keys("hang", "a", sizes=(1,))], measure, run, silence_s=2)
    assert statuses(table) == {"a": ["ok"], "hang": ["error"]}
    [note] = notes(table, "hang")
    assert note.startswith("no row within 2 s: in play (")


def test_a_whole_task_fails_as_one(table, run):
    sweep(table, [keys("a", "abort", "b"), keys("raise"), keys("c")], measure, run, whole=True)
    assert statuses(table) == {
        "a": ["ok"] * 2,
        "abort": ["error"] * 2,
        "b": ["error"] * 2,
        "raise": ["error"] * 2,
        "c": ["ok"] * 2,
    }


def test_a_sweep_measures_what_is_missing_and_again_only_when_asked(table, run):
    sweep(table, [keys("a", sizes=(1,))], measure, run)
    before = table.rows()
    sweep(table, [keys("a")], measure, run)
    assert table.rows()[0] == before[0] and len(table.rows()) == 2
    assert sweep(table, [keys("a")], measure, run) == 0
    earlier = by(read_runs(table.data), "run")
    assert len(earlier) == 2
    run.remeasure = True
    sweep(table, [keys("a")], measure, run)
    (last,) = by(read_runs(table.data), "run").keys() - earlier
    assert values(table.rows(), "run") == [last] * 2


def test_what_is_measured_again_is_the_oldest_first(table):
    for part, started in (("a", "20260102"), ("b", "20260101")):
        for key in keys(part):
            table.put({**key, **OK, "status": "ok", "run": started})
    stored = dict(zip(map(table.identify, table.rows()), values(table.rows(), "run"), strict=True))
    again = _pending(table, [keys("a"), keys("b"), keys("new")], stored, remeasure=True)
    assert list(again) == [keys("new"), keys("b"), keys("a")]


def test_who_was_ended_from_outside_is_measured_by_the_next_sweep(table, run):
    sweep(table, [keys("killed", sizes=(1,))], measure, run)
    assert statuses(table) == {"killed": ["error"]}

    def mended(asked):
        for key in asked:
            yield {**key, **OK}

    sweep(table, [keys("killed", sizes=(1,))], mended, run)
    assert statuses(table) == {"killed": ["ok"]}


def test_the_time_limit_ends_between_tasks_and_counts(table, run, capsys):
    tasks = [keys("slow", sizes=(size,)) for size in range(1, 61)]
    run.until = time.time() + 4  # a busy machine may take all of it to start a process
    left = sweep(table, tasks, measure, run)
    assert 0 < left == 60 - len(table.rows())
    assert set(values(table.rows(), "status")) <= {"ok"}
    printed = capsys.readouterr().out
    assert f"{60 - left} rows measured\n  run     " in printed
    assert f"{left} rows are left" in printed


def test_each_task_may_have_a_process_of_its_own(table, run):
    sweep(table, [keys("a"), keys("b")], measure, run, fresh=True)
    assert len(notes(table, "a", "b")) == 2


def test_what_a_worker_started_ends_with_it(table, run):
    sweep(table, [keys("grandchild")], measure, run)
    left = subprocess.run(["pgrep", "-f", "sleep 601"], capture_output=True, text=True).stdout
    for pid in left.split():  # of another's, perhaps
        assert guard.VARIABLE.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_measure_that_cannot_travel_is_refused_in_one_line(table, run):
    lock = __import__("threading").Lock()
    large = bytes(2**21)

    def locked(asked):
        yield lock

    def heavy(asked):
        yield large

    with pytest.raises(WorkerError, match="cannot be pickled: make that within the function"):
        sweep(table, [keys("a")], locked, run)
    with pytest.raises(WorkerError, match="measure takes 2 MB along"):
        sweep(table, [keys("a")], heavy, run)


def in_group(asked):
    """One of several ranks: the sum of all ranks' numbers is in the note."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    for key in asked:
        if rank == 1:
            play(key["part"])
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        yield {**key, **OK, "note": f"{total.item():g} {dist.get_backend()}"}


KILLED = ("rank SIGKILL", "torchrun SIGKILL", "torchrun SIGTERM")


def killed_once(asked):
    """One of two ranks: of each task of KILLED rank 1 or torchrun is killed the first time."""
    for key in asked:
        before = Path(os.environ["TMPDIR"], key["part"])
        if key["part"] in KILLED and os.environ["RANK"] == "1" and not before.exists():
            before.touch()
            who, _, name = key["part"].partition(" ")
            os.kill(os.getppid() if who == "torchrun" else os.getpid(), signal.Signals[name])
            time.sleep(600)
        yield from in_group([key])


@pytest.mark.slow
def test_who_is_killed_is_measured_again_and_a_rank_that_aborts_is_a_row(table, run):
    """Each part ends torchrun, so that another starts: one sweep for all."""
    sweep(table, one_key_each(*KILLED, "abort"), killed_once, run, ranks=2)
    for part in KILLED:
        assert notes(table, part) == {"3 gloo"}, part
    assert notes(table, "abort") == {"rank 1 of 2 was killed by SIGABRT"}


def test_what_a_rank_raises_or_where_it_hangs_is_the_row(table, run, forked_workers):
    sweep(table, one_key_each("raise", "hang"), in_group, run, ranks=2, silence_s=12)
    assert notes(table, "raise") == {"rank 1 of 2: ValueError: first line"}
    [note] = notes(table, "hang")
    assert "rank 1 in play" in note and "rank 0 in" in note


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_while_it_starts_is_started_again(table, run, monkeypatch, number):
    real, killed = Group._command, [["sh", "-c", f"kill -{number} $$"]]
    monkeypatch.setattr(Group, "_command", lambda group: killed.pop() if killed else real(group))
    sweep(table, [keys("a", sizes=(1,))], measure, run)
    assert statuses(table) == {"a": ["ok"]}


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import cloudpickle
from lab import test_sweep
from a2lib.lab import Table, sweep
from a2lib.lab.notebook import Run
cloudpickle.register_pickle_by_value(test_sweep)
table = Table("toy", "cpu", Path({data!r}), key="part size", values="")
measure = test_sweep.in_group if {ranks} > 1 else test_sweep.measure
tasks = [test_sweep.keys("slow", sizes=(size,)) for size in range(1, 60)]
run = Run("toy", {{}}, {{}}, "cpu", "cpu")
try:
    sweep(table, tasks, measure, run, ranks={ranks})
except KeyboardInterrupt as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGKILL, 2)])
def test_a_sweep_that_is_ended_keeps_its_rows_and_leaves_no_process(
    table, run, python, ranks, number
):
    path = [str(Path(__file__).parents[1])]
    child = python(SCRIPT.format(path=path, data=str(table.data), ranks=ranks))
    assert until(lambda: len(table.rows()) >= 2 or child.poll() is not None, 60)
    workers = list(filter(is_worker, Path("/proc").glob("[0-9]*")))
    assert workers
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert said.splitlines()[-1:] == [Interrupted.__name__] or number == signal.SIGKILL
    assert until(lambda: not any(map(Path.exists, workers)), 20)
    kept = table.rows()
    assert 2 <= len(kept) < 59 and set(values(kept, "status")) == {"ok"}
    sweep(table, [keys("slow", sizes=(1, 2, 3))], measure, run)
    assert table.rows()[: len(kept)] == kept


def is_worker(process):
    """Return whether a folder of /proc is of a worker that this test's child started."""
    try:
        is_ours = os.environ["TMPDIR"].encode() in (process / "environ").read_bytes()
        return is_ours and b"a2lib.lab.worker" in (process / "cmdline").read_bytes()
    except OSError:
        return False
