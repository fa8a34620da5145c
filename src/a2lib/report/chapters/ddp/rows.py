"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from a2lib.measure import bulk
from a2lib.report import data, metrics, style
from a2lib.report.chapters.benchmark.rows import OURS, Benchmark
from a2lib.report.chapters.collectives import Collectives, line
from a2lib.report.chapters.measured import Measured
from a2lib.report.tables import MISSING
from a2lib.theory.latency import Line
from a2lib.theory.transformer import SIZES, parameter_count

MB = 2**20
COMMAND = "papermill notebooks/ddp.ipynb -p sweep all"
WORLD_SIZE, BATCH, CONTEXT = 2, 4, 512
# What the handouts call xl.
MODELS = {"xl25": "the xl of 2025", "2.7B": "the xl of 2026 (2.7B)"}
MAIN = "xl25"
NCCL = f"nccl {WORLD_SIZE}"  # these ranks in the chapter on collectives
HANDOUT_MB = (1, 10, 100, 1000)
BUCKET_MB = 100  # where carriers and updates are compared
AFTER = ("naive", "flat")  # sent once backward is done, when nothing can hide it
PEERS = ("torch_ddp", "torch_ddp_view")
UPDATING, OVERLAPPED = "updating", "overlapped-step"
_NAMES = {
    "naive": "after backward, each by itself", "flat": "after backward, all in one",
    "overlapped": "during backward, each by itself", "bucketed": "during backward, buckets of",
    "updating": "during backward, updated as they arrive, buckets of",
    "torch_ddp": "PyTorch's DDP, buckets of",
    "torch_ddp_view": "PyTorch's DDP with views, buckets of",
}  # fmt: skip


class Ddp(Measured):
    """What the chapter shows: `table` of the published device, `local` of any other, the
    `collectives` whose line the model of the buckets takes, the `benchmark` of one GPU and what
    others have published (`reference`)."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        table, self.local = map(_in_order, self.read("ddp"))
        self.table = table
        self.collectives, self.benchmark = Collectives(roots), Benchmark(roots)
        self.link = self.sheet("nvlink_egress")
        self.reference = data.load_reference(
            "ddp", needs=("wrapper", "bucket_mb", "context"), numbers=("share",)
        )
        # The same launched steps, each beside AdamW whole and divided, of another run.
        elsewhere, _ = self.read("sharded_optimizer")
        self.elsewhere = metrics.pick(
            elsewhere, optimizer="plain", model=MAIN, capture=False, precision="bf16",
            attention="flash", compile="blocks", backend="nccl", world_size=WORLD_SIZE,
            batch=BATCH, context=CONTEXT,
        ).dropna(subset=["ms"]).assign(sent_dtype="fp32")  # fmt: skip
        roots = data.data_roots() if roots is None else roots
        found = [bulk.read("strip", *name, roots[0]) for name in bulk.pictures("strip", roots[0])
                 if name[0] == data.PUBLISHED]  # fmt: skip
        shown = {"section": "ddp", "world_size": WORLD_SIZE, "batch": BATCH, "context": CONTEXT}
        self._strips = [one for one in found if shown.items() <= one.about.items()]

    def of(self, model: str, capture: bool, **more) -> pd.DataFrame:
        """The rows of one training on two GPUs."""
        where = {"backend": "nccl", "world_size": WORLD_SIZE, "batch": BATCH, "context": CONTEXT}
        return metrics.pick(self.table, model=model, capture=capture, **where, **more)

    def row(self, wrapper: str, bucket_mb: int = 0, *, model: str = MAIN, capture: bool = False,
            carrier: str = "backend", sent_dtype: str = "fp32"):  # fmt: skip
        """The row of one way, None where it has no time."""
        return metrics.timed_row(self.of(model, capture), wrapper=wrapper, bucket_mb=bucket_mb,
                                 carrier=carrier, sent_dtype=sent_dtype)  # fmt: skip

    def best(self, model: str = MAIN, capture: bool = False, sent_dtype: str = "fp32", *,
             updating: bool = False):  # fmt: skip
        """The fastest row of ours whose optimizer comes after backward, or of those whose updates
        are beside it; None where there is none."""
        rows = self.of(model, capture, sent_dtype=sent_dtype).dropna(subset=["ms"])
        rows = rows[~rows["wrapper"].isin(PEERS) & ((rows["wrapper"] == UPDATING) == updating)]
        return next(rows.sort_values("ms").itertuples(), None)

    def fastest(self, model: str = MAIN, sent_dtype: str = "fp32"):
        """The fastest captured row of ours, its update after backward or beside the messages."""
        rows = [self.best(model, True, sent_dtype, updating=beside) for beside in (False, True)]
        return min((row for row in rows if row is not None), key=lambda row: row.ms, default=None)

    def alone_updating(self, row) -> tuple[float, bool] | None:
        """Milliseconds of the captured step of one GPU that updates each weight beside its backward
        and sends nothing, and whether they were measured in turns with the row; else its step
        without communication takes the benchmark's share of the two."""
        if not pd.isna(row.ms_without_updating):
            return float(row.ms_without_updating), True
        beside, after = (self.benchmark.ms(row.model, CONTEXT, "step", OURS, mode, True)
                         for mode in (OVERLAPPED, "train-step"))  # fmt: skip
        if not (beside and after):
            return None
        return float(row.ms_without) * beside / after, False

    def best_elsewhere(self) -> tuple[object, object] | None:
        """The fastest launched row of ours in the chapter on the sharded optimizer, with AdamW
        whole, and that of PyTorch's DDP; None where there are not both."""
        ours = self.elsewhere[~self.elsewhere["wrapper"].isin(PEERS)].sort_values("ms")
        torch = metrics.timed_row(self.elsewhere, wrapper=PEERS[0])
        return None if torch is None or not len(ours) else (next(ours.itertuples()), torch)

    def replayed(self, row):
        """The captured row of the way of a launched one; None where it has no time."""
        return self.row(row.wrapper, row.bucket_mb, model=row.model, capture=True,
                        carrier=row.carrier, sent_dtype=row.sent_dtype)  # fmt: skip

    def apart(self, capture: bool, model: str = MAIN, run: str = "") -> tuple[float, float] | None:
        """The least and the most of the steps without communication, which are all the same work,
        of one run where that is named; None where there are not two."""
        rows = self.of(model, capture)
        found = rows.loc[(rows["run"] == run) | (not run), "ms_without"].dropna()
        return (float(found.min()), float(found.max())) if len(found) > 1 else None

    def strip(self, wrapper: str, bucket_mb: int = 0, *, capture: bool = False,
              carrier: str = "backend", model: str = MAIN) -> list[dict]:  # fmt: skip
        """The window of a step's trace; no rows where there is none."""
        asked = {"wrapper": wrapper, "bucket_mb": bucket_mb, "capture": capture,
                 "carrier": carrier, "sent_dtype": "fp32", "model": model}  # fmt: skip
        return next((one.rows for one in self._strips if asked.items() <= one.about.items()), [])

    def line(self) -> Line | None:
        """What a message among others costs between two GPUs, by the rows of collectives."""
        return line.fitted(self.collectives, NCCL, "ms_queued")


def exposed(row) -> float:
    """Milliseconds that communication adds to the step."""
    return float(row.ms) - float(row.ms_without)


def spread(row, column: str = "ms") -> str:
    """From p20 to p80 of ``ms`` or ``ms_without``."""
    return f"{time(getattr(row, f'{column}_p20'))} to {time(getattr(row, f'{column}_p80'))}"


def seen(row) -> bool:
    """Whether the step and the same without communication are apart by more than their spreads."""
    p20, p80 = row.ms_without_p20, row.ms_without_p80
    return not metrics.level(row, SimpleNamespace(ms=row.ms_without, ms_p20=p20, ms_p80=p80))


def gradient_bytes(model: str, width: int = 4) -> int:
    return width * parameter_count(SIZES[model])


def name(row) -> str:
    """A way in words: during backward, buckets of 100 MB, copy engines, sent in bf16."""
    text = _NAMES.get(row.wrapper, row.wrapper)
    text += f" {int(row.bucket_mb)} MB" if int(row.bucket_mb) else ""
    text += ", by copy engines" if row.carrier == "copy_engines" else ""
    return text + (f", sent in {row.sent_dtype}" if row.sent_dtype != "fp32" else "")


def time(ms: float | None, figures: int = 3) -> str:
    """Milliseconds, or the mark of what is not measured."""
    if ms is None or pd.isna(ms):
        return MISSING
    return style.digits(float(ms), figures).replace("-", "−")


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    places = {wrapper: i for i, wrapper in enumerate(_NAMES)}
    place = rows["wrapper"].map(places).fillna(len(places))
    keys = ["_place", "sent_dtype", "bucket_mb", "carrier"]
    order = rows.assign(_place=place).sort_values(
        keys, ascending=[True, False, True, True], kind="stable"
    )
    return order.drop(columns="_place")
