"""What a replayed step loses although its messages travel beside backward: by who carries them, and
by its trace."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp.answer import floor_ms
from a2lib.report.chapters.ddp.rows import BUCKET_MB, MAIN, WORLD_SIZE, Ddp, exposed, time
from a2lib.report.chapters.ddp.timeline import COMMUNICATION, OPTIMIZER, beside_us
from a2lib.report.style import listed
from a2lib.report.tables import Markdown
from a2lib.theory.collectives import copied_bytes
from a2lib.theory.transformer import SIZES, parameter_count

SENT = ("fp32", "bf16")
MATMUL = "matmul"
EDGE = 0.01  # of a kernel, which a message may leave and still be beside all of it, or none
LEAST = 4  # kernels of a block, else what repeats is no block


@dataclass(frozen=True)
class Lost:
    """Of a trace of replayed buckets and one that sends after backward: what the kernels of a
    block's backward take in each (``beside_us``, ``alone_us``), how many times as long they take
    with a message beside all of them, each of the ``products`` and the ``others`` together, and
    ``without`` one, and from the end of backward's kernels to the update."""

    alone_us: float
    beside_us: float
    products: list[float]
    others: float
    without: float
    tail_us: float

    def ms(self, layers: int) -> float:
        """Of a step of so many blocks."""
        return (layers * (self.beside_us - self.alone_us) + self.tail_us) / 1e3


def lost(c: Ddp) -> Lost | None:
    """None where one of the two traces is missing, or shows no three blocks alike."""
    replayed, plain = c.strip("bucketed", BUCKET_MB, capture=True), c.strip("naive")
    kernels = _computing(replayed)
    period = _period([row["kind"] for row in kernels])
    if not period:
        return None
    kinds = [row["kind"] for row in kernels[-period:]]
    ours, alone = list(_blocks(kernels, kinds)), list(_blocks(_computing(plain), kinds))
    if not alone:
        return None
    usual = [statistics.median(block[i]["duration_us"] for block in alone) for i in range(period)]
    sent = [row for row in replayed if row["kind"] == COMMUNICATION]
    # By whether a message ran beside all of a kernel or none: its place, its time, its usual time.
    found: dict[bool, list[tuple[int, float, float]]] = {True: [], False: []}
    for block in ours:
        for i, row in enumerate(block):
            share = beside_us([row], sent) / row["duration_us"]
            if min(share, 1 - share) < EDGE:
                found[share > 0.5].append((i, row["duration_us"], usual[i]))
    products = [i for i, kind in enumerate(kinds) if kind == MATMUL]
    rest = [one for one in found[True] if one[0] not in products]
    each = [_longer([one for one in found[True] if one[0] == i]) for i in products]
    end = max(row["start_us"] + row["duration_us"] for row in _before_update(replayed))
    update = [row["start_us"] for row in replayed if row["kind"] == OPTIMIZER]
    return Lost(
        sum(usual),
        statistics.mean(sum(row["duration_us"] for row in block) for block in ours),
        [factor for factor in each if factor == factor],
        _longer(rest),
        _longer(found[False]),
        max(0.0, min(update) - end) if update else 0.0,
    )


def sentence(c: Ddp) -> Markdown:
    """Why buckets that travel beside backward are not free, by the trace of their replay."""
    found, row = lost(c), c.row("bucketed", BUCKET_MB, capture=True)
    if found is None or row is None or not found.products:
        return Markdown(c.not_yet("why buckets that travel beside backward are not free"))
    layers, tail = SIZES[MAIN].num_layers, found.tail_us / 1e3
    factors = style.between(found.products, lambda factor: f"{factor:.1f}")
    return Markdown(
        f"Why NCCL's are not free is in the trace of the replay, held against the one that sends "
        f"after backward. With a message beside it a product takes {factors} times as "
        f"long as there, other kernels {found.others:.1f} times, and without one "
        f"{found.without:.2f} times. Our reading: NCCL's kernels hold multiprocessors, and a "
        "product, started for all of them, ends with a second turn for what found its own taken. "
        f"The kernels of a block's backward take {time(found.beside_us)} µs in place of "
        f"{time(found.alone_us)}, over {layers} blocks {time(found.ms(layers) - tail)} ms. From "
        f"the last of them to the update, where the last messages are alone, it is {time(tail)} "
        f"ms. Together that is {time(found.ms(layers))} of the {time(exposed(row))} ms that NCCL "
        "in fp32 adds."
    )


def carriers(c: Ddp) -> Markdown:
    """Copy engines and 16 bits beside NCCL in fp32, captured, at one size of bucket."""
    told = []
    for carrier, sent in (("copy_engines", "fp32"), ("backend", "bf16"), ("copy_engines", "bf16")):
        row = c.row("bucketed", BUCKET_MB, capture=True, carrier=carrier, sent_dtype=sent)
        plain = c.row("bucketed", BUCKET_MB, capture=True)
        if row is not None and plain is not None:
            who = "copy engines" if carrier == "copy_engines" else "NCCL"
            told.append(f"{who} in {sent} {time(exposed(row))} ms")
    if not told:
        return Markdown(c.not_yet("copy engines, and gradients in 16 bits"))
    text = (
        f"In buckets of {BUCKET_MB} MB and replayed, NCCL in fp32 adds {time(exposed(plain))} ms "
        f"to the step, {listed(told)}."
    )
    where = {"capture": True, "carrier": "copy_engines"}
    engines, low = (c.row("bucketed", BUCKET_MB, **where, sent_dtype=sent) for sent in SENT)
    if engines is not None and low is not None:
        text += (
            f" Half of the bytes take {time(engines.ms - low.ms)} ms off the step of copy engines"
            f"{' (level)' if metrics.level(engines, low) else ''}, where "
            f"{time(floor_ms(c, MAIN, 2))} ms less are spent on the link."
        )
    return Markdown(text if engines is None else f"{text} {_traffic(c, engines)}")


def _traffic(c: Ddp, row) -> str:
    """Why copy engines are not free: what they and their kernels read and write."""
    elements, rate = parameter_count(SIZES[MAIN]), c.sheet("memory_bandwidth") * 1e12
    moved, low = (copied_bytes(elements, WORLD_SIZE, 4, sent) for sent in (4, 2))
    return (
        f"Copy engines take no multiprocessor, but memory: each GPU writes to the other the half "
        f"of its gradients that the other one sums, sums its own half and writes the means there "
        f"too, {moved / 1e9:.1f} GB read and written in each GPU's memory ({low / 1e9:.1f} GB "
        f"where gradients are cast to bf16 and back), beside backward but for the last bucket. "
        f"That is {time(1e3 * moved / rate)} ms of the memory's time at {rate / 1e12:.1f} TB/s, "
        f"which is our guess for most of the {time(exposed(row))} ms."
    )


def _longer(found: list[tuple[int, float, float]]) -> float:
    """Times over usual times, NaN where there is none."""
    return sum(one[1] for one in found) / (sum(one[2] for one in found) or float("nan"))


def _before_update(rows: list[dict]) -> list[dict]:
    """What computes, and comes before the update where that is there."""
    update = min((row["start_us"] for row in rows if row["kind"] == OPTIMIZER), default=None)
    return [row for row in rows if row["kind"] not in (COMMUNICATION, OPTIMIZER, "other")
            and (update is None or row["start_us"] < update)]  # fmt: skip


def _computing(rows: list[dict]) -> list[dict]:
    """In order, the kernels of backward up to its last product."""
    found = sorted(_before_update(rows), key=lambda row: row["start_us"])
    while found and found[-1]["kind"] != MATMUL:
        found.pop()
    return found


def _period(kinds: list[str]) -> int:
    """After how many kernels the kinds repeat at the end, three times; 0 where they do not."""
    for n in range(LEAST, len(kinds) // 3 + 1):
        if kinds[-n:] == kinds[-2 * n : -n] == kinds[-3 * n : -2 * n]:
            return n
    return 0


def _blocks(rows: list[dict], kinds: list[str]) -> Iterator[list[dict]]:
    """The pieces of ``rows`` whose kinds are these, from the last one on."""
    end = len(rows)
    while end >= len(kinds):
        piece = rows[end - len(kinds) : end]
        if [row["kind"] for row in piece] == kinds:
            yield piece
            end -= len(kinds)
        else:
            end -= 1
