"""The experiment on data parallelism: what a sweep asks for, and what is checked."""

import contextlib
import types

import pytest
import torch

from a2lib.experiments import collectives, ddp, fsdp, parallelism, sharded_optimizer
from a2lib.experiments.data_parallel import training, turns
from a2lib.experiments.data_parallel.configurations import Training, unusual
from a2lib.experiments.ddp import handlers, traces
from a2lib.experiments.ddp.configurations import (
    BEST_MB,
    CARRIED,
    CARRIERS,
    HANDOUT_MB,
    PEERS,
    PLAIN,
    SENT_DTYPES,
    Parameters,
    Way,
)
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.ranks import RankJob, Ranks
from a2lib.experiments.harness.sweep import Sweep
from a2lib.measure import DDP, Store, bulk, read_runs, start_run
from a2lib.measure.trace import TraceError
from a2lib.measure.trace.kernels import Kernel, Trace

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
        launched, plain = (t for t in asked if t.model == model and not t.capture)
        assert (plain.precision, plain.attention, plain.compile) == ("fp32", "eager", "none")
        assert set(asked[plain]) == handout
        assert Parameters(sweep=f"plain-{model}").asked() == {plain: asked[plain]}
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
    assert {"bucketed", "updating"} == {way.wrapper for way in essential[captured]}
    assert Way("torch_ddp", 25) in essential[launched]
    whole = Parameters(sweep="all").asked()
    assert all(set(ways) <= set(whole[t]) for t, ways in essential.items())
    tasks = ddp.tasks(essential)
    assert [task.label for task in tasks] == ["xl25 captured", "xl25 launched"]
    assert "bucketed 100 MB copy_engines bf16" in tasks[0].rows


@pytest.mark.parametrize(("start", "given", "n"), [
    (ddp.start, Parameters(sweep="essential"), "2"), (ddp.start, Parameters(backend="gloo"), "1"),
    (collectives.start, collectives.Parameters(sweep="handout"), "2"),
    (sharded_optimizer.start, sharded_optimizer.Parameters(), "2"),
    (fsdp.start, fsdp.Parameters(), "2"), (parallelism.start, parallelism.Parameters(), "2"),
])  # fmt: skip
def test_a_run_names_the_gpus_that_measure_together(gpus, monkeypatch, tmp_path, start, given, n):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    start(given)
    assert [run["n_devices"] for run in read_runs(tmp_path)] == [n]


def test_what_is_not_usual_has_timelines_of_its_own(gpus):
    (plain,) = Parameters(sweep="plain-2.7B").asked()
    assert plain.label == "2.7B launched fp32 eager uncompiled"
    assert {way.wrapper for way in traces.drawn(plain.spec(), "cuda")} >= {"naive", "overlapped"}
    (usual,) = Parameters(model="2.7B").asked()
    assert usual.label == "2.7B launched" and traces.drawn(usual.spec(), "cuda") == ()
    assert Parameters(model="2.7B", **PLAIN).asked().keys() == {plain}
    assert traces.drawn(TINY, "cpu") and unusual(TINY, "cpu") == ""


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
    assert [way.label for way in ours] == [
        "naive", "flat", "overlapped", "bucketed 25 MB", "updating 25 MB",
    ]  # fmt: skip
    (asked,) = Parameters(wrappers="flat,torch_ddp").asked().items()
    assert asked[0].model == "tiny" and asked[0].ranks.backend == "gloo"
    assert asked[1] == [Way("flat"), Way("torch_ddp", 25)]


@pytest.mark.gpu
def test_rows_of_two_gpus(tmp_path):
    """Every way, launched and captured. Those of two processes on the CPU are the notebook's
    test's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = {**TINY, "precision": "bf16"}
    ways = [Way("naive"), Way("flat"), Way("overlapped")]
    ways += [Way(w, 1, c, t) for w in CARRIED for c in CARRIERS for t in SENT_DTYPES]
    ways += [Way("bucketed", BEST_MB)]
    asked = {Training(Ranks(2, "nccl"), **{**given, "capture": True}): ways}
    ways = [*ways, *(Way(peer, 25) for peer in PEERS), Way("torch_ddp", 25, sent_dtype="bf16")]
    asked[Training(Ranks(2, "nccl"), **given)] = ways
    store = Store(DDP, "nvidia", data=tmp_path)
    run = start_run(command="test", parameters={}, device="nvidia", data=tmp_path)
    assert Sweep(store, run, "cuda", seed=3).measure(ddp.tasks(asked)) == 0
    rows = store.rows()
    assert len(rows) == sum(map(len, asked.values()))
    assert {(row["status"], row["note"]) for row in rows} == {("ok", "")}, rows
    assert all(float(row["ms_host"]) > 0 for row in rows)
    beside = [(row["wrapper"], row["capture"]) for row in rows if row["ms_without_updating"]]
    assert set(beside) == {("updating", "true")} and len(beside) == 4
    drawn = {name for _, name in bulk.pictures("strip", tmp_path)}
    bucketed = f"bucketed-{BEST_MB}-MB"
    assert drawn == {f"ddp-tiny-{way}-eager-uncompiled-2-ranks" for way in
                     ("naive", "overlapped", bucketed, f"{bucketed}-captured")}  # fmt: skip
    for name in drawn:
        kinds = {row["kind"] for row in bulk.read("strip", "nvidia", name, tmp_path).rows}
        assert {"communication", "matmul"} <= kinds, name


def test_the_window_of_a_replay_ends_backward_with_its_last_product():
    """20 ms of products, an all-reduce until 24, the optimizer from there to 60."""
    ms = 10**6
    kernels = [Kernel(name, 0, stream, begin * ms, (end - begin) * ms) for name, stream, begin, end
               in (("nvjet_tst", "7", 0, 20), ("ncclDevKernel_AllReduce", "9", 18, 24),
                   ("multi_tensor_apply_kernel<FusedAdam>", "7", 24, 60))]  # fmt: skip
    found = Trace("chrome", kernels, [])
    rows = traces.window(found, captured=True)
    assert [(row["kind"], row["start_us"], row["duration_us"]) for row in rows] == [
        ("matmul", 0, 15_000), ("communication", 13_000, 6_000), ("optimizer", 19_000, 11_000),
    ]  # fmt: skip
    assert traces.window(None, captured=True) == []
    with pytest.raises(TraceError, match="no product was traced"):
        traces.window(Trace("chrome", kernels[1:], []), captured=True)
    with pytest.raises(TraceError, match="no kernel of a backward"):
        traces.window(found)


@pytest.mark.parametrize("long", [False, True])
def test_a_long_step_is_taken_fewer_times(monkeypatch, long):
    monkeypatch.setattr(turns, "meet", lambda device: None)
    monkeypatch.setattr(turns, "LONG_MS", 0.0 if long else float("inf"))
    monkeypatch.setattr(RankJob, "everyone", lambda self, value: [value])
    taken = []
    ways = [lambda: taken.append("a"), lambda: taken.append("b")]
    rows = turns.in_turns(RankJob({}, "cpu"), DDP, ways, lambda: taken.append("without"))
    n = turns.FEWEST + (turns.TURNS - 1) * (turns.FEWEST if long else turns.STEPS)
    assert [row["n"] for row in rows] == [n, n]
    # Of each turn the first one is not counted.
    assert {way: taken.count(way) for way in ("without", "a", "b")} == dict.fromkeys(
        ("without", "a", "b"), n + turns.TURNS
    )


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

    def reset(self):
        """Nothing of it refuses a step."""


@pytest.mark.parametrize(
    ("mean", "right"),
    [
        (lambda grad: (grad + 1) / 2, True),
        (lambda grad: grad, False),
        (lambda grad: grad + 1, False),
    ],
)
def test_gradients_that_are_no_mean_are_seen(alone, mean, right):
    with alone.wrapped(lambda model: Wrapper(model, mean)):
        assert (alone.error() <= training.TOLERANCE) is right
    assert alone.wrapper is None and alone.workload.forward is alone.workload.model


class Updating(Wrapper):
    """Each gradient is the mean as soon as it is there."""

    @contextlib.contextmanager
    def each_mean(self, then):
        hooks = [p.register_post_accumulate_grad_hook(lambda p: None if self.quiet else then([p]))
                 for p in self.model.parameters()]  # fmt: skip
        yield
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("way", [Way("updating", 100), Way("bucketed", 100)])
def test_a_captured_row_that_updates_has_a_step_alone_that_updates_so(alone, monkeypatch, way):
    """Each step as it is captured: who sends, and which parameters are updated in backward."""
    steps = []

    @contextlib.contextmanager
    def captured(step):
        step()
        optimizer = alone.workload.optimizer
        update, ahead = optimizer.step, []
        optimizer.step = lambda: (ahead.append(len(getattr(optimizer, "_ahead", ()))), update())
        step()
        optimizer.step = update
        steps.append((alone.wrapper is not None, ahead))
        yield types.SimpleNamespace(replay=step)

    def in_turns(job, section, timed, without):
        return [{"ms": place} for place, _ in enumerate(timed, start=5)]

    monkeypatch.setattr(handlers, "capture_step", captured)
    monkeypatch.setattr(handlers, "in_turns", in_turns)
    monkeypatch.setattr(handlers, "wrap", lambda model, way: Updating(model, lambda grad: grad))
    monkeypatch.setattr(handlers, "TOLERANCE", 2)
    monkeypatch.setattr(RankJob, "everyone", lambda self, value: [value])
    row = handlers._measure(RankJob({"capture": True}, "cpu"), alone, lambda: None, way)
    every = len(alone.parameters)
    assert row["status"] == "ok" and row["ms"] == 5
    if way.wrapper == "updating":
        assert row["ms_without_updating"] == 6
        assert steps == [(False, [every]), (True, [every])]
    else:
        assert "ms_without_updating" not in row and steps == [(True, [0])]


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
