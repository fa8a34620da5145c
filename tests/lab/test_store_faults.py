"""The store with other writers, killed writers and full disks, all real.

The limit on the size of a file stands in for a full disk.
"""

import os
import signal
import stat

import pytest
from programs import printed
from tables import by, values

from a2lib.lab import Table, read_runs

# The other process: argument 1 is the data folder, `row` makes a row.
CHILD = """
import os, resource, signal
from pathlib import Path
from a2lib.lab import Table, StoreError, read_section, start_run
data = Path(sys.argv[1])
store = Table("flash", "cpu", data)
def row(seq_len, implementation="a2lib", note=""):
    return {"implementation": implementation, "dtype": "bf16", "batch": 1, "heads": 16,
            "seq_len": seq_len, "head_dim": 64, "causal": True, "pass": "forward",
            "status": "ok", "ms": 1.5, "n": 10, "note": note,
            "run": "20260102T030405Z-cpu-000000"}
"""


def _names(store: Table) -> list[str]:
    return sorted(os.listdir(store.path.parent))


def _lengths(store: Table) -> list[str]:
    return values(store.rows(), "seq_len")


def test_processes_that_write_at_once_lose_nothing(data, store, python):
    code = f"""{CHILD}
import time
me, rows = sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
while not (data / "go").exists():
    time.sleep(0.001)
for seq_len in range(1, rows + 1):
    store.put(row(seq_len, me))
    store.put(row(0, "shared", me))
    if seq_len % 10 == 0:
        start_run(command="test", parameters={{"me": me, "row": seq_len}}, device="cpu", data=data)
assert read_section("flash", data)["cpu"]
"""
    writers = [python(code, data, f"writer{i}", 20) for i in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    (data / "go").touch()
    for writer in writers:
        while writer.poll() is None:
            # A fresh reader, without the lock, must never meet a torn file.
            Table("flash", "cpu", data).rows()
    expected = [("shared", "0")]
    for i, writer in enumerate(writers):
        printed(writer)
        for seq_len in range(1, 21):
            expected.append((f"writer{i}", str(seq_len)))
    assert sorted(values(store.rows(), "implementation", "seq_len")) == sorted(expected)
    assert len(by(read_runs(data), "run")) == 1 + 3 * 2
    assert _names(store) == [".lock", "cpu.csv"]


KILLS = {
    # By the system, at the limit of what a file may hold.
    "half written": "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))",
    "not flushed": "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)",
    "not renamed": "os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("moment", KILLS, ids=str)
def test_a_writer_killed_in_mid_write_leaves_the_old_file(data, store, make_row, python, moment):
    store.put(make_row())
    before = store.path.read_bytes()
    child = python(f"{CHILD}{KILLS[moment]}\nstore.put(row(256))", data)
    child.communicate(timeout=60)
    assert child.returncode in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert store.path.read_bytes() == before
    # The leftover is what makes this a test: without it the writer was not killed in mid-write.
    assert _names(store) == [".cpu.csv.tmp", ".lock", "cpu.csv"]
    assert _lengths(Table("flash", "cpu", data)) == ["128"]
    store.put(make_row(seq_len=512))
    assert _lengths(store) == ["128", "512"] and _names(store) == [".lock", "cpu.csv"]


def test_a_full_disk(data, store, python):
    code = f"""{CHILD}
store.put(row(128))
before = store.path.read_bytes()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
try:
    store.put(row(256, note="measured"))
except StoreError as error:
    print(error)
assert store.path.read_bytes() == before
print(sorted(os.listdir(store.path.parent)))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
store.put(row(256))
"""
    put, names = printed(python(code, data)).splitlines()
    assert put.startswith(f"{store.path}: File too large; see to that (free some space, ")
    assert "run again: rows already stored are kept; the row not stored: {" in put
    assert "'seq_len': 256" in put and "'note': 'measured'" in put
    assert names == "['.lock', 'cpu.csv']" and _lengths(store) == ["128", "256"]


def test_a_row_is_flushed_before_its_name_and_the_name_before_return(store, make_row, monkeypatch):
    log = []

    def record(name, call):
        def recorded(*arguments):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            log.append(f"{name} folder" if is_folder else name)
            return call(*arguments)

        return recorded

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, record(name, getattr(os, name)))
    store.put(make_row())
    assert log == ["fsync", "replace", "fsync folder"]
