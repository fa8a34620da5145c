"""What the notebooks on data parallelism ask for."""

import pytest

from a2lib.experiments import collectives, ddp, fsdp, sharded_optimizer
from a2lib.experiments.data_parallel.configurations import Way
from a2lib.measure import read_runs


def test_a_training_has_the_ways_that_are_named(gpus):
    gpus(0)
    ((training, ours),) = ddp.Parameters().asked().items()
    assert training.model == "tiny" and training.ranks.backend == "gloo"
    assert [way.label for way in ours] == [
        "naive", "flat", "overlapped", "bucketed 25 MB", "updating 25 MB",
    ]  # fmt: skip
    (named,) = ddp.Parameters(wrappers="flat,torch_ddp").asked().values()
    assert named == [Way("flat"), Way("torch_ddp", 25)]
    (named,) = fsdp.Parameters(wrappers="fsdp2").asked().values()
    assert named == [Way("fsdp2")]
    (every,) = sharded_optimizer.Parameters().times().values()
    assert [way.wrapper for way in every] == ["bucketed", "bucketed", "torch_ddp", "torch_ddp"]
    (named,) = sharded_optimizer.Parameters(wrappers="copy_engines").times().values()
    assert {way.carrier for way in named} == {"copy_engines"}


@pytest.mark.parametrize(("start", "given", "n"), [
    (ddp.start, ddp.Parameters(sweep="essential"), "2"),
    (ddp.start, ddp.Parameters(backend="gloo"), "1"),
    (collectives.start, collectives.Parameters(sweep="handout"), "2"),
])  # fmt: skip
def test_a_run_names_the_gpus_that_measure_together(gpus, on_cpu, tmp_path, start, given, n):
    gpus(2)
    start(given)
    assert [run["n_devices"] for run in read_runs(tmp_path / "data")] == [n]
