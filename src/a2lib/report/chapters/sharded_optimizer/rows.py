"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style
from a2lib.report.chapters.collectives import Collectives
from a2lib.report.chapters.measured import Measured
from a2lib.report.metrics import pick
from a2lib.report.tables import MISSING
from a2lib.theory.latency import Line, fit
from a2lib.theory.sharding import CHUNKS, UPDATE_BYTES, Held, sent
from a2lib.theory.transformer import SIZES, parameter_count

COMMAND = "papermill notebooks/sharded_optimizer.ipynb -p sweep all"
WORLD_SIZE, BATCH, CONTEXT = 2, 4, 512
NCCL = f"nccl {WORLD_SIZE}"  # these ranks in the chapter on collectives
GB, GIB = 1e9, 2**30
WIDE = 4  # bytes of a weight
POINTS = 4  # a line through fewer messages says little
# Who averages gradients, and who updates; PyTorch's divided optimizer in PyTorch's DDP alone.
SIDES = {"bucketed": "", "copy_engines": "copy engines", "torch_ddp": "PyTorch's DDP"}
OPTIMIZERS = {"plain": "AdamW", "sharded": "sharded", "zero": "PyTorch's ZeRO"}


@dataclass(frozen=True)
class Setting:
    """A training that the page tells of: its label and the columns that are not usual."""

    label: str
    model: str
    precision: str = "bf16"
    attention: str = "flash"
    compile: str = "blocks"

    def columns(self) -> dict[str, str]:
        return {"model": self.model, "precision": self.precision, "attention": self.attention}


MAIN = Setting("the xl of 2025", "xl25")
HANDOUT = (
    Setting("the xl of 2025 in plain fp32", "xl25", "fp32", "eager", "none"),
    Setting("the xl of 2026 (2.7B) in plain fp32", "2.7B", "fp32", "eager", "none"),
)
SETTINGS = (MAIN, *HANDOUT)


class Sharding(Measured):
    """What the chapter shows: `times` and `memory` of the published device, `local` rows of any
    other, the `collectives` and what others have published (`reference`)."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.times, self.local_times = map(_with_side, self.read("sharded_optimizer"))
        self.memory, self.local_memory = map(_with_side, self.read("sharded_optimizer_memory"))
        rows = pick(self.memory, **_ranks(), status="ok")
        rows = rows.sort_values(["present_bytes", "on_rank"], ascending=[True, False])
        keys = [*MAIN.columns(), "optimizer", "side", "moment"]
        # Of the ranks the last is kept, which holds most.
        self._fullest = {tuple(getattr(row, k) for k in keys): row for row in rows.itertuples()}
        self.collectives = Collectives(roots)
        # Steps of the same wrappers, whose update is whole, of other runs.
        self.steps, _ = map(_with_side, self.read("ddp"))
        self.link = self.sheet("nvlink_egress") * 1e9
        self.reference = data.load_reference(
            "sharded_optimizer", needs=("quantity", "optimizer", "moment", "printed", "unit"),
            numbers=("printed", "most"),
        )  # fmt: skip

    def of(self, setting: Setting = MAIN, **more) -> pd.DataFrame:
        """The timed rows of one setting on two GPUs."""
        return pick(self.times, compile=setting.compile, **_ranks(), **setting.columns(), **more)

    def time(self, optimizer: str, side: str = "bucketed", capture: bool = False,
             setting: Setting = MAIN):  # fmt: skip
        """One of them, None where it has no time."""
        rows = self.of(setting, capture=capture)
        return metrics.timed_row(rows, optimizer=optimizer, side=side)

    def pair(self, capture: bool, setting: Setting = MAIN):
        """(plain, sharded) of the wrapper of ours that is fastest with the sharded one, of those
        whose rows are of the newest code."""
        found = [both for both, newest in self._pairs(capture, setting) if newest]
        return min(found, key=lambda both: both[1].ms, default=None)

    def older(self, capture: bool, setting: Setting = MAIN) -> list[tuple]:
        """The pairs whose rows are of an older commit than those of another wrapper."""
        return [both for both, newest in self._pairs(capture, setting) if not newest]

    def _pairs(self, capture: bool, setting: Setting) -> list[tuple[tuple, bool]]:
        """((plain, sharded), whether they are of the newest of the commits) of each wrapper."""
        found = []
        for side in ("bucketed", "copy_engines"):
            both = [self.time(name, side, capture, setting) for name in ("plain", "sharded")]
            if None not in both:
                found.append(tuple(both))
        # A run is named by when it began.
        last = max((sharded for _, sharded in found), key=lambda row: row.run, default=None)
        return [(both, self.one_commit(both[1], last)) for both in found]

    def elsewhere(self, row):
        """The row of the chapter before that takes the same step, update and all, as one that does
        not divide it; None where it has no time."""
        rows = pick(self.steps, compile=MAIN.compile, **_ranks(), **MAIN.columns())
        keys = ("wrapper", "bucket_mb", "carrier", "capture")
        return metrics.timed_row(rows, sent_dtype="fp32", **{k: getattr(row, k) for k in keys})

    def held(self, optimizer: str, moment: str, side: str = "bucketed", setting: Setting = MAIN):
        """The row of the rank that holds most at a moment, None where there is none."""
        training = tuple(setting.columns().values())
        return self._fullest.get((*training, optimizer, side, moment))

    def gathers(self) -> Line | None:
        """What an all-gather between two GPUs costs, by the rows of collectives."""
        rows = pick(self.collectives.table, ranks=NCCL, operation="all_gather", dtype="fp32",
                    status="ok")  # fmt: skip
        column = "ms_queued" if rows["ms_queued"].notna().all() else "ms"
        if len(rows) < POINTS:
            return None
        return fit(list(rows["size"].astype(float)), list(rows[column].astype(float) / 1e3))


def formula(optimizer: str, setting: Setting = MAIN) -> Held:
    """What each rank holds by the chapter's count."""
    return Held(SIZES[setting.model], WORLD_SIZE, optimizer != "plain", BATCH, CONTEXT,
                setting.precision, setting.attention)  # fmt: skip


def weight_bytes(setting: Setting = MAIN) -> int:
    return WIDE * parameter_count(SIZES[setting.model])


def update_s(c: Sharding, ranks: int = 1, setting: Setting = MAIN) -> float:
    """Seconds of a fused update of a rank's part, by the bandwidth that copies reach, or without
    rows the maker's."""
    bandwidth = (c.bandwidth or c.sheet("memory_bandwidth")) * 1e12
    return UPDATE_BYTES * parameter_count(SIZES[setting.model]) / ranks / bandwidth


def exchange_s(c: Sharding, setting: Setting = MAIN) -> tuple[float, bool]:
    """Seconds of the exchange of all weights, chunk by chunk, and whether by measured all-gathers;
    else by the maker's link."""
    line = c.gathers()
    if line is not None:
        return CHUNKS * line.time_s(weight_bytes(setting) / CHUNKS), True
    return sent("sharded", weight_bytes(setting), WORLD_SIZE).all_gather / c.link, False


def gb(n_bytes: float | None, figures: int = 3) -> str:
    """Bytes in units of 10**9, or the mark of what is not measured."""
    if n_bytes is None or pd.isna(n_bytes):
        return MISSING
    return style.digits(float(n_bytes) / GB, figures)


def name(row) -> str:
    """A row in few words: sharded, copy engines. Our buckets by NCCL go without saying."""
    side = "" if row.optimizer == "zero" else SIDES.get(row.side, row.side)
    return ", ".join(filter(None, (OPTIMIZERS.get(row.optimizer, row.optimizer), side)))


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Plain beside sharded, wrapper by wrapper."""
    places = {side: i for i, side in enumerate(SIDES)}
    order = rows.assign(_side=rows["side"].map(places).fillna(len(places)),
                        _whole=rows["optimizer"] != "plain")  # fmt: skip
    return order.sort_values(["_side", "_whole"], kind="stable").drop(columns=["_side", "_whole"])


def _ranks() -> dict[str, object]:
    return {"backend": "nccl", "world_size": WORLD_SIZE, "batch": BATCH, "context": CONTEXT}


def _with_side(rows: pd.DataFrame) -> pd.DataFrame:
    """Who averages gradients, as one name."""
    side = rows["wrapper"].where(rows["carrier"] != "copy_engines", "copy_engines")
    return rows.assign(side=side)
