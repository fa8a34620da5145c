"""notebooks/benchmark.ipynb through papermill, at the smallest size."""

from notebook_texts import rows


def test_the_phases_of_one_configuration_are_stored(execute):
    _, measured = execute("benchmark", "-p", "context", 8, "-p", "warmup", 0, "-p", "steps", 2)
    found = rows(measured, "benchmark")
    assert {(row["phase"], row["status"], row["n"]) for row in found} == {
        (phase, "ok", "2") for phase in ("forward", "loss", "backward", "optimizer", "step", "wall")
    }
    assert {(r["model"], r["context"], r["warmup"]) for r in found} == {("tiny", "8", "0")}
