"""The ladder: that each rung is what its name says, and that the library is whole again."""

import contextlib

import pytest
import torch
from attention_inputs import inputs
from attention_standins import watch_steps

from a2lib.attention import dispatch, flash_attention
from a2lib.attention.ladder import HOPPER, RUNGS, Rung
from a2lib.attention.tiles import TUTORIAL
from a2lib.lab import sanity

FEW = 1, 1, 256, 64
PLAIN = [rung for rung in RUNGS if rung not in HOPPER]


def attend(rung, q, k, v):
    with Rung(rung, "cpu"):
        return flash_attention(q, k, v, is_causal=True)


def test_the_rungs_differ_in_their_kernels_and_tiles_as_they_say(monkeypatch):
    """By (kernel, its masks, its tile) of what plain Triton would be launched with."""
    steps, found = [], {}
    watch_steps(monkeypatch, steps, launch=False)
    *qkv, do = inputs("bf16", *FEW)
    for rung in PLAIN:
        steps.clear()
        with Rung(rung, "cpu"):
            torch.autograd.grad(flash_attention(*qkv, is_causal=True), qkv, do)
        found[rung] = {}
        for step in steps:
            tile = step.tile and step.tile[1]
            found[rung][step.kernel] = step.options.get("MASKS"), tile
    masks = {"every_tile": "all", "to_diagonal": "diagonal", "two_loops": "edges"}
    for rung, mask in masks.items():
        assert found[rung] == {kernel: (mask, tile) for kernel, tile in TUTORIAL.items()}
    assert found["tuned_tiles"] != found["two_loops"]
    assert found["tuned_tiles"].keys() == TUTORIAL.keys()
    assert {mask for mask, _ in found["tuned_tiles"].values()} == {"edges"}
    for rung in PLAIN:
        assert ("backward_chunks" in found[rung]) == (rung == "query_chunks")


def test_each_rung_of_hopper_takes_one_technique_away():
    """The table is asked at the leaderboard's shape and at one head, on a Hopper GPU."""
    board = dispatch.Call("bf16", 1, 16, 16, 16384, 16384, 128, True)
    few = board._replace(heads=1, kv_heads=1, n_queries=4096, n_keys=4096)

    def chosen(without):
        dispatch.without = frozenset(without)
        try:
            found = [dispatch.forward_form(board), dispatch.backward_form(board)]
            found += [dispatch.forward_form(few), dispatch.backward_form(few)]
            consumers = dispatch.forward_consumers(board)[0]
            return *found, consumers, dispatch.heads_together(2**25, 16, False, True)
        finally:
            dispatch.without = frozenset()

    names, seen = list(RUNGS), []
    for name in names[names.index("tuned_tiles") :]:
        seen.append(chosen(names[names.index(name) + 1 :]))
    plain, hopper = ("plain", "two_sweeps"), ("hopper", "two_sweeps")
    assert seen == [
        (*plain, *plain, 1, 16),
        (*hopper, *hopper, 1, 16),
        (*hopper, *hopper, 2, 16),
        ("hopper", "one_sweep", "hopper", "one_sweep", 2, 16),
        ("hopper", "one_sweep", "hopper", "one_sweep", 2, 1),
        ("hopper", "one_sweep", "key_chunks", "one_sweep", 2, 1),
        ("hopper", "one_sweep", "key_chunks", "hopper_chunks", 2, 1),
    ]


def test_the_lowest_looks_at_keys_that_no_query_sees():
    *qkv, _ = inputs("bf16", *FEW)
    with torch.no_grad():
        qkv[2][..., -1, :] = float("nan")
    assert not attend("every_tile", *qkv)[..., :128, :].isfinite().any()
    assert attend("to_diagonal", *qkv)[..., :128, :].isfinite().all()


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
    rung = Rung("every_tile", "cpu")
    with contextlib.suppress(ZeroDivisionError), rung:
        assert dispatch.without == set(RUNGS) - {"every_tile"}
        raise ZeroDivisionError
    assert not dispatch.without
    assert not Rung(list(RUNGS)[-1], "cpu").without
