"""notebooks/attention.ipynb through papermill, at the smallest size."""

import csv

import pytest
from notebook_texts import texts


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    asked = ["-p", "seq_len", 32, "-p", "head_dim", 16, "-p", "calls", 2, "-p", "causal", True]
    return execute("attention", *asked)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    found = {}
    for section in ("attention", "attention_saved"):
        with open(measured / section / "cpu.csv", newline="") as file:
            found[section] = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {(r["pass"], r["status"], r["n"], r["run"]) for r in found["attention"]} == {
        (pass_, "ok", "2", run["run"]) for pass_ in ("forward", "backward")
    }
    saved = {r["tensor"]: int(r["saved_bytes"]) for r in found["attention_saved"]}
    tensor = 8 * 32 * 16 * 4
    assert saved == {
        "q": tensor, "k": tensor, "v": tensor, "p": 8 * 32 * 32 * 4, "mask": 32 * 32, "other": 0,
    }  # fmt: skip
    assert run["command"] == (
        "papermill notebooks/attention.ipynb -p seq_len 32 -p head_dim 16 -p causal True -p calls 2"
    )


def test_it_prints_its_tables_and_where_the_rows_are(executed):
    notebook, _ = executed
    printed = "".join(texts(executed[0]))
    assert printed.count(" ± ") + printed.count(" (median)") == 2 and "Bytes that" in printed
    assert "-p sweep limit" in printed and "measured/attention/cpu.csv" in printed


def test_it_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
