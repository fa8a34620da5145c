"""What the worker observes, on the CPU at the smallest size."""

import math

import pytest

from a2lib.experiments import mixed_precision
from a2lib.experiments.harness.sweep import identity
from a2lib.experiments.mixed_precision import ERRORS, TENSORS, handlers
from a2lib.experiments.mixed_precision.handlers import observed_dtypes, part
from a2lib.measure import LAYERNORM


def test_each_part_is_asked_for_once_and_stored(job):
    given = mixed_precision.Parameters(terms=100, features=16)
    asked = []
    for task in mixed_precision.PARTS.tasks(given, "cpu"):
        made = job(LAYERNORM, task)
        handlers.normalise(made)
        asked += [identity(LAYERNORM, key) for key in made.keys]
    stored = [identity(LAYERNORM, row) for row in made.store.rows()]
    assert len(asked) == 137 and sorted(asked) == sorted(stored)
    assert {row["status"] for row in made.store.rows()} == {"ok"}


def test_the_handouts_loops_are_the_default():
    loops = mixed_precision.Parameters().loops
    assert {(loop.terms, loop.step) for loop in loops} == {(1000, "0.01"), (10_000, "0.001")}
    assert len(set(loops)) == 14


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_dtypes_under_the_cpus_autocast(low):
    found = observed_dtypes(low, "cpu", seed=0)
    wide = {name for name, dtype in found.items() if dtype == "fp32"}
    weights = ("fc1.weight", "ln.weight", "fc2.weight")
    assert wide == {"fc1.weight", "loss: cross-entropy", *(f"gradient of {w}" for w in weights)}
    assert set(found) == set(TENSORS) and set(found.values()) == {"fp32", low}


def test_without_autocast_all_is_fp32():
    assert set(observed_dtypes("none", "cpu", seed=0).values()) == {"fp32"}


@pytest.mark.gpu
def test_on_a_gpu_layer_norm_gives_fp32():
    assert observed_dtypes("fp16", "cuda", seed=0)["ln output"] == "fp32"


def computed(quantity, setting, dtype, features=2560):
    key = {"quantity": quantity, "setting": setting, "dtype": dtype, "features": features}
    return part(key, "cpu", seed=0)


def test_the_variance_is_lost_in_one_pass_and_kept_in_two():
    for dtype in ("fp16", "bf16"):
        got, truth = computed("variance, one pass", "mean 100", dtype)
        assert abs(got - truth) > 0.5 * truth
        for quantity in ("variance, two passes", "variance, one pass in fp32"):
            got, truth = computed(quantity, "mean 100", dtype)
            assert got == pytest.approx(truth, rel=0.02)


def test_squares_leave_the_range_of_fp16_alone():
    assert computed("mean of squares", "scale 300", "fp16")[0] == math.inf
    assert computed("mean of squares", "scale 0.0001", "fp16")[0] == 0
    for setting in ("scale 300", "scale 0.0001"):
        got, truth = computed("mean of squares", setting, "bf16")
        assert got == pytest.approx(truth, rel=0.01)


def test_a_small_eps_is_nothing_in_fp16():
    assert computed("eps", "1e-08", "fp16") == (0, 1e-8)
    assert computed("eps", "1e-05", "fp16")[0] == pytest.approx(1e-5, rel=0.01)
    assert math.isnan(computed("constant input, normalised", "1e-08", "fp16")[0])
    assert computed("constant input, normalised", "1e-08", "bf16") == (0, 0)


def test_a_mean_added_one_by_one_stalls_in_bf16():
    got, truth = computed("mean, added one by one", "mean 1", "bf16")
    assert got < 0.6 * truth
    assert computed("mean, added one by one", "mean 1", "fp32")[0] == pytest.approx(truth, rel=1e-2)


def test_the_stored_input_is_judged_by_the_one_before():
    got, truth = computed("variance of the stored input", "mean 300", "bf16")
    same = computed("variance of the stored input", "mean 300", "fp32")
    assert truth == same[1] and got > 1.1 * truth


def test_a_norm_by_hand_is_pytorchs_but_for_rounding():
    for dtype, error in (("fp32", 1e-5), ("fp16", 0.02), ("bf16", 0.1)):
        for quantity in ERRORS:
            got, truth = computed(quantity, "mean 10", dtype, features=64)
            assert truth == 0 and 0 < got < error


def test_seeds_give_other_inputs():
    key = {"quantity": "variance, two passes", "setting": "mean 0", "dtype": "fp32", "features": 16}
    assert part(key, "cpu", seed=0) == part(key, "cpu", seed=0) != part(key, "cpu", seed=1)
