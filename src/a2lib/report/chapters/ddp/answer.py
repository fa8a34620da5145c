"""The first screen, and a section for each way to send gradients."""

from __future__ import annotations

from types import SimpleNamespace

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp import updates
from a2lib.report.chapters.ddp.host import SPREAD, messages
from a2lib.report.chapters.ddp.rows import (
    HANDOUT_MB,
    MAIN,
    MODELS,
    WORLD_SIZE,
    Ddp,
    exposed,
    gradient_bytes,
    name,
    seen,
    spread,
    time,
)
from a2lib.report.chapters.ddp.ways import TITLES, hidden, short
from a2lib.report.chapters.measured import HOST, refused, switched
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import Markdown
from a2lib.theory.collectives import all_reduce_s

LEVEL = " The steps are level, by their medians or their spreads."
NEAR = 0.02  # a launched step no further than this above its replay has not waited for the host


def floor_ms(c: Ddp, model: str, width: int = 4) -> float:
    """The least time that all gradients take over the link the maker states."""
    return 1e3 * all_reduce_s(gradient_bytes(model, width), WORLD_SIZE, c.link * 1e9)


def estimate(c: Ddp) -> Markdown:
    """What has to travel, before anything is measured."""
    told = [
        f"{label} has {gradient_bytes(model) / 1e9:.1f} GB of gradients in fp32, which take at "
        f"least {time(floor_ms(c, model))} ms, in bf16 {time(floor_ms(c, model, 2))} ms"
        for model, label in MODELS.items()
    ]
    return Markdown(
        f"Between two GPUs every gradient crosses the link once in each direction. {_upper(told)}, "
        f"over links of {c.link:.0f} GB/s. Nothing can be sent before backward has made it, and "
        "the gradient of the embedding is there last: what can be hidden is all but that."
    )


def sentence(c: Ddp) -> Markdown:
    """What each way adds to a step, and how near the best is to a step without communication."""
    text = (
        f"**The answer.** {MODELS[MAIN].capitalize()} has {gradient_bytes(MAIN) / 1e9:.1f} GB of "
        f"gradients to average, at least {time(floor_ms(c, MAIN))} ms between two {c.short}."
    )
    each, after = c.row("overlapped"), c.row("naive")
    ways = [after, c.row("flat"), each, c.best()]
    rows = {row.Index: row for row in ways if row is not None}.values()
    if rows:
        parts = [f"{time(row.ms)} ms ({name(row)}; {spread(row)})" for row in rows]
        without = style.between([float(row.ms_without) for row in rows], time)
        text += (
            f" Launched from Python a step takes {without} ms with nothing sent, and with them "
            f"{listed(parts)}{_all_level(list(rows))}."
        )
    if _slower(each, after):
        text += (
            f" One by one during backward they cost the host more than they hide: it takes "
            f"{time(each.ms_host)} ms to issue that step, and {time(after.ms_host)} ms where they "
            "are sent after backward."
        )
    best = c.best(capture=True)
    if best is not None:
        text += (
            f" Replayed from a CUDA graph it takes {time(best.ms_without)} ms, and with the best "
            f"of ours that updates after backward ({name(best)}) {time(best.ms)}, "
            f"{best.ms / best.ms_without:.3f} times as long."
        )
    beside = c.best(capture=True, updating=True)
    if beside is not None:
        text += (
            f" With the update beside the messages it takes {time(beside.ms)} ms, "
            f"{beside.ms / beside.ms_without:.3f} times as long as that step of one GPU in turns "
            f"with it ({time(beside.ms_without)})"
        )
        alone = c.alone_updating(beside)
        if alone is not None:
            ratio = beside.ms / alone[0]
            text += f" and {ratio:.3f} times as long as one GPU's that updates beside backward too"
        text += "."
    torch, ours = c.row("torch_ddp", 25), [c.best(), *filter(None, (best, beside))]
    if torch is not None and None not in ours:
        text += (
            f" PyTorch's DDP as its users run it, launched, takes {time(torch.ms)} ms: the best of "
            f"ours takes {ours[0].ms / torch.ms:.3f} of that launched"
        )
        if len(ours) > 1:
            text += f" and {min(row.ms for row in ours[1:]) / torch.ms:.3f} replayed"
        text += "."
    for model in MODELS:
        other = c.best(model, capture=True) if model != MAIN else None
        if other is not None:
            text += (
                f" Of {MODELS[model]}, replayed, it takes {time(other.ms_without)} ms and with the "
                f"best of ours that updates after backward ({name(other)}) {time(other.ms)}, "
                f"{other.ms / other.ms_without:.3f} times as long."
            )
    if not rows or best is None:
        missing = "what they add to a step" if not rows else "the step in a CUDA graph"
        text += f" {c.not_yet(missing)}"
    return Markdown(text)


def _all_level(rows: list) -> str:
    """Where the quickest of some steps is not ahead of any other, why not."""
    best = min(rows, key=lambda row: row.ms)
    if len(rows) < 2 or not all(metrics.level(row, best) for row in rows):
        return ""
    text = ", which their spreads from p20 to p80 do not tell apart"
    if all(row.ms_host >= HOST * row.ms for row in rows):
        text += ": nearly all of each is the host's time to issue it"
    return text


def _slower(one, other) -> bool:
    """Whether one way is seen to take longer than another."""
    known = one is not None and other is not None
    return known and one.ms > other.ms and not metrics.level(one, other)


def naive(c: Ddp) -> Markdown:
    """naive_ddp_benchmarking: the step, and the share of it spent communicating."""
    told = []
    for model, label in MODELS.items():
        row = c.row("naive", model=model)
        if row is not None:
            told.append(
                f"For {label} a step takes {time(row.ms)} ms ({spread(row)} from p20 to p80) and "
                f"{time(row.ms_without)} ms ({spread(row, 'ms_without')}) without communication: "
                f"by the medians {exposed(row) / row.ms:.0%} of it is spent communicating"
                + ("" if seen(row) else ", though the spreads overlap")
                + ". The all-reduces alone, after a backward, take "
                + f"{time(row.ms_communication)} ms."
                + _in_gaps(c, row)
            )
    return Markdown(" ".join(told) or c.not_yet("its step, and the share spent communicating"))


def _in_gaps(c: Ddp, row) -> str:
    """Where messages after backward take longer than they add."""
    if exposed(row) >= row.ms_communication:
        return ""
    text = " Those begin from rest; in the step they are queued behind backward, and add less"
    # Of the row's run alone: hosts of two runs differ by more than this.
    replayed = c.of(row.model, True, run=row.run)["ms_without"].dropna()
    least = float(replayed.min()) if len(replayed) else row.ms_without
    if row.ms_without_p20 > least * (1 + NEAR):
        text += (
            f": the host is behind there, since without communication the step takes "
            f"{time(row.ms_without)} ms launched and {time(least)} replayed, so that its GPU "
            f"stands idle for {time(row.ms_without - least)}, and while messages travel the host "
            "catches up"
        )
    return f"{text}."


def flat(c: Ddp) -> Markdown:
    """minimal_ddp_flat_benchmarking: one message against one for each."""
    told = []
    for model, label in MODELS.items():
        one, each = c.row("flat", model=model), c.row("naive", model=model)
        if one is not None and each is not None:
            told.append(
                f"For {label} a step takes {time(one.ms)} ms in place of {time(each.ms)} ms, and "
                f"{time(one.ms_without)} and {time(each.ms_without)} ms without communication. It "
                f"adds {_gain(one)} in place of {_gain(each)}{_unseen(one, each)}; alone it "
                f"takes {time(one.ms_communication)} ms, the copies into one tensor and out of it "
                f"included, in place of {time(each.ms_communication)} ms."
                + (LEVEL if metrics.level(one, each) else "")
            )
    return Markdown(" ".join(told) or c.not_yet("one message against one for each gradient"))


def _unseen(*rows) -> str:
    return "" if any(map(seen, rows)) else ", both within the spreads"


def overlap(c: Ddp) -> Markdown:
    """ddp_overlap_individual_parameters_benchmarking (a)."""
    told = []
    for model, label in MODELS.items():
        row, after = c.row("overlapped", model=model), c.row("naive", model=model)
        if row is None or after is None:
            continue
        told.append(
            f"For {label} a step takes {time(row.ms)} ms, {time(after.ms)} ms with the same "
            f"messages after backward: {_hidden(row)}."
            + (LEVEL if metrics.level(row, after) else "")
        )
        captured = c.row("overlapped", model=model, capture=True)
        if captured is not None:
            told.append(
                f"Replayed from a CUDA graph, where nothing hides in the host's gaps, it takes "
                f"{time(captured.ms)} ms, {_gain(captured)} above the step without communication."
            )
    return Markdown(" ".join(told) or c.not_yet("its step against the one that sends afterwards"))


def _hidden(row) -> str:
    if not seen(row):
        return f"what they add to the step ({_gain(row)} by the medians) is within the spreads"
    alone = f"the {time(row.ms_communication)} ms that the messages take alone"
    if exposed(row) > float(row.ms_communication):
        return f"{_gain(row)} are added to the step, more than {alone}, so that nothing is hidden"
    return f"of {alone}, {_gain(row)} are added to the step and {hidden(row)} is hidden"


def buckets(c: Ddp) -> Markdown:
    """ddp_bucketed_benchmarking (a): the sizes of the handout against each other and the rest."""
    told = []
    for model, label in MODELS.items():
        for capture, way in TITLES.items():
            rows = [
                row
                for mb in HANDOUT_MB
                if (row := c.row("bucketed", mb, model=model, capture=capture)) is not None
            ]
            if len(rows) < 2:
                continue
            parts = [f"{time(exposed(row))} ms with {int(row.bucket_mb)} MB"
                     + ("" if seen(row) else " (level)") for row in rows]  # fmt: skip
            best = min(rows, key=lambda row: row.ms)
            each = c.row("overlapped", model=model, capture=capture)
            text = f"For {label}, {way}, buckets add {listed(parts)}"
            if each is not None:
                text += f", and one message for each gradient {time(exposed(each))} ms"
            text += (
                f"; the shortest step has {int(best.bucket_mb)} MB, {messages(best)} messages: "
                f"{time(best.ms)} ms ({spread(best)})"
            )
            level = [f"{int(row.bucket_mb)}" for row in rows
                     if row.Index != best.Index and metrics.level(row, best)]  # fmt: skip
            text += f"; level with it: {listed(level)} MB." if level else "."
            told.append(text + ("" if capture else _slow_host(c, rows, best)))
    return Markdown(" ".join(told) or c.not_yet("buckets of 1, 10, 100 and 1000 MB"))


def _slow_host(c: Ddp, rows: list, best) -> str:
    """What the host does to the exposed time of launched buckets."""
    text = ""
    each = c.row("overlapped", model=best.model)
    same = [row for row in rows if each is not None and messages(row) == messages(each)]
    if same:
        sizes = listed([f"{int(row.bucket_mb)}" for row in same])
        differ = style.between([abs(row.ms - each.ms) for row in same], time)
        text += (
            f" Those of {sizes} MB send the same messages as each gradient by itself: what their "
            f"steps differ by, {differ} ms, is the host's or chance, not the size's."
        )
    low, _ = c.apart(False, best.model) or (0.0, 0.0)
    slow = [row for row in rows if not seen(row) and row.ms_without > (1 + SPREAD) * low]
    if slow:
        found = [f"{time(row.ms_without)} ms beside {int(row.bucket_mb)} MB" for row in slow]
        text += (
            f" The step without communication took {listed(found)}, but {time(low)} ms beside the "
            "way where it took least. The host was slower then, and a GPU that waits for it sends "
            "meanwhile: what such a row exposes says little."
        )
    if best.ms_host >= HOST * best.ms:
        text += (
            f" The host takes {time(best.ms_host)} ms to issue the shortest step: what is hidden "
            "there is hidden in the host's gaps as well as behind backward's kernels, "
            "which the traces above and the captured steps tell apart."
        )
    return text


def untimed(c: Ddp) -> Markdown:
    """What has no time, each with its reason, and which of the handout's ways nobody has measured
    yet."""
    if not len(c.table):
        return Markdown(c.not_yet("any of these"))
    lines, left = [], []
    for model in MODELS:
        for capture, way in TITLES.items():
            rows = c.of(model, capture)
            lines += refused(rows, lambda row, way=way: f"{row.model}, {way}, {name(row)}")
        asked = [("naive", 0), ("flat", 0), ("overlapped", 0),
                 *(("bucketed", mb) for mb in HANDOUT_MB)]  # fmt: skip
        rows = c.of(model, False)
        none = [
            short(SimpleNamespace(wrapper=wrapper, bucket_mb=mb, carrier="", sent_dtype="fp32"))
            for wrapper, mb in asked if not len(pick(rows, wrapper=wrapper, bucket_mb=mb))
        ]  # fmt: skip
        if none:
            left.append(f"{MODELS[model]}: {listed(none)}")
    if left:
        lines.append(f"\n**Not measured yet**, launched, of what the handouts ask: "
                     f"{'; '.join(left)}.")  # fmt: skip
    lines += updates.too_large(c)
    if with_ := switched(c.table):
        lines.append(f"\n{with_}")
    return Markdown("\n".join(lines) or "Every way that was tried has its times.")


def _gain(row) -> str:
    return f"{time(exposed(row))} ms"


def _upper(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text[0].upper() + text[1:]
