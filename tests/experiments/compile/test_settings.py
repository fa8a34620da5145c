"""What is asked for, and the tasks that come of it."""

import itertools

from a2lib.experiments.compile import (
    HEAD_DIMS,
    SEQ_LENS,
    SWEEPS,
    Parameters,
    attention_shapes,
    model_steps,
)


def test_the_attention_sweep_is_the_grid_of_the_question():
    found = attention_shapes("attention", "cuda")
    assert {(s.seq_len, s.head_dim) for s in found} == {
        (n, d) for n in (256, 1024, 4096, 8192, 16384) for d in (16, 32, 64, 128)
    }
    assert len(found) == 20
    assert {(s.written, s.dtype, s.batch) for s in found} == {("plain", "fp32", 8)}
    # A sweep that is cut off has whole lines, and that of the answer before any other.
    assert [s.head_dim for s in found] == [d for d in (64, 16, 128, 32) for _ in range(5)]
    assert [s.seq_len for s in found[:5]] == sorted(s.seq_len for s in found[:5])


def test_the_other_ways_to_write_it_have_a_line_and_the_ends_of_the_others():
    found = attention_shapes("written", "cuda")
    ways = [("heads", "fp32"), ("causal", "fp32"), ("plain", "bf16")]
    assert list(dict.fromkeys((s.written, s.dtype) for s in found)) == ways
    for written, dtype in ways:
        mine = {(s.seq_len, s.head_dim) for s in found if (s.written, s.dtype) == (written, dtype)}
        assert mine == {(n, 64) for n in SEQ_LENS["cuda"]} | {(16384, 16), (16384, 128)}
    assert len(found) == 3 * 7


def test_all_is_every_sweep():
    for device in ("cuda", "cpu"):
        parts = [s for sweep in SWEEPS[:-1] for s in attention_shapes(sweep, device)]
        assert parts == attention_shapes("all", device)
        models = [s for sweep in SWEEPS[:-1] for s in model_steps(sweep, device)]
        assert models == model_steps("all", device)


def test_whole_models_are_compiled_in_fp32_and_blocks_everywhere():
    found = model_steps("all", "cuda")
    *alone, largest = [one for one in found if one.ways == ("model",)]
    assert found[-1] == largest and (largest.plain.model, largest.plain.mode) == ("10B", "forward")
    few = [one for one in found if one not in (*alone, largest)]
    assert not largest.cached and all(one.ways[:2] == ("none", "blocks") for one in few)
    # Minutes each: once, after all that takes seconds, and the deepest last.
    models = model_steps("models", "cuda")
    assert models[-4:] == alone and [one.plain.model for one in alone] == [
        "2.7B", "medium", "large", "xl25",
    ]  # fmt: skip
    depths = {one.plain.model: one.plain.shape.num_layers for one in alone}
    assert max(depths, key=depths.get) == alone[-1].plain.model
    assert {one.cached for one in alone} == {False}
    assert all(one.cached for one in few)
    plain = [one.plain for one in found if "model" in one.ways and one.plain.precision == "fp32"]
    assert {one.model for one in plain} == {"small", "medium", "large", "xl25", "2.7B", "10B"}
    without = {(one.plain.precision, one.plain.mode) for one in model_steps("10B", "cuda")}
    assert without == set(itertools.product(("fp32", "bf16"), ("forward", "forward-backward")))


def test_one_shape_and_one_model_by_default():
    for device, n, model in (("cuda", 4096, "small"), ("cpu", 64, "tiny")):
        (shape,), (steps,) = Parameters().shapes(device), Parameters().steps(device)
        assert (shape.seq_len, steps.plain.model, steps.plain.batch) == (n, model, 4)
        assert steps.compiled("model").compile == "model" and steps.plain.compile == "none"
    assert Parameters(model="none").steps("cuda") == []
    assert SEQ_LENS["cpu"][-1] < SEQ_LENS["cuda"][0] and HEAD_DIMS["cpu"]
