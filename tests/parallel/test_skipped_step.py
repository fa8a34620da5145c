"""A rank that skips a step of FSDP, whose messages would be paired with others: it says so itself,
and no process trains on."""

import pytest
from forked import run_script

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from a2lib.parallel import FSDP

kind = sys.argv[1]
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
def test_the_rank_that_skipped_says_so_and_both_end(tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_script(script, kind, folder=tmp_path, ranks=2, seconds=240)
    assert done.returncode == 1, done.printed
    assert ["skips\n" in printed for printed in done.by_rank] == [False, True]
    assert "trained to the end" not in done.printed
    line = {
        "forward": "RuntimeError: the forward before this one has had no backward: call in",
        "backward": "RuntimeError: a backward has not come to its end, and other ranks may wait",
    }
    assert line[kind] in done.by_rank[1].strip().splitlines()[-1], done.printed
