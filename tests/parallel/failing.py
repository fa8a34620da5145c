"""What runs in the ranks of failures.py. They import torch where they need it: some do without."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from a2lib.parallel.rank import progress

LIMIT_S = 120  # far more than a launch takes
MARK = "A2LIB_TEST_CASE"  # a variable that every process of a case has
SIGNALS = {x: getattr(signal, x) for x in ("SIGUSR1", "SIGPIPE", "SIGSEGV", "SIGALRM")}


def train(wrapper: str, how: str, where: str, who: int, step: int, delay_s: float) -> None:
    """Train until rank ``who`` "raises", "is killed", "exits" or ends by the signal ``how`` in that
    step: "before", "in" or "after" the collectives of its gradients, or at "any time", ``delay_s``
    after the step began."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    # A process of the rank's own has to end too.
    subprocess.Popen(["sleep", str(10 * LIMIT_S)])

    def fail(*_):
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in SIGNALS:
            signal.signal(SIGNALS[how], signal.SIG_DFL)  # Python ignores SIGPIPE
            os.kill(os.getpid(), SIGNALS[how])
        if how == "raises SystemExit":
            sys.exit(0)
        if how == "exits":
            os._exit(0)
        raise LookupError("no such thing")

    class Between(nn.Module):
        """Fails in the backward of what follows it, where ``now``."""

        now = False

        def forward(self, x):
            if self.now:
                x.register_hook(fail)
            return x

    between = Between()
    module = nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 16), nn.Linear(16, 2))
    model = wrapped(wrapper, module)
    own = dist.get_rank() == who
    for number in itertools.count():
        now = own and number == step
        if number == step and (how, where) == ("is killed", "in") and not own:
            time.sleep(delay_s + 0.3)  # the other one waits in its collective
        if now and how == "is killed" and where in ("in", "any time"):
            threading.Timer(delay_s, fail).start()
        between.now = now and (how, where) == ("raises", "in")
        loss = model(torch.ones(4, 8)).square().sum()
        if now and where == "before":
            fail()
        loss.backward()
        model.finish_gradient_synchronization()
        if now and where == "after":
            fail()
        # A plain step: PyTorch's optimizers import its compiler, which doubles the start.
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad


def mismatched(wrapper: str, who: int, width: int) -> None:
    """Wrap a model, or reduce a tensor ("all_reduce"), that has other sizes on rank ``who``."""
    import torch
    import torch.distributed as dist
    from torch import nn

    width = width if dist.get_rank() == who else 16
    subprocess.Popen(["sleep", str(10 * LIMIT_S)])
    if wrapper == "all_reduce":
        dist.all_reduce(torch.ones(width))
    else:
        wrapped(wrapper, nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2)))


def flood(how: str) -> None:
    """Say something without end."""
    if how == "a child prints":
        subprocess.Popen(["yes"]).wait()
    elif how == "one line without end":
        subprocess.Popen("yes | tr -d '\\n'", shell=True).wait()
    while True:
        progress(step=1) if how == "events" else print("x" * 50)


def bears(how: str, who: int, emptied: bool) -> None:
    """Start processes, plain, in a session of their own, left by their parent and, if ``emptied``,
    without an environment. Then wait for ever, or "return", or rank ``who`` "raises", "is
    killed"."""
    sleep = ["sleep", str(10 * LIMIT_S)]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run([*"sh -c".split(), '"$@" & exit', "", *sleep], start_new_session=True)
    if emptied:
        wait = [sys.executable, "-c", f"import time; time.sleep({10 * LIMIT_S})"]
        subprocess.Popen([*wait, f"{MARK}={os.environ[MARK]}"], env={}, start_new_session=True)
    print("ready")
    if how == "returns":
        return
    if int(os.environ["RANK"]) == who and how != "waits":
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("no such thing")
    time.sleep(10 * LIMIT_S)


def stores(what: str, bytes_: int) -> str:
    """Fill the temporary folder, or return more than fits into it."""
    if what == "a file":
        Path(os.environ["TMPDIR"], "file").write_bytes(bytes(bytes_))
    return "x" * bytes_


def wrapped(wrapper: str, module):
    from a2lib import parallel

    if wrapper == "ShardedOptimizer":
        import torch

        return parallel.ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    if wrapper == "BucketedDDP":
        return parallel.BucketedDDP(module, 0.0005)
    return getattr(parallel, wrapper)(module)
