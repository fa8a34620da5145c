"""Every page that is written with claims: they hold, they can break, and nothing is said past them.

A page's cells and its ``{eval}`` expressions are run here as the build runs them: in the order in
which they stand on the page, a figure's caption after the cell that draws the figure.
"""

import ast
import functools
import re
import zlib

import numpy as np
import pandas as pd
import pytest
import yaml
from committed import WRITTEN

from a2lib.lab.sections import SECTIONS
from a2lib.paths import ROOT
from a2lib.report import page as page_module
from a2lib.report.page import Claim, Page
from a2lib.report.style import Chart

CELL = re.compile(r"^(`{3,})\{code-cell\} ipython3\n(.*?)^\1$", re.M | re.S)
OPTIONS = re.compile(r"\A(---\n[\s\S]*?^---\n|(:\w.*\n)+)", re.M)
# A role in the text, or a directive of its own, which shows a table.
EVAL = re.compile(r"\{eval\}`([^`]+)`|^`{3,}\{eval\} (.+)$", re.M)
HEADING = re.compile(r"^(#+ .*)$", re.M)
# What is derived there no row can refute.
DERIVED = {"The idea", "What it should cost", "Exercises"}
COMPARES = re.compile(
    r"\b(?:\w+er than|(?:more|less|fewer) than|(?<!at )most|(?<!at )least|(?:fast|slow|larg|small"
    r"|quick|short|long|high|low)est|faster|slower|quicker|as (?:fast|long|much|many) as)\b"
)
TYPED = re.compile(
    r"(?<![\w.])\d[\d.,]*[\s\N{NO-BREAK SPACE}]?"
    r"(?:[mnµu]?s|[GT]B/s|[GT]FLOP/s|W|J|MHz|%|[KMG]i?B|times)(?![\w/])"
)
OTHERS = {"model": "tiny", "batch": 3, "strategy": "nested:9"}


def text_of(name):
    return (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8")


@functools.cache
def pages_of(name):
    """Return the objects with a page's claims, after its cells and expressions have run; a claim
    that fails waits for its own test."""
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("A2LIB_DATA", raising=False)
        patch.chdir(ROOT / "book")
        patch.setattr(Page, "strict", False)
        patch.setattr(Chart, "__init__", lambda *_, **__: None)  # the book's build draws
        text, end = text_of(name), 0
        for cell in CELL.finditer(text):
            evaluate(text[end : cell.start()], names)
            run_cell(name, OPTIONS.sub("", cell[2]), names)
            options = OPTIONS.match(cell[2])
            if options:
                evaluate(options[0], names)
            end = cell.end()
        evaluate(text[end:], names)
    return [value for value in names.values() if isinstance(value, Page)]


def evaluate(text, names):
    for role, directive in EVAL.findall(text):
        expression = re.sub(r"\s+", " ", role or directive)  # a caption's may go over two lines
        shown = str(eval(expression, names))
        assert shown and "nan" not in shown, expression


def run_cell(name, cell, names):
    *before, last = ast.parse(cell).body
    for node in before:  # of which only the last is shown
        assert not isinstance(node, ast.Expr) or ".claim(" in ast.unparse(node)
    exec(compile(ast.Module(before, []), name, "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), name, "exec"), names)
        return
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    assert value is None or str(value)


def perturbed(table, section, draw, spread):
    """The table with each number that is no key off by a factor of some exp(spread), and words that
    were measured (a status, a dtype) dealt anew. What a column gets depends on its name and the
    draw's number alone, so that another column changes nothing."""
    key, own = set(SECTIONS[section].key), set(SECTIONS[section].columns)
    columns = dict(table.items())
    for name in table.columns.difference([*key, "device", "file", "local", "run", "n"]):
        column = table[name]
        rng = np.random.default_rng([draw, zlib.crc32(name.encode())])
        number = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
        if number:
            noise = np.exp(rng.normal(0, spread, len(table)))
            columns[name] = column.to_numpy("float64", na_value=np.nan) * noise
        elif name in own or pd.api.types.is_bool_dtype(column):
            columns[name] = rng.permutation(column.to_numpy())
    return pd.DataFrame(columns, index=table.index)


def breaks(claim, tables):
    try:
        return not claim.is_supported(tables)
    except (LookupError, AttributeError, ValueError, TypeError, ArithmeticError):
        return True


def words_of(claims):
    return [claim.words for claim in claims]


@pytest.mark.parametrize("name", WRITTEN)
def test_each_claim_holds_and_can_break(name):
    for page in pages_of(name):
        assert page.claims, f"{name} claims nothing"
        assert len(set(words_of(page.claims))) == len(page.claims)
        for claim in page.claims:
            assert claim.is_supported(page.tables), claim.words
        firm = list(page.claims)
        for draw, spread in enumerate(np.linspace(0.3, 1.3, 60)):
            tables = {}
            for claim in firm:
                for section in set(claim.sections) - tables.keys():
                    tables[section] = perturbed(page.tables[section], section, draw, spread)
            firm = [claim for claim in firm if not breaks(claim, tables)]
            if not firm:
                break
        assert words_of(firm) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_what_compares_has_a_claim_beside_it(name):
    # A section is a heading, its text and its cells; what comes before the first is the lead's.
    pieces = HEADING.split(re.sub(r"\A---\n[\s\S]*?^---\n", "", text_of(name), flags=re.M))
    bare = []
    for heading, body in zip(pieces[1::2], pieces[2::2], strict=True):
        found = COMPARES.findall(prose(body))
        if found and ".claim(" not in body and heading.strip("# ") not in DERIVED:
            bare.append((heading, found))
    assert bare == []


@pytest.mark.parametrize("name", WRITTEN)
def test_no_measured_number_is_typed(name):
    """Settings and what others state may be: the page's front matter lists them as ``given``."""
    text = text_of(name)
    given = re.search(r"^given: (.*)$", text, re.M)
    allowed = ast.literal_eval(given[1]) if given else []
    body = prose(re.sub(r"\A---\n[\s\S]*?^---\n", "", text, flags=re.M)) + captions(text)
    for words in allowed:
        assert words in body, f"{words} is given and not on the page"
        body = body.replace(words, "")
    assert TYPED.findall(body) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_its_claims_are_answered_on_other_rows(name, monkeypatch):
    monkeypatch.chdir(ROOT / "book")
    for page in pages_of(name):
        none = {section: rows.iloc[:0] for section, rows in page.tables.items()}
        for claim in page.claims:
            assert claim.answer(none) == "not measured"
        monkeypatch.setattr(page, "local", lambda none=none: {"nvidia-b200": none})
        assert "nothing is measured on NVIDIA B200" in str(page.your_machine("make x"))
        monkeypatch.setattr(page, "local", lambda page=page: {"nvidia-b200": page.tables})
        # The test above has evaluated each on these rows.
        monkeypatch.setattr(Claim, "is_supported", lambda *_: True)
        text = str(page.your_machine("make x"))
        assert text.count("| yes |") == len(page.claims) and "| no |" not in text
        monkeypatch.setattr(page, "local", dict)
        assert "make x" in str(page.your_machine("make x"))


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_that_a_page_derives_nothing_from_are_shown(name, monkeypatch):
    """As `make book` leaves them: of a model that no size is published of, of settings of one's
    own, and without the other sections' rows."""
    monkeypatch.chdir(ROOT / "book")
    for page in pages_of(name):
        trial = {}
        for section in page.tables:
            rows = page_module._raw(section, page._roots, None)
            columns = OTHERS.keys() & rows.columns
            for column in columns:
                rows = rows.assign(**{column: OTHERS[column]})
            trial[section] = rows if columns else rows[:0]
        with monkeypatch.context() as patch:
            patch.setattr(page_module, "_raw", lambda section, trial=trial, **_: trial[section])
            patch.setattr(page, "_roots", ("a trial",))
            tables = page._tables("cpu")
        monkeypatch.setattr(page, "local", lambda tables=tables: {"cpu": tables})
        assert "CPU" in str(page.your_machine("make x"))


def prose(body):
    """Return a page's text without cells, fences of code, expressions, code and formulas."""
    body = CELL.sub("", body)
    body = re.sub(r"^(`{3,})\{eval[^\n]*\n(?:.*\n)*?\1$", "", body, flags=re.M)
    body = re.sub(r"^(`{3,})\{.*\n((?:.*\n)*?)\1$", r"\2", body, flags=re.M)  # a drawing's words
    fences = r"^```[^{:\n]*\n[\s\S]*?^```$|^    .*$|^\$\$[\s\S]*?^\$\$.*$"
    body = re.sub(fences, "", body, flags=re.M)
    body = re.sub(r"^`{3,}.*$", "", body, flags=re.M)
    # Code and formulas within a paragraph: none goes over an empty line.
    body = re.sub(r"(?:\{[\w:]+\})?`(?:(?!\n\n)[^`])*`|\$(?:(?!\n\n)[^$])*\$", "", body)
    return re.sub(r"\]\([^)]*\)|<!--[\s\S]*?-->", "", body)


def captions(text):
    """Return the captions and descriptions of a page's figures, without their expressions."""
    lines = []
    for cell in CELL.finditer(text):
        options = OPTIONS.match(cell[2])
        if options and options[0].startswith("---"):
            shown = next(yaml.safe_load_all(options[0])).get("mystnb", {})
            lines.append(shown.get("figure", {}).get("caption", ""))
            lines.append(shown.get("image", {}).get("alt", ""))
    return re.sub(r"\{eval\}`[^`]*`", "", "\n".join(lines))
