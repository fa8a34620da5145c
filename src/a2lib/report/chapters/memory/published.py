"""What other writeups answer, each beside the count: figures, and the tensor that they blame."""

from __future__ import annotations

import functools

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import BATCH, SHOWN, Memory, blocks, counted, gb, step
from a2lib.report.metrics import pick
from a2lib.report.tables import MISSING, Markdown, Table, folded
from a2lib.theory.saved import block_saved_bytes
from a2lib.theory.step_tensors import SAVED, StepMemory
from a2lib.theory.transformer import SIZES, parameter_count, residual_stream_bytes, state_bytes

UNIT = {"GB": 1e9, "GiB": 2**30, "G": 1e9, "MiB": 2**20, "MB": 2**20, "B": 1}
WIDE = 4


def folded_table(m: Memory, caption: str, name: str) -> Markdown:
    return Markdown(folded(table(m, caption, name)))


def table(m: Memory, caption: str, name: str) -> Table:
    """Printed peaks beside those counted and measured for our model."""
    lines = []
    for row in pick(m.reference, quantity="peak").itertuples():
        one = step(row.context, row.mode, row.precision, model=row.model)
        said = f"{row.printed:g} {row.unit}", gb(row.printed * UNIT[row.unit])
        ours = m.row(one)
        seen = MISSING if ours is None else style.STATUS.get(ours.status, ours.status)
        if ours is not None and ours.status == "ok":
            seen = gb(ours.tensor_bytes)
        lines.append([row.device, TITLES[row.model], style.tokens(row.context), row.mode,
                      row.precision, *said, gb(counted(one).total), gb(written_out(one)),
                      seen])  # fmt: skip
    columns = ["GPU", "model", "tokens", "mode", "", "printed", "GB", "counted for ours, GB",
               "written out, GB", "ours measured, GB"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=5, keys=5)


@functools.lru_cache(maxsize=64)
def written_out(one: StepMemory) -> int:
    """The peak where softmax and SiLU are written as formulas: autograd then keeps the exponentials
    beside the probabilities (which autocast keeps in 16 bits alone), and the sigmoid beside the
    SiLU. One more tensor of scores in fp32, one more of the FFN, for as long as those are there."""
    now = peak = sum(one.standing().values())
    for event in one.events():
        twice = one.mode != "inference" and event.name.endswith(
            ("a/prob", "f/silu") if one.precision == "fp32" else "f/silu"
        )
        size = event.bytes * (2 if twice else 1)
        now += size if event.made else -size
        peak = max(peak, now)
    return peak


def accounts(m: Memory) -> Markdown:
    """Whether that explains what the writeups measured."""
    told = []
    for device in ("H800 PCIe", "A100 40 GB"):
        rows = pick(m.reference, quantity="peak", device=device, mode="forward")
        off = {}
        for way, of in (("ours", lambda one: counted(one).total), ("written", written_out)):
            off[way] = max(
                abs(of(step(r.context, r.mode, r.precision, model=r.model))
                    / (r.printed * UNIT[r.unit]) - 1)
                for r in rows.itertuples()
            )  # fmt: skip
        told.append(f"the {len(rows)} forwards of the {device} to within {off['written']:.1%} "
                    f"(ours: {off['ours']:.0%})")  # fmt: skip
    one = step(SHOWN)
    return Markdown(
        "The writeups have models of their own. By the bytes two of them write the softmax and the "
        "SiLU as formulas (the A100's says so of its softmax, the rest is our guess), of which "
        "autograd keeps the exponentials and the sigmoid as well. One more "
        f"tensor of scores and one more of the FFN in each block, {one.size('s') / 1e6:.0f} and "
        f"{one.size('g') / 1e6:.0f} MB at {SHOWN} tokens, give {' and '.join(told)}; ends of "
        "blocks come on top. Under autocast the exponentials are the only fp32 scores left, so "
        "that bf16 saves memory there: it undoes what writing the softmax out had cost, and "
        "`torch.softmax` does not cost that in fp32 either."
    )


def misprint(m: Memory) -> Markdown:
    """A figure that its own GPU could not hold."""
    said = printed(m, "A100 40 GB", "peak", mode="train-step", precision="bf16", context=SHOWN)
    there, other = (written_out(step(c, precision="bf16", model="xl25")) for c in (SHOWN, 256))
    slip = ", more than the GPU has, so that the figure is a slip" if there > 40e9 else ""
    return Markdown(
        f"The A100's writeup gives {gb(said)} GB for a train-step in bf16 at {SHOWN} tokens. By "
        f"the count that takes {gb(there)} GB{slip}. At 256 tokens, which the writeup says it ran "
        f"and its list leaves out, it takes {gb(other)}."
    )


def printed(m: Memory, device: str, quantity: str, **where) -> float:
    """A printed figure in bytes."""
    row = next(pick(m.reference, device=device, quantity=quantity, **where).itertuples())
    return float(row.printed) * UNIT[row.unit]


def fixed_sizes(m: Memory) -> Markdown:
    """The 100 MB that are said to be the allocator's are a tensor of scores."""
    said = printed(m, "A100 40 GB", "largest allocation")
    xl = SIZES["xl25"]
    scores = step(SHOWN, model="xl25").size("s")
    verdict = "equal to the last byte" if said == scores else "which is not that size"
    return Markdown(
        "The A100's writeup finds its largest allocation, "
        f"{said:,.0f} bytes, in `torch.exp` and supposes that PyTorch allocates in fixed sizes. "
        f"Its model has {xl.num_heads} heads: {BATCH} x {xl.num_heads} x {SHOWN} x {SHOWN} x "
        f"{WIDE} = {scores:,}, {verdict}. A recording shows what was asked for, not what the "
        "allocator took."
    )


def wrong_width(m: Memory) -> Markdown:
    """A residual-stream tensor with eight bytes a number."""
    row = next(pick(m.reference, quantity="residual tensor", device="A100 40 GB").itertuples())
    said = row.printed * UNIT[row.unit]
    right = residual_stream_bytes(SIZES[row.model], BATCH, int(row.context))
    return Markdown(
        f"The A100's writeup gives a residual-stream tensor of the 2025 XL "
        f"model at {int(row.context)} tokens {said:,.0f} bytes, {said / right:g} times ours: it "
        "multiplies by 8, and an fp32 number has 4."
    )


def hidden(m: Memory) -> Markdown:
    """The FFN's tensors named as the largest, where logits or scores are."""
    one = step(128, model="large")
    sizes = {"FFN": one.size("g"), "logits": one.size("l"), "scores": one.size("s")}
    s = SIZES["large"]
    most = max(sizes, key=sizes.get)
    return Markdown(
        "The writeup of the small GPU names the FFN's hidden tensors as the largest of the large "
        f"model's forward at 128 tokens. They are {sizes['FFN'] / 1e6:.1f} MB, more than a tensor "
        f"of scores ({sizes['scores'] / 1e6:.1f} MB) up to {s.d_ff / s.num_heads:g} tokens; but "
        f"the largest there are the {most}, {sizes[most] / 1e6:.1f} MB, since the vocabulary is "
        "wider than the FFN."
    )


def out_of_memory(m: Memory) -> Markdown:
    """A failure explained by a state of which the count was wrong."""
    said = printed(m, "unnamed GPU of 16 to 24 GB", "state")
    n = parameter_count(SIZES["large"])
    one = step(128, model="large")
    state, taken, row = state_bytes(SIZES["large"]).total, blocks(one).allocated, m.row(one)
    seen = ""
    if row is not None and row.status == "ok" and not pd.isna(row.allocated_bytes):
        seen = f", {row.allocated_bytes / 1e9:.1f} GB on the H200"
    return Markdown(
        "The writeup of the small GPU explains the failure of the large model's train-step by a "
        f"state of {said / 1e9:.1f} GB, for 1.6 billion parameters. The large model has {n:,}, so "
        f"16 bytes of each make {state / 1e9:.1f} GB. For a step at 128 tokens the allocator takes "
        f"{taken / 1e9:.1f} GB by the count{seen}: a GPU of 24 GB has them, one of 16 "
        f"{'has too' if taken < 16e9 else 'has not'}."
    )


def two_scores(m: Memory) -> Markdown:
    """The account with two tensors of scores a block, and everything alive at once."""
    s, L = SIZES["2.7B"], SIZES["2.7B"].num_layers
    told = []
    for context in (SHOWN, 2048):
        rows = BATCH * context
        theirs = WIDE * L * rows * (19 * s.d_model + 2 * s.num_heads * context)
        ours = L * block_saved_bytes(s, BATCH, context)
        told.append(f"{theirs / ours:.2f} times our count at {style.tokens(context)} tokens")
    peak = counted(step(256)).total
    measured = printed(m, "unnamed GPU of 80 GB", "peak", mode="train-step", context=256)
    summed = state_bytes(s).total + WIDE * L * BATCH * 256 * (19 * s.d_model
                                                              + 2 * s.num_heads * 256)  # fmt: skip
    return Markdown(
        "The writeup of the GPU of 80 GB "
        "counts two tensors of scores a block, before and after the softmax, and 19 numbers a "
        "feature and token beside them. The softmax's gradient needs its result alone; what is "
        f"linear in the tokens is {(10 * s.d_model + 4 * s.d_ff) / s.d_model:g} numbers a feature. "
        f"The two errors nearly cancel where it checked, {told[0]}, and do not elsewhere: "
        f"{told[1]}. It then adds weights, gradients, moments and all activations: {gb(summed)} GB "
        f"at 256 tokens, where it had measured {gb(measured)}. They are never all there: "
        f"gradients come as activations go, and the peak is {gb(peak)} GB by our count."
    )


def halving(m: Memory) -> Markdown:
    """bf16 said to halve activations."""
    wide, narrow = (
        counted(step(128, "forward", precision, model="large")).by_category[SAVED]
        for precision in ("fp32", "bf16")
    )
    ratio = narrow / wide
    verb = "falls to" if ratio < 1 else "rises to"
    return Markdown(
        "That mixed precision halves the activations, as the writeup of the small GPU "
        f"has it, none of its own figures shows. By the count what the large model keeps at 128 "
        f"tokens {verb} {ratio:.2f} times."
    )


def sources(m: Memory) -> Markdown:
    """Where the published figures stand."""
    told = [
        f"{source} ({style.listed(list(dict.fromkeys(rows['device'])))})"
        for source, rows in m.reference.groupby("source", sort=False)
    ]
    return Markdown(f"Published: {'; '.join(told)}. None has an address that could be given here.")
