"""What the chapter's figures rest on: what could be filed, the same steps by a second profiler and
by traces of their own, and what was not traced."""

from __future__ import annotations

import re
from dataclasses import dataclass

from a2lib.measure.trace.classes import OTHER, kind_of, plain
from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.profile.rows import (
    BATCH,
    COMPILED,
    CONFIGURATION,
    CONTEXT,
    CONTEXTS,
    MODES,
    PLAIN,
    PROFILERS,
    WAYS,
    Profile,
    lacking,
    share,
    title,
)
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import Markdown

TRACED = ("small", "2.7B")  # the models of the chapter
EVERYWHERE = (PLAIN, COMPILED)  # ways that are traced at every context, others at one
LIMIT = 2.0  # percent of the time that may be without a class


def alone(p: Profile) -> Markdown:
    """Whether a mode traced by itself has the share that its phases have in a train-step; and what
    is left to trace."""
    off = {}
    for words, way in WAYS.items():
        for model in p.models:
            for context in CONTEXTS:
                for mode in MODES[:2]:
                    both = [p.of(model, context, mode, way, (traced,))
                            for traced in ("train-step", mode)]  # fmt: skip
                    if all(len(one) for one in both):
                        name = f"{title(model)} at {style.tokens(context)} ({words})"
                        off[name, mode] = abs(share(both[0], "matmul") - share(both[1], "matmul"))
    if not off:
        text = p.not_yet("modes traced by themselves")
        return Markdown("\n\n".join(filter(None, [text, str(left(p))])))
    (name, mode), most = max(off.items(), key=lambda one: one[1])
    text = (
        f"Shares of a mode are those of its phases in a train-step's trace. In {len(off)} traces "
        f"of modes by themselves they differ by at most {100 * most:.1f} points, in the {mode} of "
        f"{name}."
    )
    return Markdown("\n\n".join(filter(None, [text, str(left(p))])))


def filed(p: Profile) -> Markdown:
    """What could not be filed, of every trace: the largest shares, and the verdict."""
    rows = pick(p.table, phase="step", status="ok")
    if not len(rows):
        return Markdown(p.not_yet("how much of the time could be filed"))
    worst = {words: float(rows[f"no_{name}_percent"].max()) for name, words in
             (("class", "a name that no rule knew"), ("launch", "no launch in the trace"),
              ("range", "a launch outside of every range"))}  # fmt: skip
    said = listed([f"{value:.2g} % has {words}" for words, value in worst.items()])
    text = f"Of the kernel time of any of {len(rows)} traces at most {said}."
    if max(worst.values()) > LIMIT:
        text += f" More than {LIMIT:g} % is too much: shares are off by as much."
    notes = rows["note"].fillna("").str.extractall(r"no class: ([^;]+)")[0]
    known = {_function(name): kind_of(name) for name in notes if kind_of(name) != OTHER}
    if known:
        named = listed([f"`{name}`" for name in sorted(known)])
        text += (
            f" Of these names {named} has a rule by now, and counts on these pages as "
            f"{listed(sorted(set(known.values())))}; the rows keep the shares of then."
        )
    return Markdown(text)


def _function(name: str) -> str:
    """A kernel's name without namespaces and arguments."""
    return re.split(r"[<(]", plain(name))[0].rpartition("::")[2]


def noted(p: Profile) -> Markdown:
    """What Nsight Systems notes of its ranges, and whether one that is used here is missing."""
    rows = pick(p.table, phase="step", status="ok", profiler="nsys")
    said = rows[rows["note"].fillna("").str.contains("NVTX")]
    if not len(said):
        return Markdown("")
    whole, incomplete = 0, []
    for key, group in pick(p.kernels, profiler="nsys").groupby(CONFIGURATION):
        where = dict(zip(CONFIGURATION, key, strict=True))
        # Ranges around modules are those of a train-step that is not compiled.
        if where["mode"] == "train-step" and where["compile"] == "none":
            if lacking(group, where["model"]):
                incomplete.append(f"{title(where['model'])} at {style.tokens(where['context'])}")
            whole += 1
    text = (
        f"In the rows of {len(said)} of {len(rows)} traces stands a note of Nsight Systems, that "
        "not all NVTX events might have been collected. "
    )
    if incomplete:
        return Markdown(f"{text}In {listed(incomplete)} products are missing from the range of "
                        "their module.")  # fmt: skip
    text += (
        f"None that is used here is missing. In each of {whole} traces with ranges around modules "
        "every product lies in that of its module, forward and backward"
    )
    same, other = _phases_alike(p)
    if other:
        text += f"; but phases of {listed(other)} differ from mode to mode in their kernels"
    elif same:
        text += (
            f"; {same} configurations were traced in three modes, and each phase has as many "
            "kernels in every one of them"
        )
    steps = set(rows["n"].astype(int))
    text += f"; every trace has its {steps.pop()} steps" if len(steps) == 1 else ""
    same = [one for one in witnesses(p) if one.calls_agree]
    if same:
        text += (
            f"; and in {listed([one.name for one in same])} torch.profiler, which has no such "
            "note, files as many kernels in each"
        )
    return Markdown(f"{text}. What the note is about was not found out: our guess is that it comes "
                    "of stopping the trace before the program ends.")  # fmt: skip


def _phases_alike(p: Profile) -> tuple[int, list[str]]:
    """How many configurations that were traced in every mode have the same number of kernels of a
    phase in each, and those that have not."""
    same, other = 0, []
    every = [name for name in CONFIGURATION if name != "mode"]
    for key, group in pick(p.kernels, profiler="nsys").groupby(every):
        counts = group.groupby(["phase", "mode"])["calls"].sum().unstack()
        if set(counts.columns) != set(MODES):
            continue
        if (counts.nunique(axis="columns") == 1).all():
            same += 1
        else:
            other.append(f"{title(key[0])} at {style.tokens(key[1])}")
    return same, other


@dataclass(frozen=True)
class Witness:
    """One configuration by two profilers: ``calls`` in both for each phase, class and part, and the
    relative difference of kernel time, of all and of the class that differs most."""

    name: str
    calls_agree: bool
    total: float
    worst: tuple[str, float]


def witnesses(p: Profile) -> list[Witness]:
    """Every configuration that both profilers traced."""
    found = []
    every, order = p.kernels.groupby(CONFIGURATION), {name: i for i, name in enumerate(MODELS)}
    for key, group in sorted(every, key=lambda one: order.get(one[0][0], len(order))):
        if set(group["profiler"]) < set(PROFILERS):
            continue
        both = {name: pick(group, profiler=name) for name in PROFILERS}
        counts = [rows.groupby(["phase", "kind", "part"])["calls"].sum() for rows in both.values()]
        times = [rows.groupby("kind")["ms"].sum() for rows in both.values()]
        sums = [float(one.sum()) for one in times]
        # A class of a thousandth of the time says nothing about the others.
        large = times[0][times[0] > 0.001 * sums[0]]
        off = (times[1].reindex(large.index, fill_value=0.0) / large - 1).abs()
        name, same = f"{title(key[0])} at {style.tokens(key[1])}", counts[0].equals(counts[1])
        worst = str(off.idxmax()), float(off.max())
        found.append(Witness(name, same, sums[1] / sums[0] - 1, worst))
    return found


def witness(p: Profile) -> Markdown:
    """Whether torch.profiler says the same of the same steps."""
    found = witnesses(p)
    if not found:
        return Markdown(p.not_yet("the same steps by a second profiler"))
    told = []
    for one in found:
        same = "the same number of kernels in every phase, class and part" if one.calls_agree else (
            "another number of kernels in some phase, class or part"
        )  # fmt: skip
        told.append(
            f"{one.name}: {same}, {abs(one.total):.1%} {'more' if one.total > 0 else 'less'} "
            f"kernel time, most apart in {one.worst[0]} ({one.worst[1]:.1%})"
        )
    return Markdown(f"torch.profiler of the same steps, in another process: {'; '.join(told)}.")


def refused(p: Profile) -> Markdown:
    """The configurations without a trace, each with its reason; steps that nobody has traced yet.
    """
    if not len(p.table):
        return Markdown(p.not_yet("which configurations do not fit"))
    rows = p.table[p.table["status"] != "ok"]
    lines = [] if len(rows) else ["Every configuration that was tried has its trace."]
    for key, group in rows.groupby([*CONFIGURATION, "profiler"], sort=False):
        r = group.iloc[0]
        how = ", ".join([key[3], *key[4:6], *(["compiled"] if key[6] != "none" else [])])
        lines.append(f"- {title(key[0])}, {style.tokens(key[1])} tokens, {how}: "
                     f"{style.STATUS[r['status']]} ({r['note']})")  # fmt: skip
    return Markdown("\n".join([*lines, *([f"\n{left(p)}"] if str(left(p)) else [])]))


def left(p: Profile) -> Markdown:
    """The steps that nobody has traced yet; nothing where there is none."""
    found = [
        f"{title(model)} at {listed([style.tokens(c) for c in contexts])} ({words})"
        for words, way in WAYS.items() for model in TRACED
        if (contexts := [c for c in (CONTEXTS if way in EVERYWHERE else (CONTEXT,))
                         if not len(pick(p.table, model=model, context=c, batch=BATCH,
                                         mode="train-step", **way))])
    ]  # fmt: skip
    if not found:
        return Markdown("")
    return Markdown(f"**Not measured yet**, of the steps that this chapter is about: "
                    f"{'; '.join(found)}.")  # fmt: skip
