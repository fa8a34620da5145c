"""Let a group of ranks fail again and again, and count what was not one clear error.

    python dev/try_failures.py build/tries.jsonl --tries 100 --at-once 2 --time-limit-s 3600

The kinds are those of tests/parallel/failures.py: a rank killed in mid-step, that raises, or exits
in another way; mismatched shapes, a wrong world size, an occupied port, an endpoint that cannot be
or that never answers; output without end, three Ctrl-C, ranks with processes of their own, an agent
that dies, a temporary folder that is full (Linux with user namespaces). One try in four has 4
ranks, the others 2, all on the CPU. A try's number seeds what is drawn: which rank, in which step,
before, in or after its collectives. Each has a process of its own, whose end is awaited; every
process that has its mark then is an orphan, and every folder that the launch has left is counted as
one. The file has a line a try; those it has are not run again.

Prints each try that failed, with what it said, and a table: per kind the tries, the clear errors,
hangs, orphans and the longest time. Exit code 1 unless all were clear. --only KIND NUMBER runs one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from importlib.metadata import version
from pathlib import Path

CASES = Path(__file__).resolve().parent.parent / "tests" / "parallel"
sys.path.insert(0, str(CASES))
import failures  # noqa: E402

# What a launch may take beyond its time limit before it hangs.
MARGIN_S = 30


def ranks_of(number: int) -> int:
    return 4 if number % 4 == 3 else 2


def run_one(kind: str, number: int, mark: str) -> dict:
    """One try in this process."""
    processes = ranks_of(number)
    case = failures.KINDS[kind](random.Random(f"{kind} {number}"), processes)
    path = os.pathsep.join([str(CASES), *filter(None, [os.environ.get("PYTHONPATH")])])
    outcome = failures.attempt(case, {"PYTHONPATH": path}, mark)
    limits = [node["time_limit_s"] for node in case.nodes]
    return {
        "what": case.what,
        "clear": all(outcome.clear),
        # The time limit ended what a failure should have ended, or not even the time limit did.
        "hang": any(
            said.startswith("TimeLimitPassed") and not clear
            for said, clear in zip(outcome.said, outcome.clear, strict=True)
        )
        or outcome.seconds > max(limits) + MARGIN_S,
        "orphans": len(outcome.orphans) + len(outcome.folders),
        "seconds": round(outcome.seconds, 1),
        "said": outcome.said,
        "output": list(outcome.output),
    }


def attempt(kind: str, number: int) -> dict:
    """One try in a process that can be ended."""
    mark = uuid.uuid4().hex
    command = [sys.executable, __file__, "-", "--only", kind, str(number), "--mark", mark]
    begin, until = time.monotonic(), failures.LIMIT_S + 2 * MARGIN_S
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=until)
        outcome = json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        outcome = {"what": "", "clear": False, "hang": True, "output": [out, err]}
        outcome |= {"seconds": round(time.monotonic() - begin, 1), "said": []}
    except (json.JSONDecodeError, IndexError):
        outcome = {"what": "", "clear": False, "hang": False, "output": [out, err]}
        outcome |= {"seconds": round(time.monotonic() - begin, 1), "said": []}
    left = failures.left(mark)
    outcome["orphans"] = max(len(left), outcome.get("orphans", 0))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if good(outcome):
        outcome["said"] = [text.splitlines()[0] for text in outcome["said"]]
        del outcome["output"]
    return {"kind": kind, "number": number, "ranks": ranks_of(number), **outcome}


def good(outcome: dict) -> bool:
    return outcome["clear"] and not outcome["hang"] and not outcome["orphans"]


def table(rows: list[dict]) -> str:
    lines = [f"{'kind':8}{'tries':>7}{'4 ranks':>9}{'clear':>7}{'hangs':>7}{'orphans':>9}  longest"]
    for kind in failures.KINDS:
        if not (own := [row for row in rows if row["kind"] == kind]):
            continue
        four = sum(row["ranks"] == 4 for row in own)
        clear, hangs, orphans = (sum(row[x] for row in own) for x in ("clear", "hang", "orphans"))
        longest = max(row["seconds"] for row in own)
        lines.append(f"{kind:8}{len(own):7}{four:9}{clear:7}{hangs:7}{orphans:9}{longest:7.1f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where each try's line goes")
    parser.add_argument("--tries", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=failures.KINDS, default=[*failures.KINDS])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--time-limit-s", type=float, default=7200, help="no try starts later")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"))
    parser.add_argument("--mark", default=uuid.uuid4().hex, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(run_one(given.only[0], int(given.only[1]), given.mark)))
        return 0
    git = ["git", "-C", CASES, "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    lines = given.file.read_text().splitlines() if given.file.exists() else []
    rows = [json.loads(line) for line in lines]
    have = {(row["kind"], row["number"]) for row in rows}
    wanted = [(k, n) for n in range(given.tries) for k in given.kinds if (k, n) not in have]
    until = time.monotonic() + given.time_limit_s

    def one(try_: tuple[str, int]) -> dict | None:
        return attempt(*try_) if time.monotonic() < until else None

    given.file.parent.mkdir(parents=True, exist_ok=True)
    with (
        given.file.open("a", buffering=1) as file,
        concurrent.futures.ThreadPoolExecutor(given.at_once) as threads,
    ):
        futures = [threads.submit(one, x) for x in wanted]
        try:
            for future in concurrent.futures.as_completed(futures):
                if not (row := future.result()):
                    continue
                row |= {"commit": commit, "torch": version("torch")}
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                if not good(row):
                    print(f"{row['kind']} {row['number']}: {row['what']}")
                    print("\n".join([*row["said"], *row["output"]]), flush=True)
        except KeyboardInterrupt:
            # Those that run end by themselves.
            threads.shutdown(cancel_futures=True)
    print(table(rows))
    return 0 if all(map(good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
