"""What the peak memory is made of: ours to the byte, the peers' extra sums, eager's matrices."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.flash.rows import BYTES, LONGEST, Flash
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import OURS, pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.attention import eager_launches, eager_matrices, eager_moves, tiled_memory

PLAIN = ("eager", "compile")


def expected(row) -> int:
    """Bytes of the tensors that a tiled implementation has to allocate in a row's pass."""
    sizes = int(row.batch), int(row.heads), int(row.seq_len), int(row.seq_len), int(row.head_dim)
    return sum(tiled_memory(*sizes, BYTES[row.dtype], row.pass_).values())


def matrices(row) -> float:
    """N x N matrices in a row's peak, beyond what a tiled implementation allocates."""
    matrix = int(row.batch) * int(row.heads) * int(row.seq_len) ** 2 * BYTES[row.dtype]
    return (float(row.peak_bytes) - expected(row)) / matrix


def extra_sums(row) -> float:
    """A row's peak beyond what a tiled implementation allocates, in fp32 tensors the size of q."""
    sums = int(row.batch) * int(row.heads) * int(row.seq_len) * int(row.head_dim) * 4
    return (float(row.peak_bytes) - expected(row)) / sums


def end_to_end(flash: Flash, implementation: str, dtype: str = "bf16", seq_len: int = LONGEST):
    """The row of one head of 64 end to end; None unless it has a peak."""
    return row_of(flash.handout.dropna(subset=["peak_bytes"]), implementation=implementation,
                  dtype=dtype, head_dim=64, seq_len=seq_len, pass_="end_to_end")  # fmt: skip


def parts(flash: Flash, caption: str, name: str) -> Table:
    """Which tensors make up our peak at the longest sequence, and what the measured peak adds."""
    held = tiled_memory(1, 1, LONGEST, LONGEST, 64, BYTES["bf16"], "end_to_end")
    what = {"o": "output", "lse": "log-sum-exp, fp32", "dq": "gradient", "dk": "gradient",
            "dv": "gradient", "delta": "$D$ of {eq}`eq-flash-delta`, fp32"}  # fmt: skip
    lines = [[f"`{tensor}`", what[tensor], f"{size:,}"] for tensor, size in held.items()]
    lines.append(["", "together", f"{sum(held.values()):,}"])
    row = end_to_end(flash, OURS)
    lines.append(["", "measured peak", "–" if row is None else f"{int(row.peak_bytes):,}"])
    columns = ["tensor", "what it is", "bytes"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def ours(flash: Flash) -> Markdown:
    """Whether our peak is what its tensors take, at every shape of the handout's sweep."""
    rows = pick(flash.handout, implementation=OURS).rename(columns={"pass": "pass_"})
    off = [int(row.peak_bytes) - expected(row)
           for row in rows.dropna(subset=["peak_bytes"]).itertuples()]  # fmt: skip
    if not off:
        return Markdown("Our peak is not measured yet.")
    if not any(off):
        return Markdown(f"The measured peak is that sum to the byte, in all {len(off)} rows of "
                        "ours in the sweep: the kernels allocate nothing else.")  # fmt: skip
    return Markdown(f"In {off.count(0)} of the {len(off)} rows of ours in the sweep the measured "
                    f"peak is that sum to the byte; elsewhere it differs by at most "
                    f"{max(map(abs, off)):,} bytes.")  # fmt: skip


def peers(flash: Flash) -> Markdown:
    """What the peers hold beyond that, in fp32 tensors of q's size and in N x N matrices."""
    sums, plain = [], []
    for name in LOOKS.order(flash.handout["implementation"].unique()):
        row = end_to_end(flash, name)
        if name == OURS or row is None:
            continue
        if name in PLAIN:
            plain.append(f"{LOOKS.of(name).label} {matrices(row):.2f}")
        else:
            sums.append(f"{LOOKS.of(name).label} {extra_sums(row):.2f}")
    where = f"at {style.tokens(LONGEST)} tokens, one head of 64, bf16"
    text = ""
    if sums:
        text += (f"Beyond those tensors, and counted in fp32 tensors of the size of $Q$, the peers "
                 f"hold: {listed(sums)} ({where}). One such tensor is what it takes to add up $dQ$ "
                 "across programs, which our second sweep avoids. ")  # fmt: skip
    if plain:
        expects = eager_matrices("end_to_end", BYTES["bf16"])
        text += (f"In $N \\times N$ matrices: {listed(plain)}. Counting says {expects:g} for "
                 "eager: the weights and a mask of one byte per score wait for the backward, which "
                 "at its peak holds three more, the gradient of the weights, its product with the "
                 "weights, and the gradient of the scores.")  # fmt: skip
    return Markdown(text.strip() or "The peers' peaks are not measured yet.")


def eager(flash: Flash) -> Markdown:
    """What eager launches and moves forward, by counting, and what its time amounts to."""
    launches, moves = eager_launches("forward"), eager_moves("forward", BYTES["bf16"])
    text = (f"Eager attention is two products and a softmax in the source and {launches} kernels "
            f"on the GPU; forward they move {moves:g} matrices of $N \\times N$ in bf16, a read or "
            "a write of one counting once")  # fmt: skip
    copy = flash.ceiling_rows[(flash.ceiling_rows["operation"] == "copy")].dropna(subset=["ms"])
    row = row_of(flash.handout.dropna(subset=["ms"]), implementation="eager", dtype="bf16",
                 head_dim=64, seq_len=LONGEST, pass_="forward")  # fmt: skip
    if row is None or not len(copy):
        return Markdown(f"{text}.")
    rate = max(2 * int(r.size) / r.ms for r in copy.itertuples())  # bytes per ms
    measured = row.ms * rate / (LONGEST**2 * BYTES["bf16"])
    text += f". At the rate of a plain copy its measured {style.digits(row.ms)} ms would move "
    text += f"{measured:.0f}"
    if measured > moves:
        text += (". What lies between was not taken apart; our guess is rows too long for the "
                 "on-chip memory, which softmax then reads more than once")  # fmt: skip
    return Markdown(f"{text}.")
