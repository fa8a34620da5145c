"""One measurement at a time on a device: two that share it both come out slower, and look normal.

    with device_lock("cuda", f"run of {notebook}"):
        ...

The lock is a file in the system's temporary folder, named by the GPU's UUID or `cpu`, so that
checkouts and users share it. The operating system drops it when its holder dies. `$A2LIB_LOCKS`
names another folder; whoever sets it to one of their own measures beside others on purpose.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from a2lib.errors import OneLine
from a2lib.lab.device import slugify


class DeviceBusy(OneLine, RuntimeError):
    """Another process measures on this device; the message is one line and names it."""


@contextlib.contextmanager
def device_lock(device: str, what: str) -> Iterator[None]:
    """Be the only one to measure on the current CUDA device, or on the CPU for `device` "cpu",
    known to others as `what`; raises DeviceBusy where another process is.

    Where no lock can be taken (a file of another user that may not be written, a file system
    without locks) a line on standard error says so, and nothing is refused.
    """
    from filelock import FileLock, Timeout  # comes with torch

    name, path = _of_device(device)
    lock = FileLock(path, timeout=0, mode=0o666)  # for other users too, whatever the umask
    try:
        lock.acquire()
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        path.write_text(f"process {os.getpid()}, {what}, since {since}")
    except Timeout:
        raise DeviceBusy(
            f"{name} is measured by {path.read_text() or 'another process'} already, and two at"
            " once would both be slower; wait for its end or end it, then run again"
        ) from None
    except OSError as error:
        print(f"{name} is not locked against others: {error.strerror}", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()


def _of_device(device: str) -> tuple[str, Path]:
    """Return the device's name in words, and the file of its lock."""
    folder = Path(os.environ.get("A2LIB_LOCKS") or tempfile.gettempdir())
    if device == "cpu":
        return "this CPU", folder / "a2lib-cpu.lock"
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{gpu.name} ({gpu.uuid})", folder / f"a2lib-{slugify(f'gpu {gpu.uuid}')}.lock"
