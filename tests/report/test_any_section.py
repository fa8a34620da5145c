"""The report's tools on rows of a section that none of its chapters has."""

import dataclasses
import re

import pandas as pd
import pytest

from a2lib.measure import Section
from a2lib.measure.sections import SECTIONS
from a2lib.report import data, figures, local, metrics, panels, provenance, style, tables
from a2lib.report.style import Look, Looks
from a2lib.report.view import Column, Columns, View

SORTING = Section("sorting", ("operation", "dtype", "size", "quantity"), ("peak_bytes", "note"))
VIEW = View(
    case=("dtype", "size", "quantity"),
    by="operation",
    along="size",
    looks=Looks(
        quick=Look("Quicksort (ours)", "#d55e00", "o", ours=True, short="quick"),
        merge=Look("Mergesort", "#0072b2", "^", short="merge"),
    ),
    columns=Columns(
        size=Column("n", text=style.tokens, axis="numbers to sort"),
        quantity=Column("input", title="{} input".format, order=("random", "sorted")),
    ),
)
# (operation, size, input) -> ms; 4,096 numbers that are sorted make quick run out of memory.
TIMES = {
    ("quick", 1024, "random"): 1.0, ("merge", 1024, "random"): 2.0, ("heap", 1024, "random"): 4.0,
    ("quick", 2048, "random"): 3.0, ("merge", 2048, "random"): 3.0,
    ("quick", 1024, "sorted"): 8.0, ("merge", 1024, "sorted"): 1.0,
    ("quick", 4096, "sorted"): None, ("merge", 4096, "sorted"): 16.0,
}  # fmt: skip


@pytest.fixture
def written(synthetic, tmp_path, monkeypatch):
    """``written(name, device)`` is a data folder with those times of one device."""
    monkeypatch.setitem(SECTIONS, SORTING.name, SORTING)

    def write(name="data", device=data.PUBLISHED, factor=1):
        rows = [
            {"operation": operation, "dtype": "fp32", "size": size, "quantity": given,
             "peak_bytes": 8 * size, "n": 5,
             **({"ms": ms * factor, "ms_p20": ms * factor, "ms_p80": ms * factor} if ms else
                {"status": "oom", "n": "", "peak_bytes": "", "note": "no stack left"})}
            for (operation, size, given), ms in TIMES.items()
        ]  # fmt: skip
        return synthetic.by_hand(tmp_path / name, device=device, sorting=rows)

    return write


@pytest.fixture
def rows(written):
    return data.load("sorting", [written()])


def words(chart):
    return re.findall(r">([^<>]+)</text>", chart._repr_svg_())


def test_times_stand_in_a_line_per_case_and_the_fastest_is_bold(rows):
    table = tables.latency(rows, VIEW, "Times", "tab-sorting", ("quantity", "size"))
    assert list(table.frame.columns) == ["input", "n", "quick", "merge", "heap"]
    assert table.frame.values.tolist() == [
        ["random", "1,024", "**1.00**", "2.00", "4.00"],
        ["random", "2,048", "**3.00**", "**3.00**", tables.MISSING],
        ["sorted", "1,024", "8.00", "**1.00**", tables.MISSING],
        ["sorted", "4,096", "oom", "16.0", tables.MISSING],
    ]
    assert ":::{table} Times\n:name: tab-sorting\n" in str(table)


def test_another_cell_and_what_a_sweep_holds(rows):
    of_sorted = metrics.pick(rows, quantity="sorted")
    table = tables.compared(of_sorted, VIEW, tables.peak, "Peaks", "tab-peaks")
    assert table.frame.values.tolist() == [["1,024", "8.00 KiB", "8.00 KiB"],
                                           ["4,096", "oom", "32.0 KiB"]]  # fmt: skip
    held = tables.coverage(rows, VIEW, "quantity", 3, "Held", "tab-held").frame
    assert held.values.tolist()[:2] == [["Quicksort (ours)", "random", 2, 0, 0, 0, 1, ""],
                                        ["Mergesort", "random", 2, 0, 0, 0, 1, ""]]  # fmt: skip
    assert held.values.tolist()[3] == [
        "Quicksort (ours)", "sorted", 1, 1, 0, 0, 1, "no stack left"
    ]  # fmt: skip


def test_who_is_fastest(rows):
    best = metrics.fastest(rows, VIEW).set_index(["quantity", "size"])
    assert list(best["winner"]) == ["quick", "quick", "merge", "merge"]
    assert list(best["verdict"]) == ["ahead", "level", "behind", ""]
    assert best.loc[("random", 1024), "peer"] == "merge"
    assert best.loc[("sorted", 1024), "factor"] == 8
    assert metrics.tally(rows, VIEW) == {"ahead": 1, "level": 1, "behind": 1}
    over = metrics.with_speedup(rows, VIEW, "merge")
    assert list(metrics.pick(over, operation="quick")["speedup"].dropna()) == [2, 1, 0.125]
    random = metrics.pick(rows, operation="quick", quantity="random")
    assert metrics.slopes(random, "ms", "size") == {2048: pytest.approx(1.585, abs=1e-3)}


def test_small_multiples_over_one_key_column_name_their_lines_where_they_end(rows):
    chart = figures.grid(rows, "ms", VIEW, down="quantity")
    said = words(chart)
    assert ["random input", "sorted input"] == [w for w in said if w.endswith("input")]
    assert said.count("numbers to sort") == 1 and said.count("latency (ms)") == 2
    # What is not ours and has no look of its own is named as it is stored.
    assert [said.count(name) for name in ("quick", "merge", "heap")] == [2, 2, 1]


def test_small_multiples_over_two_key_columns_have_a_legend(rows):
    size = panels.Measure("bytes", base=2, text=panels.round_size)
    half = rows.assign(dtype="fp16", peak_bytes=rows["peak_bytes"] / 2)
    both = pd.concat([metrics.pick(rows, quantity="random"), half], ignore_index=True)
    chart = figures.grid(both, "peak_bytes", VIEW, down="quantity", across="dtype", kind=size,
                         lines={"fp16": 4096.0}, line_label="cache")  # fmt: skip
    said = words(chart)
    assert [w for w in said if w.endswith("input")] == [
        "fp16, random input", "fp32, random input", "fp16, sorted input", "fp32, sorted input"
    ]  # fmt: skip
    assert [said.count(name) for name in ("quick", "cache", "bytes", "n")] == [1, 1, 2, 1]
    assert said.count("not measured yet") == 1  # the last panel, which has no axis to name


def test_a_column_whose_values_do_not_double(rows):
    even = dataclasses.replace(VIEW, doubling=False)
    power, plain = (words(figures.grid(rows, "ms", view, down="quantity")) for view in (VIEW, even))
    assert "4k" in power and "4k" not in plain and "4000" in plain


def test_a_map_and_dots_of_any_columns(rows):
    said = words(figures.heat(rows, VIEW, down="size", across="dtype", each="quantity"))
    assert {"0.50", "1.00", "8.00", "–"} <= set(said) and said.count("fp32") == 2
    case = metrics.pick(rows, size=1024)
    said = words(figures.dots(case, VIEW, each="quantity", reference=2.5, reference_label="book"))
    assert {"1.00", "2.00", "4.00", "8.00", "book"} <= set(said)
    assert said.count("not measured") == 1  # heap, of sorted numbers


def test_maps_of_deviations():
    shares = pd.DataFrame(
        [[0.004, 0.02], [0.3, float("nan")]], index=["a", "b"], columns=["x", "y"]
    )
    chart = figures.spreads({"random": shares, "sorted": shares * 2, "equal": shares},
                            down="numbers", across="input")  # fmt: skip
    first, second, _, empty = chart.figure.axes
    assert [t.get_text() for t in first.texts] == ["0.4", "2.0", "30.0", "–"]
    shade = list(first.collections[0].get_array().compressed())
    assert shade == [0, 1, 2] and second.get_title() == "sorted" and not empty.axison
    assert words(figures.spreads({"random": shares * float("nan")}, down="", across="")) == [
        "not measured yet"
    ]


def test_figures_and_tables_of_no_rows_say_so(rows):
    none = rows.iloc[:0]
    for chart in (figures.grid(none, "ms", VIEW, down="quantity"),
                  figures.heat(none, VIEW, down="size", across="dtype", each="quantity"),
                  figures.dots(none, VIEW, each="quantity")):  # fmt: skip
        assert words(chart) == ["not measured yet"]
    assert "nothing measured yet" in str(tables.latency(none, VIEW, "T", "tab-t"))
    assert "No rows yet. To measure: `sort`." in str(provenance.source(none, none, "sort"))


def test_the_readers_machine(written):
    roots = [written("data"), written("cpu", "cpu", 3), written("here", "nvidia-x1", 2)]
    every = data.load("sorting", roots)
    mine = every[every["local"]]
    assert local.devices(every) == [data.PUBLISHED, "nvidia-x1", "cpu"]
    assert local.devices(mine) == ["nvidia-x1", "cpu"]
    assert set(local.one(mine, SORTING.key)["device"]) == {"nvidia-x1"}
    assert len(local.one(mine, SORTING.key)) == len(TIMES)
    assert local.one(mine.iloc[:0], SORTING.key).empty

    def tabulate(rows, name, number):
        return [tables.latency(rows, VIEW, f"{name}: ms", f"tab-mine-{number}", VIEW.case[1:])]

    runs = data.load_runs(roots)
    command = "papermill notebooks/sorting.ipynb"
    text = str(local.show(runs, command, (mine, tabulate)))
    assert text.index("**CPU**: tiny sizes") < text.index("**NVIDIA X1**\n")
    assert [text.count(f":name: tab-mine-{n}\n") for n in (1, 2, 3)] == [1, 1, 0]
    assert "| 1,024 | random | **2.00** |" in text and "Measured on 1 × NVIDIA X1" in text
    nothing = str(local.show(runs, command, (mine.iloc[:0], tabulate)))
    assert "nothing had been measured" in nothing and f"\n{command}\n" in nothing

    def held(rows, name, number):
        return [tables.coverage(rows, VIEW, "dtype", 9, "Held", f"tab-held-{number}")]

    # Two sections of one machine stand under one heading, in the order given.
    both = str(local.show(runs, command, (mine.iloc[:0], tabulate), (mine, tabulate), (mine, held)))
    order = [both.index(f) for f in ("**CPU**", "tab-mine-1", "tab-held-1", "**NVIDIA X1**")]
    assert order == sorted(order) and both.count("**CPU**") == 1 and both.count("tab-held-2") == 1


def test_of_rows_measured_twice_the_published_or_the_last_is_shown(written):
    every = data.load("sorting", [written("data"), written("here", factor=10)])
    where = {"operation": "quick", "size": 1024, "quantity": "random"}
    first = local.of(every, data.PUBLISHED, SORTING.key)
    assert metrics.time_of(first, **where) == 1
    assert metrics.time_of(local.one(every, SORTING.key), **where) == 10
    assert len(first) == len(TIMES)


def test_looks_are_dealt_to_names_that_have_none():
    dealt = style.palette(["c", "a", "b"])
    assert list(dealt) == ["c", "a", "b"] and dealt.order({"b", "c", "new"}) == ["c", "b", "new"]
    assert len({look.colour for look in dealt.values()}) == 3
    many = style.palette(range(10))
    assert many[0].colour == many[8].colour and dealt.short("c") == "c"
    assert dealt.of("new").label == "new" and not dealt.of("new").ours


@pytest.mark.parametrize(
    ("value", "text"), [(512.0, "512"), (4096.0, "4k"), (2.0**20, "1M"), (3 * 2.0**19, "1.5M")]
)
def test_powers_of_two_are_short(value, text):
    assert panels.short_power(value) == text


def test_a_column_called_like_a_word_of_python(rows):
    renamed = rows.rename(columns={"quantity": "class"})
    row = metrics.row_of(renamed, class_="sorted", operation="merge")
    assert (row.class_, row.ms) == ("sorted", 1.0)


def test_words_as_a_list():
    assert [style.listed(list(words)) for words in ("a", "ab", "abc")] == [
        "a", "a and b", "a, b and c"
    ]  # fmt: skip
