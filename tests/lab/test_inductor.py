"""Inductor's caches: moved, filled and found."""

import os

import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from a2lib.lab import inductor


def test_what_is_compiled_again_is_found_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    # Seconds of the C++ compiler for each empty cache.
    quick = torch._inductor.config.patch(cpp_cache_precompile_headers=False)
    hits = []
    with inductor.caches_in(tmp_path), quick:
        for _ in range(2):
            inductor.forget()
            counters.clear()
            torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 1]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert list((tmp_path / "inductor").rglob("*.so"))
