"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.flash.shapes import handout
from a2lib.report.chapters.measured import HALF, Measured, shared

WRITTEN = ("plain", "causal", "heads")
LENGTHS = (256, 1024, 4096, 8192, 16384)
HEAD_DIMS = (16, 32, 64, 128)
PASSES = ("forward", "backward")
HOW = {"model": "as one graph", "blocks": "block by block"}
BYTES = {"fp32": 4, "bf16": 2}
BATCH, CONTEXT = 4, 512  # of a model
GRID_BATCH = 8  # of attention
COMMAND = "papermill notebooks/compile.ipynb -p sweep all"
KEY = ["written", "dtype", "batch", "head_dim", "seq_len", "pass"]


class Compile(Measured):
    """What the chapter shows: ``grid`` (attention of the handout's grid) and ``models`` of the
    published device, ``causal``: the flash chapter's eager and compiled rows, with batch 1,
    ``unmasked``: its compiled forwards without a mask, in bf16 and with many heads,
    ``replayed``: the benchmark's eager train-steps as CUDA graphs, and ``local_grid`` and
    ``local_models`` of any other device."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.grid, self.local_grid = self.read("compile_attention")
        self.models, self.local_models = self.read("compile_model")
        every = self.read("flash")[0]
        flash = handout(every)
        both = flash["implementation"].isin(("eager", "compile")) & flash["pass"].isin(PASSES)
        self.causal = flash[both].assign(written="causal")
        self.unmasked = metrics.pick(every, implementation="compile", causal=False, dtype="bf16",
                                     pass_="forward", status="ok")  # fmt: skip
        steps = self.read("benchmark")[0]
        plain = {"attention": "eager", "compile": "none", "mode": "train-step"}
        self.replayed = metrics.pick(steps, capture=True, phase="wall", **plain)
        self.reference = data.load_reference("compile", numbers=("before_mib", "peak_mib"))

    @property
    def known(self) -> pd.DataFrame:
        """Attention on the published device: the grid, or until it is measured what the flash
        chapter has."""
        return self.grid if len(self.grid) else self.causal

    @property
    def asked(self) -> pd.DataFrame:
        """Attention as the question has it: neither mask nor heads, fp32."""
        return metrics.pick(self.grid, written="plain", dtype="fp32")

    @property
    def others(self) -> pd.DataFrame:
        """Attention written in other ways."""
        return self.grid.drop(self.asked.index)

    def model(self, name: str, way: str, phase: str = "wall", context: int = CONTEXT,
              precision: str = "fp32"):  # fmt: skip
        """The row of one phase of a train-step; None where there is none with a time."""
        return metrics.timed_row(self.models, model=name, compile=way, phase=phase,
                                 context=context, precision=precision, status="ok")  # fmt: skip

    def replay(self, name: str, precision: str, context: int = CONTEXT) -> float | None:
        """ms of an eager train-step replayed from a CUDA graph, so that the host has
        no part in it; None where there is none."""
        row = metrics.timed_row(self.replayed, model=name, precision=precision, context=context)
        return None if row is None or row.status != "ok" else float(row.ms)

    def shared(self) -> str:
        """What is to be said of the host's times."""
        return f"The host's times on this page are of {HALF}." if shared(self.known).any() else ""

    def best(self, name: str, phase: str = "wall"):
        """``model`` as one graph, or where that has no time with its blocks compiled."""
        found = (self.model(name, way, phase) for way in ("model", "blocks"))
        return next((row for row in found if row is not None), None)


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Eager and compiled side by side: KEY, then each result of both with the suffixes ``_eager``
    and ``_compile``, and the ``gain`` as called, on the GPU alone (``gain_gpu``) and whether the
    two times are ``level``; where both have a time."""
    timed = rows[rows["status"] == "ok"]
    sides = [timed[timed["implementation"] == name] for name in ("eager", "compile")]
    both = sides[0].merge(sides[1], on=KEY, suffixes=("_eager", "_compile"))
    gpu = [pd.to_numeric(both[f"ms_graph_{n}"]).astype(float) for n in ("eager", "compile")]
    level = [
        metrics.level(*(_Time(getattr(r, f"ms_{n}"), getattr(r, f"ms_p20_{n}"),
                              getattr(r, f"ms_p80_{n}")) for n in ("eager", "compile")))
        for r in both.itertuples()
    ]  # fmt: skip
    return both.assign(gain=both["ms_eager"] / both["ms_compile"], gain_gpu=gpu[0] / gpu[1],
                       level=level).sort_values(KEY, ignore_index=True)  # fmt: skip


def pays_from(line: pd.DataFrame) -> int | None:
    """The length from which on compiled is ahead at every longer one too, of one curve of
    ``pairs``; None where it is not ahead at the longest."""
    found = None
    for r in line.sort_values("seq_len", ascending=False).itertuples():
        if r.level or r.gain <= 1:
            break
        found = int(r.seq_len)
    return found


def curve(both: pd.DataFrame, written: str, dtype: str, head_dim: int, pass_: str) -> pd.DataFrame:
    """One curve of ``pairs`` over the length."""
    return metrics.pick(both, written=written, dtype=dtype, head_dim=head_dim, pass_=pass_)


def made_of(written: str, dtype: str) -> str:
    """The way to write attention whose kernels Inductor makes of another one on the published GPU:
    in fp32 without TF32, as here, it recognises none there, and with one head `heads` is `plain`.
    """
    return "plain" if (written, dtype) == ("heads", "fp32") else written


def title(model: str) -> str:
    return TITLES.get(model, model)


class _Time:
    def __init__(self, ms, ms_p20, ms_p80):
        self.ms, self.ms_p20, self.ms_p80 = ms, ms_p20, ms_p80
