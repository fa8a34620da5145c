"""What is compiled ahead."""

from a2lib.experiments.flash.comparison import compilations
from a2lib.experiments.flash.shapes import Shape

SHAPES = [Shape("bf16", 1, 1, 2**n, 64, True) for n in range(7, 15)]


def test_our_kernels_compile_once_for_all_lengths():
    tasks = compilations({shape: ("a2lib", "eager", "flex", "compile") for shape in SHAPES})
    names = [task.spec["implementation"] for task in tasks]
    assert {name: names.count(name) for name in names} == {"a2lib": 1, "flex": 8, "compile": 8}
