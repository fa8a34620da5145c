"""One measurement at a time on a device: two that share it both come out slower, and look normal.

    with DeviceLock("cuda").held(f"run {run}"):
        ...

The lock is a file in the system's temporary folder, named by the GPU's UUID or `cpu`, so that
checkouts and users share it. The operating system drops it when its holder dies. `$A2LIB_LOCKS`
names another folder; whoever sets it to one of their own measures beside others on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from a2lib.errors import OneLine
from a2lib.measure.device import slugify

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


# Whoever only checks holds the lock for an instant, which must not look like a measurement.
ASIDE_S = (0.1, 0.1)


class DeviceBusy(OneLine, RuntimeError):
    """Another process measures on this device; the message is one line and names it."""


class DeviceLock:
    """The right to measure on the current CUDA device, or on the CPU for ``device`` "cpu"."""

    def __init__(self, device: str) -> None:
        self.name, identity = _identity(device)
        folder = os.environ.get("A2LIB_LOCKS") or tempfile.gettempdir()
        self.path = Path(folder) / f"a2lib-{identity}.lock"

    def check(self) -> None:
        """Raise DeviceBusy if another process holds the lock now."""
        with self.held(""):
            pass

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Hold the lock, known to others as ``what``; raises DeviceBusy where it is taken.

        Where no lock can be taken (a file of another user that may not be read, a file system
        without locks) a line on standard error says so, and nothing is refused.
        """
        descriptor = self._acquire()
        try:
            self._say_who(descriptor, what)
            yield
        finally:
            if descriptor is not None:
                self._write(descriptor, "")
                os.close(descriptor)

    def _acquire(self) -> int | None:
        descriptor = None
        try:
            descriptor = _open(self.path)
            for wait_s in (*ASIDE_S, None):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return descriptor
                except BlockingIOError:
                    if wait_s is None:
                        raise
                    time.sleep(wait_s)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise DeviceBusy(
                f"{self.name} is measured by {holder} already, and two at once would both be"
                " slower; wait for its end or end it, then run again"
            ) from None
        except (OSError, AttributeError) as error:
            if descriptor is not None:
                os.close(descriptor)
            why = getattr(error, "strerror", None) or "this system has no file locks"
            print(f"{self.name} is not locked against others: {why}", file=sys.stderr)
            return None

    def _say_who(self, descriptor: int | None, what: str) -> None:
        if descriptor is not None:
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            self._write(descriptor, json.dumps({"pid": os.getpid(), "what": what, "since": since}))

    @staticmethod
    def _write(descriptor: int, text: str) -> None:
        # Not to be written where it belongs to another user; the lock holds all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)


def _identity(device: str) -> tuple[str, str]:
    """What to call the device, and a name that no other device of this machine has."""
    if device == "cpu":
        return "this CPU", "cpu"
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.name} ({found.uuid})", slugify(f"gpu {found.uuid}")


def _open(path: Path) -> int:
    # Without O_CREAT first: Linux refuses to open with it what another user made in a folder such
    # as /tmp, whatever the file's mode (fs.protected_regular).
    always = os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(2):
        for mode in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(PermissionError, FileNotFoundError):
                return os.open(path, mode | always)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | always, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o666)  # for others, whatever the umask
            return descriptor
    raise PermissionError(0, f"{path.name} belongs to another user and may not be read")


def _holder(descriptor: int) -> str:
    """Who wrote the lock file, in words."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        os.kill(found["pid"], 0)
    except PermissionError:
        pass  # alive, and another user's
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return "another process"
    what = f", {found['what']}" if found.get("what") else ""
    return f"process {found['pid']}{what}, since {found.get('since')},"
