"""Ways for a group to fail, and what a launch must then say: the cases of test_failures.py and of
dev/try_failures.py, drawn from a seed.

The ranks train for ever with gloo, or wait, so that a case ends by its failure alone; what they run
is in failing.py. The launching side has no torch.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from failing import LIMIT_S, MARK, SIGNALS

from a2lib.parallel import LaunchError, launch
from a2lib.parallel.lifeline import PREFIX, is_alive

# Nodes that do not find each other can only wait for it, and a flood has no other end.
ALONE_S = 15
# How long the agent of a launcher that was killed may take to end what it started.
AFTER_S = 15
WRAPPERS = ("DDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "FSDP")
STEPS = 5  # the failure is in one of the first so many


@dataclass(frozen=True)
class Case:
    what: str  # in words
    # Arguments of launch for each node, and what it must raise: class, first line, words within.
    nodes: tuple[dict, ...]
    raises: tuple[tuple[str, str, str], ...]
    # Kill this rank from outside, so many seconds after its process began.
    kill: tuple[int, float] | None = None
    # Send these signals to the "launcher", its "agent" or "torchrun", so many seconds after all
    # ranks were ready (``early``: since the start) and apart; none let a launcher's program end.
    act: tuple[str, tuple[str, ...], float, float] | None = None
    early: bool = False
    holds_port: bool = False
    program: bool = False  # a process of its own launches
    room: int | None = None  # in bytes, of a file system that is its temporary folder


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
            rf"{nodes} ranks had not .+ {ALONE_S} s; none of this node's had started: "
            r"\S+ answers; all nodes .+"
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
    alone = rf"{waits}; none of this node's had started: .+; all nodes .+"
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


def exits(draw: random.Random, processes: int) -> Case:
    """A rank that ends without an exception."""
    how = draw.choice((*SIGNALS, "raises SystemExit", "exits"))
    who, where, wrapper = (
        draw.randrange(processes), draw.choice(("before", "after")), draw.choice(WRAPPERS)
    )  # fmt: skip
    step = draw.randrange(STEPS)
    given = dict(wrapper=wrapper, how=how, where=where, who=who, step=step, delay_s=0)
    words = {
        "raises SystemExit": "SystemExit: 0",
        "exits": "exited with code 0 before its function had returned",
    }.get(how, f"killed by {how}")
    return Case(
        f"{wrapper}, rank {who} of {processes}: {how} {where}, step {step}",
        (_call("train", given, processes),),
        (("RankFailed", f"rank {who} of {processes}: {words}", ""),),
    )


def floods(draw: random.Random, processes: int) -> Case:
    how = draw.choice(("prints", "a child prints", "one line without end", "events"))
    says = rf"{processes} ranks had not finished within the time limit of {ALONE_S} s"
    call = _call("flood", {"how": how}, processes, device=None) | {"time_limit_s": ALONE_S}
    return Case(f"{processes} ranks, {how}", (call,), (("TimeLimitPassed", says, ""),))


def interrupted(draw: random.Random, processes: int) -> Case:
    """Three Ctrl-C, together or apart."""
    early, after_s = _moment(draw)
    act = ("launcher", ("SIGINT",) * 3, after_s, draw.choice((0, 0.01, 0.1, 0.5)))
    given = dict(how="waits", who=0, emptied=True)
    when = f"after {after_s:.2f} s{' of the start' if early else ''}, {act[3]} s apart"
    return Case(
        f"{processes} ranks, three Ctrl-C {when}",
        (_call("bears", given, processes, device=None),),
        (("SIGINT", "", ""),),
        act=act,
        early=early,
        program=True,
    )


def children(draw: random.Random, processes: int) -> Case:
    """Ranks with processes of their own, whatever ends them."""
    ends = ("SIGKILL", "SIGTERM", "SIGHUP", "daemon")
    how, who = draw.choice(("raises", "is killed", "returns", *ends)), draw.randrange(processes)
    given = dict(how="waits" if how in ends else how, who=who, emptied=True)
    call = _call("bears", given, processes, device=None)
    says = {
        "raises": ("RankFailed", f"rank {who} of {processes}: LookupError: no such thing", ""),
        "is killed": ("RankFailed", f"rank {who} of {processes}: killed by SIGKILL", ""),
        "daemon": ("none", "", ""),
        "returns": ("none", "no error", ""),
    }.get(how, (how, "", ""))
    early, after_s = _moment(draw)
    act = ("launcher", () if how == "daemon" else (how,), after_s, 0)
    when = f" after {after_s:.2f} s{' of the start' if early else ''}" if how in ends else ""
    return Case(
        f"{processes} ranks, {how}{when}",
        (call | ({"daemon": True} if how == "daemon" else {}),),
        (says,),
        act=act if how in ends else None,
        early=early,
        program=True,
    )


def _moment(draw: random.Random) -> tuple[bool, float]:
    """Whether seconds count from the start on, and how many."""
    early = draw.random() < 0.3
    return early, draw.uniform(0, 4 if early else 1)


def agent(draw: random.Random, processes: int) -> Case:
    who, how = draw.choice(("agent", "torchrun")), draw.choice(("SIGKILL", "SIGSTOP", "SIGSEGV"))
    given = dict(how="waits", who=0, emptied=how == "SIGSTOP")
    words = "stopped by a signal .+" if how == "SIGSTOP" else f"killed by {how}"
    return Case(
        f"{processes} ranks, {who} gets {how}",
        (_call("bears", given, processes, device=None),),
        (("LaunchError", f"torchrun was {words}", ""),),
        act=(who, (how,), draw.uniform(0, 1), 0),
    )


def full(draw: random.Random, processes: int) -> Case:
    """Arguments, a result or a rank's own file that are larger than the temporary folder."""
    room = draw.choice((4096, 1 << 16, 1 << 20))
    what = draw.choice(("arguments", "result", "a file"))
    given = dict(what=what, bytes_=3 * room)
    if what == "arguments":
        given["what"] *= room // 4
    wanted = r"the temporary folder \S+ is full: [\d,]+ bytes wanted .+\(No space left .+"
    says = {
        "arguments": ("LaunchError", wanted, ""),
        "result": ("none", "no error", ""),
        "a file": ("RankFailed", r"rank \d of \d: OSError: \[Errno 28\] No space left .+", ""),
    }[what]
    call = _call("stores", given, processes, device=None)
    return Case(f"{room:,} bytes, {what}", (call,), (says,), program=True, room=room)


def endpoint(draw: random.Random, processes: int) -> Case:
    """No endpoint at all, or one that nobody has."""
    malformed = ("host", "localhost:0", "a:b:c", "host:", ":29500", "host:65536", "host:-1")
    tried = {
        "no.such.host.invalid:29512": r"tried to connect to \S+: Name or service not known",
        "127.0.0.1:1": r"tried to connect to \S+: Connection refused",
    }
    where = draw.choice(malformed if draw.random() < 0.5 else tuple(tried))
    call = _call("bears", dict(how="returns", who=0, emptied=False), 1, device=None)
    call |= dict(nodes=2, node=1, endpoint=where, time_limit_s=ALONE_S)
    says = ("other", r"ValueError\(.+endpoint must be 'host:port'.+", "")
    if where in tried:
        first = rf"2 ranks had not .+; none of this node's had started: {tried[where]}; all .+"
        says = ("TimeLimitPassed", first, "")
    return Case(where, (call,), (says,))


def silent(draw: random.Random, processes: int) -> Case:
    """An endpoint that neither takes a connection nor refuses it."""
    call = _call("bears", dict(how="returns", who=0, emptied=False), processes, device=None)
    call |= dict(nodes=2, node=1, time_limit_s=ALONE_S)
    tried = r"tried to connect to 127\.0\.0\.1:\d+: timed out"
    first = rf"{2 * processes} ranks had not .+; none of this node's had started: {tried}; all .+"
    return Case(f"{processes} ranks a node", (call,), (("TimeLimitPassed", first, ""),),
                holds_port=True)  # fmt: skip


def _call(target: str, arguments: dict, processes: int, **options) -> dict:
    return dict(
        target=f"failing:{target}",
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
    "exits": exits,
    "flood": floods,
    "ctrl-c": interrupted,
    "children": children,
    "agent": agent,
    "full": full,
    "endpoint": endpoint,
    "silent": silent,
}


@dataclass
class Outcome:
    clear: list[bool] = field(default_factory=list)  # of each node
    said: list[str] = field(default_factory=list)
    output: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=500))
    orphans: list[int] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # what is left in the temporary folder
    seconds: float = 0.0


def attempt(case: Case, env: dict[str, str], mark: str | None = None) -> Outcome:
    """Launch the case; returns once every launch has ended. What is left then is an orphan."""
    mark, outcome, begin = mark or uuid.uuid4().hex, Outcome(), time.monotonic()
    said: dict[int, tuple[str, str]] = {}
    over = threading.Event()
    ready: set[tuple[int, int]] = set()

    def note(node: int, rank: int, line: str) -> None:
        outcome.output.append(f"[node {node} rank {rank}] {line}")
        if line == "ready":
            ready.add((node, rank))

    def one(node: int, options: dict) -> None:
        try:
            launch(**options, env=env, on_output=lambda *said: note(node, *said))
        except LaunchError as error:
            said[node] = type(error).__name__, str(error)
        except BaseException as error:
            said[node] = "other", repr(error)
        else:
            said[node] = "none", "no error"

    with (
        tempfile.TemporaryDirectory(prefix="a2lib-try-") as folder,
        _temporary(folder),
        socket.socket() as bound,
        socket.socket() as other,
    ):
        env = {**env, MARK: mark, "TMPDIR": folder}
        bound.bind(("127.0.0.1", 0))
        where = {"endpoint": f"127.0.0.1:{bound.getsockname()[1]}"}
        if case.holds_port:
            bound.listen(0)
            other.connect(bound.getsockname())  # whoever comes after it has no answer
        else:
            bound.close()
        calls = [(where if "nodes" in x else {}) | x for x in case.nodes]
        threads = [threading.Thread(target=one, args=call) for call in enumerate(calls)]
        if case.kill:
            threads.append(threading.Thread(target=_kill, args=(mark, *case.kill, over)))
        if case.act and not case.program:
            wanted = sum(call["processes"] for call in calls)
            threads.append(
                threading.Thread(target=_act, args=(case, mark, lambda: len(ready) == wanted, over))
            )
        if case.program:
            said[0] = _program(case, env, mark, outcome)
            threads = []
        for thread in threads:
            thread.start()
        for thread in threads[: len(calls)]:
            thread.join()
        over.set()
        for thread in threads[len(calls) :]:
            thread.join()
        outcome.seconds = time.monotonic() - begin
        until = time.monotonic() + (AFTER_S if case.program else 0)
        while (left(mark) or _folders(folder)) and time.monotonic() < until:
            time.sleep(0.05)
        outcome.orphans = left(mark)
        outcome.folders += _folders(folder)
        commands = [b" ".join(_words(pid, "cmdline")).decode() for pid in outcome.orphans]
        outcome.output += [f"left: {name}" for name in (*commands, *outcome.folders)]
    for node, (kind, first, within) in enumerate(case.raises):
        name, text = said[node]
        line = text.partition("\n")[0]
        outcome.clear.append(
            bool(re.fullmatch(kind, name) and re.fullmatch(first, line) and within in text)
        )
    outcome.said = [f"{name}: {text}" for _, (name, text) in sorted(said.items())]
    return outcome


def _folders(folder: str) -> list[str]:
    """What launches have left there; PyTorch leaves a folder for its compiler."""
    return [name for name in os.listdir(folder) if name.startswith(PREFIX)]


@contextlib.contextmanager
def _temporary(folder: str):
    """Have Python's temporary files in ``folder``."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _program(case: Case, env: dict[str, str], mark: str, outcome: Outcome) -> tuple[str, str]:
    """Launch from a process of its own; what it said, or the signal that ended it."""
    [call] = case.nodes
    command = [sys.executable, str(Path(__file__).with_name("launching.py"))]
    if case.room:
        mount = f'mount -t tmpfs -o size={case.room} none {env["TMPDIR"]} && exec "$@"'
        command = ["unshare", *"--user --map-root-user --mount sh -c".split(), mount, "", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, **env},
        preexec_fn=_heed_signals,
    ) as process:
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        if case.act:
            for line in () if case.early else process.stdout:
                outcome.output.append(line.rstrip())
                if sum(said.endswith("ready") for said in outcome.output) == call["processes"]:
                    break
            _act(case, mark, lambda: True, threading.Event(), process)
        out, err = process.communicate(timeout=LIMIT_S)
    outcome.output += [*out.splitlines(), *err.splitlines()]
    if process.returncode < 0:
        return signal.Signals(-process.returncode).name, ""
    if process.returncode or case.act:
        return ("other", err) if process.returncode else ("none", "")
    kind, text, folders = json.loads(out.splitlines()[-1])
    outcome.folders += folders if case.room else []
    return kind, text


def _heed_signals() -> None:
    """A shell in the background has the first ignored, nohup the second."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _act(case: Case, mark: str, ready, over: threading.Event, launcher=None) -> None:
    """Do to a launch what ``case.act`` says."""
    who, signals, after_s, apart_s = case.act
    while not ready() and not over.wait(0.02):
        pass
    over.wait(after_s)
    if not signals:
        launcher.stdin.close()
        launcher.stdin = None
    for name in () if over.is_set() else signals:
        pid = launcher.pid if who == "launcher" else _agents(mark)[who == "torchrun"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))
        time.sleep(apart_s)


def _agents(mark: str) -> list[int]:
    """The agent, and torchrun below it."""
    found = [pid for pid in left(mark) if b"a2lib.parallel.agent" in _words(pid, "cmdline")]
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
               for pid in found}  # fmt: skip
    return sorted(found, key=lambda pid: parents[pid] in found)


def _kill(mark: str, rank: int, after_s: float, over: threading.Event) -> None:
    """Kill the rank from outside, once its process has been there for so long."""
    begin = None
    while not over.is_set():
        for pid in left(mark):
            command = _words(pid, "cmdline")
            if b"a2lib.parallel.rank" in command and b"RANK=%d" % rank in _words(pid, "environ"):
                begin = begin or time.monotonic()
                if time.monotonic() - begin >= after_s and b"a2lib.parallel.agent" not in command:
                    os.kill(pid, signal.SIGKILL)
                    return
        over.wait(0.02)


def left(mark: str) -> list[int]:
    """The processes that run and have the mark in their environment or their command, this one not
    among them."""
    words = f"{MARK}={mark}".encode()
    found = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if words in _words(folder.name, "environ") or words in _words(folder.name, "cmdline")
    ]
    return [pid for pid in found if pid != os.getpid() and is_alive(pid)]


def _words(pid: int | str, what: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []
