"""Compiling ahead: parallel, within its memory and time, and never the end of a sweep."""

import itertools
import time

import pytest

from a2lib.experiments.harness.ahead import CONTEXT_BYTES, Compilation, compile_ahead, worker_count

HANDLER = "experiments.harness.toy:compile_"
SIZES = [2**n for n in range(8)]


@pytest.fixture
def ahead(tmp_path):
    log = tmp_path / "log"

    def run(names="a", sizes=SIZES, parts=(), seconds=0, **options):
        asked, seen = [], []
        for size, name in itertools.product(sizes, names):
            spec = {"name": f"{name} {size}", "log": str(log), "part": dict(parts).get(name)}
            asked.append(Compilation(spec["name"], {**spec, "seconds": seconds}, size))
        given = {"workers": 2, "memory_bytes": 10**12, "timeout_s": 10, "until": None, **options}
        given |= {"handler": HANDLER, "device": "cpu", "progress": seen.append}
        failed = compile_ahead(asked, **given)
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        assert all(task in seen for task, _ in failed)
        return len(seen) - len(failed), failed, lines

    return run


def test_work_is_shared(ahead):
    done, failed, lines = ahead(names="ab", seconds=0.2)
    assert done == len(lines) == 16 and not failed
    assert len({pid for *_, pid in lines}) == 2
    assert int(lines[0][1]) == max(SIZES)


@pytest.mark.parametrize("part, reason", [("die", "SIGABRT"), ("raise", "ValueError: one")])
def test_a_worker_that_fails_loses_its_task_alone(ahead, part, reason):
    done, failed, lines = ahead(names="ab", sizes=SIZES[:4], parts={"b": part})
    assert done == 4 and len(failed) == 4
    assert all(task.label[0] == "b" and reason in why for task, why in failed)
    assert {name for name, *_ in lines} == {"a"}


def test_a_worker_that_hangs_is_replaced(ahead):
    done, failed, _ = ahead(names="ab", sizes=SIZES[:2], parts={"b": "hang"}, timeout_s=3)
    assert done == 2 and len(failed) == 2
    assert all("no answer within" in why for _, why in failed)


def test_the_largest_wait_for_memory_or_are_left(ahead):
    done, failed, lines = ahead(memory_bytes=SIZES[-2] + 2 * CONTEXT_BYTES)
    assert done == 7 and not failed
    assert max(int(size) for _, size, _ in lines) == SIZES[-2]


def test_the_time_limit_gives_up_what_runs(ahead):
    started = time.monotonic()
    done, failed, _ = ahead(until=time.time() + 1, seconds=0.6, timeout_s=60)
    assert done < 8 and not failed
    assert time.monotonic() - started < 20


def test_worker_count():
    assert worker_count(0) == worker_count(1, 8) == worker_count(100, 1) == worker_count(3) == 0
    assert worker_count(100, 8) == 8 and worker_count(3, 8) == 3
