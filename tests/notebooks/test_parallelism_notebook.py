"""notebooks/parallelism.ipynb through papermill, with two processes and tiny layers."""

from notebook_texts import figures, rows


def test_each_pass_is_stored_together_and_apart_and_drawn(execute):
    sizes = {"tokens": 16, "d_model": 16, "d_ff": 32, "layers": 2}
    asked = (word for name in sizes for word in ("-p", name, sizes[name]))
    notebook, measured = execute("parallelism", *asked)
    found = rows(measured, "parallelism")
    passes = ("forward", "backward", "end_to_end")
    assert {(r["scheme"], r["mesh"], r["pass"]) for r in found} == {
        (*one, pass_) for one in (("dp", "2x1"), ("fsdp", "2x1"), ("tp", "1x2")) for pass_ in passes
    }
    for row in found:
        key = [row[c] for c in ("backend", "world_size", "dtype", "d_model", "d_ff", "status")]
        assert key == ["gloo", "2", "fp32", "16", "32", "ok"], row
        assert float(row["ms_without"]) > 0 and int(row["n"]) >= 5
        sends = (row["scheme"], row["pass"]) != ("dp", "forward")
        assert bool(row["ms_communication"]) is sends and row["ms_data"] == ""
        assert row["conditions"].endswith("cores")
    assert figures(notebook) == 1
