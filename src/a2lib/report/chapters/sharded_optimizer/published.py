"""What another writeup of the assignment measured, beside the formula and ours."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.measured import time
from a2lib.report.chapters.sharded_optimizer.rows import (
    GIB,
    HANDOUT,
    Sharding,
    formula,
    weight_bytes,
)
from a2lib.report.metrics import pick
from a2lib.report.style import digits
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.sharding import STATE

PLAIN = HANDOUT[0]  # the model that the writeup names, as the handout has it


def table(c: Sharding, caption: str, label: str) -> Table:
    """Printed GiB and seconds, those of the formula for our model, and ours."""
    lines = []
    for row in c.reference.itertuples():
        if row.unit == "s":
            mine = c.time(row.optimizer, setting=PLAIN)
            values = [f"{row.printed:g} s", MISSING, MISSING if mine is None
                      else f"{time(mine.ms)} ms"]  # fmt: skip
        else:
            values = [_printed(row), _gib(_counted(row)), _gib(_measured(c, row))]
        lines.append([row.quantity, row.optimizer, row.moment, *values])
    columns = ["", "optimizer", "moment", "printed", "formula", "ours"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=3, keys=3)


def sentence(c: Sharding) -> Markdown:
    """What explains their figures: a temporary of the update, by its size."""
    peaks = pick(c.reference, quantity="in use", moment="after")
    after = {row.optimizer: float(row.printed) * GIB for row in peaks.itertuples()}
    fell = after["plain"] - after["sharded"]
    whole, part = (formula(o, PLAIN).at("after")[STATE] for o in ("plain", "sharded"))
    # PyTorch's default on a GPU takes the root of all second moments at once.
    foreach = 1.5 * (whole - part)
    over = [after[o] - sum(formula(o, PLAIN).at("after").values()) - s / 2
            for o, s in (("plain", whole), ("sharded", part))]  # fmt: skip
    took = {row.optimizer: float(row.printed)
            for row in pick(c.reference, unit="s").itertuples()}  # fmt: skip
    device = c.reference.device.iloc[0]
    text = (
        f"The writeup ({device}) finds {_gib(fell)} GiB less with sharding after the update, more "
        f"than the {_gib(whole - part)} GiB of state saved. PyTorch's default AdamW takes the "
        "roots of all second moments at once, a temporary of half the state, which sharding "
        f"divides too: {_gib(foreach)} GiB in all. The writeup's figures then lie "
        f"{_gib(over[0])} and {_gib(over[1])} GiB above the count, much the same with and without, "
        "which suggests that such peaks were read; that is our guess. Our updates are fused and "
        "have no temporary. "
        f"Its sharded step takes {took['sharded'] / took['plain']:.2f} times the plain one: the "
        f"weights, {_gib(weight_bytes(PLAIN))} GiB, are broadcast after the update, over PCIe."
    )
    return Markdown(text)


def _printed(row) -> str:
    if pd.isna(row.most):
        return f"{row.printed:g} {row.unit}"
    return f"{row.printed:g} to {row.most:g} {row.unit}"


def _counted(row) -> float:
    at = formula(row.optimizer, PLAIN).at(row.moment)
    return at[row.quantity] if row.quantity in at else sum(at.values())


def _measured(c: Sharding, row) -> float | None:
    found = c.held(row.optimizer, row.moment, setting=PLAIN)
    if found is None:
        return None
    column = {STATE: "optimizer_bytes", "parameters": "parameter_bytes",
              "gradients": "gradient_bytes"}.get(row.quantity, "present_bytes")  # fmt: skip
    return float(getattr(found, column))


def _gib(n_bytes: float | None) -> str:
    return MISSING if n_bytes is None else digits(n_bytes / GIB)
