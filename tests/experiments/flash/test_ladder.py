"""The ladder: what is asked for, that each rung is what its name says, and what becomes a row."""

import contextlib
import re

import pytest
import torch
from programs import printed

from a2lib.attention import attention_reference, hopper, launch, passes, plans
from a2lib.experiments.flash import ladder, peers, sanity
from a2lib.experiments.flash.shapes import Parameters, Shape

FEW = Shape("bf16", 1, 1, 256, 64, True)
PLAIN = [rung for rung in ladder.RUNGS if rung not in ladder.HOPPER]
SWAPPED = (
    *((passes, name) for name in ("TILES", "WHEN_FEW", "WHEN_SHORT")),
    *((passes, name) for name in ("_kernel", "in_chunks", "keys_per_chunk")),
    *((hopper, name) for name in ("_together", "serves_forward", "serves_backward")),
    *((hopper, "hopper_forward"), (plans, "_plans"), (launch, "_compiled")),
)


def the_task(device="cpu"):
    return ladder.tasks(Parameters(sweep="ladder"), device)[-1]


def test_each_rung_is_asked_for_at_three_shapes_of_one_gpu():
    made = ladder.tasks(Parameters(sweep="ladder"), "cuda")
    assert [t.label for t in made] == [
        f"1x{shape} bf16 causal" for shape in ("16x16384x128", "16x16384x64", "1x4096x64")
    ]
    for task in made:
        assert list(task.rows) == [*ladder.PEERS, *ladder.RUNGS] and task.in_turns
        assert {key["pass"] for key in task.keys} == set(ladder.PASSES)
        assert len({key["gpu"] for key in task.keys}) == 1
    assert len(ladder.tasks(Parameters(sweep="all"), "cuda")) == len(made)
    for other in (Parameters(sweep="leaderboard"), Parameters(sweep="all", implementations="flex")):
        assert not ladder.tasks(other, "cuda")
    assert len(ladder.compilations(made)) == len(made) * len(ladder.RUNGS)


def test_the_rungs_differ_in_their_kernels_and_tiles_as_they_say(monkeypatch):
    """By (kernel, its tile) of what plain Triton would be launched with, and is not."""

    def spy(kernel, key, n_programs, tensors, numbers, constants, options):
        found[rung].append((kernel, (constants.get("Bq"), constants.get("Bk"))))

    monkeypatch.setattr(passes, "launch", spy)
    found = {rung: [] for rung in PLAIN}
    *qkv, do = peers.inputs(FEW, "cpu", 0)
    for rung in PLAIN:
        ladder.Rung(rung, FEW, "cpu").call(qkv, do, "end_to_end")()
    own = [passes._kernel(name) for name in ladder.TUTORIAL]
    for rung in ("every_tile", "to_diagonal", "two_loops"):
        assert [tile for _, tile in found[rung]] == [t[:2] for t in ladder.TUTORIAL.values()]
        assert ([kernel for kernel, _ in found[rung]] == own) == (rung == "two_loops")
    assert found["tuned_tiles"] != found["two_loops"]
    assert [kernel for kernel, _ in found["tuned_tiles"]] == own
    chunks = passes._kernel("backward_chunks")
    assert [r for r in PLAIN if chunks in [k for k, _ in found[r]]] == ["query_chunks"]


def test_the_lowest_looks_at_keys_that_no_query_sees():
    *qkv, do = peers.inputs(FEW, "cpu", 0)
    with torch.no_grad():
        qkv[2][..., -1, :] = float("nan")
    finite = {
        rung: ladder.Rung(rung, FEW, "cpu").call(qkv, do, "forward")()[..., :128, :].isfinite()
        for rung in ("every_tile", "to_diagonal")
    }
    assert not finite["every_tile"].any() and finite["to_diagonal"].all()


@pytest.mark.parametrize(
    "rung, seq_len, causal",
    [("every_tile", 200, True), ("to_diagonal", 200, True), ("every_tile", 130, False)],
)
def test_masks_in_every_tile_change_no_result(rung, seq_len, causal):
    shape = Shape("bf16", 1, 1, seq_len, 32, causal)
    *qkv, do = peers.inputs(shape, "cpu", 0)
    expected = sanity.Expected(*qkv, do, causal=causal, dtype="bf16")
    with ladder.Rung(rung, shape, "cpu") as lower:
        expected.check(lower.forward, qkv)


def test_the_library_is_whole_again_also_after_an_error():
    before = [getattr(module, name) for module, name in SWAPPED]
    rung = ladder.Rung("every_tile", FEW, "cpu")
    with contextlib.suppress(ZeroDivisionError), rung:
        within = [getattr(module, name) for module, name in SWAPPED]
        raise ZeroDivisionError
    assert not any(x is y for x, y in zip(before, within, strict=True))
    after = [getattr(module, name) for module, name in SWAPPED]
    assert all(x is y for x, y in zip(before, after, strict=True))


def test_the_highest_rung_is_the_library():
    swaps = ladder.Rung(ladder.RUNGS[-1], FEW, "cpu").swaps
    caches = {(plans, "_plans"), (launch, "_compiled")}
    assert {(module, name) for module, name, _ in swaps} == caches


@pytest.mark.parametrize("right", [True, False])
def test_rows_of_a_cpu(put, monkeypatch, right):
    def build(name, shape, device):
        causal = right or name != "a2lib"
        return lambda q, k, v: attention_reference(q, k, v, causal)

    monkeypatch.setattr(peers, "build", build)
    rows = put(ladder.measure, the_task())
    assert len(rows) == len(the_task().keys)
    for row in rows:
        if row["rung"] in ("sdpa_cudnn", *ladder.HOPPER):
            assert row["status"] == "unsupported"
        elif right or row["rung"] == "sdpa_flash":
            assert row["status"] == "ok" and row["ms"] > 0 and row["gpu"] == "cpu"
        else:
            assert row["status"] == "error" and "wrong o" in row["note"] and "ms" not in row


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is compiled")
def test_a_process_of_its_own_interprets_what_it_cannot_compile(python, monkeypatch):
    code = """
from a2lib.experiments.flash import ladder, peers, sanity
from a2lib.experiments.flash.shapes import Shape
ladder.prepare()
shape = Shape("bf16", 1, 1, 64, 16, True)
*qkv, do = peers.inputs(shape, "cpu", 0)
expected = sanity.Expected(*qkv, do, causal=True, dtype="bf16")
with ladder.Rung("to_diagonal", shape, "cpu") as rung:
    expected.check(rung.forward, qkv)
"""
    monkeypatch.delenv("TRITON_INTERPRET")
    printed(python(code), 300)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [FEW, Shape("bf16", 1, 16, 4096, 64, True)], ids=str)
def test_every_rung_on_the_gpu(put, configured, shape):
    task = the_task("cuda")
    task.spec["shape"].update(vars(shape))
    rows = put(ladder.measure, task, "cuda")
    assert not put.raised and len(rows) == len(task.keys)
    supported = torch.cuda.get_device_capability() == (9, 0)
    for row in rows:
        assert re.fullmatch("[0-9a-f]{8}", row["gpu"])
        if supported or row["rung"] not in (*ladder.HOPPER, "sdpa_cudnn"):
            assert row["status"] == "ok" and row["ms_p20"] <= row["ms"] <= row["ms_p80"], row
