"""What the tests of the calculator and of the explorer, in a browser, do alike."""

import pytest

from a2lib.paths import ROOT

PAGES = ROOT / "book" / "_ext" / "pages"
PHONE = (390, 844)
# What of a drawing is no number, or outside of its frame of 360 by ``height``.
OUTSIDE = """function outside(text, height) {
  document.body.style = "width: 360px; margin: 0; font: 12px sans-serif";
  document.body.innerHTML = `<svg class="a2-drawing" viewBox="0 0 360 ${height}">${text}</svg>`;
  if (/NaN|Infinity|undefined/.test(text)) return [text];
  return [...document.querySelector("svg").children].filter((part) => {
    const { left, top, right, bottom } = part.getBoundingClientRect();
    return left < -1 || top < -1 || right > 361 || bottom > height + 1;
  }).map((part) => part.outerHTML.slice(0, 200));
}"""


def functions(browser, *names):
    """An empty page with these scripts and style sheets, and the function ``outside``."""
    tab = browser.new_page()
    tab.add_script_tag(content=OUTSIDE)
    for name in names:
        add = tab.add_script_tag if name.endswith(".js") else tab.add_style_tag
        add(path=PAGES / name)
    return tab


def types(tab, field, text):
    tab.focus(f"#a2-{field}")
    tab.keyboard.press("Control+A")
    tab.keyboard.type(text)


def out(tab, name):
    return tab.text_content(f'[data-out="{name}"]')


def said_under(tab, field):
    """The line that stands right under a field, which is marked as wrong."""
    assert tab.get_attribute(f"#a2-{field}", "aria-invalid") == "true"
    above, line = (tab.locator(f"#a2-{field}{end}").bounding_box() for end in ("", "-error"))
    assert 0 <= line["y"] - above["y"] - above["height"] < 12
    assert line["x"] == pytest.approx(above["x"], abs=1)
    return tab.text_content(f"#a2-{field}-error")


def fits_a_phone(tab, form, fields):
    """Each of so many fields has one label and is large enough, and none is to be scrolled to;
    that no page is wider than a phone, test_browser.py has."""
    assert tab.locator(f".a2-wide {form}").count() == 0  # nothing to scroll sideways
    labels_and_heights = """(form) => [...document.querySelectorAll(
      `${form} :is(input, select)`)].filter((one) => !one.closest("details")).map((one) =>
      [one.labels.length, one.getBoundingClientRect().height])"""
    labelled = tab.evaluate(labels_and_heights, form)
    assert len(labelled) == fields and all(n == 1 and height >= 44 for n, height in labelled)


def in_focus(tab):
    """The field that has the focus, whose outline is seen."""
    field, style, width = tab.evaluate("""() => {
      const look = getComputedStyle(document.activeElement);
      return [document.activeElement.id, look.outlineStyle, parseFloat(look.outlineWidth)]; }""")
    assert style != "none" and width >= 2
    return field
