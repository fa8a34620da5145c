"""The calculator "will it fit, and how fast": its form, its constants, and an example's choices.

`book/_ext/pages/layouts.js` computes what `a2lib.theory.layouts` does, with the constants that this
module takes from there; `calculator.js` shows it. Starting values are the example's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from html import escape
from urllib.parse import urlencode

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.parallelism import forms
from a2lib.report.chapters.parallelism.forms import Choice, Field
from a2lib.report.tables import Table
from a2lib.theory import layouts
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import ATTENTIONS, NARROW, OPTIMIZERS, WIDE, Job, score_bytes
from a2lib.theory.layouts import Layout, Plan, evaluate, flops_share
from a2lib.theory.planner import largest_batch
from a2lib.theory.saved import PRECISIONS
from a2lib.theory.transformer import SIZES, Shape, parameter_count, state_bytes

EXAMPLE = Job(SIZES["8B"], DEVICES["H200"], 8, 32, 2048)
REPLICAS = Layout(data=8, sharding="none")
SHARDED = Layout(data=8)
# What the table and the prose compare: the same model, devices and batch, one choice after another.
CHOICES: dict[str, tuple[Job, Layout]] = {
    "replicas": (EXAMPLE, REPLICAS),
    "optimizer sharded (zero1)": (EXAMPLE, replace(REPLICAS, sharding="zero1")),
    "FSDP": (EXAMPLE, SHARDED),
    "FSDP, blocks run again": (EXAMPLE, replace(SHARDED, checkpointing="block")),
    "FSDP, eager attention": (replace(EXAMPLE, attention="eager"), SHARDED),
    "FSDP, fp32": (replace(EXAMPLE, precision="fp32"), SHARDED),
}
# Links that fill the form: the table's first and third line, then jobs of the assignment.
LINKS: dict[str, tuple[Job, Layout]] = {
    "8B on eight H200, replicas": CHOICES["replicas"],
    "the same by FSDP": CHOICES["FSDP"],
    "8B, two sequences of 32,768 tokens on two H200": (
        Job(SIZES["8B"], DEVICES["H200"], 2, 2, 32_768),
        Layout(tensor=2, microbatches=2),
    ),
    "2.7B in fp32 with eager attention on an H100": (
        Job(SIZES["2.7B"], DEVICES["H100"], 1, 4, 512, precision="fp32", attention="eager"),
        Layout(sharding="none"),
    ),
    "10B on 4,096 TPU-v5p": (
        Job(SIZES["10B"], DEVICES["TPU-v5p"], 4096, 4096, 4096),
        Layout(data=4096),
    ),
}

SHAPE = (
    Field("d_model", "d_model", "width", 10**6),
    Field("d_ff", "d_ff", "width of the FFN", 10**6),
    Field("num_layers", "blocks", "num_layers", 10**4),
    Field("num_heads", "heads", "num_heads", 10**4),
    Field("vocab_size", "vocabulary", "tokens", 10**7),
)
GIVEN = (
    Choice("device", "device", "maker's figures", {name: name for name in DEVICES}),
    Field("devices", "devices", "how many", 10**6),
    Field("headroom", "left free", "% of its memory", 99, whole=False, scale=0.01, lowest=0),
    Field("efficiency", "products run at", "% of the peak", 100, whole=False, scale=0.01,
          lowest=0.1),
)  # fmt: skip
TRAINING = (
    Field("batch", "batch", "sequences", 10**9),
    Choice("batch_of", "counted", "a step", {"all": "in all", "each": "on each data rank"}),
    Field("context", "context", "tokens each", 10**7),
    Choice("precision", "precision", "bf16: autocast", {"fp32": "fp32", "bf16": "bf16"}),
    Choice("optimizer", "optimizer", "bytes a parameter",
           {name: f"{name}: {size}" for name, size in OPTIMIZERS.items()}),
    Choice("attention", "attention", "of each block",
           {"eager": "eager", "flash": "flash"}),
    Choice("sharding", "state", "what of it is cut",
           {"none": "none (DDP)", "zero1": "zero1 (optimizer)", "fsdp": "fsdp (all)"}),
    Choice("checkpointing", "checkpointing", "computed again",
           {"none": "none", "block": "each block"}),
)  # fmt: skip
AXES = (
    Field("tensor", "tensor", "devices", 10**4),
    Field("pipeline", "pipeline", "stages", 10**4),
    Field("context_parallel", "context", "devices", 10**4),
    Field("microbatches", "micro-batches", "of a data rank", 10**6),
)
FIELDS = (*SHAPE, *GIVEN, *TRAINING, *AXES)
PARTS = ("parameters", "gradients", "optimizer", "working weights", "activations", "temporaries")
BUSY = ("computation", "memory bandwidth", "node links", "network", "pipeline bubble")
SPEED = {"step": "a step", "tokens": "tokens a second", "mfu": "model FLOPs of the peak (MFU)"}


class Calculator:
    """What a notebook's cell returns to show the form."""

    def _repr_html_(self) -> str:
        start = state(EXAMPLE, SHARDED)

        def fields(legend, which, *first):
            return forms.fieldset(legend, [*first, *(f.html(start[f.name]) for f in which)])

        size = forms.presets("size", "size", "sets the others",
                             {name: asdict(shape) for name, shape in SIZES.items()})  # fmt: skip
        links = "".join(
            f'<li><a href="{escape(address(*one))}">{words}</a></li>'
            for words, one in LINKS.items()
        )
        memory = {part: _swatch(i) + part for i, part in enumerate(PARTS)}
        return (
            f"{forms.palette()}"
            "<noscript><p>The calculator needs JavaScript; the table below and the command at the "
            "end of this page have the same figures without.</p></noscript>"
            '<div class="a2-form a2-calculator" id="fit" hidden>'
            f'<script type="application/json" class="a2-constants">{json.dumps(constants())}'
            '</script><form autocomplete="off">'
            f"{fields('The model', SHAPE, size)}{fields('The devices', GIVEN)}"
            f"{fields('The training', TRAINING)}"
            "<details><summary>More axes than data, and micro-batches</summary>"
            f"{fields('The layout', AXES)}</details></form>"
            f'{forms.STATE}<p class="a2-links" id="a2-links">Fill it with:</p>'
            f'<ul class="a2-links" aria-labelledby="a2-links">{links}</ul>'
            f"{forms.picture('memory', 360, 92)}"
            + forms.table('Memory of the fullest device <span data-out="memory.moment"></span>',
                          "component", ("GB", "share"), "memory",
                          memory | {"total": "together"}, ("gb", "share"))
            + forms.table("A step, if all communication hides and if none does", "at best",
                          ("hidden", "not hidden"), "speed", SPEED, ("floor", "serial"))
            + forms.picture("time", 360, 144)
            + forms.table("What a step keeps busy, and for how long", "what", ("s", "of the step"),
                          "busy", {name: name for name in BUSY}, ("s", "share"))
            + '<p>The model has <span data-out="parameters"></span> billion parameters. The '
            'largest batch that fits is <span data-out="batch.most"></span> sequences a step, '
            '<span data-out="batch.each"></span> on each data rank. The same in a terminal:</p>'
            '<pre class="a2-command"><code data-out="command"></code></pre></div>'
        )  # fmt: skip

    def __repr__(self) -> str:
        return "Calculator()"


def state(job: Job, layout: Layout) -> dict[str, int | float | str]:
    """What each field of the form holds for a job and its layout, whose batch counts in all."""
    return {
        **asdict(job.shape),
        "device": next(name for name, device in DEVICES.items() if device == job.device),
        "headroom": float(f"{100 * job.headroom:.12g}"),
        "efficiency": float(f"{100 * job.efficiency:.12g}"),
        "batch_of": "all",
        **{name: getattr(job, name) for name in ("devices", "batch", "context", "precision",
                                                 "optimizer", "attention")},
        **{name: getattr(layout, name) for name in ("tensor", "pipeline", "microbatches",
                                                    "sharding", "checkpointing")},
        "context_parallel": layout.context,
    }  # fmt: skip


def address(job: Job, layout: Layout) -> str:
    """The end of the page's address at which the form holds a job and its layout."""
    held = state(job, layout)
    texts = {field.name: held[field.name] for field in FIELDS}
    return "#fit&" + urlencode(
        {name: text if isinstance(text, str) else f"{text:.15g}" for name, text in texts.items()}
    )


@cache
def constants() -> dict:
    """What layouts.js computes with, so that no constant is written twice."""
    return {
        "WIDE": WIDE,
        "NARROW": NARROW,
        "LOGIT_TENSORS": layouts.LOGIT_TENSORS,
        "SCORE_TENSORS": layouts.SCORE_TENSORS,
        "OPTIMIZERS": OPTIMIZERS,
        "score_bytes": {precision: score_bytes(precision) for precision in PRECISIONS},
        "saved": {
            attention: {precision: _saved(attention, precision) for precision in PRECISIONS}
            for attention in ATTENTIONS
        },
        "devices": {name: {"name": name, **asdict(device)} for name, device in DEVICES.items()},
    }


def _saved(attention: str, precision: str) -> dict[str, dict[str, int]]:
    """``Job.saved`` by its coefficients: what it grows by as one size after another does."""

    def saved(d_model=4, d_ff=1, num_heads=1, context=1):
        shape = Shape(d_model, d_ff, 1, num_heads, 1)
        job = Job(shape, DEVICES["H100"], 1, 1, context, precision=precision, attention=attention)
        return job.saved

    whole, cut = saved()
    wider = saved(d_model=8)
    d_whole, d_cut = (wider[0] - whole) // 4, (wider[1] - cut) // 4
    scores = saved(context=2)[1] - cut
    return {
        "whole": {"d_model": d_whole, "one": whole - 4 * d_whole},
        "cut": {
            "d_model": d_cut,
            "d_ff": saved(d_ff=2)[1] - cut,
            "num_heads": saved(num_heads=2)[1] - cut - scores,
            "scores": scores,
        },
    }


@cache
def evaluated() -> dict[str, tuple[Plan, int]]:
    """The plan of each of CHOICES, and its largest batch."""
    return {name: (evaluate(*one), largest_batch(*one)) for name, one in CHOICES.items()}


def numbers() -> dict[str, str]:
    """What the prose says, by name."""
    plans = evaluated()
    replicas, zero1, fsdp, again, eager, fp32 = (plan for plan, _ in plans.values())
    most = {name: largest // EXAMPLE.devices for name, (_, largest) in plans.items()}
    return {
        "fit_parameters": f"{parameter_count(EXAMPLE.shape) / 1e9:.1f}",
        "fit_context": f"{EXAMPLE.context:,}",
        "fit_devices": str(EXAMPLE.devices),
        "fit_each": str(EXAMPLE.batch // EXAMPLE.devices),
        "fit_allowed": _gb(EXAMPLE.memory),
        "fit_headroom": f"{100 * EXAMPLE.headroom:g} %",
        "fit_state": _gb(state_bytes(EXAMPLE.shape).total),
        "fit_replicas": _gb(replicas.memory_bytes),
        "fit_zero1": _gb(zero1.memory_bytes),
        "fit_fsdp": _gb(fsdp.memory_bytes),
        "fit_zero1_most": str(most["optimizer sharded (zero1)"]),
        "fit_fsdp_most": str(most["FSDP"]),
        "fit_again_most": str(most["FSDP, blocks run again"]),
        "fit_step": _seconds(fsdp.step_s),
        "fit_serial": _seconds(fsdp.serial_s),
        "fit_again_slower": f"{100 * (again.step_s / fsdp.step_s - 1):.0f} %",
        "fit_eager_kept": f"{eager.memory['activations'] / fsdp.memory['activations']:.1f}",
        "fit_eager_most": str(most["FSDP, eager attention"]),
        "fit_fp32_slower": f"{fp32.step_s / fsdp.step_s:.0f}",
        "fit_fp32_kept": f"{fp32.memory['activations'] / fsdp.memory['activations']:.1f}",
    }


def choices(caption: str, label: str) -> Table:
    """What one choice after another does to the example."""
    lines = []
    for name, (job, layout) in CHOICES.items():
        plan, most = evaluated()[name]
        lines.append([
            name, f"{plan.memory_bytes / 1e9:.0f}",
            "yes" if plan.memory_bytes <= job.memory else "no",
            f"{most // layout.data}", f"{plan.step_s:.2f}", f"{plan.serial_s:.2f}",
            f"{float(f'{job.batch * job.context / plan.step_s:.3g}'):,.0f}",
            f"{100 * flops_share(job, layout, plan.step_s):.0f}", plan.bound,
        ])  # fmt: skip
    columns = ["choice", "GB each", "fits", "most a device", "step, s", "nothing hidden, s",
               "tokens a second", "MFU, %", "bound by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def _swatch(i: int) -> str:
    return forms.swatch(f'<rect class="part{i}" width="16" height="16"/>')


def _gb(value: float) -> str:
    return f"{style.digits(value / 1e9)}\N{NO-BREAK SPACE}GB"


def _seconds(value: float) -> str:
    return f"{style.digits(value)}\N{NO-BREAK SPACE}s"
