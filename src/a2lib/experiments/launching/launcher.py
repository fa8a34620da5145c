"""torchrun from Python: run a function in several processes, see their progress, get one error.

    def train(steps: int) -> float: ...               # in package/module.py; uses torch.distributed

    losses = launch("package.module:train", {"steps": 10}, processes=2, time_limit_s=600)

A rank that raises, is killed or stands still ends the whole group, and the error has the traceback
of the rank that was first. Nothing is left running or on disk, however the launch ends (on Linux):
torchrun's process ends all that the ranks have started, also where this one is killed. Where both
are, the next launch does it.

Several nodes are torchrun's own rendezvous: the same call on each, with ``nodes``, ``node`` and the
``endpoint`` of node 0. README.md has the command, and a Slurm script that uses it.
"""

import contextlib
import errno
import json
import numbers
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from a2lib.experiments.launching.channel import KINDS, Channel, path_of
from a2lib.experiments.launching.lifeline import FOLDER, TASK, VANISH_S, end, new_folder
from a2lib.experiments.launching.watch import (
    LaunchError,
    OnOutput,
    OnProgress,
    RankFailed,
    Run,
    TimeLimitPassed,
    split,
)

__all__ = ["LaunchError", "RankFailed", "TimeLimitPassed", "launch", "print_output"]

MILLISECOND, LONGEST_S = 0.001, 365 * 24 * 3600
MOST_RANKS, MOST_NODES = 1024, 65_536  # of a node; of a training


def print_output(rank: int, line: str) -> None:
    """Print a rank's line behind its number; what ``launch`` does by default."""
    print(f"[rank {rank}] {line}", flush=True)


def launch(
    target: str,
    arguments: Mapping[str, object] | None = None,
    *,
    processes: int,
    time_limit_s: float,
    device: str | None = "cpu",
    on_progress: OnProgress | None = None,
    on_output: OnOutput = print_output,
    overdue: Callable[[], str | None] = lambda: None,
    env: Mapping[str, str] | None = None,
    collective_timeout_s: float | None = None,
    nodes: int = 1,
    node: int = 0,
    endpoint: str | None = None,
) -> list[object]:
    """Call ``target``, "module:function", with ``arguments`` in ``processes`` ranks of this node.

    Returns what the function returned in each rank of this node, in rank order. Modules are looked
    for where this process looks. Arguments and results go through JSON. ``device`` "cpu" gives the
    ranks a gloo process group, "cuda" an NCCL one with a GPU for each rank, None no group (and no
    torch; one rank then takes no torchrun).

    While it runs, ``on_progress(rank, event)`` gets what a rank sends with ``rank.progress`` and
    ``on_output(rank, line)`` what it prints. ``overdue()``, asked all the time, says why the ranks
    are to be ended before the time limit, or None. ``env`` is added to this process's environment.
    ``collective_timeout_s`` is the group's timeout; by default the time limit comes first. A rank
    that prints faster than ``on_output`` takes it waits; what it had said when the time was up, and
    could not be handed on, is counted in a last line.

    Raises ValueError for impossible numbers and endpoints, RankFailed, TimeLimitPassed, and
    LaunchError where torchrun itself fails or is killed, or the temporary folder is full.
    Ctrl-C ends the group too.
    """
    _check(target, processes, device, nodes, node, endpoint)
    _check_seconds("time_limit_s", time_limit_s)
    if collective_timeout_s is not None:
        _check_seconds("collective_timeout_s", collective_timeout_s)
    task = {
        "target": target,
        "arguments": dict(arguments or {}),
        "path": [*map(str, sys.path)],
        "device": device,
        "nodes": nodes,
        "processes": processes,
        "collective_timeout_s": collective_timeout_s or 2 * time_limit_s,
    }
    # It ends in this order too: the agent with what it started, the pipes, the folder, its lock.
    with _one_interrupt(), contextlib.ExitStack() as held:
        folder, lock, channels = _prepare(held, processes, json.dumps(task))
        with open(path_of(folder, "torchrun", "out"), "wb") as out:
            agent = subprocess.Popen(
                _command(processes, device, nodes, node, endpoint, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(processes * nodes, processes, folder, env or {}),
                pass_fds=[lock],
                start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
            )
        held.callback(_stop, agent, folder)
        run = Run(agent, channels, processes, processes * nodes, endpoint, on_progress, on_output)
        return run.wait(time_limit_s, overdue)


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let one Ctrl-C through, which ends the launch, and none that comes while it ends."""
    before, through = signal.getsignal(signal.SIGINT), []

    def once(number: int, frame: object) -> None:
        if not through:
            try:
                before(number, frame)
            except BaseException:
                through.append(number)
                raise

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare(
    held: contextlib.ExitStack, processes: int, task: str
) -> tuple[str, int, list[Channel]]:
    """The launch's folder, its lock and its pipes. LaunchError where there is no room for them."""
    try:
        folder, lock = new_folder()
        held.callback(os.close, lock)
        held.callback(end, folder)
        Path(folder, TASK).write_text(task)
        channels = []
        for who, kinds in [*((i, KINDS) for i in range(processes)), ("torchrun", KINDS[:2])]:
            for kind in kinds:
                channels.append(Channel(folder, who, kind))
                held.callback(channels[-1].close)
    except OSError as error:
        what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "is of no use"
        raise LaunchError(
            f"the temporary folder {tempfile.tempdir or ''} {what}: {len(task):,} bytes wanted for "
            f"the arguments, and {3 * processes + 4} files ({error.strerror or error}); TMPDIR "
            "names another"
        ) from None
    return folder, lock, channels


def _stop(agent: subprocess.Popen, folder: str) -> None:
    """Have the agent end what it started; where it does not, ``end`` will."""
    Path(folder, TASK).unlink(missing_ok=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(2 * VANISH_S)
    agent.kill()
    agent.wait()


def _command(
    processes: int, device: str | None, nodes: int, node: int, endpoint: str | None, folder: str
) -> list[str]:
    agent = [sys.executable, "-m", "a2lib.experiments.launching.agent"]
    if processes * nodes == 1 and device is None:
        return agent
    agent += [f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=a2lib"]
    if nodes == 1:  # a port that the system picks, and no look-up of this machine's name
        agent += ["--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    else:
        agent += [f"--rdzv-endpoint={endpoint}", f"--node-rank={node}"]
        # Said, not guessed: who guesses takes what occupies the port for the host, and waits.
        agent += [f"--rdzv-conf=is_host={int(node == 0)}"]
    agent += ["--max-restarts=0", "--monitor-interval=0.1", f"--log-dir={folder}/torchrun"]
    return [*agent, "-m", "a2lib.experiments.launching.rank"]


def cores() -> int:
    """Those that this process may use; on macOS, which does not tell, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment(world: int, processes: int, folder: str, env: Mapping[str, str]) -> dict[str, str]:
    given = {**os.environ, **env, "A2LIB_LAUNCHER": str(os.getpid()), FOLDER: folder}
    if world > 1:
        given.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
        # One connection would run collectives after the kernels they should hide behind.
        if given.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            del given["CUDA_DEVICE_MAX_CONNECTIONS"]
    return given


def _check(
    target: str, processes: int, device: str | None, nodes: int, node: int, endpoint: str | None
) -> None:
    if not (isinstance(target, str) and all(target.partition(":"))):
        raise ValueError(f"target must be 'module:function'; got {target!r}")
    for name, value, most in (("processes", processes, MOST_RANKS), ("nodes", nodes, MOST_NODES)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} must be a whole number from 1 to {most}; got {value!r}")
    if device not in ("cpu", "cuda", None):
        raise ValueError(f"device must be 'cpu', 'cuda' or None; got {device!r}")
    if nodes > 1 and not endpoint:
        raise ValueError("several nodes need endpoint, the 'host:port' of node 0")
    if endpoint is not None and split(endpoint) is None:
        raise ValueError(
            f"endpoint must be 'host:port' with a port from 1 to 65535; got {endpoint!r}"
        )
    if not isinstance(node, int) or not 0 <= node < nodes:
        raise ValueError(f"node must be from 0 to {nodes - 1}; got {node!r}")
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if not gpus:
            raise ValueError("device 'cuda' needs a GPU, and there is none here; 'cpu' is allowed")
        if processes > gpus:
            raise ValueError(f"processes must be from 1 to {gpus}, the GPUs here; got {processes}")


def _check_seconds(name: str, value: float) -> None:
    if not (isinstance(value, numbers.Real) and MILLISECOND <= value <= LONGEST_S):
        raise ValueError(
            f"{name} must be from {MILLISECOND} to {LONGEST_S:,} s, a year; got {value!r}"
        )
