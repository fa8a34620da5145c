"""Bytes by category over a step, as counted and as recorded."""

from __future__ import annotations

from a2lib.report import provenance, style
from a2lib.report.chapters import profile
from a2lib.report.chapters.memory.rows import SHOWN, Memory, counted, gb, step
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown
from a2lib.theory.step_memory import WORKSPACE, StepMemory, asked, points
from a2lib.theory.step_tensors import PARAMETERS

MS = 1000  # the drawing takes microseconds


RECORDED = (("train-step", 1), ("inference", 1), ("train-step", 0))  # those drawn, at SHOWN tokens


def by_count(one: StepMemory, without: tuple[str, ...] = ()) -> Chart:
    """The timeline that the count gives: no time, but one tensor after another."""
    nothing = dict.fromkeys(without, 0)
    rows = [
        {"time_us": MS * number, "phase": phase, **found, **nothing}
        for number, (phase, found) in enumerate(points(one))
    ]
    return profile.memory(rows, along="tensors made and dropped")


def chart(m: Memory, context: int, mode: str = "train-step", precision: str = "fp32",
          attention: str = "eager", first: bool = False) -> Chart:  # fmt: skip
    """The timeline of a step as the allocator recorded it; as counted, where it is not recorded."""
    one = step(context, mode, precision, attention, first=first)
    found = m.picture("memory", one, 0 if first else 1)
    return by_count(one) if found is None else profile.memory(_in_phases(found.rows))


def beyond_weights(m: Memory, context: int) -> Chart:
    """The same of a forward that keeps nothing, without the weights, which would dwarf it."""
    one = step(context, "inference")
    found = m.picture("memory", one)
    if found is None:
        return by_count(one, without=(PARAMETERS,))
    return profile.memory([row | {PARAMETERS: 0} for row in _in_phases(found.rows)])


def _in_phases(rows: list[dict]) -> list[dict]:
    """Without what lies before the first phase of the step, in which nothing is asked for."""
    first = next((i for i, row in enumerate(rows) if "/" in row["phase"]), 0)
    return rows[first:]


def drawn(m: Memory) -> Markdown:
    """Which of the two the pictures are."""
    if len(m.recordings[m.recordings["status"] == "ok"]):
        return Markdown(
            "The pictures are of the GPU's own allocator: every allocation of two steps recorded, "
            "against the host's time; a line is where a phase first asks for memory. The host runs "
            "ahead of the GPU until the queue of launches is full; while it waits it asks for "
            f"nothing, and the picture is level. {_rest(m)}{agreement(m)}"
        )
    return Markdown(
        "The pictures are drawn from the count, against the number of tensors. "
        + m.not_yet("the same recorded by the GPU's allocator")
    )


def _rest(m: Memory) -> str:
    shown = [m.picture("memory", step(SHOWN, mode), number) for mode, number in RECORDED]
    shown.append(m.picture("memory", step(2048, precision="bf16", attention="flash")))
    if None not in shown:
        return ""
    return "One that is not recorded is drawn from the count, against the number of tensors. "


def agreement(m: Memory) -> str:
    """The peaks of the recorded steps beside those that are counted; of some rows."""
    rows = m.recordings[m.recordings["status"] == "ok"]
    off, lost = [], 0
    for row in rows.itertuples():
        one = step(row.context, row.mode, row.precision, row.attention, row.model,
                   first=int(row.step_number) == 0)  # fmt: skip
        off.append(int(row.tensor_bytes) - asked(one))
        lost = max(lost, int(row.unexplained_bytes))
    exact = sum(not x for x in off)
    text = (
        f"Of {len(rows)} recorded steps the peak is the counted one, cuBLAS's workspaces of "
        f"{WORKSPACE // 2**20} MiB a thread included, to the byte in {exact}"
    )
    if exact < len(off):
        apart = style.between([x for x in off if x], lambda x: f"{x / 1e6:+,.1f}")
        text += f"; elsewhere they are {apart} MB apart"
    return f"{text}. At the end the recording leaves {lost:,} bytes of the allocator's unexplained."


def shapes(m: Memory) -> Markdown:
    """How the phases are told from the picture, by the counted bytes at their ends."""
    forward = [sum(found.values()) for _, found in points(step(SHOWN, "inference"))]
    low, high = forward[0], max(forward)
    one = counted(step(SHOWN))
    return Markdown(
        f"A forward that keeps nothing rises from {gb(low)} to at most {gb(high)} GB: each block "
        f"leaves its result alone. In a train-step at {SHOWN} tokens forward climbs by as many "
        f"equal stairs as there are blocks; the peak, {gb(one.total)} GB, is in {one.phase}; then "
        "gradients grow while what was saved goes, block by block, and the optimizer's phase is "
        "flat, since fused AdamW makes no tensor, until the gradients are dropped."
    )


def source(m: Memory) -> Markdown:
    return provenance.source(m.recordings, m.runs,
                             "papermill notebooks/memory.ipynb -p sweep recordings")  # fmt: skip
