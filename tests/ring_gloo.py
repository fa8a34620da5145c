"""The handout's other ring all-reduce with send and receive, by real processes over gloo."""

import json
from pathlib import Path

import torch
import torch.distributed as dist


def alternate_ring(rank: int, n: int, elements: int, folder: str) -> None:
    """Rank ``rank`` of ``n``: sum one tensor per rank, and write what was sent to ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    own = torch.arange(elements, dtype=torch.float32) % 97 + rank
    total = own.clone()
    dist.all_reduce(total)  # connects everyone before anything is counted
    before = written()
    y, held, sent, rounds = own.clone(), own, 0, 0
    for _ in range(n - 1):
        received = torch.empty_like(held)
        sending = dist.isend(held, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        sent += held.numel() * held.element_size()
        rounds += 1
        y += received
        held = received
    after = written()
    found = {
        "right": bool(torch.equal(y, total)),
        "sent": sent,
        "rounds": rounds,
        "written": None if before is None else after - before,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def written() -> int | None:
    """Bytes that this process has handed to write calls, sockets included; None if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
