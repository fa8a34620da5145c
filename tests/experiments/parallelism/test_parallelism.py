"""The experiment on parallelism: what a sweep asks for, what is refused, and its rows on GPUs.

The schemes themselves are checked in ranks: tests/parallel/checks_schemes.py.
"""

import pytest
import torch

from a2lib.experiments import parallelism
from a2lib.experiments.harness.ranks import RankJob, Ranks
from a2lib.experiments.parallelism import Parameters, Setting, handlers, meshes
from a2lib.lab import PARALLELISM


def test_meshes_by_world_size():
    both = [meshes("fsdp_tp", n) for n in (2, 4, 6, 8)]
    assert both == [[], [(2, 2)], [(3, 2), (2, 3)], [(4, 2), (2, 4)]]
    assert meshes("dp", 4) == meshes("fsdp", 4) == [(4, 1)] and meshes("tp", 4) == [(1, 4)]


def test_one_setting_has_what_is_given(gpus):
    gpus(0)
    (one,) = Parameters(schemes="dp", tokens=8, d_model=16, dtype="bf16").asked().items()
    assert one == (Setting("dp", "a2lib", (2, 1), Ranks(2, "gloo"), "bf16", 3, 16, 1024), [8])


def test_a_result_that_is_wrong_is_not_timed(monkeypatch, gpus):
    gpus(0)
    put = []
    (task,) = parallelism.tasks(Parameters(schemes="dp", tokens=8).asked())

    class Job(RankJob):
        expired, put = lambda _: False, lambda _, *rows: put.extend(rows)
        everyone = staticmethod(lambda value: [{"y": 1e-7, "dx": 0.0}, value])

    monkeypatch.setattr(handlers, "make", lambda *_: None)
    for error in (0.25, float("inf")):
        put.clear()
        monkeypatch.setattr(handlers, "errors", lambda *_, e=error: {"y": 0.0, "dx": e})
        handlers.measure(Job(task.spec, "cpu", wanted=task.rows))
        assert [row["pass"] for row in put] == ["forward", "backward", "end_to_end"]
        assert {row["status"] for row in put} == {"error"}
        assert put[0]["note"] == f"dx is off the one process's by {error:.2g}"


def test_what_is_hidden_is_a_part_of_the_shorter():
    row = {"ms": "10", "ms_without": "9", "ms_communication": "4"}
    assert parallelism.hidden(row) == 0.75
    assert parallelism.hidden({**row, "ms_communication": ""}) is None


def test_nan_is_an_error():
    nan = torch.tensor([1.0, float("nan")])
    assert handlers._off(nan, torch.ones(2)) == float("inf") == handlers._off(torch.ones(2), nan)


@pytest.mark.gpu
def test_rows_of_two_gpus(two_gpus, measured):
    """Every scheme, ours and PyTorch's. Those of two processes on the CPU are the notebook's
    test's."""
    n = 4 if torch.cuda.device_count() >= 4 else 2
    given = {"tokens": 512, "d_model": 128, "d_ff": 256, "layers": 3, "world_size": n}
    asked = {}
    for implementation in ("a2lib", "torch"):
        asked |= Parameters(implementation=implementation, **given).asked()
    rows = measured(PARALLELISM, parallelism.tasks(asked))
    sent = {(r["scheme"], r["pass"]) for r in rows if r["ms_communication"]}
    assert ("dp", "forward") not in sent and {("dp", "backward"), ("tp", "forward")} <= sent
    ours = [r for r in rows if (r["scheme"], r["implementation"]) == ("fsdp_tp", "a2lib")]
    assert all(row["ms_data"] and row["ms_tensor"] for row in ours)
