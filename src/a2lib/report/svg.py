"""One SVG for the light page and the dark one: colours by name, text as text, little weight.

A picture in an `<img>` follows the colour scheme of the element that shows it, and the book's theme
sets that scheme with its switch. So each colour becomes a variable with two values, chosen inside
the picture; its background is painted, and where a reader's browser chooses wrongly the picture is
a card of the other theme, still readable.
"""

import hashlib
import re

# The colour that Python draws with -> its name, and its value on a light and on a dark page.
# Lines have a contrast of at least 3 on both backgrounds, text at least 4.5; tests compute them.
PAIRS = {
    "#000000": ("ink", "#222832", "#ced6dd"),
    "#ffffff": ("paper", "#ffffff", "#121212"),
    "#555555": ("dim", "#555b65", "#a4acb6"),
    "#dddddd": ("grid", "#dddddd", "#343a42"),
    "#d55e00": ("vermilion", "#d55e00", "#ff8a3d"),
    "#444444": ("slate", "#444444", "#c4c4c4"),
    "#a86f00": ("ochre", "#a86f00", "#f0b63a"),
    "#0072b2": ("blue", "#0072b2", "#4aa3e0"),
    "#00825f": ("green", "#00825f", "#2cc79b"),
    "#2a86bf": ("sky", "#2a86bf", "#8fd3ff"),
    "#b0558a": ("rose", "#b0558a", "#e8a0c8"),
    "#8b5a2b": ("brown", "#8b5a2b", "#c99a6c"),
    "#808080": ("grey", "#767676", "#9a9a9a"),
    # Fills with text on them: three steps to either side of a middle that says neither.
    "#f0ad78": ("ahead3", "#f0ad78", "#84461a"),
    "#f6cfab": ("ahead2", "#f6cfab", "#63371a"),
    "#fbe9da": ("ahead1", "#fbe9da", "#43291a"),
    "#eeeeee": ("level", "#eeeeee", "#33373c"),
    "#dce9f7": ("behind1", "#dce9f7", "#1b2d42"),
    "#b5d2f0": ("behind2", "#b5d2f0", "#1d4166"),
    "#86b6e6": ("behind3", "#86b6e6", "#23568a"),
}
LONG_DECIMAL = re.compile(r"(?<![\w.#-])-?\d+\.\d{3,}(?!\d*e)")


def themed(svg: str) -> str:
    """A drawing with the colours of PAIRS turned into one that both themes can show.

    Also drops what a page does not need (metadata, ids nobody refers to, decimals beyond the
    second) and gives equal styles one class. Equal drawings give equal bytes, and names are
    prefixed by a key of the content, so that several may stand in one document.
    """
    key = "s" + hashlib.sha256(svg.encode()).hexdigest()[:4]
    svg = re.sub(
        r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->", "", svg, flags=re.S
    )
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    # Inside tags alone: a label may well say 0.0123.
    svg = re.sub(r"<[^>]+>", lambda tag: LONG_DECIMAL.sub(_shorter, tag[0]), svg)
    svg = re.sub(r"font-family: '[^;\"]*", "font-family: system-ui, sans-serif", svg)
    svg = _short_ids(svg, key)
    for colour, (name, _, _) in PAIRS.items():
        svg = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{name})", svg)
    rules: dict[str, str] = {}
    svg = re.sub(
        r' style="([^"]*)"',
        lambda m: f' class="{rules.setdefault(m[1], f"{key}{len(rules)}")}"',
        svg,
    )
    used = set(re.findall(r"var\(--(\w+)\)", " ".join(rules))) | {"ink"}
    light, dark = variables(used)
    css = f".{key}{{{light}}}@media (prefers-color-scheme:dark){{.{key}{{{dark}}}}}"
    css += f".{key}{{fill:var(--ink);stroke-linejoin:round}}"
    css += "".join(f".{name}{{{_tight(rule)}}}" for rule, name in rules.items())
    svg = re.sub(r"(<svg\b)([^>]*>)", rf'\1 class="{key}"\2<style>{css}</style>', svg, count=1)
    svg = re.sub(r">\s+<(?!/?tspan)", "><", re.sub(r" *\n *", " ", svg)).strip() + "\n"
    return _without_bare_groups(_short_paths(svg.replace("xlink:href", "href")))


def variables(names: set[str] | None = None) -> tuple[str, str]:
    """The palette's colours (of ``names``, or all) as variables of a style: light, and dark."""
    pairs = [pair for pair in PAIRS.values() if names is None or pair[0] in names]
    light = ";".join(f"--{name}:{light}" for name, light, _ in pairs)
    dark = ";".join(f"--{name}:{dark}" for name, _, dark in pairs)
    return light, dark


def _short_ids(svg: str, key: str) -> str:
    """Drop the ids that nobody refers to, and prefix the others."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    names = {old: f"{key}-{n}" for n, old in enumerate(sorted(used))}
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", svg)
    svg = re.sub(r'(url\(#|href="#)([^)"]+)', lambda m: m[1] + names[m[2]], svg)
    return svg


def _short_paths(svg: str) -> str:
    """Path data without the blanks beside its letters."""
    return re.sub(r'(?<= d=)"[^"]*"', lambda d: re.sub(r" *([A-Za-z]) *", r"\1", d[0]), svg)


def _without_bare_groups(svg: str) -> str:
    """Drop the groups that have no attribute, and turns by nothing: they say nothing."""
    kept, bare = [], []
    svg = re.sub(r"<g */>|<g></g>| transform=\"rotate\(-?0 [^\"]*\"", "", svg)
    for part in re.split(r"(<g\b[^>]*>|</g>)", svg):
        if part.startswith("<g"):
            bare.append(part == "<g>")
            kept.append("" if bare[-1] else part)
        elif part == "</g>":
            kept.append("" if bare.pop() else part)
        else:
            kept.append(part)
    return "".join(kept)


def _shorter(number: re.Match) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _tight(rule: str) -> str:
    return re.sub(r"\s*([:;,])\s*", r"\1", rule)
