"""What the benchmark's sweeps ask for, and what is refused."""

from a2lib.experiments import benchmark
from a2lib.experiments.benchmark import configurations
from a2lib.experiments.benchmark.configurations import Parameters
from a2lib.experiments.steps import Configuration
from a2lib.theory.transformer import TINY


def test_a_row_is_of_the_configuration_that_its_worker_is_told():
    for device in ("cuda", "cpu"):
        for table in benchmark.EXPERIMENT.tables:
            for task in table.tasks(Parameters(sweep="all"), device):
                own = Configuration(**task.spec["configuration"]).key(table.section)
                assert all(own.items() <= key.items() for key in task.keys)


def test_a_configuration_becomes_the_command_s():
    plain = Configuration("2.7B", 256).config("cpu", warmup=1, steps=2)
    assert plain.resolved()["size"] == "2.7B" and plain.batch == 4 and plain.context == 256
    assert not plain.compile and not plain.compile_blocks
    tiny = Configuration("tiny", 16, compile="model").config("cpu")
    assert tiny.shape == TINY and tiny.compile
    ours = Configuration("small", 128, attention="flash", compile="blocks", capture=True)
    made = ours.config("cuda")
    assert made.compile_blocks and not made.compile and made.capture
    for device in ("cuda", "cpu"):
        every = [*configurations.table(device), *configurations.columns(device)]
        every += [c for c, _ in configurations.firsts(device)]
        for configuration in [*every, *configurations.powers(device)]:
            configuration.config(device)


def test_a_cache_that_another_machine_has_is_filled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "cache", lambda repeat: tmp_path / str(repeat))
    (tmp_path / "0").mkdir()
    tasks = benchmark.first_tasks(Parameters(sweep="first"), "cuda")
    compiled = {(t.spec["prepared"], t.spec["repeat"]): t for t in tasks
                if t.spec["configuration"]["compile"] != "none"}  # fmt: skip
    pending = [compiled["cached", 0], compiled["cached", 1], compiled["cached", 2],
               compiled["nothing", 2]]  # fmt: skip
    assert benchmark.refilling(tasks, pending) == [compiled["nothing", 1]]
    assert benchmark.refilling(tasks, [t for t in tasks if t not in compiled.values()]) == []
