"""The first step taken apart on a GPU: every preparation, with a tiny model."""

import pytest

from a2lib.experiments import benchmark
from a2lib.experiments.benchmark import configurations
from a2lib.experiments.benchmark.configurations import Parameters
from a2lib.lab import BENCHMARK_FIRST

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_every_preparation_has_its_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))
    for name in ("FIRST", "FIRST_COMPILED"):
        monkeypatch.setitem(getattr(configurations, name), "cuda", ("tiny",))
    monkeypatch.setitem(configurations.REPEATS, "cuda", 1)
    run = benchmark.start(Parameters(sweep="first"))
    benchmark.measure_first(run)
    rows = run.store(BENCHMARK_FIRST).rows()
    assert [(row["prepared"], row["part"], row["note"]) for row in rows if row["note"]] == []
    found = {(row["compile"], row["prepared"]) for row in rows}
    assert found == {
        *(("none", name) for name in ("nothing", "product", "block", "memory", "modules")),
        *(("blocks", name) for name in ("nothing", "cached")),
    }
    assert all(float(row["ms"]) > 0 for row in rows)
    assert {row["part"] for row in rows} >= {"context", "product", "block_first", "memory"}
