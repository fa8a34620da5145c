"""notebooks/ddp.ipynb through papermill, with two processes: ours in buckets, and PyTorch's."""

from notebook_texts import figures, rows

from a2lib.experiments.data_parallel.times import FEWEST
from a2lib.measure import bulk


def test_ours_and_pytorchs_are_stored_with_their_parts_and_drawn(execute):
    asked = ["-p", "wrappers", "bucketed,torch_ddp", "-p", "bucket_mb", 100, "-p", "context", 8]
    notebook, measured = execute("ddp", *asked)
    found = {row["wrapper"]: row for row in rows(measured, "ddp")}
    assert set(found) == {"bucketed", "torch_ddp"}
    for row in found.values():
        columns = ("model", "context", "bucket_mb", "backend", "world_size", "status")
        assert [row[c] for c in columns] == ["tiny", "8", "100", "gloo", "2", "ok"], row
        assert int(row["n"]) >= FEWEST
        ranks = [float(row[f"ms_rank_{one}"]) for one in ("min", "median", "max")]
        assert ranks == sorted(ranks) and ranks[0] > 0
        base = [float(row[f"ms_without{one}"]) for one in ("_p20", "", "_p80")]
        assert base == sorted(base) and base[0] > 0
        assert float(row["ms_backward_without"]) > 0 and row["ms_host"] == ""
    ours, peer = found["bucketed"], found["torch_ddp"]
    # PyTorch's cannot send without a backward.
    assert float(ours["ms_communication"]) > 0 and peer["ms_communication"] == ""
    assert int(ours["sent_bytes"]) == int(peer["sent_bytes"]) > 0
    name = "ddp-tiny-bucketed-100-MB-2-ranks"
    assert bulk.pictures("strip", measured.parent) == [("cpu", name)]
    drawn = bulk.read("strip", "cpu", name, measured.parent)
    assert drawn.run == ours["run"] and drawn.about["wrapper"] == "bucketed"
    assert "backward" in {row["phase"] for row in drawn.rows}
    assert figures(notebook) == 1
