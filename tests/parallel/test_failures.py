"""A failure of some of the kinds, and how dev/try_failures.py counts many.

A rank that raises, without torch, is in test_launch.py; models of other shapes are in checks_*.py.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from a2lib.parallel import RankFailed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import failures  # noqa: E402

LEAVES = failures.Case("", ({},), (("RankFailed", "rank 1 of 2: killed", "last words"),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed", "what"),
    [
        ("killed", "killed 4", "BucketedDDP, rank 1 of 2 is killed: in, step 3"),
        ("world", "world 0", "2 nodes, of 1 processes and 2"),
        ("port", "port 0", "an occupied port"),
    ],
)
def test_one_clear_error_and_nothing_left(rank_env, kind, seed, what):
    case = failures.KINDS[kind](random.Random(seed), 2)
    assert case.what.startswith(what)
    outcome = failures.attempt(case, rank_env)
    assert outcome.clear == [True] * len(case.nodes), outcome.said
    assert outcome.orphans == outcome.folders == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "what"),
    [
        ("children 9", "SIGKILL after"),
        ("children 12", "daemon after"),
        ("ctrl-c 12", "three Ctrl-C after 0.97 s, 0 s apart"),
        ("agent 4", "torchrun gets SIGKILL"),
        ("agent 0", "agent gets SIGSTOP"),
    ],
)
def test_nothing_is_left_where_the_launch_cannot_see_to_it(rank_env, seed, what):
    case = failures.KINDS[seed.partition(" ")[0]](random.Random(seed), 2)
    assert what in case.what
    outcome = failures.attempt(case, rank_env)
    assert outcome.clear == [True], outcome.said
    assert outcome.orphans == outcome.folders == []


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        ("rank 1 of 2: killed\n\nlast words", True),
        ("rank 1 of 2: killed by SIGTERM\n\nlast words", False),
        ("rank 1 of 2: killed", False),
        (None, False),
    ],
)
def test_what_is_clear_and_what_is_left(monkeypatch, message, clear):
    started = []

    def launch(env, on_output):
        started.append(subprocess.Popen(
            ["cat"], env={**os.environ, **env}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ))  # fmt: skip
        # Popen returns once exec has closed its pipe; the environment is there a moment later.
        started[0].stdin.write(b"up\n")
        started[0].stdin.flush()
        started[0].stdout.readline()
        if message:
            raise RankFailed(message)

    monkeypatch.setattr(failures, "launch", launch)
    try:
        outcome = failures.attempt(LEAVES, {}, "a mark")
        assert outcome.clear == [clear]
        assert outcome.orphans == [started[0].pid]
        assert failures.left("another mark") == []
    finally:
        started[0].kill()
        started[0].communicate()
    assert failures.left("a mark") == []


@pytest.mark.parametrize("kind", failures.KINDS)
def test_a_seed_draws_the_same_again_and_seeds_differ(kind):
    def drawn():
        return [failures.KINDS[kind](random.Random(seed), 4) for seed in range(40)]

    assert drawn() == drawn()
    wheres = {call["arguments"].get("where") for case in drawn() for call in case.nodes}
    if kind == "killed":
        assert wheres == {"before", "in", "after", "any time", "the start"}
    if kind == "raises":
        assert wheres == {"before", "in", "after"}


@pytest.fixture
def command(monkeypatch):
    path = HERE.parents[1] / "dev" / "try_failures.py"
    spec = importlib.util.spec_from_file_location("try_failures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tries_are_counted_and_not_run_again(command, monkeypatch, tmp_path, capsys):
    ran = []

    def attempt(kind, number):
        ran.append((kind, number))
        orphan = (kind, number) == ("raises", 1)
        row = dict(what="", clear=kind != "port", hang=kind == "world", orphans=int(orphan))
        own = dict(kind=kind, number=number, ranks=command.ranks_of(number))
        return {**own, **row, "seconds": 1.5 + number, "said": ["said"], "output": ["printed"]}

    monkeypatch.setattr(command, "attempt", attempt)

    def main(tries):
        monkeypatch.setattr(
            sys, "argv", ["", str(tmp_path / "new" / "tries.jsonl"), "--tries", str(tries)]
        )
        return command.main(), capsys.readouterr().out.splitlines()

    code, lines = main(2)
    assert code == 1 and len(ran) == 2 * len(failures.KINDS)
    assert lines[-len(failures.KINDS) - 1 :][:6] == [
        "kind      tries  4 ranks  clear  hangs  orphans  longest",
        "killed        2        0      2      0        0    2.5 s",
        "raises        2        0      2      0        1    2.5 s",
        "shapes        2        0      2      0        0    2.5 s",
        "world         2        0      2      2        0    2.5 s",
        "port          2        0      0      0        0    2.5 s",
    ]
    assert {line for line in lines if line.endswith(": ")} == {
        "raises 1: ",
        *(f"{kind} {number}: " for kind in ("world", "port") for number in (0, 1)),
    }
    assert lines.count("said") == lines.count("printed") == 5
    code, lines = main(4)
    assert len(ran) == len(set(ran)) == 4 * len(failures.KINDS)
    assert "killed        4        1      4      0        0    4.5 s" in lines
    rows = [json.loads(x) for x in (tmp_path / "new" / "tries.jsonl").read_text().splitlines()]
    assert {(row["kind"], row["number"]) for row in rows} == set(ran)
    assert all(row["torch"] and row["commit"] for row in rows)


def test_a_try_that_never_ends_is_a_hang(command, monkeypatch):
    monkeypatch.setattr(failures, "LIMIT_S", 1)
    monkeypatch.setattr(command, "MARGIN_S", 0)
    stuck = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda line, **options: popen([sys.executable, "-c", stuck, *line[2:]], **options),
    )
    row = command.attempt("killed", 7)
    assert row["hang"] and not row["clear"] and not command.good(row)
    assert (row["kind"], row["number"], row["ranks"]) == ("killed", 7, 4)
    assert "'--only', 'killed', '7'" in row["output"][0]
