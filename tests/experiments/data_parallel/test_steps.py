"""How the ways of data parallelism are checked, timed and drawn, with one rank; and what the
notebooks ask for."""

import contextlib

import pytest
import torch

from a2lib.experiments import attention, collectives, fsdp, sharded_optimizer
from a2lib.experiments.data_parallel import gathers, training
from a2lib.experiments.data_parallel.configurations import Setting, Way
from a2lib.experiments.data_parallel.sharded import TOLERANCE, Deviation, deviation, worst
from a2lib.experiments.harness.ranks import Ranks
from a2lib.lab import bulk, read_runs

TINY = Setting.usual(Ranks(2, "gloo"), context=8).spec()


@pytest.fixture
def alone(monkeypatch):
    """A training of one rank, and of another of which no more is known than its gradients: ones."""

    def all_reduce(tensor):
        tensor += 1

    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(training.dist, "all_reduce", all_reduce)
    return training.Training(TINY, "cpu", rank=0, seed=0)


class Wrapper(torch.nn.Module):
    """Gradients become ``own`` times what they are and ``other`` times those of the other rank."""

    def __init__(self, model, own, other):
        super().__init__()
        self.model, self.own, self.other, self.quiet = model, own, other, False

    def forward(self, tokens):
        return self.model(tokens)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False

    def finish_gradient_synchronization(self):
        assert not self.quiet
        for p in self.model.parameters():
            p.grad.mul_(self.own).add_(self.other)

    def reset(self):
        """Nothing of it refuses a step."""


@pytest.mark.parametrize("own, other, right", [(0.5, 0.5, True), (1, 0, False), (1, 1, False)])
def test_gradients_that_are_no_mean_are_seen(alone, own, other, right):
    with alone.wrapped(lambda model: Wrapper(model, own, other)):
        assert (alone.error() <= training.TOLERANCE) is right
    assert alone.wrapper is None and alone.workload.forward is alone.workload.model


def test_steps_leave_the_weights_and_ranks_have_batches_of_their_own(alone):
    before = [p.detach().clone() for p in alone.parameters]
    marks = []
    first = alone.step(send=False, marks={"backward": marks})
    assert torch.equal(alone.step(send=False), first)
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters, before, strict=True))
    assert len(marks) == 2 and marks[0].ms_until(marks[1]) > 0
    other = training.Training(TINY, "cpu", rank=1, seed=0)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters, before, strict=True))
    assert not torch.equal(other.workload.token_ids, alone.workload.token_ids)


@pytest.mark.parametrize("right", [True, False])
def test_weights_that_do_not_come_back_are_seen(alone, right):
    """The optimizer owns every other parameter, and the rest are brought back, or are not."""
    others = alone.parameters[1::2]
    kept = [p.detach().clone() for p in others]

    @torch.no_grad
    def bring_back(*_):
        for p, x in zip(others, kept, strict=True):
            p.copy_(x)

    alone.workload.optimizer = torch.optim.AdamW(alone.parameters[::2], lr=0.0)
    if right:
        alone.workload.optimizer.register_step_post_hook(bring_back)
    alone.step(send=True)
    before = [p.detach().clone() for p in alone.parameters]
    assert (alone.unlike() == 0) is right
    # Whatever came of it, the next step begins with the same weights on every rank.
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters, before, strict=True))


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
    assert set(rows[0]) == set(bulk.TABLES["gathers"])


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_gradients_are_held_against_their_mean(world, alike):
    """In what ranks have alike, too, and beside roundings of a third of their size."""
    each = alike * torch.randn(1, 16, 32) + torch.randn(world, 16, 32)
    mean = each.mean(0)
    wrong = {"": mean, "own": each[0], "sum": world * mean, "twice": mean / world,
             "swapped": mean.roll(8, 0), "nan": mean * float("nan")}  # fmt: skip
    noise = torch.randn(16, 32)
    noise *= mean.norm() / noise.norm()
    for allowed, size in ((TOLERANCE["bf16"], 0.33), (TOLERANCE["fp32"], 1e-3)):
        found = {what: deviation(x + size * noise, mean, each[0]) for what, x in wrong.items()}
        assert [what for what, told in found.items() if not told.exceeds(allowed)] == [""], found
    assert deviation(mean[:0], mean[:0], mean[:0]) == (0, 0, 0)
    assert worst([(1.0, 5.0, 0.0), (2.0, float("nan"), 0.0)]) == (2, float("inf"), 0)
    assert Deviation(0.1, 0.1, float("nan")).exceeds(TOLERANCE["bf16"])


def test_a_training_has_the_ways_that_are_named(gpus):
    gpus(0)
    (named,) = fsdp.Parameters(wrappers="fsdp2").asked().values()
    assert named == [Way("fsdp2")]
    (every,) = sharded_optimizer.Parameters().times().values()
    assert [way.wrapper for way in every] == ["bucketed", "bucketed", "torch_ddp", "torch_ddp"]
    (named,) = sharded_optimizer.Parameters(wrappers="copy_engines").times().values()
    assert {way.carrier for way in named} == {"copy_engines"}


@pytest.mark.parametrize(("start", "given", "n"), [
    (fsdp.start, fsdp.Parameters(sweep="xl25"), "2"),
    (fsdp.start, fsdp.Parameters(backend="gloo"), "1"),
    (collectives.start, collectives.Parameters(sweep="handout"), "4"),
    (attention.start, attention.Parameters(), "1"),
])  # fmt: skip
def test_a_run_names_the_gpus_that_measure_together(gpus, on_cpu, tmp_path, start, given, n):
    gpus(4)
    start(given)
    assert [run["n_devices"] for run in read_runs(tmp_path / "data")] == [n]
