"""Set up torch.compile for what is timed: its switches, its caches, its first compilation.

with caches_in(folder):                # empty at first: what compiles now is compiled cold
    ...                                # first calls
    forget()                           # what compiles now finds the folder full: warm
    ...
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from a2lib.lab.device import synchronize
from a2lib.paths import cache_dir


def configure(*, in_several_ways: bool = False) -> None:
    """Set the switches of this process for compiled code that is timed.

    Products of fp32 are no TF32, several backwards may go through one graph, and code that Dynamo
    would no longer compile, and run uncompiled in its place, is an error. So is compiling a
    function again, unless it may be compiled `in_several_ways`.
    """
    import torch
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    # Donated buffers are gone after one backward; timing it alone takes many on one graph.
    torch._functorch.config.donated_buffer = False
    torch._functorch.config.enable_autograd_cache = True
    torch._inductor.config.fx_graph_cache = True
    torch._dynamo.config.error_on_recompile = not in_several_ways
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder that is there meanwhile, beside the caches of other processes."""
    place = cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Compiled code goes to ``folder`` and is looked for there alone."""
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    forget()
    with mock.patch.dict(os.environ, folders):
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Make this process forget what it compiled; what is on disk stays."""
    import torch
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    clear_caches()


@functools.cache
def prime(device: str) -> None:
    """Compile something small once in a process: its imports and probes belong to no shape."""
    import torch

    x = torch.ones(4, 4, device=device, requires_grad=True)
    torch.compile(lambda x: (x @ x).softmax(-1), dynamic=False)(x).sum().backward()
    synchronize(device)
    torch._dynamo.reset()
