"""What a replayed step loses although its messages travel beside backward: by who carries them, and
by its trace."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp.answer import floor_ms
from a2lib.report.chapters.ddp.rows import (
    BUCKET_MB,
    MAIN,
    MODELS,
    UPDATING,
    WORLD_SIZE,
    Ddp,
    exposed,
    time,
)
from a2lib.report.chapters.ddp.timeline import COMMUNICATION, OPTIMIZER, beside_us
from a2lib.report.style import listed
from a2lib.report.tables import Markdown
from a2lib.theory.collectives import copied_bytes, kernel_bytes
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
    ``without`` one, and how long nothing but messages runs from the last product to the update."""

    alone_us: float
    beside_us: float
    products: list[float]
    others: float
    without: float
    tail_us: float

    def ms(self, layers: int) -> float:
        """Of a step of so many blocks."""
        return (layers * (self.beside_us - self.alone_us) + self.tail_us) / 1e3


def lost(c: Ddp, carrier: str = "backend") -> Lost | None:
    """None where a trace is missing, or where NCCL's shows no three blocks alike and the others
    none of these."""
    whole = _computing(c.strip("bucketed", BUCKET_MB, capture=True))
    period = _period([row["kind"] for row in whole])
    if not period:
        return None
    kinds = [row["kind"] for row in whole[-period:]]
    replayed = c.strip("bucketed", BUCKET_MB, capture=True, carrier=carrier)
    kernels, plain = _computing(replayed), _computing(c.strip("naive"))
    ours, alone = list(_blocks(kernels, kinds)), list(_blocks(plain, kinds))
    if not ours or not alone:
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
    return Lost(
        sum(usual),
        statistics.mean(sum(row["duration_us"] for row in block) for block in ours),
        [factor for factor in each if factor == factor],
        _longer(rest),
        _longer(found[False]),
        _tail_us(replayed, kernels[-1]),
    )


def sentence(c: Ddp) -> Markdown:
    """Why buckets that travel beside backward are not free, by the trace of their replay."""
    found, row = lost(c), c.row("bucketed", BUCKET_MB, capture=True)
    if found is None or row is None or not found.products:
        return Markdown(c.not_yet("why buckets that travel beside backward are not free"))
    layers = SIZES[MAIN].num_layers
    factors = style.between(found.products, lambda factor: f"{factor:.1f}")
    return Markdown(
        f"Why NCCL's are not free is in the trace of the replay, held against the one that sends "
        f"after backward. With a message beside it a product takes {factors} times as "
        f"long as there, other kernels {found.others:.1f} times, and without one "
        f"{found.without:.2f} times. Our reading: NCCL's kernels hold multiprocessors, and a "
        "product, started for all of them, ends with a second turn for what found its own taken. "
        f"The kernels of a block's backward take {time(found.beside_us)} µs in place of "
        f"{time(found.alone_us)}, over {layers} blocks {time(_blocks_ms(found))} ms. Between the "
        f"last product and the update the last messages are alone for {time(found.tail_us / 1e3)} "
        f"ms. That makes {time(found.ms(layers))} ms; NCCL in fp32 adds {time(exposed(row))}."
        f"{_engines(c)}"
    )


def _engines(c: Ddp) -> str:
    """The same of copy engines."""
    found = lost(c, "copy_engines")
    row = c.row("bucketed", BUCKET_MB, capture=True, carrier="copy_engines")
    if found is None or row is None or not found.products:
        return ""
    factors = style.between(found.products, lambda factor: f"{factor:.2f}")
    return (
        " Beside copy engines ({numref}`fig-ddp-trace-engines`; their copies and their sums are "
        f"the messages there) a product takes {factors} times as long, other kernels "
        f"{found.others:.2f} times, and without a message {found.without:.2f} times: "
        f"{time(found.beside_us)} µs a block, {time(_blocks_ms(found))} ms in all. With "
        f"{time(found.tail_us / 1e3)} ms of messages alone at the end these are "
        f"{time(found.ms(SIZES[MAIN].num_layers))} of the {time(exposed(row))} ms that they add."
    )


def _blocks_ms(found: Lost) -> float:
    return found.ms(SIZES[MAIN].num_layers) - found.tail_us / 1e3


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
    text += _casts(c, *(c.row("bucketed", BUCKET_MB, capture=True, sent_dtype=s) for s in SENT))
    if engines is not None:
        text += f" {_traffic(c, engines)}"
    if engines is not None and low is not None:
        text += f" {_half(c, engines, low)}"
    return Markdown(text)


def _casts(c: Ddp, full, half) -> str:
    """Why NCCL gains nothing by half of the bytes: where its casts are (parallel/carriers.py)."""
    if half is None or half.ms <= full.ms:
        return ""
    moved = 2 * parameter_count(SIZES[MAIN]) * (4 + 2)
    rate = c.sheet("memory_bandwidth") * 1e12
    return (
        " NCCL gains nothing by half of the bytes: each gradient is cast to bf16 on backward's own "
        "stream and back once all have arrived, kernels that nothing hides, of "
        f"{moved / 1e9:.1f} GB, {time(1e3 * moved / rate)} ms at {rate / 1e12:.1f} TB/s."
    )


def _half(c: Ddp, engines, low) -> str:
    """What half of the bytes on the link are worth to copy engines."""
    where = {"capture": True, "carrier": "copy_engines"}
    full, half = (c.row(UPDATING, BUCKET_MB, **where, sent_dtype=sent) for sent in SENT)
    text = f"Sent in bf16 the step of copy engines takes {_differs(engines, low)}"
    if full is not None and half is not None:
        text += f", with the update beside the messages {_differs(full, half)}"
    text += f". The link has {time(floor_ms(c, MAIN, 2))} ms less to do"
    if low.ms > engines.ms:
        elements, rate = parameter_count(SIZES[MAIN]), c.sheet("memory_bandwidth") * 1e12
        wide, short = (kernel_bytes(elements, WORLD_SIZE, 4, sent) for sent in (4, 2))
        more = copied_bytes(elements, WORLD_SIZE, 4, 2) - copied_bytes(elements, WORLD_SIZE, 4, 4)
        text += (
            f", but was not what the step waits for, and the memory has {time(1e3 * more / rate)} "
            "ms more. Casts are kernels, beside backward: with the sum they move "
            f"{short / 1e9:.1f} GB in place of {wide / 1e9:.1f} and take multiprocessors, which "
            "copies do not. That this is the rest is our reading; no trace of it is taken"
        )
    return f"{text}."


def _differs(one, other) -> str:
    """By how much the other step is longer or shorter."""
    more = float(other.ms) - float(one.ms)
    text = f"{time(abs(more))} ms {'longer' if more > 0 else 'less'}"
    return f"{text} (level)" if metrics.level(one, other) else text


def scaling(c: Ddp, model: str = "2.7B") -> Markdown:
    """What the same buckets add to the larger model, beside its bytes and its backward."""
    told, times = [], []
    for words, carrier in (("by NCCL", "backend"), ("by copy engines", "copy_engines")):
        small, large = (c.row("bucketed", BUCKET_MB, model=one, capture=True, carrier=carrier)
                        for one in (MAIN, model))  # fmt: skip
        if small is not None and large is not None:
            told.append(f"{time(exposed(large))} ms {words}")
            times.append(f"{exposed(large) / exposed(small):.2f}")
    if not told:
        return Markdown(c.not_yet(f"what the same buckets add to {MODELS[model]}"))
    more = parameter_count(SIZES[model]) / parameter_count(SIZES[MAIN])
    text = (
        f"To the replayed step of {MODELS[model]} the same buckets add {listed(told)}, "
        f"{listed(times)} times what they add to that of {MODELS[MAIN]}, with {more:.2f} times as "
        "many bytes."
    )
    shares = []
    for one in (model, MAIN):
        launched, captured = (c.row("bucketed", BUCKET_MB, model=one, capture=capture)
                              for capture in (False, True))  # fmt: skip
        if launched is not None and captured is not None:
            alone, backward = launched.ms_communication, launched.ms_backward_without
            shares.append(
                f"{time(alone)} ms where backward takes {time(backward)}, and replayed "
                f"{exposed(captured) / alone:.0%} of that is exposed ({MODELS[one]})"
            )
    if shares:
        text += f" By NCCL and alone the messages take {'; '.join(shares)}."
    return Markdown(text)


def _traffic(c: Ddp, row) -> str:
    """Why copy engines are not free: what they and their kernels read and write."""
    elements, rate = parameter_count(SIZES[MAIN]), c.sheet("memory_bandwidth") * 1e12
    moved, low = (copied_bytes(elements, WORLD_SIZE, 4, sent) for sent in (4, 2))
    return (
        f"Copy engines take no multiprocessor, but memory: each GPU writes to the other the half "
        f"of its gradients that the other one sums, sums its own half (a kernel) and writes the "
        f"means there too, {moved / 1e9:.1f} GB read and written in each GPU's memory "
        f"({low / 1e9:.1f} GB where gradients are cast to bf16 and back), beside backward but for "
        f"the last bucket. That is {time(1e3 * moved / rate)} ms of the memory's time at "
        f"{rate / 1e12:.1f} TB/s, which is our guess for most of the {time(exposed(row))} ms."
    )


def _longer(found: list[tuple[int, float, float]]) -> float:
    """Times over usual times, NaN where there is none."""
    return sum(one[1] for one in found) / (sum(one[2] for one in found) or float("nan"))


def _tail_us(rows: list[dict], last: dict) -> float:
    """Microseconds from the end of the ``last`` product to the update in which no kernel but those
    of messages runs; 0 without an update."""
    update = min((row["start_us"] for row in rows if row["kind"] == OPTIMIZER), default=None)
    end = last["start_us"] + last["duration_us"]
    if update is None or update < end:
        return 0.0
    between = {"start_us": end, "duration_us": update - end}
    return update - end - beside_us([between], _before_update(rows))


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
