"""A CSV file of rows by key that many processes may write and a crash cannot tear.

Every change writes the whole file beside it, flushes that to the disk and renames it into place,
under a lock: a reader sees the old table or the new one, a killed writer leaves the old one, and
two writers take turns. A file that is not a valid table is refused, never repaired or replaced.
"""

import contextlib
import csv
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from a2lib import paths
from a2lib.errors import OneLine

Row = dict[str, str]
Key = tuple[str, ...]


class StoreError(OneLine, RuntimeError):
    """A result could not be stored or read; the message is one line and says how to go on."""


def measured(data: Path | None) -> Path:
    """Return the folder of the measured tables in `data` (default `paths.data_dir()`)."""
    return (paths.data_dir() if data is None else Path(data).absolute()) / "measured"


class CsvFile:
    """The CSV file `path` with the header `columns`, at most one row for each value of `key`.

    A file that was written before a column was known is read with blanks there, and the next `put`
    writes the whole header.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], key: tuple[str, ...]) -> None:
        self.path, self.columns, self.key = path, columns, key
        self._cached: tuple[object, dict[Key, Row]] = None, {}

    def to_text(self, row: Mapping[str, object]) -> Row:
        """Return `row` as text, every column in order; ValueError where that cannot be."""
        return {column: str(row[column]) for column in self.columns}

    def check(self, row: Row) -> None:
        """Raise ValueError, saying what is allowed, unless `row` is a valid one."""

    def rows(self) -> list[Row]:
        """Return all rows in the order of the file.

        Raises StoreError naming file and line where the file is not a valid table.
        """
        return list(map(dict, self._load().values()))

    def put(self, *rows: Mapping[str, object]) -> None:
        """Write each of `rows` in place of the one with its key, else behind the last, on disk when
        this returns.

        If one is not valid or they cannot be written, raises StoreError with that or the last row
        in its message, and the file stays as it was.
        """
        if not rows:
            return
        texts = {}
        try:
            for row in rows:
                text = self.to_text(row)
                self.check(text)
                texts[self._key(text)] = text
            with locked(self.path):
                stored = {**self._load(), **texts}
                write(self.path, to_csv([self.columns, *map(dict.values, stored.values())]))
                self._cached = self._signature(), stored
        except (ValueError, StoreError) as error:
            where = "" if isinstance(error, StoreError) else f"{self.path}: "
            unstored = clean(str(dict(row)))
            raise StoreError(f"{where}{error}; the row not stored: {unstored}") from error

    def _load(self) -> dict[Key, Row]:
        with named(self.path):
            signature = self._signature()
            if signature != self._cached[0]:
                self._cached = signature, self._parse() if signature else {}
        return self._cached[1]

    def _signature(self) -> object:
        """Return another value whenever the file is another; None where there is none."""
        if not self.path.exists():
            return None
        stat = self.path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    def _parse(self) -> dict[Key, Row]:
        blank = dict.fromkeys(self.columns, "")
        rows: dict[Key, Row] = {}
        # Bytes that are no UTF-8 come as unprintable characters.
        with open(self.path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            number = 1
            try:
                header = fields_of(file.readline())
                known = [column for column in self.columns if column in header]
                if header != known or not set(self.key) <= set(header):
                    raise ValueError(f"the header is not that of {','.join(self.columns)}")
                for line in file:
                    number += 1
                    fields = fields_of(line)
                    if len(fields) != len(header):
                        raise ValueError(f"{len(fields)} fields, not {len(header)}")
                    row = {**blank, **dict(zip(header, fields, strict=True))}
                    self.check(row)
                    key = self._key(row)
                    if key in rows:
                        raise ValueError("the same key as a line before")
                    rows[key] = row
            except ValueError as error:
                raise StoreError(
                    f"{self.path}:{number}: {error}; mend that line by hand, or restore the file"
                    " from git and run again (it was left as it is)"
                ) from None
        return rows

    def _key(self, row: Row) -> Key:
        return tuple(map(row.get, self.key))


def fields_of(line: str) -> list[str]:
    """Return the fields of a line of CSV. Raises ValueError for one that is never written here: cut
    short, with characters that cannot be printed, or with a field that goes on in the next line."""
    text = line.rstrip("\r\n")
    if not line.endswith("\n"):
        raise ValueError("cut short: the line has no end")
    if not text.isprintable():
        raise ValueError("unprintable characters, or not UTF-8 text")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(error) from None


def write(path: Path, text: str) -> None:
    """Put `text` in place of the file, on disk when this returns. Only within `locked`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems cannot flush a folder
        os.fsync(folder)
    os.close(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one to write in the folder of `path`, which is made where there is none.

    The kernel drops the lock of a process that dies. An error of the system within is a StoreError
    that names `path`.
    """
    with named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Within it an error of the system is a StoreError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}; see to that (free some space, make the folder"
            " writable, or name another by A2LIB_DATA) and run again: rows already stored are kept"
        ) from error


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Return `rows` as lines of CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def clean(text: str) -> str:
    """Return `text` on one line: line breaks, tabs and control characters become single spaces."""
    for character in set(text):
        if not character.isprintable():
            text = text.replace(character, " ")
    return " ".join(text.split())
