"""torchrun from Python: run a function in several processes, see their progress, get one error.

    def train(steps: int) -> float: ...               # in package/module.py; uses torch.distributed

    losses = launch("package.module:train", {"steps": 10}, processes=2, time_limit_s=600)

A rank that raises, is killed or stands still ends the whole group, and the error has the traceback
of the rank that was first. Nothing is left running, however the launch ends: the ranks die with
torchrun, and torchrun with this process, also where that is killed (on Linux).

Several nodes are torchrun's own rendezvous: the same call on each, with ``nodes``, ``node`` and the
``endpoint`` of node 0. README.md has the command, and a Slurm script that uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from a2lib.parallel.lifeline import is_alive, kill_all
from a2lib.parallel.rank import path_of

POLL_S = 0.05
# How long ranks have to write down where they stand, once their time is up.
STACKS_S = 1.0
# How long the ranks that are still there have to end, once one has failed, before they are killed.
END_S = 5
TAIL_LINES = 40
# What a rank says when another one is gone: it is no cause.
PEER_GONE = ("connection closed by peer", "connection reset by peer", "connection refused",
             "broken pipe", "remote process exited", "ncclremoteerror", "timed out")  # fmt: skip

OnProgress = Callable[[int, dict], None]
OnOutput = Callable[[int, str], None]


class LaunchError(RuntimeError):
    """A launch that did not end well. ``rank`` is the rank to blame, None where none is; ``code``
    the exit code of that rank, or else of torchrun, where there is one (negative: a signal)."""

    def __init__(self, message: str, rank: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code

    def _render_traceback_(self) -> list[str]:
        # A notebook shows the rank's traceback alone: the launcher's own says nothing.
        return [f"{type(self).__name__}: {self}"]


class RankFailed(LaunchError):
    """A rank raised, exited or was killed; the message ends with its traceback or last lines."""


class TimeLimitPassed(LaunchError):
    """A time limit ended the launch; the message says where each rank stood, and ``stacks``, by
    rank, holds what each said of that, innermost call first."""

    def __init__(self, message: str, stacks: Mapping[int, str]) -> None:
        super().__init__(message)
        self.stacks = dict(stacks)


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
    job: str = "a2lib",
) -> list[object]:
    """Call ``target``, "module:function", with ``arguments`` in ``processes`` ranks of this node.

    Returns what the function returned in each rank of this node, in rank order. Arguments and
    results go through JSON. ``device`` "cpu" gives the ranks a gloo process group, "cuda" an NCCL
    one with a GPU for each rank, None no group (and no torch).

    While it runs, ``on_progress(rank, event)`` gets what a rank sends with ``rank.progress`` and
    ``on_output(rank, line)`` what it prints. ``overdue()``, asked all the time, says why the ranks
    are to be ended before the time limit, or None. ``env`` is added to this process's environment.
    ``collective_timeout_s`` is the group's timeout; by default the time limit comes first.

    Raises ValueError for impossible numbers, RankFailed, TimeLimitPassed, and LaunchError where
    torchrun itself fails. Ctrl-C ends the group too.
    """
    _check(target, processes, time_limit_s, device, nodes, node, endpoint)
    with tempfile.TemporaryDirectory(prefix="a2lib-launch-") as folder:
        task = {
            "target": target,
            "arguments": dict(arguments or {}),
            "device": device,
            "nodes": nodes,
            "processes": processes,
            "collective_timeout_s": collective_timeout_s or 2 * time_limit_s,
        }
        Path(folder, "task.json").write_text(json.dumps(task))
        with open(Path(folder, "torchrun.out"), "wb") as out:
            agent = subprocess.Popen(
                _command(processes, nodes, node, endpoint, job, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(processes, folder, env or {}),
                start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
            )
        run = _Run(Path(folder), agent, processes * nodes, endpoint, on_progress, on_output)
        try:
            run.wait(time_limit_s, overdue)
        finally:
            kill_all({agent.pid, *run.pids()})
            agent.wait()
        return run.results()


class _Run:
    """What the launcher knows of the ranks, all of it from the files in ``folder``."""

    def __init__(
        self,
        folder: Path,
        agent: subprocess.Popen,
        world: int,
        endpoint: str | None,
        on_progress: OnProgress | None,
        on_output: OnOutput,
    ) -> None:
        self.folder, self.agent, self.world = folder, agent, world
        self.endpoint = endpoint
        self._listeners = {"out": on_output}
        if on_progress:
            self._listeners["events"] = lambda rank, line: on_progress(rank, json.loads(line))
        self._read: dict[Path, int] = {}

    def wait(self, time_limit_s: float, overdue: Callable[[], str | None]) -> None:
        """Hand on what ranks say until torchrun ends; raise unless all went well."""
        until, failed = time.monotonic() + time_limit_s, None
        while self.agent.poll() is None:
            if failed is None and self._has_failed():
                failed = time.monotonic()
            # torchrun itself waits 30 s for a rank that does not heed its SIGTERM.
            if failed is not None and time.monotonic() > failed + END_S:
                kill_all(self.pids())
            late = time.monotonic() > until and f"the time limit of {time_limit_s:g} s"
            if why := overdue() or late and f"{self.world} ranks had not finished within {late}":
                stacks = self._stacks()
                self._hand_on()
                raise TimeLimitPassed(f"{why}{self._shown(stacks)}", stacks)
            self._hand_on()
            time.sleep(POLL_S)
        self._hand_on(to_the_end=True)
        if self.agent.returncode:
            raise self._failure()

    def pids(self) -> list[int]:
        return [pid for _, pid in self._all("pid")]

    def _has_failed(self) -> bool:
        """Whether a rank has raised, or is gone without a result."""
        done = {rank for rank, _ in self._all("result")}
        gone = any(not is_alive(pid) for rank, pid in self._all("pid") if rank not in done)
        return gone or bool(self._all("error"))

    def results(self) -> list[object]:
        return [result for _, result in self._all("result")]

    def _all(self, kind: str) -> list[tuple[int, object]]:
        """Each rank and what its file of this kind holds, in rank order."""
        found = []
        for rank in self._ranks(kind):
            with contextlib.suppress(FileNotFoundError):
                found.append((rank, json.loads(path_of(self.folder, rank, kind).read_text())))
        return found

    def _ranks(self, kind: str) -> list[int]:
        # Not those there should be: nodes that disagree may give a rank any number.
        return sorted(int(x.stem.removeprefix("rank-")) for x in self.folder.glob(f"rank-*.{kind}"))

    def _hand_on(self, to_the_end: bool = False) -> None:
        for kind, listener in self._listeners.items():
            for rank in self._ranks(kind):
                for line in self._lines(path_of(self.folder, rank, kind), to_the_end):
                    listener(rank, line)

    def _lines(self, path: Path, to_the_end: bool) -> Iterator[str]:
        """The whole lines that are new; ``to_the_end`` also a last one without its end."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
        except FileNotFoundError:
            return
        if not to_the_end:
            new = new[: new.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(new)
        yield from new.decode(errors="replace").splitlines()

    def _stacks(self) -> dict[int, str]:
        """Where each rank stands, innermost call first; without those that have not started."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return {
            rank: path_of(self.folder, rank, "stacks").read_text().strip()
            for rank in self._ranks("stacks")
        }

    def _shown(self, stacks: Mapping[int, str]) -> str:
        if stacks:
            texts = (f"rank {rank}: {text or 'said nothing'}" for rank, text in stacks.items())
            return "".join(f"\n\n{text}" for text in texts)
        alone = ": all nodes must be launched, with the same nodes, processes, job and endpoint"
        why = alone if self.endpoint else ""
        return f"; none of this node's had started{why}{self._said('torchrun.out', 'torchrun')}"

    def _failure(self) -> LaunchError:
        try:
            text = (self.folder / "agent.json").read_text()
        except FileNotFoundError:
            said = self._said("torchrun.out", "torchrun")
            code = self.agent.returncode
            return LaunchError(f"{self._why(code)}{said}", code=code)
        ends = {int(rank): tuple(end) for rank, end in json.loads(text).items()}
        codes = {rank: code for rank, (code, _) in ends.items()}
        errors = dict(self._all("error"))
        rank = first_to_fail(ends, errors)
        others = [
            f"rank {other}: {_how(codes.get(other), errors.get(other))}"
            for other in sorted({*codes, *errors} - {rank})
        ]
        message = f"rank {rank} of {self.world}: {_how(codes.get(rank), errors.get(rank))}"
        if rank in errors:
            message += f"\n\n{errors[rank]['traceback']}"
        else:
            message += self._said(path_of(self.folder, rank, "out").name, f"rank {rank}")
        text = "\n\n".join([message, *(["\n".join(others)] if others else [])])
        return RankFailed(text, rank, codes.get(rank))

    def _why(self, code: int) -> str:
        """Why torchrun failed, in one line."""
        path = self.folder / "agent.error"
        if not path.exists():
            return f"torchrun failed, exit code {code}"
        why = path.read_text()
        if "EADDRINUSE" in why:
            return (
                f"the port of endpoint {self.endpoint} is in use on this node; take a free one, "
                "the same on every node"
            )
        return f"torchrun failed: {why}"

    def _said(self, name: str, who: str) -> str:
        path = self.folder / name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if not lines:
            return ""
        return "\n\n".join(["", f"{who}'s last lines:", "\n".join(lines[-TAIL_LINES:])])


def first_to_fail(ends: Mapping[int, tuple[int, float]], errors: Mapping[int, dict]) -> int:
    """The rank to blame: one that a signal killed; else the first that raised something other than
    that a peer is gone; else the first that raised; else the first that exited.

    ``ends`` has (exit code, when in s) by rank, ``errors`` the records of ``rank``. Once a rank has
    failed, the others are ended, by SIGTERM and END_S later by SIGKILL: those come last.
    """
    begin = min((when for _, when in ends.values()), default=0.0)

    def order(rank: int) -> tuple:
        error = errors.get(rank)
        if error:
            victim = any(words in error["error"].lower() for words in PEER_GONE)
            return 2 if victim else 1, error["time"], rank
        code, when = ends[rank]
        ended = code == -signal.SIGTERM or when - begin > END_S / 2
        return 4 if ended else 0 if code < 0 else 3, when, rank

    return min({*ends, *errors}, key=order)


def _how(code: int | None, error: dict | None) -> str:
    if error:
        return error["error"].splitlines()[0]
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _command(
    processes: int, nodes: int, node: int, endpoint: str | None, job: str, folder: str
) -> list[str]:
    # One node: a port that the system picks, and no look-up of this machine's name.
    where = (
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
        if nodes == 1
        else [
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--node-rank={node}"),
            # Said, not guessed: who guesses takes what occupies the port for the host, and waits.
            f"--rdzv-conf=is_host={int(node == 0)}",
        ]
    )
    return [
        *(sys.executable, "-m", "a2lib.parallel.agent"),
        *(f"--nnodes={nodes}", f"--nproc-per-node={processes}", *where, f"--rdzv-id={job}"),
        *("--max-restarts=0", "--monitor-interval=0.1", f"--log-dir={folder}/torchrun"),
        *("-m", "a2lib.parallel.rank"),
    ]


def _environment(processes: int, folder: str, env: Mapping[str, str]) -> dict[str, str]:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    given = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        **os.environ,
        **env,
        "A2LIB_LAUNCHER": str(os.getpid()),
        "A2LIB_RUN_DIR": folder,
    }
    # One connection would run collectives after the kernels they should hide behind.
    if given.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        del given["CUDA_DEVICE_MAX_CONNECTIONS"]
    return given


def _check(
    target: str,
    processes: int,
    time_limit_s: float,
    device: str | None,
    nodes: int,
    node: int,
    endpoint: str | None,
) -> None:
    if not all(target.partition(":")):
        raise ValueError(f"target must be 'module:function'; got {target!r}")
    for name, value in (("processes", processes), ("nodes", nodes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on; got {value!r}")
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be above 0; got {time_limit_s!r}")
    if device not in ("cpu", "cuda", None):
        raise ValueError(f"device must be 'cpu', 'cuda' or None; got {device!r}")
    if nodes > 1 and not endpoint:
        raise ValueError("several nodes need endpoint, the 'host:port' of node 0")
    if not 0 <= node < nodes:
        raise ValueError(f"node must be from 0 to {nodes - 1}; got {node!r}")
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if not gpus:
            raise ValueError("device 'cuda' needs a GPU, and there is none here; 'cpu' is allowed")
        if processes > gpus:
            raise ValueError(f"processes must be from 1 to {gpus}, the GPUs here; got {processes}")
