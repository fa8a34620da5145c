"""The lines that say where figures come from, and how numbers are written."""

import json

import pytest

from a2lib.report import data, provenance


def test_a_source_line_names_gpu_versions_commit_date_and_file(complete):
    text = str(provenance.source(data.load("flash", [complete]), data.load_runs([complete])))
    parts = ("1 × NVIDIA H200", "0.0-synthetic", "`synthetic`", "2026-11-21", "nvidia-h200.csv")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("stored", "shown"), [("91900", "9.19.0"), ("8907", "8.9.7"), ("", "")])
def test_cudnn_versions_are_readable(stored, shown):
    assert provenance._version("cudnn", stored) == shown


def test_a_command_that_repeats():
    ran = "papermill notebooks/flash.ipynb -p sweep all -p time_limit_s 300"
    again = "papermill notebooks/flash.ipynb -p sweep all -p remeasure True"
    assert provenance.repeating(ran) == provenance.repeating(again) == again
    assert provenance.repeating("make flash") == "make flash"


def test_the_lab_record_says_what_its_run_measured(complete, tmp_path):
    rows = data.load("flash", [complete])[:2]
    rows.iloc[0, rows.columns.get_loc("run")] = "R1"
    notebook = tmp_path / "n.ipynb"
    cell = {"cell_type": "code", "outputs": [{"text": ["NVIDIA H200\n", "  run     R1\n"]}]}
    notebook.write_text(json.dumps({"cells": [cell]}))
    said = str(provenance.lab_record(rows, notebook))
    assert said.endswith("measured 1 of the 2 rows shown here; the others are of other runs.")
    assert str(provenance.lab_record(rows[:1], notebook)).endswith("1 of the 1 rows shown here.")
    none = str(provenance.lab_record(rows[1:], notebook))
    assert none.endswith("measured none of the 1 rows shown here, which are of others.")


def test_what_all_runs_share_is_said_once(complete):
    runs = data.load_runs([complete])
    rows = data.load("flash", [complete])[:2].assign(run=[*runs.index, "R2"])
    runs.loc["R2"] = runs.iloc[0]
    runs.loc["R2", ["triton", "git"]] = "3.9", "abc"
    table = provenance.runs_table(rows, runs, "Runs", "n")
    assert list(table.frame.columns) == ["run", "rows", "Triton", "commit", "command"]
    assert ("{table} Runs; all with NVIDIA H200, driver 0.0, PyTorch 0.0-synthetic, CUDA 0.0, "
            "cuDNN 0, Python 3.11\n") in str(table)  # fmt: skip
