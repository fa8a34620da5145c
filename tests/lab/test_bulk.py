"""Bulk tables: a picture comes back as it was put, and what is broken is said in a line."""

import os

import pytest
import traced_by_hand
from allocations import recorded
from refusals import refused

from a2lib.lab import StoreError, bulk, snapshot, trace

RUN = "20260102T030405Z-cpu-000000"
ROW = {"start_us": 1.5, "duration_us": 2 / 3, "stream": "7"}
ROW |= {"kind": "matmul", "phase": "forward", "part": "attn, q"}


def put(data, rows, table="strip", picture="small-128", device="cpu", run=RUN):
    about = {"model": "small", "context": 128}
    return bulk.put(table, device, picture, rows, run=run, about=about, data=data)


def test_a_picture_comes_back_and_is_replaced_whole(data):
    path = put(data, [ROW, ROW])
    assert path == data / "measured" / "bulk" / "strip" / "cpu" / "small-128.csv"
    put(data, [ROW])
    found = bulk.read("strip", "cpu", "small-128", data)
    assert (found.run, found.about) == (RUN, {"model": "small", "context": 128})
    assert found.rows == [{**ROW, "duration_us": 0.666667}]
    assert bulk.pictures("strip", data) == [("cpu", "small-128")]
    assert sorted(os.listdir(path.parent)) == [".lock", "small-128.csv"]


def test_what_the_readers_make_is_what_the_tables_take(data, tmp_path):
    traced_by_hand.write_nsys(tmp_path / "report.sqlite")
    kernels = trace.from_nsys(tmp_path / "report.sqlite").kernels
    recording = recorded()
    made = {
        "strip": trace.strip_rows(kernels, 0, 10**7),
        "kernels": trace.kernel_rows(kernels),
        "memory": snapshot.timeline_rows(recording, "step 0", 100),
        "lines": snapshot.line_rows(recording, "step 0", 20),
    }
    # Measured before, and by nothing now; and in notebooks.
    assert set(made) == set(bulk.TABLES) - {"largest", "gathers", "saved"}
    for table, rows in made.items():
        put(data, rows, table)
        back = bulk.read(table, "cpu", "small-128", data).rows
        assert back == rows
        assert list(map(list, back)) == list(map(list, rows))  # columns in the same order


NOT_VALID = [
    ({"table": "sky"}, "table 'sky': allowed are strip, kernels, memory, largest"),
    ({"rows": [{**ROW, "calls": 1}]}, "columns are start_us, duration_us, stream"),
    ({"rows": [ROW, {**ROW, "start_us": float("nan")}]}, "nan is no finite number"),
]


@pytest.mark.parametrize(("changed", "words"), NOT_VALID)
def test_what_is_refused(data, changed, words):
    refused(words, put, data, **{"rows": [ROW], **changed}, error=StoreError)
    assert not list((data / "measured").glob("bulk/*/*/*.csv"))
