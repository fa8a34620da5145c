"""Run another program to its end, and have what it printed, or one line that says why not."""

import os
import signal
import subprocess
from collections.abc import Sequence

from a2lib.errors import OneLine


class ProgramError(OneLine, RuntimeError):
    """A program gave no result; the message is one line and says why. ``stuck`` is whether it did
    not end, and what it started may still run."""

    def __init__(self, message: str, stuck: bool = False) -> None:
        super().__init__(message)
        self.stuck = stuck


def run(what: str, command: Sequence[str], timeout_s: float) -> str:
    """What ``command`` printed on both outputs. Raises ProgramError, naming ``what``, where it
    fails, or does not end in time: then it is killed, with all that it started in its session."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{what} did not end within {timeout_s:g} s", stuck=True) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise ProgramError(f"{what} ended with {process.returncode}: {last_line(output)}")
    return output


def last_line(output: str) -> str:
    """The last line that says anything, an error of ncu's before others."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "==ERROR==" in line]
    return (errors or lines or ["it printed nothing"])[-1][:200]
