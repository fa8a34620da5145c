"""The ladder: that each rung is what its name says, and that the library is whole again."""

import contextlib

import pytest
import torch
from attention_inputs import inputs
from programs import printed

from a2lib.attention import flash_attention, hopper, launch, passes, plans, sanity
from a2lib.attention.ladder import HOPPER, RUNGS, TUTORIAL, Rung

FEW = 1, 1, 256, 64
PLAIN = [rung for rung in RUNGS if rung not in HOPPER]
SWAPPED = (
    *((passes, name) for name in ("TILES", "WHEN_FEW", "WHEN_SHORT")),
    *((passes, name) for name in ("_kernel", "in_chunks", "keys_per_chunk")),
    *((hopper, name) for name in ("_together", "serves_forward", "serves_backward")),
    *((hopper, "hopper_forward"), (plans, "_plans"), (launch, "_compiled")),
)


def attend(rung, q, k, v):
    with Rung(rung, "cpu"):
        return flash_attention(q, k, v, is_causal=True)


def test_the_rungs_differ_in_their_kernels_and_tiles_as_they_say(monkeypatch):
    """By (kernel, its tile) of what plain Triton would be launched with, and is not."""

    def spy(kernel, key, n_programs, tensors, numbers, constants, options):
        found[rung].append((kernel, (constants.get("Bq"), constants.get("Bk"))))

    monkeypatch.setattr(passes, "launch", spy)
    found = {rung: [] for rung in PLAIN}
    *qkv, do = inputs("bf16", *FEW)
    for rung in PLAIN:
        with Rung(rung, "cpu"):
            torch.autograd.grad(flash_attention(*qkv, is_causal=True), qkv, do)
    own = [passes._kernel(name) for name in TUTORIAL]
    for rung in ("every_tile", "to_diagonal", "two_loops"):
        assert [tile for _, tile in found[rung]] == [t[:2] for t in TUTORIAL.values()]
        assert ([kernel for kernel, _ in found[rung]] == own) == (rung == "two_loops")
    assert found["tuned_tiles"] != found["two_loops"]
    assert [kernel for kernel, _ in found["tuned_tiles"]] == own
    chunks = passes._kernel("backward_chunks")
    assert [r for r in PLAIN if chunks in [k for k, _ in found[r]]] == ["query_chunks"]


def test_the_lowest_looks_at_keys_that_no_query_sees():
    *qkv, _ = inputs("bf16", *FEW)
    with torch.no_grad():
        qkv[2][..., -1, :] = float("nan")
    finite = {
        rung: attend(rung, *qkv)[..., :128, :].isfinite() for rung in ("every_tile", "to_diagonal")
    }
    assert not finite["every_tile"].any() and finite["to_diagonal"].all()


@pytest.mark.parametrize(
    "rung, seq_len, causal",
    [("every_tile", 200, True), ("to_diagonal", 200, True), ("every_tile", 130, False)],
)
def test_masks_in_every_tile_change_no_result(rung, seq_len, causal):
    *qkv, do = inputs("bf16", 1, 1, seq_len, 32)
    expected = sanity.Expected(*qkv, do, causal=causal, dtype="bf16")
    with Rung(rung, "cpu"):
        expected.check(lambda q, k, v: flash_attention(q, k, v, is_causal=causal), qkv)


def test_the_library_is_whole_again_also_after_an_error():
    before = [getattr(module, name) for module, name in SWAPPED]
    rung = Rung("every_tile", "cpu")
    with contextlib.suppress(ZeroDivisionError), rung:
        within = [getattr(module, name) for module, name in SWAPPED]
        raise ZeroDivisionError
    assert not any(x is y for x, y in zip(before, within, strict=True))
    after = [getattr(module, name) for module, name in SWAPPED]
    assert all(x is y for x, y in zip(before, after, strict=True))


def test_the_highest_rung_is_the_library():
    swaps = Rung(list(RUNGS)[-1], "cpu").swaps
    caches = {(plans, "_plans"), (launch, "_compiled")}
    assert {(module, name) for module, name, _ in swaps} == caches


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is compiled")
def test_a_process_of_its_own_interprets_what_it_cannot_compile(python, monkeypatch):
    code = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from a2lib.attention import flash_attention, sanity
from a2lib.attention.ladder import Rung
q, k, v, do = (torch.randn(1, 1, 64, 16, dtype=torch.bfloat16) for _ in range(4))
qkv = [x.requires_grad_() for x in (q, k, v)]
expected = sanity.Expected(*qkv, do, causal=True, dtype="bf16")
with Rung("to_diagonal", "cpu"):
    expected.check(lambda q, k, v: flash_attention(q, k, v, is_causal=True), qkv)
"""
    monkeypatch.delenv("TRITON_INTERPRET")
    printed(python(code), 300)
