"""What of a layer norm needs precision, and what needs range: limits by arithmetic, then rows."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.mixed_precision.rows import MISSING, Mixed, named
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.floating import FORMATS, Loop, decimal

WRONG = 0.1  # a relative error above this is called wrong
FEATURES = 2560  # the default of the notebook, and the width of the 2.7B model
DTYPES = ("fp32", "fp16", "bf16")
ONE_PASS, TWO_PASSES = "variance, one pass", "variance, two passes"


def limits(caption: str, label: str) -> Table:
    """What each format can hold, and where a layer norm's parts leave it: nothing is measured."""
    lines = []
    for dtype in DTYPES:
        f = FORMATS[dtype]
        lines.append([
            dtype, f.precision, _power(f.largest), _power(f.smallest_normal), _power(f.smallest),
            _power(math.sqrt(float(f.largest))), _power(math.sqrt(float(f.smallest) / 2)),
            f"{math.sqrt(2**f.precision):.0f}",
            decimal(Loop(dtype, dtype, 1, "1").stalls_at()),
        ])  # fmt: skip
    columns = ["dtype", "significant bits", "largest", "smallest normal", "smallest",
               "squares overflow above", "squares vanish below",
               "one pass fails at a mean above, in σ", "a sum of ones stalls at"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def shown_rows(mixed: Mixed) -> pd.DataFrame:
    """The rows of one device and one number of features: the notebook's, or the largest."""
    rows = mixed.best("layernorm")
    found = set(rows["features"])
    return pick(rows, features=FEATURES if FEATURES in found else max(found, default=FEATURES))


def table(mixed: Mixed, caption: str, label: str) -> Table:
    """Every quantity by dtype; what is wrong, against float64 on that dtype's own inputs, is bold.

    The column of float64 is that of the first dtype's inputs.
    """
    rows = shown_rows(mixed)
    lines = []
    for (quantity, setting), group in _sorted(rows).groupby(["quantity", "setting"], sort=False):
        found = {r.dtype: r for r in group.itertuples()}
        cells = [_cell(found[d]) if d in found else "–" for d in DTYPES]
        truth = next((found[d].truth for d in DTYPES if d in found and found[d].truth), "")
        lines.append([quantity, setting, f"{float(truth):.4g}" if truth else "–", *cells])
    columns = ["quantity", "input", "float64", *DTYPES]
    frame = pd.DataFrame(lines, columns=columns)
    return Table(frame, caption, label, left=2, keys=2)


def sentence(mixed: Mixed) -> Markdown:
    """What failed in which dtype, on which device; the answer by its rows."""
    rows = shown_rows(mixed)
    if not len(rows):
        return Markdown(f"The experiment is {MISSING}; the limits are arithmetic.")
    where = named(rows["device"].iloc[0])
    text = []
    for quantity, words in (
        (ONE_PASS, "the variance in one pass, $E[x^2] - E[x]^2$,"),
        (TWO_PASSES, "the variance in two passes"),
        ("mean of squares", "the mean of squares"),
        ("mean, added one by one", "a mean added up one by one"),
        ("constant input, normalised", "the norm of a constant input"),
    ):
        failed = {d: _failures(rows, quantity, d) for d in DTYPES}
        failed = {d: settings for d, settings in failed.items() if settings}
        if not len(pick(rows, quantity=quantity)):
            continue
        if not failed:
            text.append(f"{words} is right in all three dtypes")
        else:
            parts = [f"in {d} for {listed(s)}" for d, s in failed.items()]
            text.append(f"{words} is wrong {listed(parts)}")
    return Markdown(f"On {where}: {'; '.join(text)}.")


def stored(mixed: Mixed) -> Markdown:
    """What rounding the input alone does to its variance, at the largest mean measured."""
    rows = pick(shown_rows(mixed), quantity="variance of the stored input")
    if not len(rows):
        return Markdown(f"The rounding of the input alone is {MISSING}.")
    last = _sorted(rows)["setting"].iloc[-1]
    mean = float(last.split()[1])
    text = [
        f"{r.dtype}, whose numbers there are {decimal(FORMATS[r.dtype].spacing(int(mean)))} apart, "
        f"by {style.digits(100 * error)} %"
        for r in _sorted(pick(rows, setting=last)).itertuples() if (error := _error(r)) is not None
    ]  # fmt: skip
    return Markdown(
        f"No accumulator mends what the input has lost. At a mean of {mean:g} the variance of the "
        f"stored numbers, in float64, is off in {listed(text)}."
    )


def repaired(mixed: Mixed) -> Markdown:
    """Whether fp32 arithmetic on the low inputs is right where low arithmetic is wrong."""
    rows = shown_rows(mixed)
    pairs = [(d, s) for d in ("fp16", "bf16") for s in _failures(rows, ONE_PASS, d)]
    if not pairs:
        return Markdown("")
    left = [(d, s) for d, s in pairs if s in _failures(rows, f"{ONE_PASS} in fp32", d)]
    text = (
        f"Of the {len(pairs)} variances that one pass gets wrong in fp16 or bf16, "
        f"{len(pairs) - len(left)} are right when the same inputs are converted to fp32 first"
    )
    return Markdown(text + ", with the same formula.")


def eps(mixed: Mixed) -> Markdown:
    """What is left of eps in fp16."""
    rows = _sorted(pick(shown_rows(mixed), quantity="eps", dtype="fp16"))
    gone = [r.setting for r in rows.itertuples() if r.status == "ok" and float(r.computed) == 0]
    kept = [r.setting for r in rows.itertuples() if r.status == "ok" and float(r.computed) > 0]
    f = FORMATS["fp16"]
    text = (
        f"An eps below half the smallest number, {_power(f.smallest / 2)}, is 0 in fp16; from "
        f"there to {_power(f.smallest_normal)} it is held with fewer bits."
    )
    if gone and kept:
        text += f" Of those tried {listed(gone)} became 0 and {listed(kept)} did not."
    return Markdown(text)


def _failures(rows: pd.DataFrame, quantity: str, dtype: str) -> list[str]:
    """The settings at which ``quantity`` is wrong in ``dtype``."""
    return [r.setting for r in _sorted(pick(rows, quantity=quantity, dtype=dtype)).itertuples()
            if r.status == "ok" and _is_wrong(r)]  # fmt: skip


def _is_wrong(row) -> bool:
    error = _error(row)
    return error is None or error > WRONG


def _error(row) -> float | None:
    """The relative error, absolute where the truth is 0; None where the result is no number."""
    result, truth = float(row.computed), float(row.truth)
    if not math.isfinite(result):
        return None
    return abs(result - truth) / abs(truth) if truth else abs(result)


def _cell(row) -> str:
    if row.status != "ok":
        return style.STATUS[row.status]
    text = f"{float(row.computed):.4g}"
    return f"**{text}**" if _is_wrong(row) else text


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by quantity, then by the number of their setting, then by dtype."""
    groups = ("variance of", "variance, one pass", "variance, two", "mean, added", "mean of", "eps",
              "constant", "layer_norm", "largest")  # fmt: skip

    def place(row) -> tuple:
        group = next((i for i, g in enumerate(groups) if row.quantity.startswith(g)), len(groups))
        number = float(row.setting.split()[-1])
        return group, row.quantity.endswith("fp32"), number, DTYPES.index(row.dtype)

    order = sorted(rows.itertuples(), key=place)
    return rows.loc[[row.Index for row in order]]


def _power(x) -> str:
    return f"{float(x):.3g}"
