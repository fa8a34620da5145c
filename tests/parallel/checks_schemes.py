"""The feed-forward stack under every scheme and mesh against one process: y, dx and each gradient
by name, of layers with random weights and a random dy."""

import itertools

import torch
import torch.distributed as dist
from checking import check, world

from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.parallelism import SCHEMES, Setting, handlers, meshes

LAYERS, D_MODEL, D_FF = 3, 16, 24


@check(2, 4)
def each_scheme_is_the_one_process():
    _, size = world()
    # PyTorch's own warns of views on a mesh of two axes.
    implementations = ("a2lib", "torch") if size == 2 else ("a2lib",)
    ranks, device = Ranks(size, dist.get_backend()), torch.get_default_device().type
    for scheme, implementation in itertools.product(SCHEMES, implementations):
        for mesh in meshes(scheme, size):
            given = Setting(scheme, implementation, mesh, ranks, "fp32", LAYERS, D_MODEL, D_FF)
            spec = given.spec()
            stack = handlers.make(spec, device, seed=3)
            off = handlers.errors(stack, spec, device, seed=3)
            assert len(off) == 2 + 3 * LAYERS, off
            assert max(off.values()) < 2e-5, (spec, off)
