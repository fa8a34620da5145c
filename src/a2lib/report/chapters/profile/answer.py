"""The first screen, the top kernels, what is no product, and how the shares move."""

from __future__ import annotations

import re

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.profile.drawing import KINDS, legend, step_bar
from a2lib.report.chapters.profile.rows import (
    AUTOCAST,
    COMPILED,
    CONTEXT,
    CONTEXTS,
    MODES,
    NO_CALL,
    PLAIN,
    WAYS,
    Profile,
    calls,
    products,
    share,
    title,
    unlisted,
)
from a2lib.report.chapters.profile.softmax import by_memory, compared, costs
from a2lib.report.chapters.profile.timer import (
    AGREES,
    NEAR,
    OTHER,
    forwards_of,
    verdict,
)
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table

SHOWN = {"forward": "forward", "forward-backward": "forward, backward", "train-step": "whole step"}
LEAST = 0.01  # of the forward's kernel time: what takes less has no line of its own
ATTENTION = "attention: "
LETTERS = 38  # of a kernel's name in a table
OUTSIDE = re.compile(r"simt|_ff(?:ma|m?…)")  # of the tensor cores, in names that may be cut
PARTS = {
    "": "no range", "attn": "attention: RoPE, copies", "ffn": "ffn: gate",
    "block": "residual", "forward": "no module", "backward": "no module",
    "loss": "loss", "optimizer": "optimizer",
}  # fmt: skip


def sentence(p: Profile) -> Markdown:
    """The answer, of each model at the usual context: where the kernels' time goes."""
    shares = {m: [p.share(m, CONTEXT, mode) for mode in MODES] for m in p.models}
    shares = {model: values for model, values in shares.items() if None not in values}
    if not shares:
        return Markdown(p.not_yet("the question is below, the traces will follow"))
    products, kernels, before = [], [], None
    for model, (ahead, both, step) in shares.items():
        of = f"the {title(model)} model's"
        products.append(
            f"{ahead:.0%}, {both:.0%} and {step:.0%} of {of}" if products else
            f"{ahead:.0%} of {of} kernel time in a forward, {both:.0%} with the backward and "
            f"{step:.0%} of a whole step with AdamW"
        )  # fmt: skip
        name, n, of_all = top(p.named(model, CONTEXT, "forward"))
        which = "the same" if name == before else f"`{short(name)}`"
        kernels.append(f"{which} in {title(model)}, {n} calls and {of_all:.0%} of the time")
        before = name
    text = (
        f"**The answer.** In plain fp32 at {CONTEXT} tokens, matrix products take "
        f"{'; '.join(products)}. The top kernel of a forward is {'; '.join(kernels)}."
    )
    more = " ".join(filter(None, [_softmax(p, list(shares)), _idle(p, list(shares))]))
    last = " ".join(filter(None, [_ways(p, list(shares)), _timer(p)]))
    return Markdown("\n\n".join(filter(None, [text, more, last])))


def _ways(p: Profile, models: list[str]) -> str:
    """The products' share of a step where it is compiled, and in bf16."""
    told = []
    for words, way in (("compiled", COMPILED), ("in bf16", AUTOCAST)):
        found = {m: p.share(m, CONTEXT, "train-step", way) for m in models}
        of = [f"{s:.0%} in {title(m)}" for m, s in found.items() if s is not None]
        if of:
            told.append(f"{listed(of)} where it is {words}")
    return f"Of the kernel time of a step products take {'; '.join(told)}." if told else ""


def _timer(p: Profile) -> str:
    """In how many forwards a trace says what the timer does."""
    found = [verdict(row) for *_, row in forwards_of(p)]
    if not found:
        return ""
    near = found.count(AGREES)
    text = (
        f"A forward takes in a trace what the timer says, to within {NEAR:.0%}, in {near} of "
        f"{len(found)} configurations"
    )
    if near < len(found) and OTHER not in found:
        text += "; in the others the host is the limit, and slower where it is traced"
    return f"{text}."


def _softmax(p: Profile, models: list[str]) -> str:
    """Its time, operations and bytes beside those of the two products, and what bounds them."""
    told, bound = [], True
    for model in models:
        ratio = compared(p, model, CONTEXT)
        if ratio is None:
            continue
        cost = costs(model, CONTEXT)
        moved = cost["softmax"].bytes / cost["products"].bytes
        told.append(
            f"{ratio.times:.2f} times in {title(model)}, with {1 / ratio.flops:.1%} and {moved:.0%}"
            if told else
            f"{ratio.times:.2f} times as long as the two products around it in {title(model)}, "
            f"with {1 / ratio.flops:.1%} of their operations and {moved:.0%} of their bytes"
        )  # fmt: skip
        bound = bound and by_memory(p, model, CONTEXT)
    if not told:
        return ""
    why = ": memory is its limit, arithmetic is theirs" if bound else ""
    return f"The softmax takes {'; '.join(told)}{why}."


def _idle(p: Profile, models: list[str]) -> str:
    """For how much of the step no kernel runs, by every timer."""
    gaps = {model: p.idle(model, CONTEXT) for model in models}
    told = [f"{written(gap)} of the {title(m)} model's" for m, gap in gaps.items() if gap]
    return f"The GPU is idle for {listed([f'{told[0]} step', *told[1:]])}." if told else ""


def written(gap: tuple[float, float]) -> str:
    """A range of shares: 6% to 12%, or less than 1%."""
    if gap[1] < 0.01:
        return "less than 1%"
    return style.between(gap, "{:.0%}".format)


def top(kernels: pd.DataFrame) -> tuple[str, int, float]:
    """The kernel with the most time, its calls and its share."""
    named = kernels[kernels["kernel"] != "rest"]
    sums = named.groupby("kernel")[["ms", "calls"]].sum()
    name = sums["ms"].idxmax()
    return name, int(sums.loc[name, "calls"]), float(sums.loc[name, "ms"] / kernels["ms"].sum())


def shares(p: Profile) -> Chart:
    """Kernel time by class as shares of the whole, a bar for each mode, the models below each
    other."""
    bars = [(model, mode, p.of(model, CONTEXT, mode)) for model in p.models for mode in MODES]
    bars = [bar for bar in bars if len(bar[2])]
    if not bars:
        return panels.empty()
    present = set().union(*(set(kernels["kind"]) for *_, kernels in bars))
    kinds = [kind for kind in KINDS if kind in present]
    models = list(dict.fromkeys(model for model, *_ in bars))

    def draw(figure):
        axes = figure.subplots(len(models), 1, sharex=True, squeeze=False)[:, 0]
        for ax, model in zip(axes, models, strict=True):
            mine = [(mode, kernels) for name, mode, kernels in bars if name == model]
            for y, (_, kernels) in enumerate(reversed(mine)):
                left = 0.0
                for kind in kinds:
                    part = 100 * share(kernels, kind)
                    if part:
                        ax.barh(y, part, left=left, height=0.66, color=KINDS[kind], linewidth=0)
                    left += part
                ax.annotate(f"{100 * share(kernels, 'matmul'):.0f} % matmul", (100, y),
                            xytext=(4, 0), textcoords="offset points", va="center")  # fmt: skip
            ax.set_yticks(range(len(mine)), [SHOWN[mode] for mode, _ in reversed(mine)])
            ax.set_title(f"{title(model)}, {CONTEXT} tokens", loc="left")
            ax.grid(False)
            ax.set_xlim(0, 134)
            ax.set_xticks(range(0, 101, 25))
        axes[-1].set_xlabel("share of kernel time (%)")
        legend(figure, {kind: KINDS[kind] for kind in kinds})

    return Chart(draw, height=0.9 + 1.55 * len(models) + 0.22 * -(-len(kinds) // 3))


def bar(p: Profile, model: str) -> Chart:
    """The kernel time of one step by phase, in milliseconds."""
    return step_bar(p.of(model, CONTEXT).to_dict("records"))


def tops(p: Profile, caption: str, name: str) -> Table:
    """The top kernel of forward, and of forward with backward: calls, share, what launches it."""
    lines = []
    for model in p.models:
        for context in CONTEXTS:
            for mode in MODES[:2]:
                kernels = p.named(model, context, mode)
                if not len(kernels):
                    continue
                kernel, n, of_all = top(kernels)
                parts = launched_by(p.of(model, context, mode), kernel)
                lines.append([title(model), style.tokens(context), SHOWN[mode],
                              f"`{short(kernel)}`", n,
                              f"{of_all:.1%}", _parts(parts)])  # fmt: skip
    columns = ["model", "tokens", "of", "kernel", "calls", "share", "launched by"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=4, keys=3)


def launched_by(kernels: pd.DataFrame, kernel: str) -> list[str]:
    """The parts in which a kernel is launched, by a trace that has them and may cut its name."""
    cut = kernels["kernel"].map(lambda name: name.endswith("…") and kernel.startswith(name[:-1]))
    return list(kernels.loc[cut | (kernels["kernel"] == kernel), "part"].unique())


def same_top(p: Profile) -> Markdown:
    """Whether the top kernel stays the same with the backward, and whether the trace has as many
    products as the model."""
    found = [(m, c, *(p.named(m, c, mode) for mode in MODES[:2]))
             for m in p.models for c in CONTEXTS]  # fmt: skip
    found = [one for one in found if len(one[2]) and len(one[3])]
    if not found:
        return Markdown(p.not_yet("the top kernels"))
    same = [(m, c) for m, c, ahead, both in found if top(ahead)[0] == top(both)[0]]
    other = [f"{title(m)} at {style.tokens(c)}" for m, c, *_ in found if (m, c) not in same]
    most = [top(ahead) for *_, ahead, _ in found]
    kinds = {kind for (name, *_), (*_, ahead, _) in zip(most, found, strict=True)
             for kind in pick(ahead, kernel=name)["kind"]}  # fmt: skip
    what = " of matrix products" if kinds == {"matmul"} else ""
    text = (
        f"In each of {len(found)} forwards one kernel{what} takes most, "
        f"{style.between([of_all for *_, of_all in most], '{:.0%}'.format)} of the time in "
        f"{style.between([n for _, n, _ in most], '{:,}'.format)} calls; which one depends on the "
        f"sizes. {_cores(p)}With the backward it is the same kernel in {len(same)} of {len(found)} "
        "configurations"
    )
    text += f" (another in {listed(other)})" if same and other else ""
    text += (
        ". The count is a check: a block has seven linear layers and two products of attention, "
        "the model a head, so that a forward has 9 L + 1 products and a backward twice as many. "
    )
    wrong, beside = [], []
    for m, c, *both in found:
        at = f"{title(m)} at {style.tokens(c)}"
        for mode, kernels in zip(MODES[:2], both, strict=True):
            want, seen = products(m, mode), calls(kernels)
            # What adds parts is the shortest of the class: what is not listed by name may be that.
            if want not in (seen, seen - unlisted(kernels)):
                wrong.append(f"{at}: {seen} in place of {want}")
        more = int(pick(both[0], kind="matmul")["calls"].sum()) - products(m)
        if more > 0:
            short_ = ", too short to be listed by name" if unlisted(both[0]) else ""
            beside.append(f"{at} ({more}{short_})")
    exact = len(found) - len({one.partition(":")[0] for one in wrong})
    text += (
        "Every trace has exactly these" if exact == len(found)
        else f"{exact} of {len(found)} traces have exactly these"
    )  # fmt: skip
    if wrong:
        text += f". **Not all are the model's**: {listed(wrong)}"
    elif beside:
        text += (
            ". Where a product is small, cuBLAS divides it, and a second kernel (`split_k`, "
            "`splitKreduce`) adds the parts: that is no product, and the forwards of "
            f"{listed(beside)} have such ones"
        )
    return Markdown(f"{text}.")


def _cores(p: Profile) -> str:
    """That no product uses the tensor cores, where each one's name says so."""
    plain_ = pick(p.kernels, **PLAIN)
    products = pick(plain_[plain_["kernel"] != "rest"], kind="matmul")["kernel"]
    products = products[~products.str.contains(NO_CALL)]
    if not len(products) or not products.str.contains(OUTSIDE).all():
        return ""
    return (
        "`ffma` or `simt` in every product's name says that it runs outside of the tensor cores, "
        "which fp32 without TF32 does not use. "
    )


def rest(p: Profile, caption: str, name: str) -> Table:
    """What of the forward is no product: class and part, calls, share of the kernel time."""
    models = [model for model in p.models if len(p.of(model, CONTEXT, "forward"))]
    shares_of, of_calls = {}, {}
    for model in models:
        kernels = p.of(model, CONTEXT, "forward")
        total = kernels["ms"].sum()
        other = kernels[kernels["kind"] != "matmul"]
        for (part, kind), group in other.groupby(["part", "kind"]):
            shares_of[model, part, kind] = group["ms"].sum() / total
            of_calls[model, part, kind] = int(group["calls"].sum())
    keys = {key[1:] for key, value in shares_of.items() if value >= LEAST}
    order = sorted(keys, key=lambda key: -max(shares_of.get((m, *key), 0) for m in models))
    lines = []
    for key in order:
        cells = []
        for model in models:
            n, of_all = of_calls.get((model, *key)), shares_of.get((model, *key))
            cells += [MISSING, MISSING] if n is None else [n, f"{of_all:.1%}"]
        lines.append([part_name(key[0]), key[1], *cells])
    columns = ["launched by", "class"]
    for i, model in enumerate(models):
        columns += [f"{title(model)}: calls" + " " * i, f"{title(model)}: share" + " " * i]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def not_products(p: Profile) -> Markdown:
    """How much of a forward is no product, and the largest class of it."""
    told = []
    for model in p.models:
        kernels = p.of(model, CONTEXT, "forward")
        other = kernels[kernels["kind"] != "matmul"]
        if not len(other):
            continue
        kinds = other.groupby("kind")["ms"].sum().sort_values(ascending=False)
        total = kernels["ms"].sum()
        most = [f"{kind} {ms / total:.1%}" for kind, ms in kinds.head(3).items()]
        n = int(other["calls"].sum())
        told.append(
            f"{kinds.sum() / total:.1%} of the forward's kernel time in {title(model)}, {n:,} of "
            f"{int(kernels['calls'].sum()):,} kernels ({listed(most)})"
        )
    if not told:
        return Markdown(p.not_yet("the kernels that are no product"))
    return Markdown(f"What is no product takes {'; '.join(told)}.")


def moves(p: Profile, caption: str, name: str) -> Table:
    """The products' share of kernel time by mode, for each way of running the step."""
    lines = []
    for words, way in WAYS.items():
        for model in p.models:
            for context in CONTEXTS:
                found = [p.of(model, context, mode, way) for mode in MODES]
                if not all(len(one) for one in found):
                    continue
                cells = [f"{share(one, 'matmul') + share(one, 'attention'):.1%}" for one in found]
                whole = found[-1].groupby("kind")["ms"].sum().drop(["matmul", "attention"],
                                                                   errors="ignore")  # fmt: skip
                kind = whole.idxmax()
                lines.append([words, title(model), style.tokens(context), *cells,
                              style.digits(found[-1]["ms"].sum()),
                              f"{kind}, {whole[kind] / found[-1]['ms'].sum():.1%}"])  # fmt: skip
    columns = ["way", "model", "tokens", *SHOWN.values(), "step: kernels, ms", "most of the rest"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def shift(p: Profile) -> Markdown:
    """In how many plain configurations the share falls from mode to mode, and what takes its
    place."""
    found = []
    for model in p.models:
        for context in CONTEXTS:
            values = [p.share(model, context, mode) for mode in MODES]
            if None not in values:
                found.append((model, context, values))
    if not found:
        return Markdown(p.not_yet("how the products' share moves"))
    falls = [one for one in found if one[2][2] < one[2][0]]
    rises = [f"{title(m)} at {style.tokens(c)}" for m, c, v in found if v[2] >= v[0]]
    text = (
        f"From inference to a whole step the products' share falls in {len(falls)} of "
        f"{len(found)} plain configurations"
    )
    if falls and rises:
        text += f" (not in {listed(rises)})"
    if falls:
        drops = {(m, c): v[0] - v[2] for m, c, v in falls}
        most = max(drops, key=drops.get)
        step = p.of(*most)
        added = step[step["phase"] == "optimizer"]["ms"].sum() / step["ms"].sum()
        text += (
            f", most in {title(most[0])} at {style.tokens(most[1])} tokens, by "
            f"{100 * drops[most]:.0f} points. There AdamW, which has no product, is {added:.0%} of "
            "the step's kernel time"
        )
    near = [abs(v[1] - v[0]) for *_, v in found]
    times = [_times(p.of(m, c, "forward"), p.of(m, c, "forward-backward")) for m, c, _ in found]
    products, rest = (style.between(of, "{:.1f}".format) for of in zip(*times, strict=True))
    return Markdown(
        f"{text}. The backward moves it by {_points(near)}: its products take {products} times "
        f"those of the forward, its other kernels {rest} times the others."
    )


def part_name(part: str) -> str:
    """A part as the page names it; what a module launches outside of those in it, by what it is."""
    return PARTS.get(part, part.replace("attn.attention.", "attn.").replace("attn.", ATTENTION))


def short(kernel: str) -> str:
    """A kernel's name that fits the width of a phone: the inner one of cutlass's, without a row of
    dtypes, cut."""
    inner = re.match(r"cutlass::Kernel2<(\w+)", kernel)
    name = inner[1] if inner else kernel
    name = re.sub(r"_(?:bf16|f16|f32|_)+(?=_[nt][nt]_)", "", name)
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"


def _times(forward: pd.DataFrame, both: pd.DataFrame) -> tuple[float, float]:
    """How many times the forward's the backward takes, of the products and of everything else."""
    backward, found = both[both["phase"] == "backward"], []
    for product in (True, False):
        ahead, back = (one.loc[(one["kind"] == "matmul") == product, "ms"].sum()
                       for one in (forward, backward))  # fmt: skip
        found.append(float(back / ahead) if ahead else float("nan"))
    return found[0], found[1]


def _points(shares: list[float]) -> str:
    return f"{style.between(shares, lambda share: f'{100 * share:.0f}')} points"


def _parts(parts) -> str:
    shown = sorted(part_name(part) for part in parts)
    inside = [name.removeprefix(ATTENTION) for name in shown[:5] if name.startswith(ATTENTION)]
    groups = [ATTENTION + ", ".join(inside)] if inside else []
    groups += [name for name in shown[:5] if not name.startswith(ATTENTION)]
    return "; ".join([*groups, *["…"] * (len(shown) > 5)])
