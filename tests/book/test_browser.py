"""The book as a reader has it: on a screen, a phone, paper and a keyboard, in both themes.

Runs where a Chromium is installed; playwright drives it and downloads nothing.
"""

import io
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from svg_sizes import contrast

from a2lib.paths import ROOT

pytestmark = pytest.mark.slow
PHONE, PAPER = (390, 844), (718, 1000)
# Bytes that a page may read from the disk; a whole sweep, or the words of the book, may be more.
WITH_EQUATIONS, WITHOUT, WHOLE_SWEEP = 3e6, 1.5e6, 2e6
BACKGROUND = {"light": "#ffffff", "dark": "#121212"}


def corner(tab, selector):
    """The colour of a few pixels just inside the upper left corner of an element, as #rrggbb."""
    shot = tab.locator(selector).first.screenshot()
    pixel = imread(io.BytesIO(shot), format="png")[4, 4, :3]
    return "#" + "".join(f"{round(float(part) * 255):02x}" for part in pixel)


def test_a_figure_has_the_colour_of_the_page_in_both_themes(open_page):
    tab = open_page("flash-shapes.html", theme="dark")
    assert corner(tab, "figure img") == BACKGROUND["dark"]
    # The theme's switch, not the system's setting, has the last word.
    for theme in ("light", "dark"):
        tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        assert corner(tab, "figure img") == BACKGROUND[theme]
        body = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert hexed(body) == BACKGROUND[theme]


# Of the box of a table, before and after it is scrolled to its end: whether it says that there is
# more, and where the cells stand that name its first line; and how far it went, and its words.
SCROLLED = """(table) => {
  const box = [...document.querySelectorAll(".pst-scrollable-table-container.a2-wide")]
    .find((one) => one.querySelector(table) && one.scrollWidth - one.clientWidth > 40);
  const left = (one) => one.getBoundingClientRect().left - box.getBoundingClientRect().left;
  const look = () => [box.classList.contains("a2-more"),
    getComputedStyle(box).maskImage !== "none",
    ...[...box.querySelectorAll("tbody tr:first-child th")].map(left)];
  const before = look();
  box.scrollLeft = box.scrollWidth;
  return new Promise((done) => setTimeout(() => done([before, look(), box.scrollLeft,
    getComputedStyle(box, "::before").content, box.tabIndex, box.ariaLabel]), 100));
}"""


def test_on_a_phone_a_table_says_that_there_is_more_and_what_names_a_line_stays(open_page):
    tab = open_page("flash-shapes.html", PHONE)
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.wait_for_timeout(200)
    before, after, moved, words, tab_index, label = tab.evaluate(SCROLLED, "table.keys-2")
    assert moved > 40 and before[:2] == [True, True] and after[:2] == [False, False]
    assert len(before) == 2 + 2 and after[2:] == pytest.approx(before[2:], abs=1.5)
    assert "sideways" in words and tab_index == 0 and "scrolls sideways" in label


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


# Of both themes, every colour of letters and what is behind them: some of the words. Letters that
# are drawn (formulas, icons) are left out.
PAIRS_OF_COLOURS = """() => {
  const style = document.createElement("style"), themes = {};
  style.textContent = "* { transition: none !important; }";
  document.head.append(style);
  const seen = { visibilityProperty: true, opacityProperty: true };
  for (const theme of ["light", "dark"]) {
    document.documentElement.dataset.theme = theme;
    const found = themes[theme] = {}, backs = new Map([[null, "rgb(255, 255, 255)"]]);
    const behind = (one) => {
      if (!backs.has(one)) {
        const own = getComputedStyle(one).backgroundColor;
        backs.set(one, /, 0\\)$/.test(own) ? behind(one.parentElement) : own);
      }
      return backs.get(one);
    };
    for (const part of document.querySelectorAll("article, #pst-primary-sidebar")) {
      const texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
      while (texts.nextNode()) {
        const words = texts.currentNode.data.trim(), one = texts.currentNode.parentElement;
        if (!words || one.closest("mjx-container, .headerlink, svg, .math")) continue;
        if (!one.checkVisibility(seen)) continue;
        found[[getComputedStyle(one).color, behind(one)].join("|")] = words;
      }
    }
  }
  return themes;
}"""
# What on a phone is wrong: wider than its screen; a table that scrolls outside of a fold, but for
# those of lab records; columns that stay, and leave little to those that scroll; formulas that are
# not typeset, or wide and do not show their beginning. And how many there are of such tables,
# formulas and wide ones.
ON_A_PHONE = """() => {
  const width = (one) => one.getBoundingClientRect().width, wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the screen");
  let tables = 0;
  for (const table of document.querySelectorAll("article table")) {
    const box = table.closest(".pst-scrollable-table-container");
    if (!box || width(table) <= width(box) + 1) continue;
    tables++;
    if (!table.closest("details") && !location.pathname.includes("/notebooks/"))
      wrong.push(`scrolls, and is in no fold: ${table.innerText.slice(0, 99)}`);
    const stay = [...table.querySelectorAll("tbody tr:first-child .stub")]
      .filter((cell) => getComputedStyle(cell).position === "sticky");
    if (stay.reduce((sum, cell) => sum + width(cell), 0) >= 0.7 * width(box))
      wrong.push(`columns that stay: ${table.innerText.slice(0, 99)}`);
  }
  const formulas = [...document.querySelectorAll("article .math")];
  const wide = [...document.querySelectorAll("div.math.a2-wide")];
  for (const one of formulas)
    if (!one.querySelector("mjx-container") || one.querySelector("mjx-merror"))
      wrong.push(`not typeset: ${one.textContent}`);
  for (const box of wide) {
    const begins = box.querySelector("mjx-math").getBoundingClientRect().left;
    if (box.tabIndex !== 0 || getComputedStyle(box).maskImage === "none"
        || begins < box.getBoundingClientRect().left - 0.5)
      wrong.push(`wide formula: ${box.id}`);
  }
  return [wrong, tables, formulas.length, wide.length];
}"""
NAMELESS = """[...document.querySelectorAll("button, a[href], input, summary")]
  .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.title || one.placeholder
    || one.labels?.[0]?.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 120))"""


def readable(tab):
    """Asserts of both themes that a page's letters stand out; returns how many pairs it has."""
    themes = tab.evaluate(PAIRS_OF_COLOURS)
    for theme, found in themes.items():
        for colours, words in found.items():
            one, other = map(hexed, colours.split("|"))
            assert contrast(one, other) >= 4.5, f"{tab.url} {theme} {colours}: {words}"
    return min(map(len, themes.values()))


# Of the lab records, which one template makes: the longest, and one of ranks.
RECORDS = ("notebooks/flash.html", "notebooks/ddp.html")


def test_every_page_is_light_named_readable_and_fits_a_phone(book, open_page):
    tab, equations, counts = None, {}, []
    for page in book.pages():
        name = str(page.relative_to(book.html))
        if name.startswith("notebooks/") and name not in RECORDS:
            continue
        tab = open_page(name, PHONE, tab=tab)
        files = {Path(url.split("?")[0].split("#")[0].removeprefix("file://")) for url in tab.read}
        equations[name] = tab.evaluate("!!window.MathJax")
        whole = name.endswith(("-shapes.html", "-kernels.html")) or name == "search.html"
        limit = WITH_EQUATIONS if equations[name] else WHOLE_SWEEP if whole else WITHOUT
        assert sum(file.stat().st_size for file in files if file.is_file()) <= limit, name
        assert tab.evaluate(NAMELESS) == [], name
        wrong, *there = tab.evaluate(ON_A_PHONE)
        assert wrong == [], name
        counts.append(there)
        assert readable(tab) or name in ("search.html", "genindex.html"), name
    assert len(equations) >= 8 and set(RECORDS) <= equations.keys()
    tables, formulas, _ = map(sum, zip(*counts, strict=True))
    assert tables > 2 and formulas > 50, (tables, formulas)
    # test_mathjax_comes_with_equations_alone_and_the_search_with_its_page says of which pages.
    assert equations["flash.html"] and not equations["search.html"]


def test_the_side_bar_of_a_desk_is_readable_and_names_its_toggles(open_page):
    tab = open_page("notebooks/ddp.html")
    assert tab.locator("#pst-primary-sidebar a:visible").count() > 10
    assert readable(tab)
    toggles = tab.locator("#pst-primary-sidebar summary").all()
    names = [toggle.get_attribute("aria-label") for toggle in toggles]
    assert len(set(names)) == len(names) > 8


def hexed(colour):
    """Return a browser's rgb(a) text as #rrggbb, what shows through counted as nothing."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"[\d.]+", colour)[:3])


def test_each_stop_of_the_tab_key_is_seen_and_has_a_name(open_page):
    tab = open_page("flash.html")
    focused = """() => {
      const one = document.activeElement, look = getComputedStyle(one);
      const named = one.textContent.trim() || one.ariaLabel || one.title || one.placeholder;
      const width = parseFloat(look.outlineWidth);
      return [one.outerHTML.slice(0, 120), look.outlineStyle, width, !!named];
    }"""
    stops = []
    for _ in range(45):
        tab.keyboard.press("Tab")
        stops.append(tab.evaluate(focused))
    assert len({html for html, *_ in stops}) > 30
    assert [stop for stop in stops if stop[1] == "none" or stop[2] < 2 or not stop[3]] == []


def test_what_the_search_shows_is_readable_in_both_themes(open_page):
    tab = open_page("search.html", query="?q=why+is+my+first+step+slow")
    assert readable(tab) and tab.locator(".a2-results a mark").count()


def relations(page):
    """Where a page's head says that the previous and the next one is, and its title."""
    html = page.read_text(encoding="utf-8")
    links = dict(re.findall(r'<link rel="(next|prev)"[^>]* href="([^"]*)"', html))
    ways = {way: (page.parent / link).resolve() for way, link in links.items()}
    return ways, re.search(r"<title>([^<]*)</title>", html)[1]


def test_chapters_follow_chapters_and_a_lab_record_its_own(book):
    named = re.findall(r"(?:root|file): *(\S+)", (ROOT / "_toc.yml").read_text())
    chapters = [name for name in named if not name.startswith("notebooks/")]
    pages = [(book.html / f"{name}.html").resolve() for name in chapters]
    for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
        found, _ = relations(page)
        assert (found.get("prev"), found.get("next")) == (before, after), page.name
    records = sorted((book.html / "notebooks").glob("*.html"))
    assert len(records) == len(named) - len(chapters) > 8
    titles = set()
    for record in records:
        found, title = relations(record)
        assert found == {"prev": (book.html / record.name).resolve()}
        short = title.split(" &#8212; ")[0]
        assert short.startswith("Lab record: ")
        titles.add(short)
        link = f'of <a href="../{record.name}">'
        assert record.read_text(encoding="utf-8").count(link) == 1, record.name
        chapter = (book.html / record.name).read_text(encoding="utf-8")
        assert f'href="notebooks/{record.name}">{short}<' in chapter  # in the side bar
    assert len(titles) == len(records)


FOLDS = """<article style="height: 3000px"><div style="height: 1500px"></div>
<a href="#inside">in</a> <a href="#fold">fold</a>
<details><summary>one</summary>
<details><summary>two</summary><p id="inside">words</p></details></details>
<details id="fold"><summary>three</summary><p>words</p></details></article>"""


def test_a_link_opens_the_fold_that_it_ends_in(browser, book, tmp_path):
    script = (book.html / "_static" / "page.js").read_text()
    (tmp_path / "page.html").write_text(f"{FOLDS}<script>{script}</script>")
    tab = browser.new_page(viewport={"width": 900, "height": 600})

    def opened():
        return tab.evaluate("[...document.querySelectorAll('details')].map((one) => one.open)")

    def in_view(selector):
        top = f"document.querySelector('{selector}').getBoundingClientRect().top"
        tab.wait_for_function(f"{top} >= 0 && {top} < 600")

    for anchor, expected in (("inside", [True, True, False]), ("fold", [False, False, True])):
        tab.goto((tmp_path / "page.html").as_uri() + f"#{anchor}")
        tab.reload()
        in_view(f"#{anchor}")
        assert opened() == expected
        tab.goto((tmp_path / "page.html").as_uri())
        for _ in range(2):  # the second time the address is there already
            tab.evaluate("document.querySelectorAll('details').forEach((one) => one.open = false)")
            tab.click(f"a[href='#{anchor}']")
            in_view(f"#{anchor}")
            tab.wait_for_function("document.querySelector('details[open]')")
            assert opened() == expected
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")  # all of it is on paper
    assert opened() == [True] * 3
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened() == [False, False, True]
    tab.close()


def test_a_figure_is_enlarged_by_click_and_by_keyboard(open_page):
    tab = open_page("index.html", PHONE, "dark")
    width = "document.querySelector('{}').getBoundingClientRect().width"
    before = tab.evaluate(width.format("article figure img"))
    tab.focus(".a2-enlarge")
    assert re.fullmatch(r"Enlarge Fig\. \d+", tab.get_attribute(".a2-enlarge", "aria-label"))
    tab.keyboard.press("Enter")
    assert tab.is_visible(".a2-large") and tab.locator(".a2-large p").text_content().strip()
    assert tab.evaluate(width.format(".a2-large img")) >= 1.5 * before
    assert tab.get_attribute(".a2-large img", "alt")
    box = tab.locator(".a2-large").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0] and box["height"] <= PHONE[1]
    assert corner(tab, ".a2-large img") == BACKGROUND["dark"]
    tab.keyboard.press("Escape")
    assert not tab.is_visible(".a2-large")
    assert tab.evaluate("document.activeElement.className") == "a2-enlarge"
    tab.click("article figure img")
    assert tab.is_visible(".a2-large")
    tab.click(".a2-large button")
    assert not tab.is_visible(".a2-large")
