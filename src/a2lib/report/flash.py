"""The FlashAttention-2 chapter: its rows, its numbers, and the sentences that depend on them.

Every sentence here is chosen from the data, so that it stays true when the data change.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style, tables
from a2lib.report.metrics import OURS, compare, pick, time_of, with_tflops
from a2lib.report.tables import Markdown, Table

LENGTHS = tuple(2**n for n in range(7, 17))
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = ("bf16", "fp32")
COMPARED = (OURS, "eager", "compile", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex")
LONGEST = LENGTHS[-1]
UNKNOWN = "(not measured yet)"
COMMAND = "papermill notebooks/flash.ipynb -p seq_len 65536"


class Flash:
    """What the chapter shows: `rows` of the published device, `local` of any other, references."""

    def __init__(self, roots: list[Path] | None = None):
        every = data.load("flash", roots)
        self.rows = every[~every["local"]]
        self.local = every[every["local"]]
        self.handout = data.handout(self.rows)
        self.leaderboard = data.leaderboard(self.rows)
        self.paper = data.paper(self.rows)
        ceiling = data.load("ceiling", roots)
        self.ceiling_rows = ceiling[~ceiling["local"]]
        self.ceilings = metrics.ceilings(self.ceiling_rows)
        self.runs = data.load_runs(roots)
        self.reference = data.load_reference("flash")
        self.device = style.device_name(data.PUBLISHED)
        self.short = self.device.split()[-1]

    def best_public(self) -> float:
        """The best verified time of the 2025 leaderboard, ms, on an H100."""
        return float(time_of(self.reference, implementation="leaderboard_2025_best"))

    def numbers(self) -> dict[str, str]:
        """The chapter's glued numbers, with units; UNKNOWN for what has not been measured."""
        shape = self.leaderboard
        text = {
            f"leaderboard_{pass_}": _ms(time_of(shape, implementation=OURS, pass_=pass_))
            for pass_ in style.PASSES
        }
        rate = with_tflops(pick(shape, implementation=OURS, pass_="end_to_end"))["tflops"].dropna()
        text["leaderboard_tflops"] = _unit(rate.iloc[0] if len(rate) else None, "TFLOP/s")
        for dtype in DTYPES:
            text[f"ceiling_{dtype}"] = _unit(self.ceilings.get(dtype), "TFLOP/s")
        ceiling = self.ceilings.get("bf16")
        share = 100 * rate.iloc[0] / ceiling if len(rate) and ceiling else None
        text["leaderboard_share"] = f"{share:.0f} %" if share else UNKNOWN
        text["copy_bandwidth"] = _unit(metrics.copy_bandwidth(self.ceiling_rows), "TB/s")
        text["best_public"] = f"{self.best_public():g} ms"
        for name in (OURS, "eager"):
            text[f"memory_longest_{name}"] = self._memory(name)
            longest = time_of(self.handout, implementation=name, dtype="bf16", head_dim=64,
                              seq_len=LONGEST, pass_="end_to_end")  # fmt: skip
            text[f"longest_{name}"] = _ms(longest)
        return text

    def answer(self) -> Markdown:
        """The chapter's answer in two or three sentences."""
        n = self.numbers()
        if n["leaderboard_end_to_end"] == UNKNOWN:
            return Markdown(
                "**The answer** is not measured yet: the data hold no time of ours at "
                f"the leaderboard's shape on an {self.device}. What follows shows what there is."
            )
        text = (
            f"**The answer.** On one {self.device}, forward and backward take "
            f"**{n['leaderboard_end_to_end']}** at the shape of the course's 2025 leaderboard "
            f"(16 heads of 64, 16,384 tokens, causal, bf16). That is {n['leaderboard_tflops']}"
        )
        if n["leaderboard_share"] != UNKNOWN:
            text += f", {n['leaderboard_share']} of the matrix-multiply rate of the same GPU"
        return Markdown(f"{text}. {self._standing()} {self._memory_sentence()}")

    def _standing(self) -> str:
        total = pick(self.leaderboard, pass_="end_to_end")
        times = total.dropna(subset=["ms"]).set_index("implementation")["ms"]
        peers = times.drop([OURS, "eager"], errors="ignore").sort_values()
        words = []
        if len(peers):
            words.append(f"{_beside(times[OURS], peers.iloc[0], peers.index[0])}, the fastest peer")
        if "eager" in times:
            words.append(_beside(times[OURS], times["eager"], "eager"))
        if not words:
            return "No peer is measured at this shape yet."
        return f"It is {', and '.join(words)}."

    def _memory_sentence(self) -> str:
        ours, eager = self._memory(OURS), self._memory("eager")
        if UNKNOWN in (ours, eager):
            return ""
        where = f"At {style.tokens(LONGEST)} tokens and one head of 64 in bf16"
        if eager == "oom":
            return f"{where} it needs {ours} of memory beyond its inputs, and eager runs out of it."
        return f"{where} it needs {ours} of memory beyond its inputs where eager needs {eager}."

    def _memory(self, implementation: str) -> str:
        row = pick(self.handout, implementation=implementation, dtype="bf16", head_dim=64,
                   seq_len=LONGEST, pass_="end_to_end")  # fmt: skip
        if not len(row):
            return UNKNOWN
        if row["status"].iloc[0] != "ok":
            return style.STATUS.get(row["status"].iloc[0], UNKNOWN)
        peak = row["peak_bytes"].iloc[0]
        return UNKNOWN if pd.isna(peak) else style.size(float(peak))

    def results(self, caption: str, name: str) -> Table:
        """The chapter's results for the landing page: ours, the best peer, eager, the evidence."""
        at = f"{style.tokens(LONGEST)} tokens, 1 head of 64"
        longest = pick(self.handout, head_dim=64, seq_len=LONGEST)
        shapes = [
            ("2025 leaderboard shape, bf16", self.leaderboard, "fig-flash-leaderboard"),
            (f"{at}, bf16", pick(longest, dtype="bf16"), "tab-flash-latency-bf16"),
            (f"{at}, fp32", pick(longest, dtype="fp32"), "tab-flash-latency-fp32"),
        ]
        lines = []
        for title, rows, evidence in shapes:
            rows = pick(rows, pass_="end_to_end")
            peers = rows[~rows["implementation"].isin([OURS, "eager"])].dropna(subset=["ms"])
            best = peers.loc[peers["ms"].idxmin()] if len(peers) else None
            peer = tables.MISSING if best is None else (
                f"{style.digits(best['ms'])} ms, {style.SHORT[best['implementation']]}")
            cells = []
            for implementation in (OURS, "eager"):
                row = find(rows, implementation=implementation)
                timed = row is not None and row.status == "ok"
                text = tables.shown(row) if row is not None else tables.MISSING
                cells.append(f"{text} ms" if timed else text)
            lines.append([title, f"**{cells[0]}**", peer, cells[1], f"{{numref}}`{evidence}`"])
        columns = ["forward + backward", "ours", "best peer", "eager", "evidence"]
        return Table(pd.DataFrame(lines, columns=columns), caption, name, left=5)

    def completeness(self) -> Markdown:
        """Whether the handout's whole sweep is there, and if not, what is missing."""
        cells = len(LENGTHS) * len(HEAD_DIMS) * len(style.PASSES)
        lacking = []
        for dtype in DTYPES:
            if not len(pick(self.handout, dtype=dtype)):
                lacking.append(f"anything in {dtype}")
                continue
            for name in COMPARED:
                rows = pick(self.handout, implementation=name, dtype=dtype)
                rows = rows[rows["seq_len"].isin(LENGTHS) & rows["head_dim"].isin(HEAD_DIMS)]
                if len(rows) < cells:
                    missing = f"{cells - len(rows)} of {cells}"
                    lacking.append(f"{style.look(name).label} in {dtype} ({missing})")
        if not len(self.handout):
            return Markdown(f"**Nothing of this sweep is measured yet on an {self.device}.**")
        if lacking:
            return Markdown(f"**This sweep is not complete.** Not measured: {listed(lacking)}.")
        total = len(DTYPES) * len(COMPARED) * cells
        return Markdown(
            f"The sweep is complete: each of its {total:,} cells holds a time or a reason why "
            "there is none."
        )

    def who_wins(self) -> Markdown:
        """How often each implementation is the fastest end to end, and where, by dtype."""
        parts = []
        for dtype in DTYPES:
            best = metrics.fastest(pick(self.handout, dtype=dtype, pass_="end_to_end"))
            if not len(best):
                parts.append(f"**{dtype}**: nothing measured yet.")
                continue
            words = []
            for name in style.implementations(best["winner"]):
                where = best[best["winner"] == name]
                words.append(f"{_subject(name)} in {len(where)} ({_span(where['seq_len'])})")
            text = f"**{dtype}**: of {len(best)} shapes, the fastest end to end is {listed(words)}."
            behind = best[best["factor"] > metrics.LEVEL]
            if len(behind):
                worst = behind.loc[behind["factor"].idxmax()]
                text += (
                    f" Ours is furthest behind at {style.tokens(worst['seq_len'])} tokens and "
                    f"d = {worst['head_dim']}, with {worst['factor']:.2f} times the time of "
                    f"{_subject(worst['peer'])}."
                )
            parts.append(text)
        return Markdown("\n".join(f"- {part}" for part in parts))

    def launch_bound(self) -> Markdown:
        """Up to which length the time of ours and of each peer is that of its launches."""
        words = []
        rows = pick(self.handout, dtype="bf16", head_dim=64, pass_="end_to_end")
        for name in style.implementations(rows["implementation"]):
            last = metrics.flat_until(rows, name)
            if last is not None:
                words.append(f"{_subject(name)} {style.tokens(last)}")
        if not words:
            return Markdown("Up to which length that is so is not measured yet.")
        return Markdown(
            "In bf16 with d = 64, end to end, the longest sequence that takes at most a quarter "
            f"more than the least time at any length: {listed(words)}."
        )

    def paper_answer(self) -> Markdown:
        """Ours and the best peer at the longest of the paper's causal shapes, in TFLOP/s."""
        rows = with_tflops(pick(self.paper, seq_len=16384, causal=True))
        lines = []
        for head_dim in (64, 128):
            words = []
            for pass_ in ("forward", "backward"):
                here = pick(rows, head_dim=head_dim, pass_=pass_).dropna(subset=["tflops"])
                rates = here.set_index("implementation")["tflops"]
                peers = rates.drop(OURS, errors="ignore")
                if OURS in rates and len(peers):
                    peer = f"{style.look(peers.idxmax()).label} {style.digits(peers.max())}"
                    words.append(f"{pass_} **{style.digits(rates[OURS])}** (best peer: {peer})")
            if words:
                lines.append(f"- heads of {head_dim}: {listed(words)}")
        if not lines:
            return Markdown("**The answer** is not measured yet: the data hold no such rows.")
        return Markdown(
            "**The answer.** With one causal sequence of 16,384 tokens ours reaches in TFLOP/s:\n\n"
            + "\n".join(lines) + "\n\n{numref}`fig-flash-paper` has the rest."
        )  # fmt: skip


def find(rows: pd.DataFrame, **where):
    """The first row that matches, as a named tuple; None where there is none."""
    found = pick(rows, **where)
    return next(iter(found.itertuples()), None)


def _beside(ours: float, theirs: float, name: str) -> str:
    return f"{compare(ours, theirs)} {style.look(name).label} ({style.digits(theirs)} ms)"


def _span(lengths: pd.Series) -> str:
    low, high = style.tokens(lengths.min()), style.tokens(lengths.max())
    return f"at {low} tokens" if low == high else f"between {low} and {high} tokens"


def _subject(name: str) -> str:
    return "ours" if name == OURS else style.look(name).label


def listed(words: list[str]) -> str:
    """Words as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _ms(value: float | None) -> str:
    return _unit(value, "ms")


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{style.digits(value)} {unit}"
