"""What the notebooks on data parallelism ask for, and what they refuse."""

import pytest

from a2lib.experiments import collectives, ddp, fsdp, sharded_optimizer
from a2lib.experiments.data_parallel.configurations import Way
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.measure import read_runs

BOTH = [Way("fsdp"), Way("fsdp2")]


@pytest.fixture
def two(gpus):
    gpus(2)


@pytest.fixture
def no_gpu(gpus):
    gpus(0)


@pytest.mark.parametrize("Parameters", [
    ddp.Parameters, fsdp.Parameters, sharded_optimizer.Parameters,
])  # fmt: skip
def test_what_cannot_be_is_refused(no_gpu, Parameters):
    asked = getattr(Parameters, "asked", None) or Parameters.times
    with pytest.raises(ParameterError, match="sweep = 'all': allowed on two GPUs or more"):
        asked(Parameters(sweep="all"))
    with pytest.raises(ParameterError, match="capture = True: allowed with nccl"):
        asked(Parameters(capture=True))
    with pytest.raises(ParameterError, match="model = 'tiny': sweep all has its own"):
        Parameters(sweep="all", model="tiny")
    peer = "fsdp2" if Parameters is fsdp.Parameters else "torch_ddp"
    with pytest.raises(ParameterError, match=f"without {peer}, which is launched"):
        Parameters(capture=True, wrappers=peer)
    (training,) = asked(Parameters())
    assert training.model == "tiny" and training.ranks.backend == "gloo"


def test_a_training_has_the_ways_that_are_named(no_gpu):
    with pytest.raises(ParameterError, match="sent_dtype = 'bf16': allowed with wrappers bucketed"):
        ddp.Parameters(sent_dtype="bf16")
    (ours,) = ddp.Parameters().asked().values()
    assert [way.label for way in ours] == [
        "naive", "flat", "overlapped", "bucketed 25 MB", "updating 25 MB",
    ]  # fmt: skip
    (named,) = ddp.Parameters(wrappers="flat,torch_ddp").asked().values()
    assert named == [Way("flat"), Way("torch_ddp", 25)]
    (named,) = fsdp.Parameters(wrappers="fsdp2").asked().values()
    assert named == BOTH[1:]
    (every,) = sharded_optimizer.Parameters().times().values()
    assert [way.wrapper for way in every] == ["bucketed", "bucketed", "torch_ddp", "torch_ddp"]
    (named,) = sharded_optimizer.Parameters(wrappers="copy_engines").times().values()
    assert {way.carrier for way in named} == {"copy_engines"}


@pytest.mark.parametrize(("start", "given", "n"), [
    (ddp.start, ddp.Parameters(sweep="essential"), "2"),
    (ddp.start, ddp.Parameters(backend="gloo"), "1"),
    (collectives.start, collectives.Parameters(sweep="handout"), "2"),
])  # fmt: skip
def test_a_run_names_the_gpus_that_measure_together(two, monkeypatch, tmp_path, start, given, n):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    start(given)
    assert [run["n_devices"] for run in read_runs(tmp_path)] == [n]
