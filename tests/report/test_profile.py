"""The pictures of a step: what is drawn is what the tables hold, in the house's colours."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from profiles import make

from a2lib.measure import snapshot, trace
from a2lib.paths import ROOT
from a2lib.report import svg
from a2lib.report.chapters import profile

HERE = Path(make.__file__).parent
TRACE, MEMORY = HERE / "report.sqlite", HERE / "cuda_memory.pickle"


def texts(chart):
    return [w.strip() for w in re.findall(r"<text[^>]*>([^<]*)</text>", chart._repr_svg_())]


@pytest.fixture(scope="module")
def long_memory():
    """A timeline of 1500 points with one peak."""
    empty = dict.fromkeys(snapshot.CATEGORIES, 0)
    return [
        {"time_us": i * 100, "phase": "step 0/forward" if i < 800 else "step 0/backward",
         **empty, "parameters": 10**9, "saved for backward": 10**6 * min(i, 1500 - i),
         "temporaries": 10**9 if i == 777 else i % 7 * 1000}
        for i in range(1500)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def long_strip():
    kinds = list(profile.KINDS)
    return [
        {"start_us": i * 2.0, "duration_us": 1.5, "stream": "host" if i % 3 else "7",
         "kind": kinds[i % len(kinds)], "phase": "forward", "part": "ffn"}
        for i in range(1500)
    ]  # fmt: skip


def charts(long_strip, long_memory):
    return {
        "strip": profile.strip(TRACE), "long strip": profile.strip(long_strip),
        "chrome": profile.strip(str(HERE / "gpu_trace.json")),
        "cpu": profile.strip(HERE / "cpu_trace.json.gz"),
        "step": profile.step_bar(TRACE), "memory": profile.memory(MEMORY),
        "long memory": profile.memory(long_memory, total_bytes=3 * 10**9),
    }  # fmt: skip


def test_every_picture_is_of_the_house(long_strip, long_memory):
    for name, chart in charts(long_strip, long_memory).items():
        text = chart._repr_svg_()
        ElementTree.fromstring(text)
        assert re.findall(r"#[0-9a-f]{6}\b", re.sub(r"--\w+:#[0-9a-f]{6}", "", text)) == [], name
        assert svg.smallest_text(text) >= svg.LEAST_SIZE, name
        assert len(text) < 70_000, name


def test_every_class_and_category_has_a_colour_of_the_palette():
    assert set(profile.KINDS) == set(trace.KINDS)
    assert set(profile.CATEGORIES) == set(snapshot.CATEGORIES)
    for colours in (profile.KINDS, profile.CATEGORIES):
        assert set(colours.values()) <= set(svg.PAIRS)
        assert len(set(colours.values())) == len(colours)


def test_a_strip_names_its_streams_phases_and_classes():
    words = texts(profile.strip(TRACE))
    assert {"launches", "stream 7", "stream 14", "forward", "backward"} <= set(words)
    assert [w for w in words if w in trace.KINDS] == ["matmul", "softmax", "copy", "optimizer",
                                                      "other"]  # fmt: skip


def test_the_branches_of_a_replayed_graph_share_rows_that_are_idle():
    """A product all the time on stream 7, and five messages of 10 us, each on a stream of its own:
    the second begins while the first runs, the others later."""

    def piece(stream, start, length, kind):
        return {"stream": stream, "start_us": float(start), "duration_us": float(length),
                "kind": kind, "phase": "", "part": ""}  # fmt: skip

    rows = [piece("7", 0, 100, "matmul")]
    starts = {"11": 0, "12": 5, "13": 20, "14": 40, "15": 60}
    rows += [piece(stream, start, 10, "communication") for stream, start in starts.items()]
    words = texts(profile.strip(rows))
    drawn = {w for w in words if w.startswith("stream")}
    assert drawn == {"stream 7", "stream 11 +3", "stream 12"}
    assert "phase" not in words and "part" not in words
    few = texts(profile.strip(rows[:4]))
    assert {"stream 11", "stream 12", "stream 13", "stream 7"} <= set(few)


def test_a_window_of_a_strip():
    words = texts(profile.strip(TRACE, start_us=480, length_us=200))
    assert "backward" in words and "softmax" not in words
    with pytest.raises(ValueError, match="from 1030 µs on; allowed are windows .* before 1025 µs"):
        profile.strip(TRACE, start_us=1030)


def test_a_strip_without_ranges_of_modules_has_the_phase_alone():
    rows = [{"start_us": 0.0, "duration_us": 9.0, "stream": "7", "kind": "fused",
             "phase": "forward", "part": "forward"}]  # fmt: skip
    words = texts(profile.strip(rows))
    assert "phase" in words and not {"part", "module"} & set(words)
    words = texts(profile.strip([*rows, {**rows[0], "start_us": 9.0, "part": "attn.q_proj"}]))
    assert {"phase", "module", "part", "attn"} <= set(words)


def test_a_bar_of_each_phase_says_its_milliseconds():
    words = texts(profile.step_bar(TRACE))
    # 100 + 50 + 10, 100 + 50, 40 and 5 us of the one step; what no range holds is no step's.
    assert [w for w in words if re.fullmatch(r"0\.\d+", w)][-4:] == [
        "0.005", "0.04", "0.15", "0.16",
    ]  # fmt: skip
    assert "other" not in words and "step" in words and "step 0" not in words
    rows = [{"phase": "forward", "kind": "matmul", "ms": 6.0}]
    assert "3" in texts(profile.step_bar(rows, steps=2))
    with pytest.raises(ValueError, match="steps is 0; allowed are 1 or more"):
        profile.step_bar(TRACE, steps=0)


def scheduled(path, steps=2):
    """A trace of operators with a schedule of torch.profiler: 3 ms of "mine" and 1 ms of no range
    in each step."""
    events = []
    for i in range(steps):
        at = 10_000 * i
        for cat, name, start, length in (
            ("user_annotation", f"ProfilerStep#{i + 2}", at, 9000),
            ("user_annotation", "mine", at, 4000), ("cpu_op", "aten::mm", at + 500, 3000),
            ("cpu_op", "aten::add", at + 5000, 1000),
        ):  # fmt: skip
            events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start,
                           "dur": length})  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_steps_of_torch_profilers_schedule_are_steps(tmp_path):
    path = scheduled(tmp_path / "trace.json")
    words = texts(profile.step_bar(path))
    assert {"mine", "step"} <= set(words) and not {"ProfilerStep#2", "no range"} & set(words)
    assert {"3", "1"} <= set(words)
    words = texts(profile.strip(path))
    assert "time (ms)" in words and {"2", "14"} <= set(words)
    assert "time (µs)" in texts(profile.strip(path, length_us=9000))


def test_a_long_bar_has_no_exponent():
    rows = [{"phase": "forward", "kind": "matmul", "ms": 3843.0}]
    assert "3843" in texts(profile.step_bar(rows))


def test_a_timeline_marks_its_peak_however_long(long_memory):
    assert "peak 0.002 MB" in texts(profile.memory(MEMORY))
    # 1 GB, 1 GB for a moment, and 723 MB: the 777th of 1500 points.
    words = texts(profile.memory(long_memory))
    assert {"peak 2.72 GB", "forward", "backward", "saved for backward"} <= set(words)
    assert "gradients" not in words
    assert "peak 0.0019 MB" in texts(profile.memory(MEMORY, phase="backward"))


def test_thinning_keeps_first_last_and_highest():
    totals = [i * 7919 % 1009 for i in range(1500)]
    kept = profile.drawing._thin(totals, 180, [0, 701])
    assert kept[0] == 0 and kept[-1] == 1499 and totals.index(max(totals)) in kept
    assert 701 in kept and len(kept) <= 183
    assert 701 not in profile.drawing._thin(totals, 180)


def test_files_that_cannot_be_drawn(tmp_path):
    (tmp_path / "x").write_text("hello")
    for draw in (profile.strip, profile.step_bar):
        with pytest.raises(trace.TraceError, match="neither an SQLite export nor JSON"):
            draw(tmp_path / "x")
    with pytest.raises(snapshot.SnapshotError, match="no pickle"):
        profile.memory(tmp_path / "x")
    for draw in (profile.strip, profile.step_bar, profile.memory):
        assert "not measured yet" in texts(draw([]))


def test_a_reader_s_own_files_are_drawn_as_the_pages_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(HERE / "cpu_trace.json.gz", "trace.json.gz")
    shutil.copy(MEMORY, "memory.pickle")
    [traced] = re.findall(r"```python\n(.*?)```", (ROOT / "book/profile.md").read_text(), re.S)
    [recorded] = re.findall(r'python -c "(.*)"', (ROOT / "book/memory.md").read_text())
    for code in (traced, recorded):
        exec(code, {})
    for name in ("strip", "step", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
