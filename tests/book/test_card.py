"""The card that a link to a published page is shown with."""

from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup

from a2lib.paths import ROOT


@pytest.fixture
def tags(monkeypatch):
    """``tags(address)``: name -> content of the tags in the head of a page published there."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    import a2lib_pages

    monkeypatch.setattr(a2lib_pages, "called", lambda app, page: "Data parallelism (DDP)")

    def of(address):
        env = SimpleNamespace(metadata={"ddp": {"description": 'Four "ways" to average.'}})
        config = SimpleNamespace(html_title="a2lib", a2lib_address=address)
        context = {}
        a2lib_pages.describe(SimpleNamespace(env=env, config=config), "ddp", "", context, object())
        metas = BeautifulSoup(context["metatags"], "html.parser").find_all("meta")
        return {tag.get("name") or tag.get("property"): tag["content"] for tag in metas}

    return of


def test_a_published_page_has_a_picture_and_an_address(tags):
    card = tags("https://example.org/a2lib/")
    assert card["og:url"] == "https://example.org/a2lib/ddp.html"
    assert card["og:title"] == "Data parallelism (DDP)"
    assert card["og:description"] == 'Four "ways" to average.'
    assert card["twitter:card"] == "summary_large_image"
    picture = card["og:image"].removeprefix("https://example.org/a2lib/")
    assert (ROOT / "book" / picture).is_file()


def test_a_page_of_no_address_names_none(tags):
    assert tags("").keys().isdisjoint({"og:url", "og:image", "twitter:card"})
