"""The accumulation loops: what arithmetic predicts, what was measured, where a sum stalls."""

from __future__ import annotations

import itertools

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.mixed_precision.rows import MISSING, Mixed, named
from a2lib.report.metrics import pick
from a2lib.report.style import DIM, INK, Chart, listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.floating import FORMATS, Binade, Loop, binades, decimal, handout_loops

LOOPS = handout_loops()
COLOURS = {"fp32": "#0072b2", "fp16": "#00825f", "bf16": "#d55e00"}
CROWDED = 0.4  # the least distance of two names in the figure, in units of the sum


def name(loop: Loop) -> str:
    """A loop as a line of the program."""
    return f"{loop.sum} += {loop.addend}" + (" (cast)" if loop.cast else "")


def of(sum_: str, addend: str, terms: int = 1000, cast: bool = False) -> Loop:
    """The handout's loop of these formats."""
    return next(
        loop for loop in LOOPS
        if (loop.sum, loop.addend, loop.terms, loop.cast) == (sum_, addend, terms, cast)
    )  # fmt: skip


def numbers() -> dict[str, str]:
    """What the prose quotes, by name: every digit of the 1,000 and 10,000 additions."""
    found = {
        f"{loop.sum}_{loop.addend}_{loop.terms}": decimal(loop.result())
        for loop in LOOPS if not loop.cast
    }  # fmt: skip
    found["fp32_stall"] = f"{int(of('fp32', 'fp32').stalls_at()):,}"
    for format_ in FORMATS.values():
        found[f"addend_{format_.name}"] = decimal(of("fp32", format_.name).held)
    return found


def parts(loop: Loop) -> tuple:
    """The error of the result, its part from rounding the addend once, and that from rounding the
    sums."""
    addend = loop.terms * loop.held - loop.exact
    error = loop.result() - loop.exact
    return error, addend, error - addend


def table(mixed: Mixed, caption: str, label: str) -> Table:
    """Every loop: result, error and its two parts as predicted, and what devices gave."""
    devices = mixed.devices_of("accumulation")
    lines = []
    for loop in LOOPS:
        error, addend, sums = parts(loop)
        cells = [_measured(mixed, loop, device) for device in devices] or [MISSING]
        lines.append([f"{loop.terms:,} × {loop.step}", f"`{name(loop)}`", decimal(loop.result()),
                      *cells, *(_short(part) for part in (error, addend, sums))])  # fmt: skip
    heads = [style.device_name(device) for device in devices] or ["measured"]
    columns = ["sum", "loop", "predicted result", *heads, "error", "of the addend", "of the sums"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def confirmed(mixed: Mixed) -> Markdown:
    """Whether the machines agree with the prediction, digit for digit."""
    text = []
    for device in mixed.devices_of("accumulation"):
        cells = [_measured(mixed, loop, device) for loop in LOOPS]
        ran = [cell for cell in cells if cell not in (MISSING, *style.STATUS.values())]
        if not ran:
            continue
        equal = ran.count("equal")
        verdict = "all to the last digit" if equal == len(ran) else f"{len(ran) - equal} differ"
        text.append(f"{equal} of {len(ran)} loops run on {named(device)} gave what is predicted "
                    f"({verdict})")  # fmt: skip
    if not text:
        return Markdown("No machine's loops are measured yet; the results are the predicted ones.")
    return Markdown(f"{listed(text)}.")


def walk(loop: Loop, caption: str, label: str) -> Table:
    """A loop power of two by power of two: how far apart numbers are, what an addition adds."""
    lines = [
        [f"{decimal(b.start)} to {decimal(2 * b.start)}", decimal(b.spacing), f"{b.additions:,}",
         decimal(b.gains[0]), _verdict(loop, b)]
        for b in binades(loop)
    ]  # fmt: skip
    columns = ["the sum is from", "numbers are apart", "additions", "most add", "which is"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def stalls() -> Markdown:
    """Where each low sum stops, and after how many additions."""
    text = []
    for low, terms in itertools.product(("fp16", "bf16"), (1000, 10_000)):
        loop = of(low, low, terms)
        if loop.result() != loop.stalls_at():
            text.append(
                f"the {low} sum of {terms:,} × {loop.step} would stall at "
                f"{decimal(loop.stalls_at())}, which it does not reach"
            )
            continue
        after = loop.partial_sums().index(loop.result()) + 1
        spacing = FORMATS[low].spacing(loop.result())
        text.append(
            f"that of {terms:,} × {loop.step} in {low} stalls at {decimal(loop.result())} after "
            f"{after:,} additions: numbers there are {decimal(spacing)} apart, and "
            f"{decimal(loop.held)} is less than half of it"
        )
    return Markdown(f"{text[0][0].upper()}{text[0][1:]}; {'; '.join(text[1:])}.")


def published(mixed: Mixed) -> Markdown:
    """How the published results compare with the prediction."""
    rows = pick(mixed.reference, table="accumulation")
    by_item = {_item(loop): loop for loop in LOOPS}
    equal = sum(_agrees(r.answer, by_item[r.item]) for r in rows.itertuples())
    n = rows["device"].nunique()
    return Markdown(
        f"{n} public writeups print {len(rows)} results of these loops, on "
        f"{listed(sorted(rows['device'].unique()))}; {equal} of them are the predicted ones to the "
        "digits printed."
    )


def figure() -> Chart:
    """The running sums against the additions, one panel for 0.01 and one for 0.001."""

    def draw(fig):
        axes = fig.subplots(2, 1)
        for ax, terms in zip(axes, (1000, 10_000), strict=True):
            ends = []
            for sum_, addend in (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")):
                loop = of(sum_, addend, terms)
                sums = loop.partial_sums()
                at = range(0, terms, terms // 250)
                x, y = [i + 1 for i in at] + [terms], [float(sums[i]) for i in at]
                y.append(float(sums[-1]))
                ax.plot(x, y, color=COLOURS[sum_], linewidth=2 if sum_ == "bf16" else 1.5)
                ends.append((y[-1], sum_))
            ax.plot([0, terms], [0, 10], color=INK, linewidth=1, linestyle=(0, (4, 3)))
            for height, names in _heaps(ends):
                ax.annotate(", ".join(names), (terms, height), xytext=(5, 0), va="center",
                            textcoords="offset points", annotation_clip=False)  # fmt: skip
            ax.set_title(f"{terms:,} times {of('fp32', 'fp32', terms).step}")
            ax.set_ylabel("running sum")
            ax.set_xlim(0, terms)
            ax.set_ylim(0, 11)
        axes[-1].set_xlabel("additions (dashed: exact)", color=DIM)

    return Chart(draw, height=5.2, room=0.17)


def _heaps(ends: list[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """The names at the ends of lines; those of lines that end together share a place."""
    heaps: list[tuple[float, list[str]]] = []
    for height, text in sorted(ends, reverse=True):
        if heaps and heaps[-1][0] - height < CROWDED:
            heaps[-1][1].append(text)
        else:
            heaps.append((height, [text]))
    return heaps


def _verdict(loop: Loop, binade: Binade) -> str:
    gain, times = binade.gains[0], binade.gains[0] / binade.spacing
    if not gain:
        return "nothing: less than half a distance"
    words = f"{times} distances" if times > 1 else "one distance"
    over = "" if gain == loop.held else f", {abs(1 - float(gain / loop.held)):.2%} too " + (
        "much" if gain > loop.held else "little")  # fmt: skip
    return words + over


def _measured(mixed: Mixed, loop: Loop, device: str) -> str:
    rows = mixed.of("accumulation", device)
    found = rows[
        (rows["sum_dtype"] == loop.sum) & (rows["addend_dtype"] == loop.addend)
        & (rows["cast"] == loop.cast) & (rows["terms"] == loop.terms)
        & (rows["addend"] == loop.step)
    ]  # fmt: skip
    if not len(found):
        return MISSING
    row = found.iloc[0]
    if row["status"] != "ok":
        return style.STATUS[row["status"]]
    return "equal" if row["computed"] == decimal(loop.result()) else row["computed"]


def _item(loop: Loop) -> str:
    cast = " cast" if loop.cast else ""
    return f"{loop.sum}+={loop.addend}{cast} {loop.terms}x{loop.step}"


def _agrees(answer: str, loop: Loop) -> bool:
    """Whether a printed number is the result, rounded to as many places as it has."""
    places = len(answer.partition(".")[2])
    return abs(float(answer) - float(loop.result())) <= 0.5 * 10.0**-places


def _short(x) -> str:
    """An error to three figures, with its sign; 0 if it is none."""
    if not x:
        return "0"
    return f"{'+' if x > 0 else '−'}{abs(float(x)):.3g}"
