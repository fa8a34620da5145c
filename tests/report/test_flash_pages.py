"""What the pages on attention derive from their rows, by value; the ladder's are invented."""

import functools

import pandas as pd
import pytest
from attention_standins import call
from notebook_cells import load_cells

from a2lib import lab
from a2lib.attention import dispatch
from a2lib.attention.ladder import RUNGS
from a2lib.report import data
from a2lib.report.page import one, pick
from a2lib.report.pages import flash, flash_shapes
from a2lib.report.pages import flash_ladder as ladder
from a2lib.theory.attention import attention_flops

WHERE = {"dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 16384, "head_dim": 64, "causal": True}


def kernel(name, tensor, l2, launch=0, run="R"):
    key = {"implementation": "a2lib", **WHERE, "pass": "backward", "launch": launch, "kernel": name}
    shares = {"tensor_percent": tensor, "exp_percent": tensor / 2, "issue_percent": 9.0}
    return {**key, "device_bytes": 10, "l2_bytes": l2, **shares, "status": "ok", "run": run}


def test_a_call_is_its_largest_kernel_of_one_run():
    rows = [kernel("a", 50.0, 800), kernel("b", 1.0, 10, 1), kernel("c", 9.0, 900, 2, "older")]
    [call] = flash.calls(pd.DataFrame(rows), None).itertuples()
    assert (call.tensor, call.exp) == (50, 25)


def test_the_estimate_in_round_numbers():
    # 2 matmuls of 16 x 16384^2 x 64, half of the pairs, at 989.4 TFLOP/s: 0.556 ms; 5: 1.39 ms.
    forward, backward = flash.least_times("forward"), flash.least_times("backward")
    assert forward["tensor cores"] == pytest.approx(0.5556, abs=1e-4)
    assert backward["tensor cores"] == pytest.approx(2.5 * forward["tensor cores"])
    # An SM does 4,096 operations of bf16 in a clock and 16 exponentials; 256 a score at d = 64.
    assert forward["exponentials"] == pytest.approx(forward["tensor cores"])
    assert backward["device memory"] < 0.1 < backward["exponentials"]
    assert flash.peak_mhz() == pytest.approx(1830, abs=1)
    # The 132 SMs are full from 264 tiles on.
    assert list(flash.tile_times([132, 264, 528])) == [132, 264, 1056]


def test_columns_are_of_the_gpus_time():
    stored = pick(data.load("flash"), local=False)
    graph = stored["ms"].where(stored["seq_len"] != 128) * 0.5
    rows = flash.columns(stored.assign(ms_graph=graph), None)
    assert len(rows) == len(stored) and set(rows["kind"]) == {"one head", "board", "paper"}
    key = [*flash.SHAPE, "implementation"]
    called = stored[[*key, "ms"]].rename(columns={"ms": "called"})
    beside = rows.merge(called, on=key).dropna(subset=["ms"])
    expected = beside["called"].where(beside["seq_len"] == 128, 0.5 * beside["called"])
    assert (beside["ms"] == expected).all() and len(beside)
    assert (beside["timed"] == beside["called"]).all()
    launched = rows.dropna(subset=["ms", "ms_host"])
    longer = launched["ms_host"] > launched["ms"]
    assert longer.any() and not longer.all()
    assert (launched["steady"] == launched["ms_host"].where(longer, launched["ms"])).all()
    own = rows[(rows["kind"] == "board") & (rows["pass"] == "end_to_end")].dropna(subset=["ms"])
    time = own.set_index("implementation")["ms"]
    first = own[own["implementation"] == "a2lib"].iloc[0]
    flops = attention_flops(1, 16, 16384, 16384, 64, True, "end_to_end")
    assert first["tflops"] == pytest.approx(flops / time["a2lib"] / 1e9)
    others = time.drop(["a2lib", flash.FA4])
    part = stored[stored["implementation"] == "eager"].assign(implementation=flash.PART, ms=1e-3)
    peers = flash.columns(pd.concat([stored, part]), None)["peer"].dropna()
    assert flash.PART not in set(peers) and len(peers)
    assert (first["peer"], first["best"]) == (others.idxmin(), others.min())


@pytest.fixture(scope="module")
def measured():
    """Return the notebook's names where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "device_kind", lambda: "cuda")
        return load_cells("flash", sweep="ladder")


@pytest.fixture
def invented(measured):
    return functools.partial(rows_of, measured)


def rows_of(measured, **ms):
    """Rung k, counted from the top, takes 2^k ms on one GPU and 2.2^k on the other; peers 4."""
    found = []
    for keys in measured.ladder_tasks:
        for gpu, base in (("a", 2.0), ("b", 2.2)):
            for key in keys:
                order = list(RUNGS)[::-1]
                own = key["rung"] in order
                time = base ** order.index(key["rung"]) if own else 4.0
                row = {**key, "gpu": gpu, "status": "ok", "run": "20261129"}
                found.append({**row, "ms": ms.get(key["rung"], time)})
    return ladder.columns(pd.DataFrame(found), None)


def test_the_rungs_and_shapes_are_those_that_are_measured(measured, invented):
    assert tuple(ladder.RUNGS) == tuple(RUNGS)
    assert set(ladder.PEERS) == set(measured.LADDER_PEERS)
    assert set(invented()["kind"]) == set(ladder.SHAPES)


def test_rungs_that_change_nothing_at_a_shape_are_those_that_the_library_does_not_choose(invented):
    cells = invented()[["kind", "heads", "head_dim", "seq_len"]].drop_duplicates()
    assert len(cells) == len(ladder.SHAPES)
    for kind, heads, d, n in cells.itertuples(index=False):
        one = call("bf16", heads, n, d)
        chosen = {
            "key_chunks": dispatch.keys_per_chunk(one) > 0,
            "query_chunks": dispatch.in_chunks(one),
            "consumers": dispatch.forward_consumers(one)[0] > 1,
            "heads_in_l2": heads > 1,
        }
        assert {rung for rung, on in chosen.items() if not on} == set(ladder.SAME[kind])


def test_a_gain_is_of_one_gpu_and_the_last_run(invented):
    rows = invented()
    for gpu, base in (("a", 2.0), ("b", 2.2)):
        own = rows[(rows["gpu"] == gpu) & rows["rung"].isin(ladder.RUNGS)]
        first = own["rung"] == "every_tile"
        assert own["gain"][first].isna().all()
        assert own["gain"][~first].to_numpy() == pytest.approx(base)
    assert rows[rows["rung"].isin(ladder.PEERS)]["gain"].isna().all()
    assert ladder.spread(rows) == pytest.approx(0.1)
    older = rows.assign(run=rows["run"].where(rows["gpu"] == "b", "20261128"))
    assert ladder.gain(older, "few", "one_sweep") == pytest.approx(2.2)
    assert ladder.ms(older, "few", "sdpa_cudnn") == 4
    shown = ladder.table(older).set_index("step")
    assert shown.loc["one-sweep backward"].tolist() == ["2.20"] * 3
    assert shown.loc["several consumers", "one head of 64"] == "·"
    assert shown.loc["**the library**", "16 heads of 64"] == "1.00 ms"


def test_a_ratio_launched_from_python_is_of_todays_launcher():
    key = {"dtype": "bf16", "batch": 1, "heads": 1, "head_dim": 64, "causal": True}
    key |= {"pass": "end_to_end", "kind": "one head"}
    rows = []
    for n, run in ((128, "20261128T220421Z-older"), (256, "20261129T121712Z-today")):
        for name, steady in ((flash.OURS, 3.0), ("sdpa_flash", 2.0), ("sdpa_cudnn", 4.0)):
            rows.append({**key, "seq_len": n, "implementation": name, "run": run, "steady": steady})
    beside = flash.launched_beside(pd.DataFrame(rows), "bf16")
    assert beside.loc[(256, 64)].to_dict() == {"sdpa_flash": 1.5, "sdpa_cudnn": 0.75}
    assert len(beside) == 1
    assert flash.launched(pd.DataFrame(rows), "bf16").loc[256, 64] == 1.5


def test_a_verdict_launched_from_python_holds_by_both_measures():
    key = {"dtype": "bf16", "batch": 1, "heads": 1, "head_dim": 64, "causal": True}
    key |= {"pass": "end_to_end", "kind": "one head", "run": "20261129T121712Z-today"}
    rows = []
    # tokens -> a2lib's longer of two and timed call; the peer's are 2 and 4
    for n, (steady, timed) in {128: (3, 5), 256: (3, 4), 512: (3, 2), 1024: (1, 2)}.items():
        for name, times in ((flash.OURS, (steady, timed)), ("sdpa_flash", (2, 4))):
            own = {"seq_len": n, "implementation": name}
            rows.append({**key, **own, "steady": times[0], "timed": times[1]})
    ratios = flash.launched_by_both(pd.DataFrame(rows), "bf16").droplevel("head_dim")
    assert ratios.loc[128].to_dict() == {"steady": 1.5, "timed": 1.25}
    lost, won = flash.lost_by_both(ratios), flash.won_by_both(ratios)
    assert list(ratios.index[lost]) == [128] and list(ratios.index[won]) == [1024]


def test_a_ratio_in_bf16_compares_times_of_one_run():
    rows = flash.columns(pick(data.load("flash"), local=False), None)
    own = pick(rows, implementation="a2lib", dtype="bf16")
    theirs = rows[[*flash.SHAPE, "implementation", "run"]]
    theirs = theirs.rename(columns={"implementation": "peer", "run": "of_peer"})
    pairs = own.merge(theirs, on=[*flash.SHAPE, "peer"])
    assert len(pairs) == len(own) > 0 and (pairs["run"] == pairs["of_peer"]).all()


def test_masks_heads_and_lengths_order_the_papers_ratios():
    rows = flash.columns(pick(data.load("flash"), local=False), None)
    for ratios in (flash_shapes.paper_ratios, flash_shapes.fa4_ratios):
        ratio = ratios(rows, "forward")
        assert ratio.index.names == ["causal", "head_dim", "seq_len"] and len(ratio) == 24
        shape = {"kind": "paper", "pass_": "forward", "causal": True, "head_dim": 64}
        row = one(rows, implementation="a2lib", seq_len=4096, **shape)
        fa4 = one(rows, implementation="fa4", seq_len=4096, **shape)
        other = row.best if ratios is flash_shapes.paper_ratios else fa4.ms
        assert ratio.loc[True, 64, 4096] == pytest.approx(row.ms / other)
