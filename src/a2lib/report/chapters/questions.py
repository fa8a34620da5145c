"""Every question of the assignment, both editions, and where the book answers it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.measure.section import Answer, Section
from a2lib.measure.sections import DERIVED, SECTIONS
from a2lib.report import style
from a2lib.report.data import PUBLISHED, load
from a2lib.report.tables import Markdown, pipe

NOT_YET = "not yet answered"
NOT_MEASURED = f"; not measured yet on an {style.device_name(PUBLISHED)}"
# Groups, labels (the handouts' own name of the problem, its parts, the editions that ask it), and
# below each label the question in short.
_TEXT = """
# Profiling and benchmarking
benchmarking_script (a) · 25, 26
    a command that times a model's forward, backward and optimizer step
benchmarking_script (b) · 25, 26
    the times of every model size and context length
benchmarking_script (c) · 25, 26
    the same with 0, 1 and 2 warm-up steps
nsys_profile (a)–(e) · 25, 26
    what the kernels of a step are and what they cost
mixed_precision_accumulation · 25, 26
    sums of small numbers in several precisions
benchmarking_mixed_precision (a) · 25, 26
    the dtypes inside an autocast region
benchmarking_mixed_precision (b) · 25, 26
    which parts of layer normalisation need precision
benchmarking_mixed_precision (c) · 25, 26
    fp32 against bf16 autocast for every size
memory_profiling (a)–(e) · 25, 26
    memory over time, its peaks and its largest allocations
memory_profiling (f) · 26
    what one block saves for its backward
gradient_checkpointing (a), (b) · 26
    the least memory, and the best size of a segment
# Attention
pytorch_attention · 25, 26
    time and memory of attention in plain PyTorch
torch_compile (a), (b) · 25, 26
    what compiling attention and the whole model gains
flash_forward (a)–(c) · 25, 26
    the tiled forward pass: plain PyTorch, Triton, causal
flash_backward · 25, 26
    the backward pass by recomputation
flash_benchmarking · 25, 26
    latency against PyTorch over length, head size and dtype
leaderboard · 25
    forward and backward at one large shape
# Distributed data parallel
distributed_communication_single_node · 25, 26
    what an all-reduce costs, by backend, ranks and size
naive_ddp · 25, 26
    an all-reduce per parameter after the backward pass
naive_ddp_benchmarking · 25, 26
    its step time and the share spent communicating
minimal_ddp_flat_benchmarking · 25, 26
    one all-reduce of all gradients together
ddp_overlap_individual_parameters · 25, 26
    communication during the backward pass
ddp_overlap_individual_parameters_benchmarking (a), (b) · 25, 26
    its step time, and traces of the overlap
ddp_overlap_bucketed · 25
    gradients communicated in buckets
ddp_bucketed_benchmarking (a) · 25
    step time by bucket size
ddp_bucketed_benchmarking (b) · 25
    a model of the overhead, and the best bucket size
optimizer_state_sharding · 25, 26
    optimizer states split over ranks
optimizer_state_sharding_accounting (a) · 25, 26
    its memory at three moments, by what it is
optimizer_state_sharding_accounting (b) · 25, 26
    a step's time with and without
optimizer_state_sharding_accounting (c) · 25, 26
    its memory and bytes against ZeRO stage 1
fsdp · 26
    weights, gradients and states split over ranks
fsdp_accounting (a) · 26
    its memory at four moments, by what it is
fsdp_accounting (b) · 26
    whether each all-gather is done in time
# Parallelism on paper
communication_accounting (a)–(d) · 25
    memory and batch size of a very large model
alternate_ring_all_reduce · 26
    the time of another ring all-reduce
data_parallel_calcs · 26
    when data parallelism is bound by communication
fsdp_calcs · 26
    the same for fully sharded training
tp_calcs · 26
    the same for tensor parallelism
fsdp_tp_calcs · 26
    the best mixture of both
leaderboard · 26
    a training step of an 8B model on two GPUs
"""


def _read(text: str) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    label = ""
    for line in text.strip().splitlines():
        if line.startswith("# "):
            group = found.setdefault(line[2:], [])
        elif line.startswith(" "):
            group.append((label, line.strip()))
        else:
            label = line
    return found


QUESTIONS = _read(_TEXT)


def standing(roots: list[Path] | None = None) -> Markdown:
    """How many of the questions are answered, how many wait for rows, how many have no answer."""
    found = _answers()
    labels = [label for questions in QUESTIONS.values() for label, _ in questions]
    lacking = sum(label not in found for label in labels)
    waiting = sum(not _measured(section, roots) for _, section in found.values())
    text = f"Of {len(labels)} questions {len(labels) - lacking - waiting} are answered"
    if waiting:
        text += (
            f"; {waiting} have their derivation and their code, and wait for rows of an "
            f"{style.device_name(PUBLISHED)}"
        )
    if lacking:
        text += f"; {'one is' if lacking == 1 else f'{lacking} are'} not answered yet"
    return Markdown(f"{text}.")


def index(group: str, roots: list[Path] | None = None) -> Markdown:
    """The questions of one group, each with a link to its answer.

    Where the rows that answer it are not measured on the published device, it says so.
    """
    found, rows = _answers(), []
    for label, words in QUESTIONS[group]:
        shown = _link(*found[label], roots) if label in found else NOT_YET
        name, _, rest = label.partition(" ")
        rows.append([f"`{name}` {rest}", words, shown])
    frame = pd.DataFrame(rows, columns=["id · edition", "question, in short", "answer"])
    return Markdown(f":::{{table}}\n:class: questions\n\n{pipe(frame, left=3)}\n:::\n")


def _answers() -> dict[str, tuple[Answer, Section | None]]:
    """The answers by the questions' labels, each with the section whose rows it needs; None where
    it is derived and needs no row."""
    found = {a.label: (a, section) for section in SECTIONS.values() for a in section.answers}
    return found | {a.label: (a, None) for derived in DERIVED.values() for a in derived}


def _measured(section: Section | None, roots: list[Path] | None) -> bool:
    return section is None or not load(section.name, roots)["local"].all()


def _link(answer: Answer, section: Section | None, roots: list[Path] | None) -> str:
    more = "" if _measured(section, roots) else NOT_MEASURED
    return f"[{answer.title}](#{answer.anchor}){more}"
