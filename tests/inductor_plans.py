"""Inductor up to its plan: which kernels it would make and what they move, nothing compiled."""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.graph import GraphLowering

from a2lib.lab import inductor

# Lines of the generated code that launch: a kernel of its own (Triton's on a GPU, C++'s on the
# CPU), a matrix product of a library, another operator of PyTorch.
OWN = re.compile(r"^\s+(triton_\w+(?=\.run\()|cpp_\w+(?=\())", re.M)
LIBRARY = re.compile(r"^\s+(?:\w+ = )?((?:extern_kernels|torch\.ops)\.[\w.]+)\(", re.M)
BACKWARD = re.compile(r"^# AOT ID: \['\d+_backward'\]", re.M)
# Of an operator's results taking memory; they launch nothing.
NO_KERNEL = ("torch.ops.aten.view", "torch.ops.aten.reshape", "torch.ops.aten.as_strided")


@dataclass(frozen=True)
class Calls:
    """The calls in the generated code of one graph: kernels of Inductor's own, by name, and of
    libraries, of which some are an attention."""

    backward: bool
    own: list[str]
    library: list[str]

    @property
    def attentions(self):
        return sum("scaled_dot_product" in name for name in self.library)


def calls_of(code):
    """Return what the generated `code` of one graph calls."""
    library = [name for name in LIBRARY.findall(code) if not name.startswith(NO_KERNEL)]
    return Calls(bool(BACKWARD.search(code)), OWN.findall(code), library)


class Eager:
    """In the place of a compiled module: runs the graph as it is."""

    __file__ = key = ""

    def __init__(self, graph):
        self.call = lambda args: tuple(graph.orig_gm(*args))


@contextmanager
def planned():
    """A list of (generated code, bytes by Inductor's count) of every graph compiled meanwhile."""
    found = []

    def compile_to_module(graph):
        code, _ = graph.codegen()
        found.append((code.value, graph.count_bytes()[0]))
        if GraphLowering.save_output_code is not None:
            GraphLowering.save_output_code(code.value)
        return Eager(graph)

    configure = inductor.configure

    def without_caches(**options):  # a plan is nothing that a cache holds
        configure(**options)
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False

    torch._dynamo.reset()
    with (
        mock.patch.object(inductor, "configure", without_caches),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        # Probing for the CPU's instruction set would call a compiler.
        mock.patch("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield found
    torch._dynamo.reset()
