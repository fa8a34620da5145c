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
"""

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
