"""What the notebooks on data parallelism ask for, and what they refuse."""

import pytest
from refusals import refused

from a2lib.experiments import collectives, ddp, fsdp, sharded_optimizer
from a2lib.experiments.data_parallel.configurations import Way
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.measure import read_runs


@pytest.mark.parametrize("Parameters", [
    ddp.Parameters, fsdp.Parameters, sharded_optimizer.Parameters,
])  # fmt: skip
def test_what_cannot_be_is_refused(gpus, Parameters):
    gpus(0)
    asked = getattr(Parameters, "asked", None) or Parameters.times
    peer = "fsdp2" if Parameters is fsdp.Parameters else "torch_ddp"
    for words, given in (
        ("sweep = 'all': allowed on two GPUs or more", {"sweep": "all"}),
        ("capture = True: allowed with nccl", {"capture": True}),
        ("model = 'tiny': sweep all has its own", {"sweep": "all", "model": "tiny"}),
        (f"without {peer}, which is launched", {"capture": True, "wrappers": peer}),
    ):
        refused(words, lambda given=given: asked(Parameters(**given)), error=ParameterError)
    (training,) = asked(Parameters())
    assert training.model == "tiny" and training.ranks.backend == "gloo"


def test_a_training_has_the_ways_that_are_named(gpus):
    gpus(0)
    words = "sent_dtype = 'bf16': allowed with wrappers bucketed"
    refused(words, ddp.Parameters, sent_dtype="bf16", error=ParameterError)
    (ours,) = ddp.Parameters().asked().values()
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
