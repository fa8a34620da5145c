"""A keyed CSV file that many processes may write and a crash cannot tear.

Every change writes the whole table to a file beside it, flushes that to the disk and renames it
into place, under an advisory lock: a reader sees the old table or the new one, a killed writer
leaves the old one, and two writers take turns. A file that is not a valid table is refused, never
repaired or replaced.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from a2lib.errors import OneLine

try:
    import fcntl
except ImportError:  # not a POSIX system: reading works, writing says why it does not
    fcntl = None  # type: ignore[assignment]

LOCK_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.002

NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")

Row = dict[str, str]
Key = tuple[str, ...]


class StoreError(OneLine, RuntimeError):
    """A result could not be stored or read; the message is one line and says how to go on."""


class _Entry(NamedTuple):
    key: Key
    order: tuple
    line: str
    row: Row


class Table:
    """The CSV file ``path`` with the header ``columns``, at most one row per value of ``key``.

    The columns in ``later`` may be missing from a file that was written before they were known:
    its rows have them blank, and the next ``put`` writes the whole header. Where ``path`` is a
    symbolic link, the file that it leads to is written and the link stays.
    ``check`` takes a row (column -> text) and raises ValueError where it is not a valid one.
    """

    def __init__(
        self,
        path: Path,
        columns: tuple[str, ...],
        key: tuple[str, ...],
        check: Callable[[Row], None],
        later: tuple[str, ...] = (),
    ) -> None:
        self.path = Path(path)
        self.columns = columns
        self._later = frozenset(later) - frozenset(key)
        self.key = key
        self._check = check
        self._signature: tuple | None = None
        self._entries: dict[Key, _Entry] = {}

    def rows(self) -> list[Row]:
        """All rows in the order of the file; row ``i`` is on line ``i + 2``.

        Raises StoreError naming file and line where the file is not a valid table.
        """
        return [dict(entry.row) for entry in self._load().values()]

    def get(self, key: Key) -> Row | None:
        """The row of ``key``, or None."""
        entry = self._load().get(key)
        return None if entry is None else dict(entry.row)

    def put(self, row: Row, *, replace: bool = True) -> bool:
        """Write ``row`` in place of the one with its key, on disk when this returns.

        With ``replace=False`` an existing row is left alone and False is returned. If it cannot be
        written, raises StoreError with the row in its message, and the file stays as it was.
        """
        try:
            entry = self._entry(row)
            with self._locked():
                entries = dict(self._load())
                if entry.key in entries and not replace:
                    return False
                entries[entry.key] = entry
                # Always, not for a new key alone: a merge by hand may have left another order.
                entries = dict(sorted(entries.items(), key=lambda item: item[1].order))
                lines = [to_line(self.columns), *(e.line for e in entries.values()), ""]
                self._write("\n".join(lines).encode())
                self._entries, self._signature = entries, self._stat()
        except ValueError as error:
            raise StoreError(f"{self.path}: {error}; {self._unstored(row)}") from error
        except OSError as error:
            raise StoreError(f"{_os_message(self.path, error)}; {self._unstored(row)}") from error
        except StoreError as error:
            raise StoreError(f"{error}; {self._unstored(row)}") from error
        return True

    def check_writable(self) -> None:
        """Raise StoreError now if ``put`` would fail: broken file, read-only folder, full disk.

        Leaves nothing behind but the folder.
        """
        try:
            with self._locked():
                self._load()
                size = self.path.stat().st_size if self.path.exists() else 0
                temporary = self._write_temporary(bytes(size + 65536))
                temporary.unlink()
        except OSError as error:
            raise StoreError(_os_message(self.path, error)) from error

    def _unstored(self, row: Mapping[str, object]) -> str:
        line = to_line([clean(str(row.get(column, ""))) for column in self.columns])
        return f"the row not stored: {line}"

    def _entry(self, row: Row, line: str | None = None) -> _Entry:
        self._check(row)
        key = tuple(row[column] for column in self.key)
        order = tuple(_order(value) for value in key)
        line = line or to_line([row[column] for column in self.columns])
        if not line.isprintable():
            raise ValueError("unprintable characters")
        return _Entry(key, order, line, row)

    def _target(self) -> Path:
        # os.path: Path.resolve raises RuntimeError for a loop of links, which open() names better.
        return Path(os.path.realpath(self.path))

    def _stat(self) -> tuple | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _load(self) -> dict[Key, _Entry]:
        try:
            signature = self._stat()
            if signature is None:
                self._entries, self._signature = {}, None
            elif signature != self._signature:
                self._entries = self._parse(self.path.read_bytes())
                self._signature = signature
        except OSError as error:
            raise StoreError(_os_message(self.path, error)) from error
        return self._entries

    def _parse(self, content: bytes) -> dict[Key, _Entry]:
        # Lines seen before were valid then: another process's row costs one line, not the file.
        known = {entry.line: entry for entry in self._entries.values()}
        entries: dict[Key, _Entry] = {}
        columns = self.columns
        for number, line in enumerate(self._lines(content), start=1):
            try:
                if number == 1:
                    columns = self._header(line)
                    continue
                entry = columns == self.columns and known.get(line)
                entry = entry or self._parse_line(line, columns)
                if entry.key in entries:
                    first = list(entries).index(entry.key) + 2
                    raise ValueError(f"the same key as line {first}")
            except (ValueError, csv.Error) as error:
                raise self._broken(number, str(error)) from None
            entries[entry.key] = entry
        return entries

    def _lines(self, content: bytes) -> list[str]:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, error.start) + 1
            raise self._broken(number, "not UTF-8 text") from None
        lines = text.split("\n")
        if text.startswith("\ufeff"):
            raise self._broken(1, "a byte order mark; save the file as UTF-8 without one")
        if not text:
            raise self._broken(1, "the file is empty, its header is missing")
        if lines.pop():
            raise self._broken(len(lines) + 1, "cut short: the line has no end")
        return [line.removesuffix("\r") for line in lines]

    def _header(self, line: str) -> tuple[str, ...]:
        """The columns of a file whose header is ``line``: all of ours, or less some later ones."""
        if line == to_line(self.columns):
            return self.columns
        if line.startswith(_CONFLICT):
            raise ValueError("a merge conflict marker")
        named = next(csv.reader([line], strict=True), [])
        columns = tuple(c for c in self.columns if c in named or c not in self._later)
        if line != to_line(columns):
            raise ValueError(f"the header is {clean(line)!r}, not {to_line(self.columns)!r}")
        return columns

    def _parse_line(self, line: str, columns: tuple[str, ...]) -> _Entry:
        if line.startswith(_CONFLICT):
            raise ValueError("a merge conflict marker")
        fields = next(csv.reader([line], strict=True), [])
        if len(fields) != len(columns):
            raise ValueError(f"{len(fields)} fields, not {len(columns)}")
        row = dict.fromkeys(self.columns, "") | dict(zip(columns, fields, strict=True))
        return self._entry(row, line if columns == self.columns else None)

    def _broken(self, number: int, reason: str) -> StoreError:
        return StoreError(
            f"{self.path}:{number}: {reason}; mend that line by hand, or restore the file from git"
            " and run again (it was left as it is)"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock file beside the table; the kernel drops the lock of a process that dies."""
        if fcntl is None:
            raise StoreError(
                f"{self.path}: writing needs POSIX file locks (fcntl), which this system lacks;"
                " run under Linux, macOS or WSL"
            )
        target = self._target()
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if _acquire(descriptor, lock):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.path}: another process has held {lock.name} for {LOCK_TIMEOUT_S:g} s;"
                    " end it and run again"
                )
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            # Unlinked while held: whoever waits on this inode sees in _acquire that it is gone.
            with contextlib.suppress(OSError):
                lock.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _write(self, content: bytes) -> None:
        temporary = self._write_temporary(content)
        try:
            os.replace(temporary, self._target())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self._target().parent)

    def _write_temporary(self, content: bytes) -> Path:
        # Only the holder of the lock writes one, so any that is here was left by a killed process.
        target = self._target()
        for stale in target.parent.glob(f".{target.name}.*.tmp"):
            stale.unlink(missing_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                if self.path.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(self.path.stat().st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def to_line(fields) -> str:
    """``fields`` as one CSV line without its end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


def clean(text: str) -> str:
    """``text`` on one line: line breaks, tabs and control characters become single spaces."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())


def _order(value: str) -> tuple:
    if NUMBER.fullmatch(value):
        return 0, float(value), value
    return 1, 0.0, value


def _acquire(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.stat(lock).st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; the rename itself is done.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _os_message(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some space"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "make the folder writable, or set A2LIB_DATA to one that is,"
    elif error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        advice = "this file system has no file locks, set A2LIB_DATA to a local folder"
    else:
        advice = "see to the cause"
    reason = error.strerror or str(error)
    return f"{path}: {reason}; {advice} and run again: rows already stored are kept"
