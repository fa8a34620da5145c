"""What a figure's letters say, how large and how clear they are, of its SVG."""

import re

LEAST_SIZE = 9  # px a letter has at least on a phone
PHONE = 342  # px that a figure is wide there


def texts(chart) -> list[str]:
    """Return the texts of a chart, in order."""
    return list(map(str.strip, re.findall(r"<text[^>]*>([^<]*)</text>", chart._repr_svg_())))


def smallest_text(svg: str) -> float:
    """Height in px of the smallest letters where the drawing is as wide as a phone shows it."""
    width = float(re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', svg)[1])
    sizes = re.findall(r"font(?:-size)?:\s*(?:[a-z]+ |\d{3} )*([\d.]+)px", svg)
    return min(map(float, sizes)) * PHONE / width if sizes else float("inf")


def parts_of(colour: str) -> list[float]:
    """Red, green and blue of a colour #rrggbb, from 0 to 1."""
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def on_a_dark_page(colour: str) -> str:
    """Return a colour #rrggbb after the filter of custom.css: invert(0.93) hue-rotate(180deg)."""
    r, g, b = [0.93 - 0.86 * part for part in parts_of(colour)]
    turned = (
        -0.574 * r + 1.43 * g + 0.144 * b,
        0.426 * r + 0.43 * g + 0.144 * b,
        0.426 * r + 1.43 * g - 0.856 * b,
    )
    text = "#"
    for part in turned:
        text += f"{round(255 * min(max(part, 0), 1)):02x}"
    return text


def luminance(colour: str) -> float:
    linear = []
    for part in parts_of(colour):
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    r, g, b = linear
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two #rrggbb colours, by WCAG 2: 1 for equal ones, 21 at most."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)
