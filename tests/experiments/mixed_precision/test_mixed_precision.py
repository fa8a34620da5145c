"""What the worker observes, on the CPU at the smallest size."""

import pytest

from a2lib.experiments.mixed_precision import ERRORS, TENSORS
from a2lib.experiments.mixed_precision.handlers import observed_dtypes, part


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


def test_a_norm_by_hand_is_pytorchs_but_for_rounding():
    for dtype, error in (("fp32", 1e-5), ("fp16", 0.02), ("bf16", 0.1)):
        for quantity in ERRORS:
            got, truth = computed(quantity, "mean 10", dtype, features=64)
            assert truth == 0 and 0 < got < error


def test_seeds_give_other_inputs():
    key = {"quantity": "variance, two passes", "setting": "mean 0", "dtype": "fp32", "features": 16}
    assert part(key, "cpu", seed=0) == part(key, "cpu", seed=0) != part(key, "cpu", seed=1)
