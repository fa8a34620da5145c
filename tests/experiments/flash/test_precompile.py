"""What is compiled ahead, and that the process that measures finds it."""

import contextlib
import sys

import pytest

from a2lib.experiments.flash.precompile import compilation, compilations
from a2lib.experiments.flash.shapes import Shape, sweep_shapes
from a2lib.experiments.harness.process import Worker
from a2lib.experiments.harness.worker import AT_WORK

SHAPES = [Shape("bf16", 1, 1, 2**n, 64, True) for n in range(7, 15)]


def test_our_kernels_compile_once_for_all_lengths():
    tasks = compilations({shape: ("a2lib", "eager", "flex", "compile") for shape in SHAPES})
    names = [task.spec["implementation"] for task in tasks]
    assert {name: names.count(name) for name in names} == {"a2lib": 1, "flex": 8, "compile": 8}


def test_every_shape_of_the_sweep_has_an_estimate():
    for shape in sweep_shapes("all"):
        eager, flex = (compilation(shape, name).bytes for name in ("compile", "flex"))
        assert eager >= 6 * shape.matrix_bytes and flex > 0


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.prefix, reason="Inductor's call of g++ breaks at a space in a path")
def test_the_next_process_finds_the_code_on_disk_and_none_that_was_spoilt(
    monkeypatch, tmp_path, path_of_tests
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # seconds
    shape = {"dtype": "fp32", "batch": 1, "heads": 1, "seq_len": 16, "head_dim": 8, "causal": True}
    task = {
        "do": "a2lib.experiments.flash.precompile:run",
        "spec": {"shape": shape, "implementation": "compile"},
        "device": "cpu",
        "seed": 0,
    }

    def compiled():
        with contextlib.closing(Worker(task["do"])) as worker:
            assert list(worker.ask(task, 300)) == []
            (counted,) = worker.ask(task | {"do": "experiments.flash.inductor:counters"}, 60)
        libraries = list(tmp_path.rglob("*.so"))
        assert libraries and all(path.stat().st_size for path in libraries)
        return counted, libraries

    first, libraries = compiled()
    assert first["autograd_cache_miss"] == 1 and first["fxgraph_cache_miss"] == 2
    for path in libraries:  # as a worker that is killed leaves them, with its compiler
        path.write_bytes(b"")
    (tmp_path / f"{AT_WORK}1").touch()
    second, found = compiled()
    assert second["autograd_cache_hit"] == 1 and second["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in second and set(found) == set(libraries)
