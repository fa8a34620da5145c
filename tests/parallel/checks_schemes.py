"""The feed-forward stack under every scheme and mesh against one process: y, dx and each gradient
by name, of layers with random weights and a random dy."""

import itertools

import torch.distributed as dist
from checking import check, world

from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.parallelism import SCHEMES, Setting, handlers, meshes

LAYERS, D_MODEL, D_FF = 3, 16, 24


def stacks(scheme, implementation="a2lib"):
    """(spec, stack) of every mesh of a scheme on these ranks."""
    _, size = world()
    backend = dist.get_backend()
    for mesh in meshes(scheme, size):
        given = Setting(scheme, implementation, mesh, Ranks(size, backend), "fp32", LAYERS, D_MODEL,
                      D_FF)  # fmt: skip
        yield given.spec(), handlers.make(given.spec(), device(), seed=3)


def device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@check(2, 4)
def each_scheme_is_the_one_process():
    # PyTorch's own warns of views on a mesh of two axes.
    implementations = ("a2lib", "torch") if world()[1] == 2 else ("a2lib",)
    for scheme, implementation in itertools.product(SCHEMES, implementations):
        for spec, stack in stacks(scheme, implementation):
            off = handlers.errors(stack, spec, device(), seed=3)
            assert len(off) == 2 + 3 * LAYERS, off
            assert max(off.values()) < 2e-5, (spec, off)
