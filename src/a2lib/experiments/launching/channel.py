"""What ranks and torchrun say to the launcher, by named pipes in the launch's folder.

A pipe holds 64 KiB, and who writes more waits until the launcher has read: a flood fills neither a
disk nor memory. The launcher keeps each pipe open, so that nothing is lost of who wrote and ended,
and what is started with a pipe in hand does not hold up the launch's end.
"""

import contextlib
import fcntl
import json
import math
import os
from pathlib import Path

KINDS = ("messages", "out", "stacks")
READ = 1 << 16
# A longer line is handed on in pieces of about this many bytes; a message is never split.
LONGEST_LINE = 1 << 16


def path_of(folder: str | os.PathLike, who: int | str, kind: str) -> Path:
    """A pipe of local rank ``who`` ("out", what it prints; "messages"; "stacks") or "torchrun"."""
    return Path(folder, f"{who}.{kind}")


def send(folder: str | os.PathLike, who: int | str, kind: str, value: object) -> None:
    """Send a message that JSON can write, from any thread or process of ``who``."""
    text = json.dumps([kind, value]).encode() + b"\n"
    with open(os.open(path_of(folder, who, "messages"), os.O_WRONLY), "wb") as file:
        # More than PIPE_BUF (4 KiB) would mix with another's.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)


class Channel:
    """The launcher's end of a pipe, which this makes."""

    def __init__(self, folder: str, who: int | str, kind: str) -> None:
        self.who, self.kind = who, kind
        path = path_of(folder, who, kind)
        os.mkfifo(path)
        # Also for writing: it has no end while nobody writes.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._longest = LONGEST_LINE if kind != "messages" else math.inf

    def close(self) -> None:
        os.close(self.fd)

    def lines(self, to_the_end: bool = False) -> list[str]:
        """The lines that are new, of at most READ bytes; ``to_the_end`` also one without its
        end."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self.fd, READ)
        *found, self._rest = self._rest.split(b"\n")
        if self._rest and (to_the_end or len(self._rest) > self._longest):
            found.append(self._rest)
            self._rest = b""
        return [
            text for line in found for text in line.decode(errors="replace").splitlines() or [""]
        ]
