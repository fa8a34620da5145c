"""A rank that skips a step of FSDP, whose messages would be paired with others: each process ends
with an error that names it."""

import pytest
from forked import run_script

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from a2lib.parallel import FSDP, meeting

kind = sys.argv[1]
meeting.LIMIT_S = 1
dist.init_process_group("gloo")
rank = dist.get_rank()
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
def test_both_ranks_end_with_the_number_of_the_one_that_skipped(tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_script(script, kind, folder=tmp_path, ranks=2, seconds=240)
    assert done.returncode == 1, done.printed
    assert ["skips\n" in printed for printed in done.by_rank] == [False, True]
    for rank, printed in enumerate(done.by_rank):
        assert "trained to the end" not in printed
        last = printed.strip().splitlines()[-1]
        if kind == "backward" and rank == 1:
            assert "RuntimeError: a backward has not come to its end; call reset()" in last
        else:
            assert "RuntimeError: rank 1 gave up a step" in last, printed
