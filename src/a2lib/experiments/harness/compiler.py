"""C++ for Inductor's cache that is whole or not there.

Inductor lets the compiler write into its cache under the final name, and takes whatever has that
name for finished work: a process killed in mid-link leaves an empty ``.so`` that every later run
loads, and fails. Where it is the probe for the CPU's instruction set, nothing fails, and code is
compiled for a lesser CPU from then on. Workers therefore call the compiler through a script that
renames what is finished, and look the cache over when they start.

Triton needs nothing of the kind: it renames into its cache itself.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import re
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PART = ".part"
TIMEOUT_S = 3600  # by then the number of a process is another's
_EXTENSION = "torch.utils.cpp_extension"
_LEFT = re.compile(rf"\.(\d+)\{PART}$")
# The words are those of the command, with the path after -o changed.
_SCRIPT = """#!/bin/sh
# Made by a2lib. Runs {compiler}; the file it writes gets its name when it is complete.
out= before=
for word; do
    shift
    if [ "$before" = -o ]; then
        out=$word
        set -- "$@" "$out.$${part}"
    else
        set -- "$@" "$word"
    fi
    before=$word
done
[ -n "$out" ] || exec {compiler} "$@"
{compiler} "$@"
code=$?
if [ $code = 0 ]; then mv -f "$out.$${part}" "$out"; else rm -f "$out.$${part}"; fi
exit $code
"""


def environment(given: Mapping[str, str], cache: Path) -> dict[str, str]:
    """What to add to the environment ``given`` of a worker; the script is written to ``cache``.

    Nothing where there is no compiler.
    """
    folder = cache / "compiler"
    wanted = given.get("CXX", "g++")
    found = shutil.which(wanted, path=given.get("PATH"))
    if found is None or Path(found).parent == folder:
        return {}
    # Inductor tells GCC from Clang by the name.
    script = folder / Path(found).name
    if re.search(r"\s", str(script)):
        return {}  # Inductor takes the name apart at a space
    text = _SCRIPT.format(compiler=shlex.quote(found), part=PART)
    try:
        if not script.is_file() or script.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder)
            with open(descriptor, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o755)
            os.replace(temporary, script)
    except OSError:
        return {}  # nor could anything be cached there
    return {"CXX": str(script)}


def quote_torch() -> None:
    """Let Inductor link where torch lies in a folder with a space in its path: it names that folder
    to the linker without quotes (torch 2.13). Imports no torch: what has to wait for it waits."""
    folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    if not re.search(r"\s", str(folder)):
        return
    if _EXTENSION in sys.modules:
        sys.modules[_EXTENSION].TORCH_LIB_PATH = shlex.quote(str(folder))
    elif not any(isinstance(finder, _Quoted) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Quoted())


class _Quoted(importlib.abc.MetaPathFinder):
    """Quotes once the module that names the folder has been imported."""

    def find_spec(self, name: str, path: object, target: object = None):
        if name != _EXTENSION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), quote_torch())
        return spec


def drop_broken(cache: Path) -> list[Path]:
    """Remove from Inductor's folder ``cache`` what no process can load and what nobody finishes.

    Returns the compiled files removed. What is being compiled now has another name, so nothing is
    taken from under a compiler.
    """
    dropped = []
    for path in cache.rglob("*"):
        with contextlib.suppress(OSError):
            if path.suffix in (".so", ".o") and not _is_whole(path):
                path.unlink()
                dropped.append(path)
            elif (left := _LEFT.search(path.name)) and (
                not _runs(int(left[1])) or time.time() - path.stat().st_mtime > TIMEOUT_S
            ):
                path.unlink()
    return dropped


def _is_whole(path: Path) -> bool:
    """Whether an object file has all its parts; one that is not ELF only has to have content."""
    if not stat.S_ISREG(path.stat().st_mode):
        return True
    with open(path, "rb") as file:
        head = file.read(64)
    size = path.stat().st_size
    if head[:4] != b"\x7fELF":
        # A linker writes the head last.
        return bool(head.strip(b"\0"))
    if len(head) < 64:
        return False
    order = "<" if head[5] == 1 else ">"
    if head[4] == 2:
        (start,) = struct.unpack_from(f"{order}Q", head, 40)
        entry, count = struct.unpack_from(f"{order}HH", head, 58)
    else:
        (start,) = struct.unpack_from(f"{order}I", head, 32)
        entry, count = struct.unpack_from(f"{order}HH", head, 46)
    return start > 0 and size >= start + entry * count


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
