"""The book as a reader has it: on a screen, a phone, paper and a keyboard, in both themes.

Runs where a Chromium is installed; playwright drives it and downloads nothing.
"""

import io
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

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


# Of the lab records, which one template makes: the longest, and one of ranks.
RECORDS = ("notebooks/flash.html", "notebooks/ddp.html")


def test_every_page_is_light_and_fits_a_phone(book, open_page):
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
        wrong, *there = tab.evaluate(ON_A_PHONE)
        assert wrong == [], name
        counts.append(there)
    assert len(equations) >= 8 and set(RECORDS) <= equations.keys()
    tables, formulas, _ = map(sum, zip(*counts, strict=True))
    assert tables > 2 and formulas > 50, (tables, formulas)
    assert equations["flash.html"] and not equations["search.html"]


def hexed(colour):
    """A browser's rgb(a) text as #rrggbb, what shows through counted as nothing."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"[\d.]+", colour)[:3])


def test_a_link_opens_the_fold_that_it_ends_in(open_page):
    tab = open_page("flash.html", query="#flash-forward")
    [fold] = tab.locator("article details[open]").all()
    assert fold.inner_text().startswith("flash_forward (a)")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")  # all of it is on paper
    assert tab.locator("article details:not([open])").count() == 0
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("article details[open]").count() == 1


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
