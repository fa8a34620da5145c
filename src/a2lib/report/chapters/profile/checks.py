"""What the chapter's figures rest on: what could be filed, the same steps by a second profiler and
by traces of their own, and what was not traced."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Whether a mode traced by itself has the share that its phases have in a train-step."""
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
        return Markdown(p.not_yet("modes traced by themselves"))
    (name, mode), most = max(off.items(), key=lambda one: one[1])
    return Markdown(
        f"Shares of a mode are those of its phases in a train-step's trace. In {len(off)} traces "
        f"of modes by themselves they differ by at most {100 * most:.1f} points, in the {mode} of "
        f"{name}."
    )


def filed(p: Profile) -> Markdown:
    """What could not be filed, of every trace: the largest shares, and the verdict."""
    rows = pick(p.table, phase="step", status="ok")
    if not len(rows):
        return Markdown(p.not_yet("how much of the time could be filed"))
    worst = {words: float(rows[f"no_{name}_percent"].max()) for name, words in
             (("class", "a name that no rule knows"), ("launch", "no launch in the trace"),
              ("range", "a launch outside of every range"))}  # fmt: skip
    said = listed([f"{value:.2g} % {words}" for words, value in worst.items()])
    text = f"Of the kernel time of {len(rows)} traces, no more than this has, in any one: {said}."
    if max(worst.values()) > LIMIT:
        text += f" More than {LIMIT:g} % is too much: shares are off by as much."
    return Markdown(text)


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
        f"Of {len(said)} traces Nsight Systems notes that not all NVTX events might have been "
        "collected. "
    )
    if incomplete:
        return Markdown(f"{text}In {listed(incomplete)} products are missing from the range of "
                        "their module.")  # fmt: skip
    text += (
        f"None that is used here is missing: in each of {whole} traces with ranges around modules "
        "every product lies in that of its module, forward and backward"
    )
    same = [one for one in witnesses(p) if one.calls_agree]
    if same:
        text += (
            f", and in {listed([one.name for one in same])} torch.profiler, which has no such "
            "note, files as many kernels in each"
        )
    return Markdown(f"{text}. Our guess is that the note comes of stopping the trace before the "
                    "program ends.")  # fmt: skip


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
