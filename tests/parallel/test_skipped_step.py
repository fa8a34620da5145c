"""A rank that skips a step of FSDP, whose messages would be paired with others: each process ends
with an error that names it."""

import pytest

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from a2lib.parallel import FSDP, meeting

rank, place, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
meeting.LIMIT_S = 1
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
fsdp = FSDP(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)

class Raises(Exception):
    pass

def raising(*_):
    raise Raises

for step in range(4):
    handle = None
    if step == 2 and rank == 1 and kind == "forward":
        handle = fsdp.module[1].register_forward_pre_hook(raising)
    if step == 2 and rank == 1 and kind == "backward":
        handle = fsdp.module[1].register_full_backward_hook(raising)
    try:
        output = fsdp(torch.ones(2, 4))
        output.sum().backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()
    except Raises:
        print("skips", flush=True)
    optimizer.zero_grad()
    if handle is not None:
        handle.remove()
print("trained to the end")
"""


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_both_ranks_end_with_the_number_of_the_one_that_skipped(python, tmp_path, kind):
    ranks = [python(TRAIN, rank, tmp_path / "store", kind) for rank in range(2)]
    told = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], told
    assert [output for output, _ in told] == ["", "skips\n"]
    for _, errors in told:
        last = errors.strip().splitlines()[-1]
        if kind == "backward" and errors is told[1][1]:
            assert "RuntimeError: a backward has not come to its end; call reset()" in last
        else:
            assert "RuntimeError: rank 1 gave up a step" in last, errors
