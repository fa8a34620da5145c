"""The store with other writers, killed writers, full disks and read-only folders, all real.

A full disk is a small tmpfs in a mount namespace of its own; where that is not allowed, the limit
on the size of a file stands in for it. A read-only folder is one that the process, having given up
root if it had it, may not write.
"""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from a2lib.measure import FLASH, Store, StoreError, read_runs, table

# The other process: argument 1 is the data folder, `row` makes a row, `put` stores one.
CHILD = """
import os, resource, signal
from pathlib import Path
from a2lib.measure import FLASH, Store, StoreError, start_run, table
data = Path(sys.argv[1])
store = Store(FLASH, "cpu", data)
def row(seq_len, implementation="a2lib", note=""):
    return {"implementation": implementation, "dtype": "bf16", "batch": 1, "heads": 16,
            "seq_len": seq_len, "head_dim": 64, "causal": True, "pass": "forward",
            "status": "ok", "ms": 1.5, "n": 10, "note": note,
            "run": "20260102T030405Z-cpu-000000"}
"""

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        shell = 'mount -t tmpfs none "$0" && exec "$@"'
        command = [*NAMESPACE, "sh", "-c", shell, folder, sys.executable, "-c", ""]
        try:
            return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


needs_mount = pytest.mark.skipif(not _can_mount(), reason="mount namespaces are not allowed here")


def _names(store: Store) -> list[str]:
    return sorted(path.name for path in store.path.parent.iterdir())


def _finish(child: subprocess.Popen) -> str:
    out, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    return out


def test_processes_that_write_at_once_lose_nothing(data, store, python):
    go = data / "go"
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
"""
    writers = [python(code, data, f"writer{i}", 120) for i in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    go.touch()
    while any(writer.poll() is None for writer in writers):
        if store.path.exists():
            # A fresh reader, without the lock, must never meet a torn file.
            Store(FLASH, "cpu", data).rows()
    for writer in writers:
        _finish(writer)
    found = {(row["implementation"], int(row["seq_len"])) for row in store.rows()}
    expected = {(f"writer{i}", seq_len) for i in range(3) for seq_len in range(1, 121)}
    assert found == expected | {("shared", 0)}
    assert len(store.rows()) == len(found)
    runs = read_runs(data)
    assert len(runs) == 1 + 3 * 12 == len({run["run"] for run in runs})
    assert _names(store) == ["cpu.csv"]


def test_threads_that_write_at_once_lose_nothing(data, store, make_row):
    def write(name):
        mine = Store(FLASH, "cpu", data)
        for seq_len in range(30):
            mine.put(make_row(implementation=name, seq_len=seq_len))
            store.put(make_row(implementation=f"{name}-shared", seq_len=seq_len))

    threads = [threading.Thread(target=write, args=(f"thread{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(Store(FLASH, "cpu", data).rows()) == 240


def test_a_process_killed_at_any_moment_loses_no_stored_row(data, store, make_row, python):
    code = f"""{CHILD}
seq_len = int(sys.argv[2])
while True:
    store.put(row(seq_len, "killed", "x" * 2000))
    print(seq_len, flush=True)
    seq_len += 1
"""
    stored: set[int] = set()
    for attempt in range(8):
        child = python(code, data, attempt * 10_000 + 1)
        stored.add(int(child.stdout.readline()))
        time.sleep(0.02 + 0.013 * attempt)
        child.send_signal(signal.SIGKILL)
        stored |= {int(line) for line in child.communicate()[0].split("\n") if line}
        assert child.returncode == -signal.SIGKILL
        assert stored <= {int(row["seq_len"]) for row in Store(FLASH, "cpu", data).rows()}
    store.put(make_row())
    assert store.get({name: make_row()[name] for name in FLASH.key})["ms"] == "1.5"
    assert _names(store) == ["cpu.csv"]


KILLS = {
    "half written": """
class Half:
    def __init__(self, *args): self.file = open(*args)
    def __enter__(self): return self
    def __exit__(self, *args): pass
    def fileno(self): return self.file.fileno()
    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
table.open = Half
""",
    "not flushed": "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)",
    "not renamed": "os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("moment", KILLS, ids=str)
def test_a_writer_killed_in_mid_write_leaves_the_old_file(data, store, make_row, python, moment):
    store.put(make_row())
    before = store.path.read_bytes()
    child = python(f"{CHILD}{KILLS[moment]}\nstore.put(row(256))", data)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert store.path.read_bytes() == before
    # The leftovers are what makes this a test: without them the writer was not killed in mid-write.
    assert _names(store) == [".cpu.csv.%d.tmp" % child.pid, ".cpu.csv.lock", "cpu.csv"]
    assert len(Store(FLASH, "cpu", data).rows()) == 1
    store.put(make_row(seq_len=512))
    assert [row["seq_len"] for row in store.rows()] == ["128", "512"]
    assert _names(store) == ["cpu.csv"]


def test_a_lock_that_is_never_released_is_an_error_in_time(
    data, store, make_row, python, monkeypatch
):
    code = f"""{CHILD}
sync = os.fsync
def stop(descriptor):
    os.fsync = sync
    print("holding", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
os.fsync = stop
store.put(row(256))
"""
    child = python(code, data)
    assert child.stdout.readline() == "holding\n"
    monkeypatch.setattr(table, "LOCK_TIMEOUT_S", 0.2)
    with pytest.raises(StoreError, match=r"another process has held \.cpu\.csv\.lock") as raised:
        store.put(make_row())
    assert "the row not stored: a2lib,bf16,1,16,128" in str(raised.value)
    child.send_signal(signal.SIGCONT)
    _finish(child)
    store.put(make_row())
    assert [row["seq_len"] for row in store.rows()] == ["128", "256"]


FULL = f"""{CHILD}
filler = data / "filler"
store.put(row(128))
before = store.path.read_bytes()
with open(filler, "wb", buffering=0) as file:
    for size in (4096, 1):
        try:
            while file.write(bytes(size)):
                pass
        except OSError as error:
            print(error.errno)
for call in (lambda: store.put(row(256, note="measured")), store.check_writable):
    try:
        call()
    except StoreError as error:
        print(error)
assert store.path.read_bytes() == before
names = sorted(path.name for path in store.path.parent.iterdir())
filler.unlink()
store.put(row(256))
assert len(Store(FLASH, "cpu", data).rows()) == 2
print(names)
"""


@needs_mount
def test_a_full_disk(data, tmp_path, python):
    runs = (data / "measured" / "runs.csv").rename(tmp_path / "runs.csv")
    shell = (
        'mount -t tmpfs -o size=64k none "$0" && mkdir "$0/measured" &&'
        ' cp "$1" "$0/measured/" && shift && exec "$@"'
    )
    child = python(FULL, data, prefix=(*NAMESPACE, "sh", "-c", shell, str(data), str(runs)))
    *_, put, check, names = _finish(child).splitlines()
    assert put.startswith(
        f"{data}/measured/flash/cpu.csv: No space left on device; free some space"
    )
    assert "run again: rows already stored are kept" in put
    assert (
        "the row not stored: a2lib,bf16,1,16,256,64,true,forward,,,,,measured,ok,1.5,,,10," in put
    )
    assert check.startswith(f"{data}/measured/") and ".csv: No space left on device" in check
    assert names == "['cpu.csv']"


def test_a_file_that_may_not_grow(data, store, python):
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
print(sorted(path.name for path in store.path.parent.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
store.put(row(256))
"""
    put, names = _finish(python(code, data)).splitlines()
    assert put.startswith(f"{store.path}: File too large; free some space")
    assert ",256,64,true,forward,,,,,measured,ok,1.5,,,10," in put
    assert names == "['cpu.csv']"
    assert len(store.rows()) == 2


READ_ONLY = f"""{CHILD}
if os.getuid() == 0 and sys.argv[2] == "drop":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for call in (lambda: store.put(row(256)), store.check_writable,
             lambda: start_run(command="c", parameters={{}}, device="cpu", data=data)):
    try:
        call()
    except StoreError as error:
        print(error)
assert len(store.rows()) == 1
"""


def _check_read_only(lines: list[str], path: Path, reason: str, runs: Path) -> None:
    put, check, run = lines
    assert put.startswith(f"{path}: {reason}; make the folder writable, or set A2LIB_DATA")
    assert "the row not stored: a2lib,bf16,1,16,256,64,true,forward,,,,,,ok,1.5,,,10," in put
    assert check.startswith((f"{path}: {reason}", f"{runs}: {reason}"))
    assert run.startswith(f"{runs}: {reason}; make the folder writable")


def test_a_folder_without_permission(data, make_row, python):
    # Not under tmp_path, which only its owner may enter.
    public = Path(tempfile.mkdtemp())
    try:
        public.chmod(0o755)
        shutil.copytree(data, public / "data")
        store = Store(FLASH, "cpu", public / "data")
        store.put(make_row())
        before = store.path.read_bytes()
        folders = [store.path.parent, store.path.parent.parent]
        for folder in folders:
            folder.chmod(0o555)
        child = python(READ_ONLY, public / "data", "drop")
        lines = _finish(child).splitlines()
        _check_read_only(lines, store.path, "Permission denied", folders[1] / "runs.csv")
        assert store.path.read_bytes() == before and _names(store) == ["cpu.csv"]
        for folder in folders:
            folder.chmod(0o755)
        store.put(make_row(seq_len=256))
    finally:
        shutil.rmtree(public)


@needs_mount
def test_a_read_only_file_system(data, store, make_row, python):
    store.put(make_row())
    shell = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = (*NAMESPACE, "sh", "-c", shell, str(data))
    lines = _finish(python(READ_ONLY, data, "keep", prefix=prefix)).splitlines()
    _check_read_only(lines, store.path, "Read-only file system", data / "measured" / "runs.csv")
    assert _names(store) == ["cpu.csv"]


def test_a_system_without_file_locks_reads_and_says_why_it_cannot_write(
    store, make_row, monkeypatch
):
    store.put(make_row())
    monkeypatch.setattr(table, "fcntl", None)
    assert len(store.rows()) == 1
    with pytest.raises(StoreError, match="needs POSIX file locks .* WSL; the row not stored: a2l"):
        store.put(make_row(seq_len=256))


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


def test_a_file_system_without_locks_is_named(store, make_row, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(table.fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="No locks available; this file system has no file locks"):
        store.put(make_row())


def test_a_failed_write_gives_the_lock_back(store, make_row, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="Input/output error; see to the cause and run again"):
            store.put(make_row())
    assert _names(store) == []
    store.put(make_row())
    assert len(store.rows()) == 1
