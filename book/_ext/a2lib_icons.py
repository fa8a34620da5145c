"""The icons that pages use, and not the two thousand that the theme brings.

The theme's style sheet has a rule for every icon of Font Awesome, and its fonts a glyph. Rules that
no page and no script asks for go, and each font keeps the characters that some style sheet names.
fontTools is there because matplotlib needs it.
"""

from __future__ import annotations

import re
from pathlib import Path

from fontTools import subset, ttLib

SHEET = Path("_static") / "styles" / "pydata-sphinx-theme.css"
ONE_ICON = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"[^"]*"\}')
ASKED = re.compile(r"\bfa-[\w-]+")
ESCAPED = re.compile(r'"\\([0-9a-f]{2,5}) ?"')
PRIVATE = re.compile("[\ue000-\uf8ff]")  # the icons' range; some rules hold them unescaped
FONT = re.compile(
    r'url\(([^()]*/)(fa-[\w-]+)\.woff2\) format\("woff2"\)'
    r'(?:,url\([^()]*\.ttf\) format\("truetype"\))?'
)


def keep_used_icons(app, exception) -> None:
    """Cut the theme's icon rules and fonts down to what the built pages use."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    sheet = out / SHEET
    css = sheet.read_text(encoding="utf-8")
    if not ONE_ICON.search(css):
        raise RuntimeError(f"{SHEET}: no icon rules; see _ext/a2lib_icons.py")
    files = [*out.rglob("*.html"), *out.rglob("*.js")]
    asked = set().union(*(ASKED.findall(file.read_text(encoding="utf-8")) for file in files))
    css = used_rules(css, asked)
    files += [file for file in out.rglob("*.css") if file != sheet]
    texts = [css, *(file.read_text(encoding="utf-8") for file in files)]
    characters = {int(code, 16) for text in texts for code in ESCAPED.findall(text)}
    characters |= {ord(icon) for text in texts for icon in PRIVATE.findall(text)}
    for folder, name in FONT.findall(css):
        small_font(sheet.parent / folder / f"{name}.ttf", characters)
    css = FONT.sub(r'url(\1\2.woff) format("woff")', css)
    sheet.write_text(css, encoding="utf-8")
    for file in (out / "_static" / "vendor").rglob("fa-*.*"):
        if file.suffix in (".woff2", ".ttf"):
            file.unlink()


def used_rules(css: str, asked: set[str]) -> str:
    """The style sheet without the rules of icons that are not among `asked` (fa-sun, ...)."""
    return ONE_ICON.sub(lambda m: m[0] if asked & set(ASKED.findall(m[1])) else "", css)


def small_font(file: Path, characters: set[int]) -> Path:
    """Write the glyphs of `characters` beside a TrueType font, as .woff; returns its path."""
    font = ttLib.TTFont(file)
    options = subset.Options(flavor="woff", layout_features=[], hinting=False)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=characters)
    cut.subset(font)
    font.flavor = "woff"
    font.save(file.with_suffix(".woff"), reorderTables=None)
    return file.with_suffix(".woff")


def setup(app) -> dict:
    # After a2lib_theme, which drops a script that names every icon.
    app.connect("build-finished", keep_used_icons, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
