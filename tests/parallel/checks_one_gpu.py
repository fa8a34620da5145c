"""Copy engines between two ranks that share one GPU: no second one is needed for it.

NCCL refuses that, and gloo has not all of its messages on a GPU, nor any in a graph: what is sent
by them goes by the host here, or in a captured step not at all. Copies and barriers are those of
two GPUs; how quick they are, and how two GPUs reach each other, this cannot show.
"""

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist
from checking import check, same, world
from checks_capture import captured_as_launched
from checks_finish import EVERY, trains_as_one_process
from checks_fsdp import Stack, computes_in_low_precision
from checks_streams import the_same_whoever_is_late

from a2lib.parallel.agreement import Agreement
from a2lib.parallel.copy_engines import SharedMemory
from a2lib.parallel.group import Mean


@contextlib.contextmanager
def means_by_the_host():
    def mean(_, tensors):
        for x in tensors:
            host = x.cpu()
            dist.all_reduce(host)
            x.copy_(host / dist.get_world_size())
        return []

    with patch.object(Mean, "__call__", mean):
        yield


@contextlib.contextmanager
def each_rank_for_itself():
    """Leave out what the backend sends, and no message of copy engines."""
    ends = patch.object(Agreement, "end_step", lambda *_: set())
    with ends, patch.object(Mean, "__call__", lambda *_: []):
        yield


@check(2)
def one_gpu_has_the_memory_of_both_ranks():
    """Launched, and in a graph that is replayed between other uses."""
    rank, size = world()
    shared = SharedMemory(1024, None, torch.device("cuda", 0))
    mine, theirs = (shared.view(r, 256, 100, torch.float32) for r in (rank, 1 - rank))
    number, got = torch.zeros(100), torch.zeros(100)

    def exchange():
        shared.barrier()
        mine.copy_(number + rank)
        shared.barrier()
        got.copy_(theirs)

    def check_exchange(step, how):
        number.fill_(10 * step)
        how()
        same(got, torch.full((100,), 10.0 * step + 1 - rank), f"step {step}")

    for step in range(3):
        check_exchange(step, exchange)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange()
    for step in range(3, 9):
        check_exchange(step, exchange if step % 3 else graph.replay)


@check(2)
def one_gpu_trains_as_one_process():
    with means_by_the_host():
        for kind in ("FSDP, copied", "BucketedDDP some, copied"):
            trains_as_one_process(kind)
        for dtype in (torch.bfloat16, torch.float16):
            computes_in_low_precision(EVERY["FSDP, copied"], dtype, Stack())


@check(2)
def one_gpu_waits_where_it_must():
    with means_by_the_host():
        for kind in ("fsdp_copies", "fsdp_copies_bf16", "copy_engines"):
            the_same_whoever_is_late(kind)


@check(2)
def one_gpu_captures_fsdp_and_buckets():
    with each_rank_for_itself():
        for kind in ("fsdp_copies", "fsdp_copies_bf16", "copy_engines", "copy_engines_bf16"):
            captured_as_launched(kind)
