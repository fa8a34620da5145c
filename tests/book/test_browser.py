"""The book as a reader has it: on a screen, a phone, paper and a keyboard, in both themes.

Runs where a Chromium is installed; playwright drives it and downloads nothing. With A2LIB_AXE
naming the file axe.min.js of axe-core, its rules are run over every page as well.
"""

import io
import os
import re
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread

from a2lib.report import svg

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]
QUIET = ("--no-sandbox --disable-gpu --disable-background-networking --no-first-run --disable-sync "
         "--disable-component-update").split()  # fmt: skip
PHONE, DESK, PAPER = (390, 844), (1400, 900), (718, 1000)
# Bytes that a page may read from the disk; one that draws and lists a whole sweep may read more.
WITH_EQUATIONS, WITHOUT, WHOLE_SWEEP = 2.7e6, 1e6, 1.3e6


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def open_page(book, browser):
    """Open a page of the book; afterwards, that it asked no network and no script failed."""
    contexts, asked, broken = [], [], []

    def opened(page, size=DESK, theme="light", query=""):
        context = browser.new_context(viewport=dict(zip(("width", "height"), size, strict=True)),
                                      color_scheme=theme)  # fmt: skip
        contexts.append(context)
        tab = context.new_page()
        tab.read = set()
        tab.on("request", lambda request: (asked.append(request.url), tab.read.add(request.url)))
        tab.on("pageerror", lambda error: broken.append(f"{page}: {error}"))
        tab.goto((book.html / page).as_uri() + query)
        if tab.evaluate("!!window.MathJax"):
            tab.evaluate("MathJax.startup.promise.then(() => 0)")
        tab.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert broken == []


def names(book):
    return [str(page.relative_to(book.html)) for page in book.pages()]


def corner(tab, selector):
    """The colour of a few pixels just inside the upper left corner of an element, as #rrggbb."""
    shot = tab.locator(selector).first.screenshot()
    pixel = imread(io.BytesIO(shot), format="png")[4, 4, :3]
    return "#" + "".join(f"{round(float(part) * 255):02x}" for part in pixel)


def test_a_figure_has_the_colour_of_the_page_in_both_themes(open_page):
    papers = svg.PAIRS["#ffffff"]
    for system, light, dark in (("light", *papers[1:]), ("dark", *papers[1:])):
        tab = open_page("flash-shapes.html", theme=system)
        expected = {"light": light, "dark": dark}
        assert corner(tab, "figure img") == expected[system]
        # The theme's switch, not the system's setting, has the last word.
        for theme in ("dark", "light"):
            tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            assert corner(tab, "figure img") == expected[theme]
            body = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert hexed(body) == expected[theme]


def test_on_a_phone_a_table_says_that_there_is_more_and_keeps_its_first_column(open_page):
    tab = open_page("flash.html", PHONE)
    wide = tab.locator(".pst-scrollable-table-container.a2-wide:has(table.dataframe)")
    assert wide.count() >= 3
    seen = wide.first.evaluate("""(box) => {
      const look = () => [box.classList.contains("a2-more"),
        getComputedStyle(box).maskImage !== "none",
        box.querySelector("tbody th").getBoundingClientRect().left
          - box.getBoundingClientRect().left];
      const before = look();
      box.scrollLeft = box.scrollWidth;
      return new Promise((done) => setTimeout(() => done([before, look(), box.scrollLeft,
        getComputedStyle(box, "::before").content, box.tabIndex, box.ariaLabel]), 100));
    }""")
    before, after, moved, words, tab_index, label = seen
    assert before[:2] == [True, True] and moved > 40
    assert after[:2] == [False, False] and after[2] == pytest.approx(before[2], abs=1)
    assert "sideways" in words and tab_index == 0 and "scrolls sideways" in label


def test_two_columns_that_name_a_line_both_stay(open_page):
    tab = open_page("flash-shapes.html", PHONE)
    lefts = tab.evaluate("""() => {
      document.querySelectorAll("details").forEach((one) => { one.open = true; });
      const box = [...document.querySelectorAll(".pst-scrollable-table-container")]
        .find((one) => one.querySelector(".keys-2"));
      const look = () => [...box.querySelectorAll("tbody tr:first-child th")]
        .map((cell) => cell.getBoundingClientRect().left);
      return new Promise((done) => setTimeout(() => {
        const before = look();
        box.scrollLeft = 120;
        setTimeout(() => done([before, look(), box.scrollLeft]), 100);
      }, 200));
    }""")
    before, after, moved = lefts
    assert moved > 40 and after == pytest.approx(before, abs=1.5)


def test_the_columns_that_stay_leave_room_on_a_phone_for_those_that_scroll(open_page):
    for page in ("communication.html", "parallelism-axes.html", "mixed_precision.html"):
        shares = open_page(page, PHONE).evaluate("""() => {
          const width = (one) => one.getBoundingClientRect().width;
          return [...document.querySelectorAll("table.dataframe")].flatMap((table) => {
            const box = table.closest(".pst-scrollable-table-container");
            if (!box || width(table) <= width(box) + 1) return [];
            const stay = [...table.querySelectorAll("tbody tr:first-child .stub")]
              .filter((cell) => getComputedStyle(cell).position === "sticky");
            return [stay.reduce((sum, cell) => sum + width(cell), 0) / width(box)];
          });
        }""")
        assert shares and max(shares) < 0.7, page


def test_a_formula_wider_than_a_phone_is_scrolled_from_its_beginning(book, open_page):
    def formulas(name):
        return (book.html / name).read_text(encoding="utf-8").count('<div class="math')

    tab = open_page(max(names(book), key=formulas), PHONE)
    wide = tab.evaluate("""[...document.querySelectorAll("div.math.a2-wide")].map((box) =>
      [box.tabIndex, getComputedStyle(box).maskImage !== "none",
       box.querySelector("mjx-math").getBoundingClientRect().left
         - box.getBoundingClientRect().left])""")
    assert wide and all(index == 0 and fades and left >= -0.5 for index, fades, left in wide)


def test_on_a_desk_what_fits_has_no_cue(open_page):
    tab = open_page("index.html")
    assert tab.locator("table.dataframe").count() and tab.locator(".a2-wide").count() == 0


def test_paper_is_light_and_nothing_is_cut(open_page):
    tab = open_page("flash.html", PAPER, theme="dark")
    themes = tab.evaluate("""["beforeprint", "afterprint"].map((name) => {
      dispatchEvent(new Event(name));
      return document.documentElement.dataset.theme;
    })""")
    assert themes == ["light", "dark"]
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    wide = tab.evaluate("""
      [...document.querySelectorAll("article :is(table, figure, img)")]
      .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
      .map((one) => one.outerHTML.slice(0, 200))""")
    assert wide == []
    clipped = tab.evaluate("""
      [...document.querySelectorAll(".pst-scrollable-table-container, .cell_output .output")]
      .map((box) => getComputedStyle(box))
      .filter((look) => look.overflowX !== "visible" || look.maskImage !== "none").length""")
    assert clipped == 0
    heights = tab.evaluate("[...document.querySelectorAll('figure img')].map((one) => one.height)")
    assert heights and max(heights) <= 13 / 2.54 * 96 + 1  # 13 cm: two to a page
    assert corner(tab, "figure img") == "#ffffff"
    assert tab.pdf(format="A4").startswith(b"%PDF")


# Of every colour of letters and what is behind them: some of the words. Letters that are drawn
# (formulas, icons) are left out.
PAIRS_OF_COLOURS = """() => {
  const found = {}, style = document.createElement("style");
  style.textContent = "* { transition: none !important; }";
  document.head.append(style);
  const seen = { visibilityProperty: true, opacityProperty: true };
  for (const one of document.querySelectorAll("article *, #pst-primary-sidebar *")) {
    const words = [...one.childNodes].find((node) => node.nodeType === 3 && node.data.trim());
    if (!words || !one.checkVisibility(seen)) continue;
    if (one.closest("mjx-container, .headerlink, svg, .math")) continue;
    let behind = one;
    while (behind && /, 0\\)$/.test(getComputedStyle(behind).backgroundColor))
      behind = behind.parentElement;
    const back = behind ? getComputedStyle(behind).backgroundColor : "rgb(255, 255, 255)";
    found[[getComputedStyle(one).color, back].join("|")] = words.data.trim();
  }
  return found;
}"""
NAMELESS = """[...document.querySelectorAll("button, a[href], input, summary")]
  .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.title || one.placeholder
    || one.labels?.[0]?.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 120))"""


@pytest.fixture
def survey(book, open_page):
    """What there is to say of every page, from opening each once at the size of a desk."""
    found = {}
    for page in book.pages():
        name = str(page.relative_to(book.html))
        tab = open_page(name)
        files = {Path(url.split("?")[0].split("#")[0].removeprefix("file://")) for url in tab.read}
        found[name] = one = {
            "weight": sum(file.stat().st_size for file in files if file.is_file()),
            "equations": tab.evaluate("!!window.MathJax"),
            "nameless": tab.evaluate(NAMELESS),
        }
        for theme in ("light", "dark"):
            tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            one[theme] = tab.evaluate(PAIRS_OF_COLOURS)
        tab.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        one["over"] = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
    return found


def test_every_page_is_light_named_readable_and_no_wider_than_a_phone(survey):
    assert len(survey) >= 8
    for name, page in survey.items():
        limit = WHOLE_SWEEP if name.endswith("-shapes.html") else WITHOUT
        assert page["weight"] <= (WITH_EQUATIONS if page["equations"] else limit), name
        assert page["nameless"] == [] and page["over"] <= 0, name
        for theme in ("light", "dark"):
            assert page[theme] or name == "genindex.html", name
            for colours, words in page[theme].items():
                one, other = map(hexed, colours.split("|"))
                assert svg.contrast(one, other) >= 4.5, f"{name} {theme} {colours}: {words}"
    assert survey["flash.html"]["equations"] and not survey["questions.html"]["equations"]


def hexed(colour):
    """A browser's rgb(a) text as #rrggbb, what shows through counted as nothing."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"[\d.]+", colour)[:3])


def test_each_stop_of_the_tab_key_is_seen_and_has_a_name(open_page):
    tab = open_page("flash.html")
    stops = []
    for _ in range(45):
        tab.keyboard.press("Tab")
        stops.append(tab.evaluate("""() => {
          const one = document.activeElement, look = getComputedStyle(one);
          const named = one.textContent.trim() || one.ariaLabel || one.title || one.placeholder;
          return [one.outerHTML.slice(0, 120), look.outlineStyle,
                  parseFloat(look.outlineWidth), !!named];
        }"""))
    assert len({html for html, *_ in stops}) > 30
    assert [stop for stop in stops if stop[1] == "none" or stop[2] < 2 or not stop[3]] == []


def attributes(tab, selector, name):
    return [one.get_attribute(name) for one in tab.locator(selector).all()]


@pytest.mark.parametrize(
    ("query", "section"),
    [("atomic additions", "#derivation-one-number-per-query-is-enough"),
     ("ring all-reduce", "questions.html#parallelism-on-paper"),
     ("expon", "flash")],
)  # fmt: skip
def test_the_search_quotes_sections_from_a_disk(open_page, query, section):
    tab = open_page("search.html", query=f"?q={query.replace(' ', '+')}")
    assert re.match(r"\d+ sections? with", tab.text_content("[role=status]"))
    links = attributes(tab, ".a2-results a", "href")
    assert any(section in link for link in links), links
    marks = tab.locator(".a2-results mark").all_text_contents()
    assert {mark.lower() for mark in marks} <= set(query.split()) and marks
    with tab.expect_navigation():
        tab.locator(".a2-results a").first.click()
    assert tab.evaluate("!!document.getElementById(location.hash.slice(1))")


TEXTS = """A2_TEXTS = [
  ["notebooks/x", "Log", "all", "All rows", "tile tile tile", "4.99", 0.5],
  ["a", "A", "one", "One", "A tile of keys.", "", 1],
  ["b", "B", "tiles", "Tiles", "How many there are.", "", 1],
  ["c", "C", "all", "Words", "a <b>textile</b> mill", "", 1],
]"""


def test_the_search_ranks_headings_then_prose_then_records(browser, book, tmp_path):
    page = tmp_path / "search.html"
    script = (book.html / "_static" / "search.js").read_text()
    page.write_text('<div class="bd-search-container"><input name="q"></div>'
                    f'<p id="search-results"></p><script>{TEXTS}</script>'
                    f"<script>{script}</script>")  # fmt: skip
    tab = browser.new_page()
    tab.goto(page.as_uri() + "?q=tile")
    expected = ["b.html#tiles", "a.html#one", "notebooks/x.html#all", "c.html#all"]
    assert attributes(tab, ".a2-results a", "href") == expected
    assert tab.locator(".a2-results b").count() == 0  # words of a page are never HTML
    tab.fill("input", "4.99")  # in a table's cell: found, and not quoted
    assert attributes(tab, ".a2-results a", "href") == ["notebooks/x.html#all"]
    assert tab.text_content(".a2-results p") == "tile tile tile"
    tab.fill("input", "nowhere")
    assert tab.text_content("[role=status]").startswith("No sections with")
    tab.fill("input", "")
    assert tab.locator(".a2-results li").count() == 0
    tab.close()


@pytest.mark.skipif("A2LIB_AXE" not in os.environ, reason="A2LIB_AXE names no axe.min.js")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing(book, open_page, size, theme):
    rules = Path(os.environ["A2LIB_AXE"]).read_text(encoding="utf-8")
    for name in names(book):
        tab = open_page(name, size, theme)
        tab.evaluate(rules)
        found = tab.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], [n["html"][:120] for n in one["nodes"]]) for one in found] == [], name
