"""Storing and reading results needs neither torch nor pandas, which the report builds on."""


def test_results_are_stored_and_read_without_them(python, data):
    code = """
import importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "pandas", "numpy"):
            raise ImportError(f"{name} is blocked")
del sys.modules["torch"]
sys.meta_path.insert(0, Block())
from pathlib import Path
from a2lib.measure import CEILING, Store, read_section, start_run, time_call
data = Path(sys.argv[1])
run = start_run(command="test", parameters={}, device="cpu", data=data)
timing = time_call(lambda: None, device="cpu")
Store(CEILING, "cpu", data).put({"operation": "copy", "dtype": "", "size": 1, "status": "ok",
                                 "ms": timing.ms, "n": timing.n, "run": run})
print(len(read_section("ceiling", data)["cpu"]))
import torch
"""
    out, errors = python(code, data).communicate(timeout=60)
    assert out == "1\n" and "torch is blocked" in errors
