"""What the ladder's page derives from its rows, by value, on invented ones of two GPUs."""

import pandas as pd
import pytest

from a2lib.experiments.flash import ladder as measured
from a2lib.experiments.flash.shapes import Parameters
from a2lib.report.pages import flash_ladder as ladder
from a2lib.theory.attention import in_chunks, keys_per_chunk


def invented(**ms):
    """Rung k, counted from the top, takes 2^k ms on one GPU and 2.2^k on the other; peers 4."""
    found = []
    for task in measured.tasks(Parameters(sweep="ladder"), "cuda"):
        for gpu, base in (("a", 2.0), ("b", 2.2)):
            for key in task.keys:
                order = measured.RUNGS[::-1]
                own = key["rung"] in order
                time = base ** order.index(key["rung"]) if own else 4.0
                found.append({**key, "gpu": gpu, "status": "ok", "ms": ms.get(key["rung"], time)})
    return ladder.columns(pd.DataFrame(found), None)


def test_the_rungs_and_shapes_are_those_that_are_measured():
    assert tuple(ladder.RUNGS) == measured.RUNGS and set(ladder.PEERS) == set(measured.PEERS)
    assert tuple(ladder.PASSES) == measured.PASSES
    assert set(invented()["kind"]) == set(ladder.SHAPES)


def test_rungs_that_change_nothing_at_a_shape_are_those_that_the_library_does_not_choose():
    tiles = pytest.importorskip("a2lib.attention.tiles")
    cells = invented()[["kind", "heads", "head_dim", "seq_len"]].drop_duplicates()
    assert len(cells) == len(ladder.SHAPES)
    for kind, heads, d, n in cells.itertuples(index=False):
        chosen = {
            "key_chunks": keys_per_chunk(n, n, heads, True, 2) > 0,
            "query_chunks": in_chunks(n, heads, d, True, 2),
            "consumers": tiles.hopper_forward(d, n, heads, True)[0] > 1,
            "heads_in_l2": heads > 1,
        }
        assert {rung for rung, on in chosen.items() if not on} == set(ladder.SAME[kind])


def test_a_gain_is_of_one_gpu_and_a_median_over_all():
    rows = invented()
    for gpu, base in (("a", 2.0), ("b", 2.2)):
        own = rows[(rows["gpu"] == gpu) & rows["rung"].isin(ladder.RUNGS)]
        first = own["rung"] == "every_tile"
        assert own["gain"][first].isna().all()
        assert own["gain"][~first].to_numpy() == pytest.approx(base)
    assert ladder.rungs(rows, "few")["gain"]["one_sweep"] == pytest.approx(2.1)
    assert ladder.rungs(rows, "few")["gain"][[*ladder.PEERS]].isna().all()
    at = rows[(rows["rung"] == "one_sweep") & (rows["gpu"] == "a")]
    assert (at["cudnn"] == 2).all() and (at["fa2"] == 2).all()


def test_tables_have_a_line_a_rung_and_ranges_over_the_gpus():
    rows = invented(query_chunks=2.0)
    gains, machines = ladder.gains(rows), ladder.machines(rows)
    assert list(gains["rung"]) == [*ladder.RUNGS.values(), *ladder.PEERS.values()]
    assert len(machines) == 6 and set(machines["ours / cuDNN"]) == {"0.500"}
    rows.loc[rows["gpu"] == "b", ["cudnn", "fa2"]] *= 2
    assert set(ladder.machines(rows)["ours / cuDNN"]) == {"0.500 to 1.00"}


def test_a_rung_without_a_kernel_is_left_out_of_the_figure():
    rows = invented()
    rows.loc[rows["rung"] == "one_sweep", "ms"] = None
    (ax,) = ladder.climb(rows, "few").figure.axes
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ladder.RUNGS["one_sweep"] not in names and ladder.RUNGS["key_chunks"] in names
    assert ladder.RUNGS["consumers"] not in names
