"""Tables in a notebook are HTML, and text everywhere else."""

import pytest
from bs4 import BeautifulSoup

from a2lib.experiments.harness import output, tables
from a2lib.experiments.harness.tables import mean, show_tables, table

BODY = [["a <b>", "1.5", "-", ""], ["c", "2 ± 1", "-", "why"]]
HEADER = ["", "ms", "peak, GB", ""]


def test_a_table_has_its_sentence_and_no_column_of_nothing():
    made = table(BODY, HEADER, "What it is.")
    says, head, _, *lines = made.splitlines()
    assert says == "What it is." and head.split() == ["ms"]
    assert [line.split() for line in lines] == [["a", "<b>", "1.5"], ["c", "2", "±", "1", "why"]]
    html = BeautifulSoup(made.html, "html.parser")
    assert html.caption.text == "What it is."
    rows = [[cell.text for cell in row.find_all(["th", "td"])] for row in html.find_all("tr")]
    assert rows == [["", "ms", ""], ["a <b>", "1.5", ""], ["c", "2 ± 1", "why"]]


def test_a_table_without_lines_shows_nothing(capsys):
    assert table([], HEADER, "What it is.") == ""
    show_tables(table([], HEADER, "What it is."), "")
    assert capsys.readouterr().out == ""


def test_in_a_notebook_it_is_html_with_text_beside_it(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(tables, "display", lambda bundle: shown.append(bundle) or True)
    made = table(BODY, HEADER, "What it is.")
    show_tables(made, "noted")
    assert shown == [{"text/html": made.html, "text/plain": str(made)}]
    assert capsys.readouterr().out == "noted\n"
    monkeypatch.setattr(tables, "display", output.display)  # and outside of one
    show_tables(made)
    assert capsys.readouterr().out == f"{made}\n"


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"ms_mean": "78.39", "ms_std": "91", "ms": "2.5"}, "2.5 (median)"),
        ({"ms_mean": "2.5", "ms_std": "0.25", "ms": "2.4"}, "2.5 ± 0.25"),
        ({"ms_mean": "2.5", "ms_std": "", "ms": "2.5"}, "2.5"),
        ({"status": "oom"}, "oom"),
    ],
)
def test_a_deviation_that_says_nothing_is_left_out(row, shown):
    assert mean({"status": "ok", **row}) == shown
