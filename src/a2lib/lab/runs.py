"""Where a figure comes from: ``data/measured/runs.csv``, one row per run of an experiment.

Each measured row names its run, and the run names the device, the versions and the commit. Nothing
here identifies the machine: no column holds a host name, and local paths are shortened.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from a2lib import paths
from a2lib.lab.csv_file import CsvFile, Row, clean, measured
from a2lib.lab.device import device_kind

COLUMNS = (
    *("run", "started", "device", "n_devices", "driver", "torch", "triton", "cuda", "cudnn"),
    *("nccl", "python", "git", "command", "parameters", "source"),
)
_ABSOLUTE_PATH = re.compile(r"(?<![\w/.~-])/(?!/)(?:[^\s/\"'=:,;]+/)+([^\s/\"'=:,;]*)")
_COMMAND_TIMEOUT_S = 20


def start_run(
    *,
    command: str,
    parameters: Mapping[str, object],
    device: str,
    n_devices: int = 1,
    data: Path | None = None,
    source: str = "",
) -> str:
    """Record a new run in runs.csv and return its id, ``<UTC time>-<device>-<random suffix>``.

    ``command`` is what a reader would type to repeat it, ``parameters`` what it was given,
    ``source`` what `sources.py` tells of the code that measures. Driver, versions and commit are
    read here; what this machine does not have is blank. Raises StoreError if the row cannot be
    written.
    """
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{device}-{secrets.token_hex(3)}"
    row = {
        "run": run,
        "started": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device,
        "n_devices": n_devices,
        "command": clean(scrub(command)),
        "parameters": scrub(json.dumps(parameters, default=str, sort_keys=True)),
        "source": source,
        **versions(),
    }
    runs_table(data).put(dict.fromkeys(COLUMNS, "") | row)
    return run


def read_runs(data: Path | None = None) -> list[Row]:
    """All runs, oldest first, every value as text; [] where nothing was measured.

    Raises StoreError naming file and line for a broken runs.csv.
    """
    return runs_table(data).rows()


def runs_table(data: Path | None) -> CsvFile:
    """Return the table behind runs.csv in ``data`` (default ``paths.data_dir()``)."""
    return CsvFile(measured(data) / "runs.csv", COLUMNS, ("run",))


def git_version() -> str:
    """$A2LIB_GIT, else the short commit of this checkout, ``-dirty`` if its code was changed.

    Blank where the package does not lie in a git checkout of its own.
    """
    if os.environ.get("A2LIB_GIT"):
        return clean(os.environ["A2LIB_GIT"])
    # The prefix is blank only where ROOT is the top of the checkout, not a folder of another one.
    lines = _git("rev-parse", "--show-prefix", "--short=12", "HEAD").split("\n")
    if len(lines) != 2 or lines[0]:
        return ""
    # Results are written while measuring: they say nothing about the code that wrote them.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)data")
    return lines[1] + ("-dirty" if changed else "")


def scrub(text: str) -> str:
    """``text`` with local absolute paths shortened: relative to the repository, ``~`` for the home
    folder, and ``.../name`` for any other."""
    if "/" not in text:
        return text
    for folder, inside, alone in ((str(paths.ROOT), "", "."), (os.path.expanduser("~"), "~/", "~")):
        if len(folder) > 1:
            begin = rf"(?<![\w.~-]){re.escape(folder)}"
            text = re.sub(rf"{begin}/+(?=\S)", inside, text)
            text = re.sub(rf"{begin}(?![\w.-])", alone, text)
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def versions() -> dict[str, str]:
    """Return the versions of Python, the commit, torch, triton and what drives a GPU."""
    texts = {"python": platform.python_version(), "git": git_version()}
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            texts[package] = importlib.metadata.version(package)
    if device_kind() == "cuda":
        import torch

        texts["torch"] = torch.__version__  # with a "+cu130", which its metadata may leave out
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        texts["driver"] = clean(driver.split("\n")[0])
        texts["cuda"] = str(torch.version.cuda or "")
        texts["cudnn"] = str(torch.backends.cudnn.version() or "")
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            texts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return texts


def _git(*arguments: str) -> str:
    # A hook runs with GIT_DIR set, which would answer for another checkout.
    environment = dict(os.environ)
    for name in os.environ:
        if name.startswith("GIT_"):
            del environment[name]
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # asking must not get in the way of a commit
    return _output("git", "-C", str(paths.ROOT), *arguments, env=environment)


def _output(*command: str, env: dict[str, str] | None = None) -> str:
    """The standard output of ``command`` less its last line end; "" if it fails or is not there."""
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.removesuffix("\n") if done.returncode == 0 else ""
