"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from a2lib.measure import bulk
from a2lib.measure.trace.classes import OTHER, kind_of, plain
from a2lib.measure.trace.kernels import OF_LIBRARIES
from a2lib.report import data
from a2lib.report.chapters.benchmark.rows import MODELS, TITLES, WARMUP
from a2lib.report.chapters.measured import Measured
from a2lib.report.metrics import pick
from a2lib.theory.transformer import SIZES

CONTEXTS = (128, 256, 512, 1024)
CONTEXT = 512  # where one context tells what is asked
PLAIN = {"precision": "fp32", "attention": "eager", "compile": "none"}
COMPILED = {**PLAIN, "compile": "blocks"}
AUTOCAST = {**PLAIN, "precision": "bf16"}
OURS = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
WAYS = {"plain": PLAIN, "compiled": COMPILED, "bf16": AUTOCAST, "bf16, ours, compiled": OURS}
# What a mode runs, as the question has it: from inference to a step of training.
PHASES_OF = {
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "train-step": ("forward", "loss", "backward", "optimizer"),
}
MODES = tuple(PHASES_OF)
CONFIGURATION = ["model", "context", "batch", "mode", "precision", "attention", "compile"]
BATCH = 4
PROFILERS = {"nsys": "Nsight Systems", "torch": "torch.profiler"}
# What adds the parts of a product that was divided, and is none of its own.
NO_CALL = re.compile(r"split_k_kernel|reduce")
# Traces whose names are whole; those of train-steps may be older, and cut before names differ.
NAMED = ("forward-backward", "train-step")
# Where a block has its products.
LINEAR = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ffn.w1", "ffn.w2",
          "ffn.w3")  # fmt: skip
HEAD, SCORES, VALUES = "lm_head", "attn.attention.scores", "attn.attention.values"
COMMAND = "papermill notebooks/profile.ipynb -p sweep all"


class Profile(Measured):
    """What the chapter shows of the published device: ``table`` (a row for each phase), ``kernels``
    (every kernel of a step of each trace, with its configuration) and ``strips`` (name of the
    picture -> its rows); ``local`` and ``local_kernels`` of any other device."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = self.read("profile")
        self.benchmark, _ = self.read("benchmark")
        every = self._kernels(roots)
        self.kernels, self.local_kernels = every[~every["local"]], every[every["local"]]
        self.strips = {
            name: rows for name, about, rows, local in self._pictures("strip", roots) if not local
        }
        self.reference = data.load_reference("profile", numbers=("printed",))

    def row(self, model: str, context: int, phase: str = "step", mode: str = "train-step",
            way: dict = PLAIN):  # fmt: skip
        """The row of one phase of a configuration, Nsight's if there is one; None where there is
        none with a time."""
        found = pick(self.table, model=model, context=context, phase=phase, mode=mode, batch=BATCH,
                     status="ok", **way)  # fmt: skip
        return next(iter(found.sort_values("profiler").itertuples()), None)

    def timers(self, model: str, context: int, phase: str = "step", mode: str = "train-step",
               way: dict = PLAIN) -> list[float]:  # fmt: skip
        """What each process that timed this without a profiler said, in ms: those beside a trace,
        and the benchmark's, if it has one."""
        where = {"model": model, "context": context, "phase": phase, "mode": mode, "batch": BATCH,
                 "status": "ok", **way}  # fmt: skip
        beside = pick(self.table, **where)["ms_timer"].dropna()
        own = pick(self.benchmark, **where, capture=False, warmup=WARMUP)["ms"].dropna()
        return [float(ms) for ms in (*beside, *own)]

    def idle(self, model: str, context: int, way: dict = PLAIN) -> tuple[float, float] | None:
        """The least and the most that the timers leave without a kernel of a train-step."""
        row = self.row(model, context, way=way)
        found = [idle(row, ms) for ms in self.timers(model, context, way=way)]
        found = [share for share in found if share is not None]
        return (min(found), max(found)) if found else None

    def replayed(self, model: str, context: int, way: dict = PLAIN) -> float | None:
        """The benchmark's train-step as one CUDA graph, in ms; None where there is none."""
        where = {"model": model, "context": context, "phase": "step", "mode": "train-step",
                 "batch": BATCH, "status": "ok", **way}  # fmt: skip
        found = pick(self.benchmark, **where, capture=True, warmup=WARMUP)
        return float(found["ms"].iloc[0]) if len(found) else None

    def forward(self, model: str, context: int, way: dict = PLAIN):
        """The row of a forward, of the trace that has the least ranges in it."""
        found = (self.row(model, context, "forward", mode, way) for mode in MODES)
        return next((row for row in found if row is not None), None)

    def of(self, model: str, context: int, mode: str = "train-step", way: dict = PLAIN,
           traced: tuple[str, ...] = ()) -> pd.DataFrame:  # fmt: skip
        """The kernels of one step of a mode: of the train-step's trace, whose ranges are the
        finest, or where there is none of the mode's own; no rows for neither. ``traced`` are the
        modes whose traces may serve, if not these."""
        for own in traced or ("train-step", mode):
            found = pick(self.kernels, model=model, context=context, batch=BATCH, mode=own, **way)
            found = found[found["profiler"] == found["profiler"].min()]
            found = found[found["phase"].isin(PHASES_OF[mode])]
            if len(found):
                return found
        return found

    def named(self, model: str, context: int, mode: str, way: dict = PLAIN) -> pd.DataFrame:
        """The same where the kernels' names matter: of the trace that has them whole."""
        return self.of(model, context, mode, way, (*NAMED, mode))

    def share(self, model: str, context: int, mode: str, way: dict = PLAIN,
              kind: str = "matmul") -> float | None:  # fmt: skip
        """A class's share of the kernel time of a mode, or None."""
        found = self.of(model, context, mode, way)
        return share(found, kind) if len(found) else None

    def strip(self, model: str, context: int, phase: str, way: dict = PLAIN) -> list[dict]:
        """The window of one block in a phase; [] where there is none."""
        how = (model, context, BATCH, "train-step", way["precision"], way["attention"])
        for profiler in PROFILERS:
            name = "-".join(map(str, (*how, way["compile"], profiler, phase)))
            if name in self.strips:
                return self.strips[name]
        return []

    @property
    def models(self) -> list[str]:
        """Those with kernels, smallest first."""
        present = set(self.kernels["model"])
        return [model for model in MODELS if model in present]

    def _kernels(self, roots: list[Path] | None) -> pd.DataFrame:
        frames = [
            pd.DataFrame(rows).assign(**about, local=local)
            for _, about, rows, local in self._pictures("kernels", roots)
        ]
        if frames:
            found = pd.concat(frames, ignore_index=True)
            # Traces of before names and parts were taken so.
            of_library = found["part"].map(lambda part: bool(OF_LIBRARIES.match(part)))
            # What no rule knew then, by those of now; a short one has its library's range alone.
            names = found["kernel"].where(~of_library | (found["kernel"] != "rest"), found["part"])
            found["kind"] = found["kind"].mask(found["kind"] == OTHER, names.map(kind_of))
            found["part"] = found["part"].mask(of_library, found["phase"])
            return found.assign(kernel=found["kernel"].map(plain))
        columns = [*bulk.TABLES["kernels"], *CONFIGURATION, "profiler", "source", "device", "local"]
        return pd.DataFrame(columns=columns).astype({"local": bool})

    def _pictures(self, table: str, roots: list[Path] | None):
        """(name, what it is of, rows, local) of each picture; refuses one whose run is unknown."""
        for position, root in enumerate(data.data_roots() if roots is None else roots):
            for device, name in bulk.pictures(table, root):
                found = bulk.read(table, device, name, root)
                if found.run not in self.runs.index:
                    raise data.ReportError(f"{table} {name} of {device}: run {found.run!r} is not "
                                           "in runs.csv")  # fmt: skip
                local = device != data.PUBLISHED or position > 0
                yield name, {**found.about, "device": device}, found.rows, local


def share(kernels: pd.DataFrame, kind: str) -> float:
    """A class's share of the time of some kernels."""
    return float(pick(kernels, kind=kind)["ms"].sum() / kernels["ms"].sum())


def calls(kernels: pd.DataFrame) -> int:
    """How many products there are among some kernels: matmuls without what only sums their parts.
    """
    products = pick(kernels, kind="matmul")
    return int(products.loc[~products["kernel"].str.contains(NO_CALL), "calls"].sum())


def unlisted(kernels: pd.DataFrame) -> int:
    """How many of the class are too short to be listed by name: a product or what adds its parts.
    """
    return int(pick(kernels, kind="matmul", kernel="rest")["calls"].sum())


def products(model: str, mode: str = "forward") -> int:
    """How many the model has: seven linear layers and two products of attention a block, and the
    head; a backward has two for each."""
    return (9 * SIZES[model].num_layers + 1) * (1 if mode == "forward" else 3)


def lacking(kernels: pd.DataFrame, model: str) -> list[str]:
    """The parts of a plain trace's forward and backward that have fewer products than the model."""
    layers, missing = SIZES[model].num_layers, []
    for phase, times in (("forward", 1), ("backward", 2)):
        mine = pick(kernels, phase=phase)
        if not len(mine):
            continue
        for part in (*LINEAR, SCORES, VALUES, HEAD):
            want = times * (1 if part == HEAD else layers)
            if calls(pick(mine, part=part)) < want:
                missing.append(f"{part} ({phase})")
    return missing


def title(model: str) -> str:
    return TITLES.get(model, model)


def idle(row, timer: float | None = None) -> float | None:
    """The share of a phase, timed without a profiler, in which no kernel ran: kernels take the same
    time under a profiler, gaps do not. Never below zero, where the two differ by their noise.
    ``timer`` is in ms, by default the row's."""
    timer = getattr(row, "ms_timer", None) if timer is None else timer
    if row is None or pd.isna(timer) or pd.isna(row.ms_busy):
        return None
    return max(0.0, 1 - float(row.ms_busy) / float(timer))


def ahead(row) -> float | None:
    """How many kernels the host is ahead of the GPU: the median wait of a kernel over the mean time
    of one."""
    values = None if row is None else (row.us_queued, row.ms_busy, row.launches)
    if values is None or any(pd.isna(value) for value in values):
        return None
    return float(row.us_queued) / 1e3 * float(row.launches) / float(row.ms_busy)
