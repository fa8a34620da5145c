"""The experiment on fully sharded data parallel: what a sweep asks for, and what is looked at.

Rows of two processes on the CPU are the notebook's test's.
"""

import pytest
import torch

from a2lib.experiments import fsdp
from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.data_parallel.training import of_each_kind
from a2lib.experiments.fsdp import gathers, handlers
from a2lib.experiments.fsdp.configurations import MOMENTS, Parameters, Way
from a2lib.experiments.fsdp.gradients import TOLERANCE, Deviation, deviation, worst
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.sweep import Sweep
from a2lib.measure import FSDP, FSDP_MEMORY, Store, bulk, start_run

TINY = {"model": "tiny", "batch": 2, "context": 16, "precision": "bf16", "attention": "eager",
        "compile": "none"}  # fmt: skip
BOTH = [Way("fsdp"), Way("fsdp2")]


def test_a_sweep_has_both_models_launched_beside_the_peer_and_captured(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    asked = Parameters(sweep="all").asked()
    assert [(t.model, t.capture) for t in asked] == [
        ("xl25", True), ("xl25", False), ("2.7B", True), ("2.7B", False),
    ]  # fmt: skip
    for training, ways in asked.items():
        assert ways == (BOTH[:1] if training.capture else BOTH)
        assert (training.batch, training.context, training.precision) == (4, 512, "bf16")
    assert len(fsdp.time_tasks(asked)) == 4
    tasks = fsdp.memory_tasks(asked)
    assert [(t.label, list(t.rows)) for t in tasks] == [
        ("xl25 launched", ["fsdp"]), ("xl25 launched", ["fsdp2"]),
        ("2.7B launched", ["fsdp"]), ("2.7B launched", ["fsdp2"]),
    ]  # fmt: skip
    assert all(task.size == len(MOMENTS) and not task.spec["capture"] for task in tasks)


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ParameterError, match="sweep = 'all': allowed on two GPUs or more"):
        Parameters(sweep="all").asked()
    with pytest.raises(ParameterError, match="capture = True: allowed with nccl"):
        Parameters(capture=True).asked()
    with pytest.raises(ParameterError, match="capture = True: allowed without fsdp2"):
        Parameters(capture=True, wrappers="fsdp2")
    with pytest.raises(ParameterError, match="model = 'tiny': sweep all has its own"):
        Parameters(sweep="all", model="tiny")
    (asked,) = Parameters(wrappers="fsdp2").asked().items()
    assert asked[0].model == "tiny" and asked[1] == BOTH[1:]


# Two units: b is gathered ahead in forward and kept; a has to be gathered again in backward.
MOMENTS_OF_A_STEP = [
    ("begins", "root", "forward", 0), ("gather begins", "a", "forward", 1),
    ("gather ends", "a", "forward", 4), ("gather begins", "b", "forward", 5),
    ("gather ends", "b", "forward", 7),
    ("turn", "a", "forward", 2), ("computes", "a", "forward", 4),
    ("turn", "b", "forward", 10), ("computes", "b", "forward", 10), ("ends", "root", "forward", 15),
    ("gather begins", "a", "backward", 16), ("gather ends", "a", "backward", 22),
    ("turn", "b", "backward", 15), ("computes", "b", "backward", 15),
    ("reduce begins", "b", "backward", 20), ("reduce ends", "b", "backward", 24),
    ("turn", "a", "backward", 20), ("computes", "a", "backward", 22),
    ("ends", "root", "backward", 30),
]  # fmt: skip


def test_a_gather_is_held_against_the_turn_of_its_unit():
    rows = gathers.table([gathers.Moment(*one) for one in MOMENTS_OF_A_STEP])
    assert [(row["pass"], row["unit"], row["gather_start_ms"], row["gather_end_ms"],
             row["slack_ms"], row["waited_ms"], row["compute_end_ms"]) for row in rows] == [
        ("forward", "a", 1, 4, -2, 2, 10), ("forward", "b", 5, 7, 3, 0, 15),
        ("backward", "a", 16, 22, -2, 2, 30),
    ]  # fmt: skip
    assert gathers.waited_ms(rows) == 4
    assert set(rows[0]) == set(bulk.TABLES["gathers"])


def test_a_recorder_has_the_pass_and_starts_each_step_anew():
    recorder = gathers.Recorder("cpu")
    for _ in range(2):
        recorder.begin()
        recorder("turn", "")
        recorder.turn_back()
        recorder("turn", "layers.0")
        recorder.end()
    found = recorder.moments()
    assert [(m.name, m.unit, m.phase) for m in found] == [
        ("begins", "root", "forward"), ("turn", "root", "forward"), ("ends", "root", "forward"),
        ("turn", "layers.0", "backward"), ("ends", "root", "backward"),
    ]  # fmt: skip
    assert found[0].ms == 0 and found[-1].ms > 0


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_gradients_are_held_against_their_mean(world, alike):
    """In what ranks have alike, too, and beside roundings of a third of their size."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    each = alike * random(1, 16, 32) + random(world, 16, 32)
    mean = each.mean(0)
    wrong = {
        "": mean,
        "own": each[0],
        "sum": world * mean,
        "twice": mean / world,
        "swapped": mean.roll(8, 0),
        "nan": mean * float("nan"),
    }
    noise = random(16, 32)
    noise *= mean.norm() / noise.norm()
    for allowed, size in ((TOLERANCE["bf16"], 0.33), (TOLERANCE["fp32"], 1e-3)):
        found = {what: deviation(x + size * noise, mean, each[0]) for what, x in wrong.items()}
        assert [what for what, told in found.items() if not told.exceeds(allowed)] == [""], found
    assert deviation(mean[:0], mean[:0], mean[:0]) == (0, 0, 0)
    assert worst([(1.0, 5.0, 0.0), (2.0, float("nan"), 0.0)]) == (2, float("inf"), 0)
    assert Deviation(0.1, 0.1, float("nan")).exceeds(TOLERANCE["bf16"])


@pytest.mark.parametrize("fits", [True, False])
def test_what_follows_a_profiler_is_not_timed(monkeypatch, fits):
    """Ours comes last, together with PyTorch's or behind it."""
    groups = []

    class Job:
        spec, device, rank, seed = {"capture": False}, "cpu", 0, 0
        wanted = {way.label: [{"wrapper": way.wrapper}] for way in BOTH}
        expired, begin = (lambda _: False), (lambda *_: None)

    class Plain:
        __init__, step = (lambda *_: None), (lambda *_, send: None)

    monkeypatch.setattr(handlers, "Training", Plain)
    monkeypatch.setattr(handlers, "_fit", lambda *_: fits)
    monkeypatch.setattr(
        handlers, "_in_turns", lambda _, keys, *__: groups.append([k["wrapper"] for k in keys])
    )
    handlers.measure(Job())
    assert groups == ([["fsdp2", "fsdp"]] if fits else [["fsdp2"], ["fsdp"]])


def test_parameters_of_each_kind_are_looked_at():
    names = ["embed", *(f"layers.{i}.{n}" for i in range(3) for n in ("q.weight", "norm")), "head"]
    assert of_each_kind(names) == [0, 1, 2, 5, 6, 7]


@pytest.mark.gpu
def test_rows_of_two_gpus(tmp_path):
    """Launched and captured, with the tables of gathers and the trace."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "nccl")
    asked = {Training(ranks, **TINY, capture=True): BOTH[:1],
             Training(ranks, **TINY, capture=False): BOTH}  # fmt: skip
    run = start_run(command="test", parameters={}, device="nvidia", data=tmp_path)
    stored = {}
    for section, tasks in ((FSDP_MEMORY, fsdp.memory_tasks(asked)), (FSDP, fsdp.time_tasks(asked))):
        store = Store(section, "nvidia", data=tmp_path)
        assert Sweep(store, run, "cuda", seed=3).measure(tasks) == 0
        stored[section.name] = store.rows()
        assert {(row["status"], row["note"]) for row in store.rows()} == {("ok", "")}, store.rows()
    assert len(stored["fsdp"]) == 3 and len(stored["fsdp_memory"]) == 2 * len(MOMENTS)
    assert all(float(row["ms_host"]) > 0 for row in stored["fsdp"])
    held = {(row["wrapper"], row["step_number"], row["moment"]): row
            for row in stored["fsdp_memory"]}  # fmt: skip
    for wrapper in ("fsdp", "fsdp2"):
        peak = int(held[wrapper, "3", "peak"]["tensor_bytes"])
        after = int(held[wrapper, "3", "after"]["present_bytes"])
        parts = ("parameter", "gradient", "optimizer")
        known = sum(int(held[wrapper, "3", "after"][f"{part}_bytes"]) for part in parts)
        assert peak >= after >= known
    assert {name for _, name in bulk.pictures("gathers", tmp_path)} == {
        "fsdp-tiny-captured-2-ranks", "fsdp-tiny-launched-2-ranks",
    }  # fmt: skip
    for way in ("captured", "launched"):
        rows = bulk.read("gathers", "nvidia", f"fsdp-tiny-{way}-2-ranks", tmp_path).rows
        assert [(row["pass"], row["unit"]) for row in rows] == [
            ("forward", "root"), ("forward", "layers.0"), ("forward", "layers.1"),
            ("backward", "layers.0"),
        ]  # fmt: skip
        assert all(row["waited_ms"] >= 0 for row in rows)
        ends = [row["compute_end_ms"] for row in rows]
        assert ends == sorted(ends) and ends[0] > 0
    strip = bulk.read("strip", "nvidia", "fsdp-tiny-2-ranks", tmp_path).rows
    assert "communication" in {row["kind"] for row in strip}
