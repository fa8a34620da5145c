"""Watch Inductor while something is compiled: its graphs, its kernels, its caches.

with caches_in(folder):                # empty at first: what compiles now is compiled cold
    with watching() as graphs:
        ...                            # first calls
    forget()                           # what compiles now finds the folder full: warm
    ...
graphs[0].calls
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from a2lib.lab.device import synchronize
from a2lib.paths import cache_dir

# Lines of the generated code that launch: a kernel of its own (Triton's on a GPU, C++'s on the
# CPU), a matrix product of a library, another operator of PyTorch.
_OWN = re.compile(r"^\s+(triton_\w+(?=\.run\()|cpp_\w+(?=\())", re.M)
_LIBRARY = re.compile(r"^\s+(?:\w+ = )?((?:extern_kernels|torch\.ops)\.[\w.]+)\(", re.M)
_BACKWARD = re.compile(r"^# AOT ID: \['\d+_backward'\]", re.M)
# Of an operator's results taking memory; they launch nothing.
_NO_KERNEL = ("torch.ops.aten.view", "torch.ops.aten.reshape", "torch.ops.aten.as_strided")


@dataclass(frozen=True)
class Graph:
    """One graph that was compiled, forward or ``backward``: how many kernels Inductor ``written``,
    how often they are ``called``, how many calls go to a ``library``, how many of those are an
    attention that it recognised, and the bytes that all of them read and write by Inductor's own
    count, each operand of a kernel once; None where this version of PyTorch tells none."""

    backward: bool
    written: int
    called: int
    library: int
    attentions: int
    bytes: int | None = None


def read(code: str, moved: int | None = None) -> Graph:
    """Return what the generated ``code`` of one graph launches in a call."""
    kernels = _OWN.findall(code)
    library = [name for name in _LIBRARY.findall(code) if not name.startswith(_NO_KERNEL)]
    return Graph(
        bool(_BACKWARD.search(code)),
        len(set(kernels)),
        len(kernels),
        len(library),
        sum("scaled_dot_product" in name for name in library),
        moved,
    )


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


def counts(graphs: Sequence[Graph], times: int = 1) -> dict[str, int | None]:
    """Return what Inductor made of these graphs, each called `times` times, as columns of a row;
    {} where there is none."""
    if not graphs:
        return {}
    moved = [graph.bytes for graph in graphs]
    return {
        "kernels_written": sum(graph.written for graph in graphs),
        "kernels_called": times * sum(graph.called for graph in graphs),
        "library_calls": times * sum(graph.library for graph in graphs),
        "attentions": times * sum(graph.attentions for graph in graphs),
        "moved_bytes": None if None in moved else times * sum(moved),
    }


@contextlib.contextmanager
def watching() -> Iterator[list[Graph]]:
    """A list that gets every graph compiled meanwhile, in order."""
    from torch._inductor.graph import GraphLowering

    graphs: list[Graph] = []
    codes: list[str] = []
    compile_ = GraphLowering.compile_to_module

    def compiled(graph, *args, **kwargs):
        codes.clear()
        module = compile_(graph, *args, **kwargs)
        graphs.extend(read(code, _bytes(graph)) for code in codes[-1:])
        return module

    with (
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(codes.append)),
        mock.patch.object(GraphLowering, "compile_to_module", compiled),
    ):
        yield graphs


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
    where = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    forget()
    with mock.patch.dict(os.environ, {name: str(path) for name, path in where.items()}):
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


def launches(call) -> int:
    """Kernels that the GPU runs in one ``call()``, by PyTorch's profiler; copies do not count."""
    import torch
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        synchronize("cuda")
    return sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")
        for event in profile.events()
    )


def _bytes(graph) -> int | None:
    try:
        return int(graph.count_bytes()[0])
    except Exception:  # an estimate of PyTorch's own, whose failure is no failure of the shape
        return None
