"""Notebooks that measure in one process, through papermill, each at its smallest size."""

import pytest
from notebook_texts import figures, rows, texts

from a2lib.measure import bulk


def test_attention_stores_and_draws_both_passes_and_what_they_save(execute):
    notebook, measured = execute("attention", seq_len=32, head_dim=16, calls=2, causal=True)
    assert {(r["pass"], r["status"], r["n"]) for r in rows(measured, "attention")} == {
        (pass_, "ok", "2") for pass_ in ("forward", "backward")
    }
    saved = {r["tensor"]: int(r["saved_bytes"]) for r in rows(measured, "attention_saved")}
    tensors = dict.fromkeys("qkv", 8 * 32 * 16 * 4)
    assert saved == tensors | {"p": 8 * 32 * 32 * 4, "mask": 32 * 32, "other": 0}
    assert figures(notebook) == 1


def test_benchmark_stores_the_phases_of_one_configuration(execute):
    _, measured = execute("benchmark", context=8, warmup=0, steps=2)
    found = rows(measured, "benchmark")
    assert {(row["phase"], row["status"], row["n"]) for row in found} == {
        (phase, "ok", "2") for phase in ("forward", "loss", "backward", "optimizer", "step", "wall")
    }
    assert {(r["model"], r["context"], r["warmup"]) for r in found} == {("tiny", "8", "0")}


def test_checkpointing_stores_and_draws_a_row_for_each_strategy(execute):
    asked = {"context": 8, "strategies": "none,block", "steps": 1, "precision": "fp32"}
    notebook, measured = execute("checkpointing", **asked)
    found = rows(measured, "checkpointing")
    expected = {("none", "ok", "1", "4"), ("block", "ok", "1", "4")}
    assert {(r["strategy"], r["status"], r["n"], r["layers"]) for r in found} == expected
    assert figures(notebook) == 1


def test_memory_stores_rows_and_pictures_and_draws_the_recording(execute):
    notebook, measured = execute("memory", context=8, batch=2)
    for section, n in (("memory", 2 * 5), ("memory_recording", 2), ("memory_block", 1)):
        found = rows(measured, section)
        assert len(found) == n and {row["status"] for row in found} == {"ok"}
    pictures = sorted(p.parent.parent.name for p in measured.glob("bulk/*/cpu/*.csv"))
    assert pictures == ["largest"] * 2 + ["lines"] * 2 + ["memory"] * 2 + ["saved"]
    assert figures(notebook) == 1


def test_mixed_precision_stores_every_row_and_each_sum_is_what_was_predicted(execute):
    notebook, measured = execute("mixed_precision", terms=50, features=16)
    for section, n in (("accumulation", 7), ("autocast_dtypes", 39), ("layernorm", 137)):
        found = rows(measured, section)
        assert len(found) == n and {row["status"] for row in found} == {"ok"}
    (sums,) = (text for text in texts(notebook) if "off by" in text)
    assert sums.count(" yes ") == 7
    assert figures(notebook) == 1


@pytest.mark.slow
def test_compile_stores_attention_with_what_was_compiled(execute):
    """A whole model would take a minute."""
    # Seconds of the C++ compiler for each empty cache, which are measured and not tested.
    notebook, measured = execute("compile", seq_len=8, head_dim=4, batch=1, model="none")
    found = rows(measured, "compile_attention")
    assert {(r["implementation"], r["pass"], r["status"]) for r in found} == {
        (name, pass_, "ok") for name in ("eager", "compile") for pass_ in ("forward", "backward")
    }
    assert {(r["written"], r["seq_len"], r["head_dim"]) for r in found} == {("plain", "8", "4")}
    made = {r["pass"]: r for r in found if r["implementation"] == "compile"}
    assert [made[p]["kernels_called"] for p in ("forward", "backward")] == ["1", "1"]
    assert [made[p]["library_calls"] for p in ("forward", "backward")] == ["2", "4"]
    assert not list(measured.glob("compile_model/*.csv"))
    assert figures(notebook) == 1


def test_profile_stores_shows_and_draws_a_trace(execute):
    notebook, measured = execute("profile", context=8)
    found = {row["phase"]: row for row in rows(measured, "profile")}
    assert set(found) == {"forward", "loss", "backward", "optimizer", "step"}
    assert {(r["status"], r["profiler"], r["n"]) for r in found.values()} == {("ok", "torch", "3")}
    assert float(found["step"]["no_class_percent"]) <= 2
    name = "tiny-8-4-train-step-fp32-eager-none-torch"
    kernels = bulk.read("kernels", "cpu", name, measured.parent)
    assert kernels.run == found["step"]["run"]
    # Two blocks and the head: 2 * 7 + 1 linear layers, two products of attention each.
    for phase, products in (("forward", 19), ("backward", 38)):
        own = [row for row in kernels.rows if (row["phase"], row["kind"]) == (phase, "matmul")]
        assert sum(row["calls"] for row in own) == products
    assert "what takes the most time" in "".join(texts(notebook)) and figures(notebook) == 1
