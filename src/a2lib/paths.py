"""Find this repository's folders, whatever folder the caller stands in."""

import os
import re
import shlex
import tempfile
from pathlib import Path

# Right for the editable install, the only one supported: notebooks and data are not in the package.
ROOT = Path(__file__).resolve().parents[2]
# Names the terminal on which a notebook was started, where a sweep shows how far it is.
TERMINAL = "A2LIB_TERMINAL"


def data_dir() -> Path:
    """Return the folder of the measured data: `$A2LIB_DATA` if set and not empty, else `data/`."""
    chosen = os.environ.get("A2LIB_DATA")
    return Path(os.path.expanduser(chosen)).absolute() if chosen else ROOT / "data"


def build_dir() -> Path:
    """Return the folder of everything that can be made again and is not committed."""
    return ROOT / "build"


def cache_dir() -> Path:
    """Return the folder of compiled code. Inductor writes commands without quotes, so that it is
    one of temporary files where the path of this repository has a space."""
    if re.search(r"\s", str(ROOT)):
        return Path(tempfile.gettempdir(), f"a2lib-{os.getuid()}")  # containers name no user
    return build_dir() / "cache"


def runs_dir() -> Path:
    """Return the folder of the executed notebooks."""
    return build_dir() / "runs"


def quote_torch() -> None:
    """Let Inductor link where torch lies in a folder with a space in its path: it names that folder
    to the linker without quotes before torch 2.14."""
    import torch

    folder = str(Path(torch.__file__).parent / "lib")
    if torch.__version__ < "2.14" and re.search(r"\s", folder):
        import torch.utils.cpp_extension

        torch.utils.cpp_extension.TORCH_LIB_PATH = shlex.quote(folder)
