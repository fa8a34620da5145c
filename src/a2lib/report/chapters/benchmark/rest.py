"""Where the time of our step beyond its floor goes, as far as the rows tell."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.estimate import floors, idle
from a2lib.report.chapters.benchmark.rows import (
    AUTOCAST,
    CONTEXT,
    EAGER_OURS,
    MODELS,
    OURS,
    PEER,
    PLAIN,
    TITLES,
    Benchmark,
)
from a2lib.report.chapters.measured import HOST, time
from a2lib.report.chapters.profile.rows import Profile
from a2lib.report.chapters.profile.ways import measured
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table

WAYS = (PLAIN, {**PLAIN, "precision": "tf32"}, AUTOCAST, EAGER_OURS, PEER, OURS)
PASSES = ("forward", "backward", "optimizer")


def passes(b: Benchmark, model: str) -> dict[str, float]:
    """The GPU's time of each part of our step, in ms.

    The optimizer's is its least in any way, since it is the same kernels; the forward's that of a
    captured one; the backward's what the captured step has beyond both. Without a captured forward
    the two are those as called, where the host keeps ahead."""
    # The captured step less captured forward and backward is no optimizer: in fp32 that has been
    # less than its bytes over the bandwidth.
    optimizer = [b.ms(model, CONTEXT, "optimizer", way) for way in WAYS]
    found = {"optimizer": min(filter(None, optimizer))} if any(optimizer) else {}
    rows = [b.row(model, CONTEXT, "step", OURS, mode, True) for mode in ("forward", "train-step")]
    forward, step = (None if row is None or row.status != "ok" else float(row.ms) for row in rows)
    host = b.host(model, CONTEXT, OURS)
    if forward and step and found and b.one_commit(*rows):
        found["forward"], found["backward"] = forward, step - forward - found["optimizer"]
    elif host and step and host < HOST * step:
        parts = {p: b.ms(model, CONTEXT, p, OURS) for p in ("forward", "loss", "backward")}
        found["forward"] = parts["forward"]
        found["backward"] = (parts["loss"] or 0) + parts["backward"]
    return found


def table(b: Benchmark, caption: str, name: str) -> Table:
    """The floor of our step and of its parts beside the GPU's time."""
    lines = []
    for model in MODELS:
        captured = b.ms(model, CONTEXT, "step", way=OURS, capture=True)
        least = _by_pass(b, model)
        if not (captured and least):
            continue
        known = passes(b, model)
        cells = [time(least["total"]), time(captured), f"{least['total'] / captured:.0%}"]
        for part in PASSES:
            cells += [time(least[part]), time(known.get(part))]
        lines.append([TITLES[model], *cells])
    heads = ["step: floor", "GPU", "share"]
    for i, part in enumerate(PASSES):
        heads += [f"{part}: floor", f"GPU {' ' * i}"]
    return Table(pd.DataFrame(lines, columns=["model", *heads]), caption, name)


def sentence(b: Benchmark, profile: Profile) -> Markdown:
    """What each step takes beyond its floor, and which parts have it."""
    beyond, shares, reached, told, missing = {}, [], [], {}, []
    for model in MODELS:
        captured = b.ms(model, CONTEXT, "step", way=OURS, capture=True)
        least, known = _by_pass(b, model), passes(b, model)
        if not (captured and least and "optimizer" in known):
            continue
        beyond[model] = captured - least["total"]
        reached.append(least["optimizer"] / known["optimizer"])
        shares.append((known["optimizer"] - least["optimizer"]) / beyond[model])
        if "backward" in known:
            told[model] = [known[p] - least[p] for p in ("forward", "backward")]
        else:
            missing.append(TITLES[model])
    if not beyond:
        return Markdown(b.not_yet("where the rest of the step goes"))
    text = (
        f"Beyond its floor the captured step takes "
        f"{listed([f'{time(ms)} ms ({TITLES[model]})' for model, ms in beyond.items()])}. The "
        f"optimizer has {style.between(shares, style.share)} of that: its bytes over the "
        f"measured bandwidth are {style.between(reached, '{:.0%}'.format)} of its time."
    )
    if told:
        named = ", ".join(f"{TITLES[model]} {time(first)} and {time(second)} ms"
                          for model, (first, second) in told.items())  # fmt: skip
        whole = {model: sum(more) for model, more in told.items()}
        text += f" Forward and backward take beyond their floors: {named}.{_idle(b, whole)}"
        text += _traced(b, profile)
    if missing:
        text += f" {b.not_yet(f'forward and backward of {listed(missing)} apart, by the GPU')}"
    return Markdown(text)


def _idle(b: Benchmark, told: dict[str, float]) -> str:
    """How much of what forward and backward take beyond their floors the tiles explain."""
    least = {model: idle(b, model)["total"] for model in told}
    named = listed([f"{time(ms)} ms ({TITLES[model]})" for model, ms in least.items()])
    shares = [least[model] / ms for model, ms in told.items() if ms > 0]
    if not shares:
        return ""
    return (
        f" Of that, products cut into tiles explain {named}, "
        f"{style.between(shares, '{:.0%}'.format)}: tiles of 128 by 128 elements or more that are "
        f"computed whole, one at a time by each of {b.sheet('multiprocessors'):.0f} "
        "multiprocessors, leave some of these idle in the last turn and reach beyond the edge, "
        "more than in the product of the best rate."
    )


def _traced(b: Benchmark, profile: Profile) -> str:
    """Whether products or what lies between them takes more than its floor, by the traces."""
    found = {model: way for model in MODELS if (way := measured(profile, model, OURS))}
    told = []
    for model, way in found.items():
        least = _by_pass(b, model)
        if way.floors and least:
            products, others = way.products - way.floors[0], way.rest - way.floors[1]
            told.append(
                f"{time(products)} and {time(others)} ms in {TITLES[model]}, of the latter "
                f"{time(way.update - least['optimizer'])} AdamW's"
            )
    if not told:
        return (
            " Whether the rest is products below the best rate or what lies between them, these "
            "rows do not say."
        )
    return (
        " [Traces](#tab-profile-ways) of the same step, launched, tell products, attention's among "
        f"them, from all else. Beyond their floors the two take {'; '.join(told)}."
    )


def _by_pass(b: Benchmark, model: str) -> dict[str, float]:
    """The floor of the step and of its parts, the loss in the backward's; {} without ceilings."""
    least = {name: f.ms for name, f in floors(b, model, "bf16", True, by="phase").items()}
    if least:
        least["backward"] += least.pop("loss")
    return least
