"""The experiment on data parallelism: what a sweep asks for, its rows, what it checks."""

import pytest
import torch

from a2lib.experiments import ddp
from a2lib.experiments.ddp import training
from a2lib.experiments.ddp.configurations import HANDOUT_MB, Parameters, Way
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.sweep import Sweep
from a2lib.measure import DDP, Store, bulk, start_run

TINY = {"model": "tiny", "batch": 2, "context": 8, "precision": "fp32", "attention": "eager",
        "compile": "none", "capture": False}  # fmt: skip


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_a_sweep_has_what_the_questions_ask(gpus):
    asked = Parameters(sweep="all").asked()
    handout = {Way("naive"), Way("flat"), Way("overlapped")}
    handout |= {Way("bucketed", mb) for mb in HANDOUT_MB}
    for model in ("xl25", "2.7B"):
        (launched,) = (t for t in asked if t.model == model and not t.capture)
        assert handout | {Way("torch_ddp", 25)} <= set(asked[launched])
        assert launched.ranks.backend == "nccl" and launched.ranks.world_size == 2
        assert (launched.batch, launched.context, launched.compile) == (4, 512, "blocks")
    (captured,) = (t for t in asked if t.model == "xl25" and t.capture)
    assert handout < set(asked[captured])
    assert not any(way.wrapper.startswith("torch") for way in asked[captured])
    assert all(len(set(ways)) == len(ways) for ways in asked.values())


def test_the_essential_sweep_has_all_sides_of_the_targets_and_resumes_in_the_whole(gpus):
    essential = Parameters(sweep="essential").asked()
    captured, launched = essential
    assert captured.capture and not launched.capture
    assert {(w.carrier, w.sent_dtype) for w in essential[captured]} >= {
        ("copy_engines", "fp32"), ("backend", "fp32"), ("copy_engines", "bf16"),
    }  # fmt: skip
    assert Way("torch_ddp", 25) in essential[launched]
    whole = Parameters(sweep="all").asked()
    assert all(set(ways) <= set(whole[t]) for t, ways in essential.items())
    tasks = ddp.tasks(essential)
    assert [task.label for task in tasks] == ["xl25 captured", "xl25 launched"]
    assert "bucketed 100 MB copy_engines bf16" in tasks[0].rows


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ParameterError, match="sweep = 'all': allowed on two GPUs or more"):
        Parameters(sweep="all").asked()
    with pytest.raises(ParameterError, match="capture = True: allowed with nccl"):
        Parameters(capture=True).asked()
    with pytest.raises(ParameterError, match="without torch_ddp, which is launched"):
        Parameters(capture=True, wrappers="naive,torch_ddp")
    with pytest.raises(ParameterError, match="sent_dtype = 'bf16': allowed with wrappers bucketed"):
        Parameters(sent_dtype="bf16")
    with pytest.raises(ParameterError, match="model = 'tiny': sweep all has its own"):
        Parameters(sweep="all", model="tiny")
    (ours,) = Parameters().asked().values()
    assert [way.label for way in ours] == ["naive", "flat", "overlapped", "bucketed 25 MB"]
    (asked,) = Parameters(wrappers="flat,torch_ddp").asked().items()
    assert asked[0].model == "tiny" and asked[0].ranks.backend == "gloo"
    assert asked[1] == [Way("flat"), Way("torch_ddp", 25)]


def test_rows_of_two_ranks(tmp_path):
    (asked,) = Parameters(wrappers="flat,torch_ddp", context=8).asked()
    ways = [Way("bucketed", 100), Way("bucketed", 1, sent_dtype="bf16"), Way("torch_ddp", 25)]
    ways.append(Way("bucketed", 1, "copy_engines"))
    store = Store(DDP, "cpu", data=tmp_path)
    run = start_run(command="test", parameters={}, device="cpu", data=tmp_path)
    assert Sweep(store, run, "cpu", seed=3).measure(ddp.tasks({asked: ways})) == 0
    (picture,) = bulk.pictures("strip", tmp_path)
    assert picture == ("cpu", "ddp-tiny-bucketed-100-MB")
    drawn = bulk.read("strip", *picture, tmp_path)
    assert drawn.run == run and drawn.about["wrapper"] == "bucketed"
    assert "backward" in {r["phase"] for r in drawn.rows}
    rows = {(r["wrapper"], r["carrier"], r["sent_dtype"]): r for r in store.rows()}
    engines = rows.pop(("bucketed", "copy_engines", "fp32"))
    assert engines["status"] == "unsupported"
    assert engines["note"] == "the parameters are on cpu, not on GPUs"
    assert len(rows) == 3
    for row in rows.values():
        assert row["status"] == "ok" and row["n"] == "20", row
        ranks = [float(row[f"ms_rank_{one}"]) for one in ("min", "median", "max")]
        assert ranks == sorted(ranks) and ranks[0] > 0
        base = [float(row[f"ms_without{one}"]) for one in ("_p20", "", "_p80")]
        assert base == sorted(base) and base[0] > 0
        assert float(row["ms_backward_without"]) > 0 and row["ms_host"] == ""
    assert rows["torch_ddp", "backend", "fp32"]["ms_communication"] == ""
    each, low = rows["bucketed", "backend", "fp32"], rows["bucketed", "backend", "bf16"]
    assert float(each["ms_communication"]) > 0
    assert int(each["sent_bytes"]) == 2 * int(low["sent_bytes"]) > 0


@pytest.fixture
def alone(monkeypatch):
    """A training of one rank, and of another of which no more is known than its gradients: ones."""

    def all_reduce(tensor):
        tensor += 1

    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(training.dist, "all_reduce", all_reduce)
    return training.Training(TINY, "cpu", rank=0, seed=0)


class Wrapper(torch.nn.Module):
    """Gradients become what ``mean`` makes of them."""

    def __init__(self, model, mean):
        super().__init__()
        self.model, self.mean, self.quiet = model, mean, 0

    def forward(self, tokens):
        return self.model(tokens)

    def no_sync(self):
        return self

    def __enter__(self):
        self.quiet += 1

    def __exit__(self, *_):
        self.quiet -= 1

    def finish_gradient_synchronization(self):
        assert not self.quiet
        for p in self.model.parameters():
            p.grad.copy_(self.mean(p.grad))


@pytest.mark.parametrize(
    ("mean", "right"),
    [
        (lambda grad: (grad + 1) / 2, True),
        (lambda grad: grad, False),
        (lambda grad: grad + 1, False),
    ],
)
def test_gradients_that_are_no_mean_are_seen(alone, monkeypatch, mean, right):
    monkeypatch.setattr(training, "wrap", lambda model, way: Wrapper(model, mean))
    with alone.wrapped(Way("naive")):
        assert (alone.error() <= training.TOLERANCE) is right
    assert alone.wrapper is None and alone.workload.forward is alone.workload.model


def test_steps_leave_the_weights_and_ranks_have_batches_of_their_own(alone):
    before = [p.detach().clone() for p in alone.parameters]
    marks = []
    first = alone.step(send=False, backward=marks)
    assert torch.equal(alone.step(send=False), first)
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters, before, strict=True))
    assert len(marks) == 2 and marks[0].ms_until(marks[1]) > 0
    other = training.Training(TINY, "cpu", rank=1, seed=0)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters, before, strict=True))
    assert not torch.equal(other.workload.token_ids, alone.workload.token_ids)
