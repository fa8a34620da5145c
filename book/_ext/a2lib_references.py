"""The list of references by author and year, the words by which the text cites them.

Each entry of references.bib says in ``used`` what the book takes from it. The list shows that, and
the pages that cite the entry.
"""

from __future__ import annotations

from docutils import nodes
from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle


def surname(person) -> str:
    return " ".join(str(part) for part in person.rich_prelast_names + person.rich_last_names)


def authors(names: list[str]) -> str:
    """Return the names as a citation has them."""
    if len(names) > 2:
        return f"{names[0]} et al."
    return " and ".join(names)


class AuthorYearLabels(BaseLabelStyle):
    """Label an entry as the text cites it: "Dao et al., 2022"."""

    def format_labels(self, sorted_entries):
        for entry in sorted_entries:
            names = [surname(person) for person in entry.persons["author"]]
            yield f"{authors(names)}, {entry.fields['year']}"


class AuthorYearStyle(Style):
    default_label_style = AuthorYearLabels


def places_that_cite(env) -> dict[str, dict[str, str]]:
    """Return the pages that cite each entry, by its key, each with the id of its first citation.

    The pages are in the order of the book.
    """
    order = list(env.external_site_map)
    citations = env.get_domain("cite").citation_refs
    places = {}
    for citation in sorted(citations, key=lambda one: (order.index(one.docname), one.line)):
        for target in citation.targets:
            places.setdefault(target.key, {}).setdefault(citation.docname, citation.citation_ref_id)
    return places


def say_what_for(app, doctree, page: str) -> None:
    """Add to each entry of the list what it is used for, and links to the places that cite it."""
    if not hasattr(app.env, "external_site_map"):  # a page that is built alone
        return
    entries = {entry.citation_id: entry for entry in app.env.get_domain("cite").citations}
    places = places_that_cite(app.env)
    for listed in doctree.findall(nodes.citation):
        entry = entries.get(listed["ids"][0])
        if entry is None:
            continue
        line = nodes.paragraph("", f"Used for: {entry.entry.fields['used']}.")
        cited = places.get(entry.key, {})
        for number, (name, place) in enumerate(cited.items()):
            line += nodes.Text(", " if number else " Cited in: ")
            address = f"{app.builder.get_relative_uri(page, name)}#{place}"
            title = app.env.external_site_map[name].title or app.env.titles[name].astext()
            line += nodes.reference("", title, refuri=address, internal=True)
        if cited:
            line += nodes.Text(".")
        listed += line


def setup(app) -> dict:
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    app.connect("doctree-resolved", say_what_for)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
