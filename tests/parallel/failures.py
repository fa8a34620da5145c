"""Ways for a group to fail, and what a launch must then say: the cases of test_failures.py and of
dev/try_failures.py, drawn from a seed.

The ranks train for ever with gloo, so that a case ends by its failure alone. The half that runs in
them imports torch where it needs it: the launching side has none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from a2lib.parallel import LaunchError, launch
from a2lib.parallel.lifeline import is_alive

LIMIT_S = 120  # far more than a launch takes
# Nodes that do not find each other can only wait for it.
ALONE_S = 15
MARK = "A2LIB_TEST_CASE"  # a variable that every process of a case has
WRAPPERS = ("DDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "FSDP")
STEPS = 5  # the failure is in one of the first so many

# What runs in the ranks.


def train(wrapper: str, how: str, where: str, who: int, step: int, delay_s: float) -> None:
    """Train until rank ``who`` "raises" or "is killed" in that step: "before", "in" or "after" the
    collectives of its gradients, or at "any time", ``delay_s`` after the step began."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    # A process of the rank's own has to end too.
    subprocess.Popen(["sleep", str(10 * LIMIT_S)])

    def fail(*_):
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
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


def wrapped(wrapper: str, module):
    from a2lib import parallel

    if wrapper == "ShardedOptimizer":
        import torch

        return parallel.ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    if wrapper == "BucketedDDP":
        return parallel.BucketedDDP(module, 0.0005)
    return getattr(parallel, wrapper)(module)


# What launches them.


@dataclass(frozen=True)
class Case:
    what: str  # in words
    # Arguments of launch for each node, and what it must raise: class, first line, words within.
    nodes: tuple[dict, ...]
    raises: tuple[tuple[str, str, str], ...]
    # Kill this rank from outside, so many seconds after its process began.
    kill: tuple[int, float] | None = None
    holds_port: bool = False


def _train(how: str, draw: random.Random, processes: int) -> Case:
    where = draw.choice(
        ("before", "in", "after", *(("any time", "the start") if how == "is killed" else ()))
    )
    who, delay_s, wrapper = draw.randrange(processes), draw.uniform(0, 0.3), draw.choice(WRAPPERS)
    step = draw.randrange(STEPS)
    words = {"raises": "LookupError: no such thing", "is killed": "killed by SIGKILL"}[how]
    kill = None
    if where == "the start":
        # All of it: imports, the guard, the process group, the first steps.
        kill, step = (who, draw.uniform(0, 6)), -1
    given = dict(wrapper=wrapper, how=how, where=where, who=who, step=step, delay_s=delay_s)
    at = f"{where}, {kill[1]:.2f} s" if kill else f"{where}, step {step}, {delay_s:.3f} s"
    return Case(
        f"{wrapper}, rank {who} of {processes} {how}: {at}",
        (_call("train", given, processes),),
        (("RankFailed", f"rank {who} of {processes}: {words}", ""),),
        kill,
    )


def killed(draw: random.Random, processes: int) -> Case:
    return _train("is killed", draw, processes)


def raising(draw: random.Random, processes: int) -> Case:
    return _train("raises", draw, processes)


def shapes(draw: random.Random, processes: int) -> Case:
    wrapper = draw.choice((*WRAPPERS, "ShardedOptimizer", "all_reduce"))
    who, width = draw.randrange(processes), draw.choice((1, 15, 17, 64))
    says = (r"ValueError: .+ must be the same on every rank: rank 0 has .+, rank \d .+", "")
    if wrapper == "all_reduce":
        says = ("killed by SIGABRT", "distributed collective mismatch in your code")
    return Case(
        f"{wrapper}, rank {who} of {processes} has {width} for 16",
        (_call("mismatched", dict(wrapper=wrapper, who=who, width=width), processes),),
        (("RankFailed", rf"rank \d of {processes}: {says[0]}", says[1]),),
    )


def world_size(draw: random.Random, processes: int) -> Case:
    how = draw.choice(("nobody joins", "other processes", "other nodes"))
    train = dict(wrapper="DDP", how="raises", where="", who=0, step=-1, delay_s=0)
    nodes = 2 if how == "other processes" or processes == 2 else 4
    each = processes // 2 if how == "other processes" else 1
    first = _call("train", train, each, nodes=nodes, node=0)
    if how == "nobody joins":
        first["time_limit_s"] = ALONE_S
        says = (
            rf"{nodes} ranks had not .+ {ALONE_S} s; none of this node's had started: all nodes .+"
        )
        return Case(f"{nodes} nodes, and one is there", (first,), (("TimeLimitPassed", says, ""),))
    if how == "other processes":
        more = each + draw.choice((1, 2))
        second = _call("train", train, more, nodes=nodes, node=1)
        says = tuple(
            ("RankFailed", rf"rank \d of {2 * n}: ValueError: the world has {each + more} ranks, "
             rf"this node was launched for 2 x {n}; .+", "")
            for n in (each, more)
        )  # fmt: skip
        what = f"2 nodes, of {each} processes and {more}"
        return Case(what, (first, second), says)
    # They wait for each other, or meet as two: that depends on who is first.
    first, second = (
        _call("train", train, 1, nodes=n, node=i) | {"time_limit_s": 2 * ALONE_S}
        for i, n in enumerate((2, 3))
    )
    waits = rf"[23] ranks had not .+ {2 * ALONE_S} s"
    alone = rf"{waits}; none of this node's had started: all nodes .+"
    world = "ValueError: the world has 2 ranks, this node was launched for 3 x 1; .+"
    kinds = "TimeLimitPassed|RankFailed"
    return Case(
        "a node of 2 and a node of 3",
        (first, second),
        ((kinds, f"{waits}.*|rank 0 of 2: .+", ""), (kinds, rf"{alone}|rank \d of 3: {world}", "")),
    )


def port(draw: random.Random, processes: int) -> Case:
    train = dict(wrapper="DDP", how="raises", where="", who=0, step=-1, delay_s=0)
    says = r"the port of endpoint 127\.0\.0\.1:\d+ is in use on this node; .+"
    return Case(
        f"an occupied port, {processes // 2} processes a node",
        (_call("train", train, processes // 2, nodes=2, node=0),),
        (("LaunchError", says, ""),),
        holds_port=True,
    )


def _call(target: str, arguments: dict, processes: int, **options) -> dict:
    return dict(
        target=f"{Path(__file__).stem}:{target}",
        arguments=arguments,
        processes=processes,
        time_limit_s=LIMIT_S,
        **options,
    )


KINDS = {
    "killed": killed,
    "raises": raising,
    "shapes": shapes,
    "world": world_size,
    "port": port,
}


@dataclass
class Outcome:
    clear: list[bool] = field(default_factory=list)  # of each node
    said: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)
    seconds: float = 0.0


def attempt(case: Case, env: dict[str, str], mark: str | None = None) -> Outcome:
    """Launch the case; returns once every launch has ended. What is left then is an orphan."""
    mark, outcome, begin = mark or uuid.uuid4().hex, Outcome(), time.monotonic()
    said: dict[int, tuple[str, str]] = {}
    over = threading.Event()

    def one(node: int, options: dict, where: dict) -> None:
        note = lambda rank, line: outcome.output.append(f"[node {node} rank {rank}] {line}")  # noqa: E731
        try:
            launch(**options, **where, env={**env, MARK: mark}, on_output=note)
        except LaunchError as error:
            said[node] = type(error).__name__, str(error)
        except BaseException as error:
            said[node] = "other", repr(error)
        else:
            said[node] = "none", "no error"

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        where = {"endpoint": f"127.0.0.1:{bound.getsockname()[1]}"}
        bound.listen() if case.holds_port else bound.close()
        threads = [
            threading.Thread(target=one, args=(i, x, where if "nodes" in x else {}))
            for i, x in enumerate(case.nodes)
        ]
        if case.kill:
            killer = threading.Thread(target=_kill, args=(mark, *case.kill, over))
            killer.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        if case.kill:
            killer.join()
    outcome.seconds = time.monotonic() - begin
    outcome.orphans = left(mark)
    for node, (kind, first, within) in enumerate(case.raises):
        name, text = said[node]
        line = text.splitlines()[0]
        outcome.clear.append(
            bool(re.fullmatch(kind, name) and re.fullmatch(first, line) and within in text)
        )
    outcome.said = [f"{name}: {text}" for _, (name, text) in sorted(said.items())]
    return outcome


def _kill(mark: str, rank: int, after_s: float, over: threading.Event) -> None:
    """Kill the rank from outside, once its process has been there for so long."""
    begin = None
    while not over.is_set():
        for pid in left(mark):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                own = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"a2lib.parallel.rank" in command.split(b"\0") and b"RANK=%d" % rank in own:
                    begin = begin or time.monotonic()
                    if time.monotonic() - begin >= after_s and b".agent" not in command:
                        os.kill(pid, signal.SIGKILL)
                        return
        over.wait(0.02)


def left(mark: str) -> list[int]:
    """The processes that run and have the mark in their environment, this one not among them."""
    found, words = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid() and is_alive(pid)]
