"""The calculator "will it fit, and how fast": its form, its constants, and an example's choices.

`book/_ext/pages/layouts.js` computes what `a2lib.theory.layouts` does, with the constants that this
module takes from there; `calculator.js` shows it. Starting values are the example's.
"""

import json
from dataclasses import asdict, replace
from functools import cache
from html import escape
from urllib.parse import urlencode

import pandas as pd

from a2lib.report.pages import forms
from a2lib.report.pages.forms import Choice, Field
from a2lib.report.plots import reference, stacks
from a2lib.report.style import Chart
from a2lib.theory import layouts
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import ATTENTIONS, OPTIMIZERS, Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.memory.step import PRECISIONS
from a2lib.theory.products import NARROW, WIDE
from a2lib.theory.step_floor import score_bytes
from a2lib.theory.transformer import PRESETS, SIZES, Shape

EXAMPLE = Job(SIZES["8B"], DEVICES["H200"], 8, 32, 2048)
REPLICAS = Layout(data=8, sharding="none")
SHARDED = Layout(data=8)
# What the table and the prose compare: the same model, devices and batch, one choice after another.
CHOICES: dict[str, tuple[Job, Layout]] = {
    "replicas": (EXAMPLE, REPLICAS),
    "zero1": (EXAMPLE, replace(REPLICAS, sharding="zero1")),
    "FSDP": (EXAMPLE, SHARDED),
    "FSDP, recompute": (EXAMPLE, replace(SHARDED, checkpointing="block")),
    "FSDP, eager": (replace(EXAMPLE, attention="eager"), SHARDED),
    "FSDP, fp32": (replace(EXAMPLE, precision="fp32"), SHARDED),
}
LONG = Job(SIZES["8B"], DEVICES["H200"], 2, 2, 32_768)
IN_TWO = Layout(tensor=2, microbatches=2, checkpointing="block")
LLAMA = Job(PRESETS["Llama-3-405B"], DEVICES["H100"], 16_384, 2048, 8192, 0.03, activations="fused")
META = Layout(128, 8, 16, 1, 16, "zero2", chunks=8)
DEEPSEEK = Job(PRESETS["DeepSeek-V3"], DEVICES["H800"], 2048, 15_360, 4096, activations="fused")
WIDE_EP = Layout(128, 1, 16, 1, 120, "zero1", "block", expert=64, schedule="zb-h1")
# Links that fill the form: the table's first and third line, then jobs of the assignment.
LINKS: dict[str, tuple[Job, Layout]] = {
    "8B on eight H200, replicas": CHOICES["replicas"],
    "the same by FSDP": CHOICES["FSDP"],
    "8B, two sequences of 32,768 tokens on two H200": (LONG, IN_TWO),
    "Llama 3 405B on 16,384 H100, as Meta laid it out": (LLAMA, META),
    "DeepSeek-V3 on 2,048 H800, with blocks computed again": (DEEPSEEK, WIDE_EP),
}

SHAPE = (
    Field("d_model", "d_model", "width", 10**6),
    Field("d_ff", "d_ff", "width of the FFN", 10**6),
    Field("num_layers", "blocks", "num_layers", 10**4),
    Field("num_heads", "heads", "num_heads", 10**4),
    Field("num_kv_heads", "of keys, values", "num_kv_heads", 10**4),
    Field("vocab_size", "vocabulary", "tokens", 10**7),
)
TIED = Choice("tied", "head", "what it is", {"own": "its own", "tied": "the embedding"})
MIXED = (
    Field("experts", "experts", "of a block", 10**6, least=0),
    Field("top_k", "top_k", "that a token goes to", 10**6, least=0),
    Field("shared", "shared", "of every token", 10**6, least=0),
    Field("dense", "dense", "layers without", 10**6, least=0),
    Field("nodes", "nodes", "of a token, at most", 10**6, least=0),
    Field("head_size", "head_size", "0: d_model / heads", 10**6, least=0),
    Field("q_rank", "q_rank", "queries' latent", 10**6, least=0),
    Field("kv_rank", "kv_rank", "keys' and values'", 10**6, least=0),
    Field("rope", "rope", "that turns", 10**6, least=0),
)
PERCENT = {"whole": False, "scale": 0.01}
GIVEN = (
    Choice("device", "device", "maker's figures", {name: name for name in DEVICES}),
    Field("devices", "devices", "how many", 10**6),
    Field("headroom", "left free", "% of its memory", 99, **PERCENT, least=0),
    Field("efficiency", "multiplies run at", "% of the peak", 100, **PERCENT, least=0.1),
)
KEPT = {name: f"{name}: {size}" for name, size in OPTIMIZERS.items()}
CUT = {"none": "none (DDP)", "zero1": "zero1 (and fp32 weights)", "zero2": "zero2 (and gradients)"}
CUT |= {"fsdp": "fsdp (all)", "hsdp": "hsdp (all, in a node)"}
AGAIN = {"none": "none", "selective": "eager's scores", "block": "each block"}
OF = {"library": "this library", "fused": "fused kernels"}
TRAINING = (
    Field("batch", "batch", "sequences", 10**9),
    Choice("batch_of", "counted", "a step", {"all": "in all", "each": "on each data rank"}),
    Field("context", "context", "tokens each", 10**7),
    Choice("precision", "precision", "bf16: autocast", {"fp32": "fp32", "bf16": "bf16"}),
    Choice("optimizer", "optimizer", "bytes a parameter", KEPT),
    Choice("attention", "attention", "of each block", {"eager": "eager", "flash": "flash"}),
    Choice("sharding", "state", "what of it is cut", CUT),
    Choice("checkpointing", "checkpointing", "computed again", AGAIN),
    Choice("activations", "activations", "as kept by", OF),
    Field("frozen", "not trained", "% of each matrix", 99.99, **PERCENT, least=0),
)
AXES = (
    Field("tensor", "tensor", "devices", 10**4),
    Field("pipeline", "pipeline", "stages", 10**4),
    Field("context_parallel", "context", "devices", 10**4),
    Field("microbatches", "micro-batches", "of a data rank", 10**6),
    Field("chunks", "pieces", "of the model, interleaved", 10**4),
    Field("expert", "expert", "devices, of data × context", 10**4),
    Choice("schedule", "schedule", "of a pipeline", {name: name for name in layouts.SCHEDULES}),
    Choice("sequence", "sequence", "by tensor's devices", {"cut": "cut", "whole": "whole"}),
)
FIELDS = (*SHAPE, TIED, *MIXED, *GIVEN, *TRAINING, *AXES)
PARTS = ("parameters", "gradients", "optimizer", "working weights", "activations", "temporaries")
SHADES = ("#0072b2", "#a86f00", "#00825f", "#b0558a", "#2a86bf", "#444444")  # as the form has
BUSY = ("computation", "memory bandwidth", "node links", "network", "pipeline bubble")
SPEED = {"step": "a step", "tokens": "tokens a second", "mfu": "model FLOPs of the peak (MFU)"}


class Calculator:
    """What a notebook's cell returns to show the form."""

    def _repr_html_(self) -> str:
        start = state(EXAMPLE, SHARDED)

        def fields(legend, which, *first):
            return forms.fieldset(legend, [*first, *(f.html(start[f.name]) for f in which)])

        sets = {name: _sizes(shape) for name, shape in PRESETS.items()}
        size = forms.presets("size", "size", "sets the others", sets)
        links = "".join(
            f'<li><a href="{escape(address(*one))}">{words}</a></li>'
            for words, one in LINKS.items()
        )
        square = '<rect class="part{}" width="16" height="16"/>'
        held = {part: forms.swatch(square.format(i)) + part for i, part in enumerate(PARTS)}
        held |= {"total": "together"}
        moment = 'Memory of the fullest device <span data-out="memory.moment"></span>'
        hides = (
            "A step, if all communication hides, if tensor's, context's and experts' does not, and "
            "if none does"
        )
        ends = {"floor": "all", "expected": "but theirs", "serial": "none"}
        long, parts = "What a step keeps busy, and for how long", {name: name for name in BUSY}
        bytes_, seconds = {"gb": "GB", "share": "share"}, {"s": "s", "share": "of the step"}
        return (
            f"{forms.palette()}"
            "<noscript><p>The calculator needs JavaScript; the table below has the example's "
            "figures, and a command at the end of this page others.</p></noscript>"
            '<div class="a2-form a2-calculator" id="fit" hidden>'
            f'<script type="application/json" class="a2-constants">{json.dumps(constants())}'
            f"</script>{forms.VERDICT}{forms.picture('memory', 92)}"
            '<form autocomplete="off">'
            f"{fields('The model', (*SHAPE, TIED), size)}{fields('The devices', GIVEN)}"
            f"{fields('The training', TRAINING)}"
            "<details><summary>More axes than data, and micro-batches</summary>"
            f"{fields('The layout', AXES)}</details>"
            "<details><summary>Experts and latent attention</summary>"
            f"{fields('The blocks', MIXED)}</details></form>"
            f'{forms.STATE}<p class="a2-links" id="a2-links">Fill it with:</p>'
            f'<ul class="a2-links" aria-labelledby="a2-links">{links}</ul>'
            f"{forms.table('memory', moment, 'component', held, bytes_)}"
            f"{forms.table('speed', hides, 'at best', SPEED, ends)}"
            f"{forms.picture('time', 144)}"
            f"{forms.table('busy', long, 'what', parts, seconds)}"
            '<p>The model has <span data-out="parameters"></span> billion parameters. The '
            'largest batch that fits is <span data-out="batch.most"></span> sequences a step, '
            '<span data-out="batch.each"></span> on each data rank. The same in a terminal:</p>'
            '<pre class="a2-command"><code data-out="command"></code></pre></div>'
        )


def state(job: Job, layout: Layout) -> dict[str, int | float | str]:
    """What each field of the form holds for a job and its layout, whose batch counts in all."""
    shares = ("headroom", "efficiency", "frozen")
    own = ("devices", "batch", "context", "precision", "optimizer", "attention", "activations")
    cut = ("tensor", "pipeline", "microbatches", "sharding", "checkpointing", "chunks", "expert")
    return {
        **_sizes(job.shape),
        "device": next(name for name, device in DEVICES.items() if device == job.device),
        **{name: float(f"{100 * getattr(job, name):.12g}") for name in shares},
        "batch_of": "all",
        **{name: getattr(job, name) for name in own},
        **{name: getattr(layout, name) for name in (*cut, "schedule")},
        "context_parallel": layout.context,
        "sequence": "cut" if layout.sequence else "whole",
        "tied": "tied" if job.shape.tied else "own",
    }


def _sizes(shape: Shape) -> dict[str, int]:
    sizes = {f.name: getattr(shape, f.name) for f in (*SHAPE, *MIXED)}
    return sizes | {"num_kv_heads": shape.kv_heads}


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
        "saved": {one: {p: _saved(one, p) for p in PRECISIONS} for one in ATTENTIONS},
        "devices": {name: {"name": name, **asdict(device)} for name, device in DEVICES.items()},
    }


def _saved(attention: str, precision: str) -> dict[str, dict[str, int]]:
    """``Job.saved`` by its coefficients: what it grows by as one size after another does."""

    def saved(*sizes: int) -> tuple[int, int, int]:
        shape, on = Shape(*sizes[:2], 1, sizes[2], 1), DEVICES["H100"]
        return Job(shape, on, 1, 1, 1, precision=precision, attention=attention).saved

    (whole, cut, scores), wider, deeper, more = map(saved, (4, 8, 4, 4), (1, 1, 2, 1), (1, 1, 1, 2))
    d_whole, d_cut = (wider[0] - whole) // 4, (wider[1] - cut) // 4
    by_cut = {"d_model": d_cut, "d_ff": deeper[1] - cut, "num_heads": more[1] - cut}
    by_whole = {"d_model": d_whole, "one": whole - 4 * d_whole}
    return {"whole": by_whole, "cut": by_cut | {"scores": scores}}


def memory() -> Chart:
    """Memory of the fullest device by choice and component, beside what may be used."""
    parts = pd.DataFrame({name: evaluate(*one).memory for name, one in CHOICES.items()}).T / 1e9
    shades = dict(zip(PARTS, SHADES, strict=True))

    def room(ax):
        reference(ax, EXAMPLE.memory / 1e9, "", vertical=True)

    return stacks(parts, shades, 4.0, xlabel="GB on the fullest device", more=room)
