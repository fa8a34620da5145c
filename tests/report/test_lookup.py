"""The pages to look up in: the glossary is in order, and each source says what it is used for."""

import re

from a2lib.paths import ROOT


def first_terms():
    """Return the first term of each entry of the glossary, in the order of the page."""
    text = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
    terms = []
    for section in re.findall(r"^:::\{glossary\}\n(.*?)\n:::$", text, re.M | re.S):
        terms += [entry.split("\n")[0] for entry in section.split("\n\n")]
    return terms


def test_the_glossary_is_in_alphabetical_order():
    def letters(term):
        return term.lower().replace("-", " ").replace(",", " ")

    terms = first_terms()
    assert len(terms) > 100
    assert terms == sorted(terms, key=letters)


def test_each_source_says_what_it_is_used_for_and_where_it_is_found():
    text = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    entries = re.split(r"^@", text, flags=re.M)[1:]
    assert len(entries) > 40
    for entry in entries:
        fields = set(re.findall(r"^  (\w+) *= ", entry, re.M))
        assert {"author", "title", "year", "used"} <= fields, entry
        assert fields & {"eprint", "doi", "url"}, entry
