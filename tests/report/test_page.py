"""What a page is written with, on rows of a section that no page has."""

import math

import invented_rows
import pandas as pd
import pytest

from a2lib.lab import Section
from a2lib.lab.sections import SECTIONS
from a2lib.report import data, tables, units
from a2lib.report.page import ClaimError, Missing, Page, faster, level, one, pick

SORTING = Section("sorting", ("operation", "size"), ("peak_bytes", "note"), notebook="flash")
TIMES = {("quick", 1024): 1.0, ("merge", 1024): 2.0, ("quick", 2048): 3.0, ("merge", 2048): 3.0}
TIMES["quick", 4096] = None


@pytest.fixture
def page(tmp_path, monkeypatch):
    """``page(here=1.0)``: the section's page, with rows of a reader's GPU or other device that are
    so many times as slow, of sizes ``below`` one, or without any; each with the column ``twice``.
    """
    monkeypatch.setitem(SECTIONS, SORTING.name, SORTING)
    monkeypatch.chdir(tmp_path)

    def write(folder, device, factor, below):
        rows = []
        for (operation, size), ms in TIMES.items():
            row = {"status": "oom", "note": "no stack left"}
            if ms is not None:
                row = dict.fromkeys(("ms", "ms_p20", "ms_p80"), ms * factor)
                row |= {"n": 5, "peak_bytes": 8 * size}
            if size < below:
                rows.append({"operation": operation, "size": size, **row})
        return invented_rows.write(tmp_path / folder, device=device, sorting=rows)

    def make(here=None, below=math.inf, device="nvidia-b200"):
        roots = [write("data", data.PUBLISHED, 1, math.inf)]
        if here is not None:
            roots.append(write("here", device, here, below))
        return Page("sorting", lambda rows, of: rows.assign(twice=2 * rows["ms"]), roots=roots)

    return make


def test_one_row_or_a_line_that_says_what_there_is(page):
    t = page().rows
    assert one(t, operation="quick", size=1024).twice == 2
    assert len(pick(t, size=[1024, 2048])) == 4
    with pytest.raises(Missing, match=r"no row with .*size = 512 on, of 1024, 2048, 4096"):
        one(t, size=512)
    with pytest.raises(Missing, match=r"2 rows with .*they differ in operation, .*ms"):
        one(t, size=1024)


def test_times_tie_within_two_per_cent_or_where_their_spreads_meet(page):
    t = page().rows
    quick, merge = (one(t, operation=name, size=1024) for name in ("quick", "merge"))
    assert faster(quick, merge) and not faster(merge, quick) and not level(quick, merge)
    assert level(quick._replace(ms_p80=2.0), merge) and not faster(quick._replace(ms_p80=2), merge)
    assert level(quick._replace(ms_p20=math.nan, ms_p80=math.nan), quick)
    assert level(100, 101.9) and not level(100, 102.1)


def test_a_claim_that_the_rows_do_not_support_stops_the_page_with_its_words_and_rows(page):
    made = page()

    @made.claim("Quicksort is faster")
    def quicksort_is_faster(t):
        quick, merge = (one(t, operation=name, size=1024) for name in ("quick", "merge"))
        return faster(quick, merge)

    with pytest.raises(
        ClaimError, match=r"sorting: .*not support: Mergesort is.*'merge'.*: ms 2.0"
    ):

        @made.claim("Mergesort is")
        def mergesort_takes_less_than_1_ms(t):
            return one(t, operation="merge", size=1024).ms < 1


def test_what_is_not_measured_is_said_until_it_is(page):
    made = page()
    shown = made.pending("heapsort", lambda t: pick(t, operation="heap"))
    assert str(shown) == "*Not measured yet: heapsort.*"
    with pytest.raises(ClaimError, match="3 rows are there now of: quicksort"):
        made.pending("quicksort", lambda t: pick(t, operation="quick"))


def test_the_claims_are_answered_on_the_readers_rows(page):
    """By what was measured there: yes, no, and not measured where a row is missing."""
    made = page(here=3.0, below=2048)

    @made.claim("quick first")
    def quick_first(t):
        return one(t, operation="quick", size=1024).ms < 2

    @made.claim("merge last")
    def merge_last(t):
        return one(t, operation="merge", size=1024).ms > 1

    @made.claim("the same at 2,048")
    def the_same_at_2048(t):
        return level(*pick(t, size=2048)["ms"])

    text = str(made.your_machine("make x"))
    assert "| quick first | no |" in text and "| merge last | yes |" in text
    assert "the same at 2,048" not in text
    assert "Claims whose rows are not measured on NVIDIA B200: 1." in text
    assert "Rows of NVIDIA B200: {download}`" in text and "```\nmake x\nmake html\n```" in text
    assert "Nothing is measured on another machine yet" in str(page().your_machine("make x"))


def test_a_cpu_is_given_no_command_of_a_gpu(page):
    made = page(here=3.0, below=2048, device="cpu")

    @made.claim("the same at 2,048")
    def the_same_at_2048(t):
        return level(*pick(t, size=2048)["ms"])

    text = str(made.your_machine("make x"))
    assert text.startswith("This page's claims are about GPUs; ") and "Rows of CPU: " in text
    assert "make x" not in text


@pytest.mark.parametrize(("written", "text"), [
    (units.ms(0.0999), "0.10\xa0ms"), (units.ms(1234.5), "1,234\xa0ms"),
    (units.us(0.0281), "28\xa0µs"), (units.gib(2**30), "1.0\xa0GiB"),
    (units.percent(-0.001), "0\xa0%"), (units.digits(-2.5), "−2.5"),
    (units.span([40.2, 66, 61], units.ms), "40\xa0ms to\xa066\xa0ms"),
    (units.span([1.001, 1.002], units.ms), "1.0\xa0ms"),
])  # fmt: skip
def test_a_number_as_text(written, text):
    assert written == text and written._repr_markdown_() == text


def test_a_cell_without_a_number_is_blank():
    assert tables.cells([0.012345, math.nan, None, 1234.4]) == ["0.0123", None, None, "1,234"]
    text = tables.pipe(pd.DataFrame({"time": tables.cells([1.5, None])}))
    assert text.splitlines()[2:] == ["| 1.50 |", f"| {tables.MISSING} |"]


def test_what_is_no_number_is_not_printed():
    with pytest.raises(ValueError, match="nan is no number to print"):
        units.ms(math.nan)
