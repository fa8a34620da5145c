"""What the launcher knows of its ranks while they run, and the one error that it makes of it."""

import collections
import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from a2lib.errors import OneLine
from a2lib.experiments.launching.channel import Channel
from a2lib.experiments.launching.lifeline import is_alive
from a2lib.experiments.launching.rank import STACKS

POLL_S = 0.05
# How long ranks have to write down where they stand, once their time is up.
STACKS_S = 1.0
# How long the ranks that are still there have to end, once one has failed, before they are killed;
# and torchrun after them.
END_S = 5
# How long listeners hear, once all is over, what they have not heard.
HEAR_S = 2.0
# How long an endpoint may take to answer when an error is to say whether it does.
ANSWER_S = 2.0
# What an error shows of a rank's output.
TAIL_LINES, TAIL_WIDTH = 40, 2000
# What a rank says when another one is gone: it is no cause.
PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "ncclremoteerror",
    "timed out",
)

OnProgress = Callable[[int, dict], None]
OnOutput = Callable[[int, str], None]


class LaunchError(OneLine, RuntimeError):
    """A launch that did not end well. ``rank`` is the rank to blame, None where none is; ``code``
    the exit code of that rank, or else of torchrun, where there is one (negative: a signal).

    A notebook shows the rank's traceback alone: the launcher's own says nothing."""

    def __init__(self, message: str, rank: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code


class RankFailed(LaunchError):
    """A rank raised, exited or was killed; the message ends with its traceback or last lines."""


class TimeLimitPassed(LaunchError):
    """A time limit ended the launch; the message says where each rank stood, and ``stacks``, by
    rank, holds what each said of that, innermost call first."""

    def __init__(self, message: str, stacks: Mapping[int, str]) -> None:
        super().__init__(message)
        self.stacks = dict(stacks)


class Run:
    """The ranks of ``agent``, all of whose ``channels`` are read here."""

    def __init__(
        self,
        agent: subprocess.Popen,
        channels: Sequence[Channel],
        processes: int,
        world: int,
        endpoint: str | None,
        on_progress: OnProgress | None,
        on_output: OnOutput,
    ) -> None:
        self.agent, self.channels = agent, channels
        self._new = select.poll()
        for channel in channels:
            self._new.register(channel.fd, select.POLLIN)
        self.processes, self.world, self.endpoint = processes, world, endpoint
        self.on_progress, self.on_output = on_progress or (lambda rank, event: None), on_output
        # By local rank, or "torchrun": the last lines of the output, and how many there were.
        self.said = collections.defaultdict(lambda: collections.deque(maxlen=TAIL_LINES))
        self.count: collections.Counter[int | str] = collections.Counter()
        self.ranks: dict[int | str, int] = {}
        # By rank; ``gone`` is when a rank was seen to have ended without a word, and ``ends`` what
        # torchrun says: the exit code and when.
        self.pids: dict[int, int] = {}
        self.values: dict[int, object] = {}
        self.errors: dict[int, dict] = {}
        self.stacks: dict[int, list[str]] = collections.defaultdict(list)
        self.gone: dict[int, float] = {}
        self.ends: dict[int, tuple[int, float]] | None = None
        # When ranks were killed because one had failed; in whole seconds, as torchrun's are.
        self.killed = math.inf
        self.failed: str | None = None
        self._unheard: collections.Counter[int] = collections.Counter()

    def wait(self, time_limit_s: float, overdue: Callable[[], str | None]) -> list[object]:
        """Hand on what ranks say until torchrun ends. The results, in rank order; raises unless all
        went well."""
        until, failed = time.monotonic() + time_limit_s, None
        late = f"{self.world} ranks had not finished within the time limit of {time_limit_s:g} s"
        while self.agent.poll() is None:
            self._hand_on(until)
            now = time.monotonic()
            if failed is None and (self.errors or self.gone):
                failed = now
            # torchrun itself waits 30 s for a rank that does not heed its SIGTERM.
            if failed is not None and now > failed + END_S:
                self.killed = min(self.killed, int(time.time()))
                self._signal(signal.SIGKILL)
            if failed is not None and now > failed + 2 * END_S:
                break
            if why := overdue() or (now > until and late):
                self._signal(STACKS)
                time.sleep(STACKS_S)
                self._end_hearing(now)
                stacks = {r: "\n".join(self.stacks[r]).strip() for r in sorted(self.pids)}
                raise TimeLimitPassed(f"{why}{self._shown(stacks)}", stacks)
            self._new.poll(1e3 * POLL_S)
        self._end_hearing(until)
        if self.agent.returncode or len(self.values) < self.processes:
            raise self._failure()
        return [value for _, value in sorted(self.values.items())]

    def _signal(self, number: int) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hand_on(self, until: float, to_the_end: bool = False) -> None:
        """Take what is new, which listeners hear until that moment."""
        dead = [rank for rank, pid in self.pids.items() if not is_alive(pid)]
        for channel in self.channels:
            # It has told its number before it printed, but this may have been looked for then.
            if channel.kind != "out" or channel.who in (*self.ranks, "torchrun"):
                for line in channel.lines(to_the_end):
                    self._take(channel, line, until)
        for rank in dead:
            if rank not in self.values and rank not in self.errors:
                self.gone.setdefault(rank, time.time())

    def _end_hearing(self, until: float) -> None:
        until = max(until, time.monotonic() + HEAR_S)
        while self._new.poll(0) and time.monotonic() < until:
            self._hand_on(until)
        self._hand_on(until, to_the_end=True)
        for rank, count in sorted(self._unheard.items()):
            self.on_output(rank, f"({count:,} more lines, not shown)")

    def _take(self, channel: Channel, line: str, until: float) -> None:
        who, rank = channel.who, self.ranks.get(channel.who)
        heard = time.monotonic() < until
        if channel.kind == "stacks":
            self.stacks[rank].append(line)
        elif channel.kind == "out":
            self.said[who].append(line if len(line) <= TAIL_WIDTH else f"{line[:TAIL_WIDTH]}...")
            self.count[who] += 1
            if rank is not None and heard:
                self.on_output(rank, line)
            elif rank is not None:
                self._unheard[rank] += 1
        else:
            # Who is killed leaves half a message.
            with contextlib.suppress(json.JSONDecodeError):
                self._learn(who, rank, *json.loads(line), heard)

    def _learn(self, who: int | str, rank: int | None, kind: str, value: object, heard: bool):
        if kind == "event" and heard:
            self.on_progress(rank, value)
        elif kind == "rank":
            self.ranks[who], self.pids[value[0]] = value
        elif kind == "result":
            self.values[rank] = value
        elif kind == "error":
            self.errors[rank] = value
        elif kind == "ends":
            self.ends = {int(rank): tuple(end) for rank, end in value.items()}
        elif kind == "failed":
            self.failed = value

    def _shown(self, stacks: Mapping[int, str]) -> str:
        if stacks:
            texts = (f"rank {rank}: {text or 'said nothing'}" for rank, text in stacks.items())
            return "".join(f"\n\n{text}" for text in texts)
        why = ""
        if self.endpoint:
            why = (
                f": {_answer(self.endpoint)}; all nodes must be launched, with the same nodes, "
                "processes and endpoint"
            )
        return f"; none of this node's had started{why}{self._last_lines('torchrun', 'torchrun')}"

    def _failure(self) -> LaunchError:
        code = self.agent.returncode
        killed = code is not None and code < 0
        # What torchrun does not report has ended with 0, if it reports at all.
        silent = 0 if code == 0 or self.ends is not None else None
        ends = {rank: (silent, when) for rank, when in self.gone.items()} | (self.ends or {})
        if not self.errors and (killed or not ends):
            why = f"torchrun was {_how(code, None)}" if killed else self._why(code)
            return LaunchError(f"{why}{self._last_lines('torchrun', 'torchrun')}", code=code)
        codes = {rank: code for rank, (code, _) in ends.items()}
        errors = self.errors
        rank = first_to_fail(ends, errors, self.killed)
        others = [
            f"rank {other}: {_how(codes.get(other), errors.get(other))}"
            for other in sorted({*codes, *errors} - {rank})
        ]
        message = f"rank {rank} of {self.world}: {_how(codes.get(rank), errors.get(rank))}"
        if rank in errors:
            message += f"\n\n{errors[rank]['traceback']}"
        else:
            who = next((who for who, known in self.ranks.items() if known == rank), "torchrun")
            message += self._last_lines(who, f"rank {rank}" if who != "torchrun" else who)
        text = "\n\n".join([message, *(["\n".join(others)] if others else [])])
        return RankFailed(text, rank, codes.get(rank))

    def _why(self, code: int) -> str:
        """Why torchrun failed, in one line."""
        why = self.failed or f"exit code {code}"
        if "EADDRINUSE" in why:
            return (
                f"the port of endpoint {self.endpoint} is in use on this node; take a free one, "
                "the same on every node"
            )
        if "Rendezvous" in why and self.endpoint:
            why += f" ({_answer(self.endpoint)})"
        return f"torchrun failed: {why}"

    def _last_lines(self, who: int | str, name: str) -> str:
        lines, count = self.said[who], self.count[who]
        of = f" (of {count:,})" if count > len(lines) else ""
        return "\n".join([f"\n\n{name}'s last lines{of}:\n", *lines]) if lines else ""


def split(endpoint: str) -> tuple[str, int] | None:
    """Host and port of 'host:port', '[address]:port' with IPv6; None for anything else."""
    host, colon, port = endpoint.rpartition(":") if isinstance(endpoint, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host or not host.strip():
        return None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        return None
    return host, int(port)


def _answer(endpoint: str) -> str:
    """Whether the endpoint answers, in a few words."""
    try:
        socket.create_connection(split(endpoint), timeout=ANSWER_S).close()
    except OSError as error:
        return f"tried to connect to {endpoint}: {error.strerror or error}"
    return f"{endpoint} answers"


def first_to_fail(
    ends: Mapping[int, tuple[int | None, float]],
    errors: Mapping[int, dict],
    killed: float = math.inf,
) -> int:
    """The rank to blame: one that a signal killed; else the first that raised something other than
    that a peer is gone; else the first that exited; else the first that raised.

    ``ends`` has (exit code, when in s) by rank, ``errors`` the records of ``rank``. Those that were
    ended since another had failed come last: by SIGTERM, or after ``killed``, in s.
    """

    def order(rank: int) -> tuple:
        error = errors.get(rank)
        if error:
            victim = any(words in error["error"].lower() for words in PEER_GONE)
            return 3 if victim else 1, error["time"], rank
        code, when = ends[rank]
        ended = code == -signal.SIGTERM or when >= killed
        return 4 if ended else 0 if code is None or code < 0 else 2, when, rank

    return min({*ends, *errors}, key=order)


def _how(code: int | None, error: dict | None) -> str:
    if error:
        return error["error"].splitlines()[0]
    if code is None:
        return "its process is gone"
    if code < 0:
        known = -code in set(signal.Signals)
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"exit code {code}" if code else "exited with code 0 before its function had returned"
