"""The lines that say where figures come from, and how numbers are written."""

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
