"""Training one model in several processes: data parallel, sharded optimizer, fully sharded.

    ddp = DDP(model)                                  # or NaiveDDP, FlatDDP, BucketedDDP(model, 25)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(ddp(x), y).backward()
    ddp.finish_gradient_synchronization()
    optimizer.step()

    captured = capture_step(step)                     # a step as one CUDA graph, collectives too

    model = FSDP(model, compute_dtype=torch.bfloat16)
    save_sharded(folder, model, optimizer)            # load_sharded at any number of ranks

Each class works for any nn.Module, in a process group such as torchrun's processes form:

    torchrun --standalone --nproc-per-node 2 train.py     # README.md has a train.py

A name is loaded when it is asked for: some parts of this package do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from a2lib.parallel.ddp import DDP, BucketedDDP, FlatDDP, NaiveDDP
    from a2lib.parallel.fsdp import FSDP
    from a2lib.parallel.fsdp.checkpoint import load_sharded, save_sharded
    from a2lib.parallel.graphs import capture_step
    from a2lib.parallel.sharded_optimizer import ShardedOptimizer

__all__ = [
    "DDP",
    "FSDP",
    "BucketedDDP",
    "FlatDDP",
    "NaiveDDP",
    "ShardedOptimizer",
    "capture_step",
    "load_sharded",
    "save_sharded",
]
_HOMES = {
    "BucketedDDP": "ddp",
    "DDP": "ddp",
    "FSDP": "fsdp",
    "FlatDDP": "ddp",
    "NaiveDDP": "ddp",
    "ShardedOptimizer": "sharded_optimizer",
    "capture_step": "graphs",
    "load_sharded": "fsdp.checkpoint",
    "save_sharded": "fsdp.checkpoint",
}


if not TYPE_CHECKING:  # a checker would take it for the home of any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
