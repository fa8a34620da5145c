"""One measurement at a time on a device: two that share it both come out slower, and look normal.

    with DeviceLock("cuda").held(f"run {run}"):
        ...

The lock is a file in the system's temporary folder, named by the GPU's UUID or `cpu`, so that
checkouts and users share it. The operating system drops it when its holder dies. `$A2LIB_LOCKS`
names another folder; whoever sets it to one of their own measures beside others on purpose.
"""

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from a2lib.errors import OneLine
from a2lib.lab.device import slugify

# Whoever only checks holds the lock for an instant, which must not look like a measurement.
ASIDE_S = (0.1, 0.1)


class DeviceBusy(OneLine, RuntimeError):
    """Another process measures on this device; the message is one line and names it."""


class DeviceLock:
    """The right to measure on the current CUDA device, or on the CPU for ``device`` "cpu"."""

    def __init__(self, device: str) -> None:
        self.name, identity = "this CPU", "cpu"
        if device != "cpu":
            import torch

            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            # What no other device of this machine has.
            self.name, identity = f"{found.name} ({found.uuid})", slugify(f"gpu {found.uuid}")
        folder = os.environ.get("A2LIB_LOCKS") or tempfile.gettempdir()
        self.path = Path(folder) / f"a2lib-{identity}.lock"

    def check(self) -> None:
        """Raise DeviceBusy if another process holds the lock now."""
        with self.held(""):
            pass

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Hold the lock, known to others as ``what``; raises DeviceBusy where it is taken.

        Where no lock can be taken (a file of another user that may not be written, a file system
        without locks) a line on standard error says so, and nothing is refused.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(os.fdopen(_open(self.path), "r+"))
                self._acquire(file)
                since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                _say(file, f"process {os.getpid()}, {what or 'a check'}, since {since}")
                stack.callback(_say, file, "")
            except OSError as error:
                why = error.strerror or error
                print(f"{self.name} is not locked against others: {why}", file=sys.stderr)
            yield

    def _acquire(self, file) -> None:
        for wait_s in (*ASIDE_S, 0):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(wait_s)
        raise DeviceBusy(
            f"{self.name} is measured by {file.read() or 'another process'} already, and two at"
            " once would both be slower; wait for its end or end it, then run again"
        )


def _say(file, who: str) -> None:
    """Leave the holder's name in the file, in words."""
    with contextlib.suppress(OSError):
        file.seek(0)
        file.truncate()
        file.write(who)
        file.flush()


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Without O_CREAT first: Linux refuses to open with it what another user made in a folder
        # such as /tmp, whatever the file's mode (fs.protected_regular).
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666)  # for others, whatever the umask
        return descriptor
