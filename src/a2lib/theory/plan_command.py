"""Plan the training of a Transformer: python -m a2lib.theory plan [--json].

Prints the layout of the shortest step that fits, what fills the fullest device, how long a step
takes at least and what binds it, and the assumptions all of that rests on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace

from a2lib.command import Number, Parser, Whole, add_number
from a2lib.theory.devices import DEVICES, Device, named_device
from a2lib.theory.jobs import ACTIVATIONS, ATTENTIONS, EFFICIENCY, OPTIMIZERS, Job
from a2lib.theory.layouts import (
    ASSUMPTIONS,
    HIDDEN,
    SCHEDULES,
    SHARDINGS,
    STRATEGIES,
    Layout,
    Plan,
    evaluate,
    flops_share,
)
from a2lib.theory.memory.saved import PRECISIONS
from a2lib.theory.planner import MOST_COUNTED, largest_batch, search
from a2lib.theory.transformer import (
    LATENT,
    PRESETS,
    GroupedShape,
    Shape,
    active_parameter_count,
    named_size,
    parameter_count,
)

DEFAULT_SIZE = "8B"
MOST_DEVICES, MOST_SEQUENCES = 2**20, 2**24
EXPERTS = ("experts", "top_k", "shared", "dense", "nodes", *LATENT)
EPILOG = """\
A layout is data x tensor x pipeline x context devices. Unless you hold some of its numbers, all
that keep the rules are tried: data divides the batch; tensor the heads, those of keys, d_ff and the
vocabulary; pipeline the layers, or up to three more than there are; twice context the length;
micro-batches the sequences of a data rank; chunks the blocks of a stage; expert the experts and the
devices of data x context, among which it is. Tensor stays within a node, and cuts no model of
experts. Fewer devices than there are may be used, if no layout of all of them is faster. Of sizes
with very many divisors some are left out, and the answer says so.

  fsdp   ZeRO-3: parameters, gradients and moments cut over data x context, gathered block by block
  zero2  bf16 weights whole on each device; fp32 weights, gradients and moments cut
  zero1  bf16 weights and gradients whole; fp32 weights and moments cut, as in the paper (this
         library's ShardedOptimizer cuts the moments alone: 4 bytes a parameter more)
  hsdp   fsdp within a node, the same on each; gradients averaged over the nodes once a step
  none   everything whole on each device; never tried, since zero1 sends as much and holds less

The best layout is that of the shortest step in which messages of FSDP, data parallelism and
pipeline hide behind computation as far as they are shorter, and those of tensor, context and expert
parallelism, which the next operation waits for, do not (--hidden data). "at least" is the floor,
where all hide (--hidden all), "with nothing hidden" the other end (none); a share, --hidden 0.5,
takes so much of the way from the latter to the former.

examples:
  python -m a2lib.theory plan --size 8B --device H200 --devices 2 --batch 2 --context 32768
  python -m a2lib.theory plan --device H100 --devices 4096 --batch 2048 --context 8192 \\
      --size Llama-3-405B --activations fused
  python -m a2lib.theory plan --as-given --size Llama-3-405B --activations fused --device H100 \\
      --devices 16384 --data 128 --tensor 8 --pipeline 16 --chunks 8 --batch 2048 \\
      --context 8192 --microbatches 16 --sharding zero2 --headroom 0.03
  python -m a2lib.theory plan --as-given --size DeepSeek-V3 --activations fused --device H100 \\
      --devices 2048 --data 128 --pipeline 16 --expert 64 --batch 15360 --context 4096 \\
      --microbatches 120 --sharding zero1 --schedule zb-h1
  python -m a2lib.theory plan --size 8B --devices 8 --tensor 8 --bandwidth 3.6e11 --latency-us 20
  python -m a2lib.theory plan --as-given --size 2.7B --device H100 --devices 8 --data 8 --batch 8 \\
      --context 1024 --sharding none --precision fp32 --attention eager --optimizer sgd
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m a2lib.theory plan",
        description=__doc__.partition("\n\n")[2],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    made.add_argument("--size", default=DEFAULT_SIZE,
                      help=f"model: {', '.join(PRESETS)} ({DEFAULT_SIZE})")  # fmt: skip
    for name, most, words in (("d-model", 2**20, "its width"), ("d-ff", 2**24, "width of its FFN"),
                              ("layers", 10**5, "its blocks"), ("heads", 2**16, "its heads"),
                              ("kv-heads", 2**16, "its heads of keys and values"),
                              ("vocab", 2**24, "its vocabulary")):  # fmt: skip
        add_number(made, f"--{name}", Whole(1, most), f"{words}, in place of the size's")
    made.add_argument("--tied", action="store_true",
                      help="the head is the embedding, no matrix of its own")  # fmt: skip
    of_experts = made.add_argument_group(
        "experts and latent attention", "in place of the size's; 0 is none"
    )
    for name, words in (("experts", "experts of a block"),
                        ("top-k", "experts that a token goes to"),
                        ("shared", "experts that every token goes to; both have d-ff together"),
                        ("dense", "layers at the beginning without experts"),
                        ("nodes", "nodes that a token's experts lie in at most"),
                        ("head-size", "width of a head"),
                        ("q-rank", "width that queries come of"),
                        ("kv-rank", "width that keys and values come of"),
                        ("rope", "width that turns, beside a head's")):  # fmt: skip
        add_number(of_experts, f"--{name}", Whole(0, 2**20), words)
    made.add_argument("--device", default="H200", help=f"{', '.join(DEVICES)} (H200)")
    add_number(made, "--devices", Whole(1, MOST_DEVICES), "how many there are", 2)
    add_number(made, "--batch", Whole(1, MOST_SEQUENCES), "sequences of a step, in all", 2)
    add_number(made, "--context", Whole(1, 2**28), "tokens of a sequence", 32_768)
    add_number(made, "--headroom", Number(0, 0.99), "share of a device's memory to leave free", 0.1)
    for name, values in (("precision", PRECISIONS), ("attention", ATTENTIONS),
                         ("optimizer", OPTIMIZERS), ("activations", ACTIVATIONS)):  # fmt: skip
        default = Job.__dataclass_fields__[name].default
        made.add_argument(f"--{name}", default=default, help=f"{', '.join(values)} ({default})")
    add_number(made, "--efficiency", Number(1e-4, 1),
               "share of the maker's peak at which products run", EFFICIENCY)  # fmt: skip
    links = made.add_argument_group(
        "links of a node", "the maker's, or as fitted to measured collectives"
    )
    add_number(links, "--bandwidth", Number(1e3, 1e18),
               "bytes a second that a device sends, of a fit of all-reduces the bus "
               "bandwidth")  # fmt: skip
    add_number(links, "--latency-us", Number(0, 1e9),
               "microseconds that a message takes beside its bytes", 0.0)  # fmt: skip
    held = made.add_argument_group("held, not searched")
    for name, words in (("data", "data"), ("tensor", "tensor"), ("pipeline", "pipeline"),
                        ("context-parallel", "context")):  # fmt: skip
        add_number(held, f"--{name}", Whole(1, MOST_DEVICES), f"devices along {words}")
    add_number(held, "--microbatches", Whole(1, MOST_SEQUENCES),
               "micro-batches of a data rank in a step")  # fmt: skip
    add_number(held, "--chunks", Whole(1, 10**5),
               "pieces of the model on a device, interleaved")  # fmt: skip
    add_number(held, "--expert", Whole(1, MOST_DEVICES),
               "devices that a block's experts are cut over")  # fmt: skip
    held.add_argument("--schedule", help=f"{', '.join(SCHEDULES)}; 1f1b unless held")
    held.add_argument("--sharding", help=", ".join(SHARDINGS))
    held.add_argument("--checkpointing", help=", ".join(STRATEGIES))
    held.add_argument("--no-sequence-parallel", action="store_true",
                      help="the residual stream whole on tensor's devices")  # fmt: skip
    words = f"what hides: {', '.join(HIDDEN)}, or a share from 0 to 1 (data)"
    made.add_argument("--hidden", default="data", metavar="WHAT", help=words)
    words = "try tensor parallelism over more devices than a node has"
    made.add_argument("--across-nodes", action="store_true", help=words)
    made.add_argument("--as-given", action="store_true",
                      help="no search: the layout given, 1 along what is not and fsdp, whether or "
                           "not it fits")  # fmt: skip
    return made


def main(arguments: list[str]) -> int:
    made = parser()
    given = made.parse_args(arguments)
    try:
        job = Job(
            shape=_shape(given),
            device=_device(given),
            devices=given.devices,
            batch=given.batch,
            context=given.context,
            headroom=given.headroom,
            precision=given.precision,
            attention=given.attention,
            optimizer=given.optimizer,
            efficiency=given.efficiency,
            activations=given.activations,
        )
        hidden = _hidden(given.hidden)
        held = _held(given)
        plan = (evaluate(job, Layout(**held)) if given.as_given
                else search(job, held, hidden=hidden, across=given.across_nodes))  # fmt: skip
    except ValueError as error:
        made.error(str(error))
    if given.json:
        said = as_object(job, plan)
        print(json.dumps(said, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        print(text(job, plan))
    return 0


def as_object(job: Job, plan: Plan) -> dict:
    """Job and plan for JSON: bytes, seconds, shares."""
    return {
        "model": {
            **asdict(job.shape),
            "num_kv_heads": job.shape.kv_heads,
            "tied": job.shape.tied,
            "parameters": parameter_count(job.shape),
            "active_parameters": active_parameter_count(job.shape),
        },
        "device": asdict(job.device),
        "devices": job.devices,
        "batch": job.batch,
        "context": job.context,
        "precision": job.precision,
        "attention": job.attention,
        "optimizer": job.optimizer,
        "efficiency": job.efficiency,
        "activations": job.activations,
        "layout": {**asdict(plan.layout), "devices": plan.layout.devices},
        "memory_bytes": {**plan.memory, "total": plan.memory_bytes, "allowed": job.memory},
        "moment": plan.moment,
        "fits": plan.memory_bytes <= job.memory,
        "largest_batch": largest_batch(job, plan.layout),
        "step_s": plan.step_s,
        "expected_s": plan.expected_s,
        "serial_s": plan.serial_s,
        "busy_s": plan.busy,
        "bound": plan.bound,
        "all_tried": plan.tried,
        "flops_share": plan.flops_share,
        "expected_flops_share": flops_share(job, plan.layout, plan.expected_s),
        "serial_flops_share": flops_share(job, plan.layout, plan.serial_s),
        "tokens_per_s": job.batch * job.context / plan.step_s,
        "serial_tokens_per_s": job.batch * job.context / plan.serial_s,
        "assumptions": list(ASSUMPTIONS),
    }


def text(job: Job, plan: Plan) -> str:
    """Job and plan in lines."""
    layout, shape = plan.layout, job.shape
    lines = [
        f"{parameter_count(shape):,} parameters (d_model {shape.d_model}, d_ff {shape.d_ff}, "
        f"{shape.num_layers} layers, {shape.num_heads} heads, {shape.kv_heads} of keys, "
        f"{'tied ' if shape.tied else ''}vocabulary {shape.vocab_size}), "
        + (
            f"{active_parameter_count(shape):,} of them for a token ({shape.top_k} of "
            f"{shape.experts} experts and {shape.shared} shared), "
            if shape.experts
            else ""
        )
        + f"{job.batch} sequences of {job.context} tokens",
        f"{layout.devices} of {job.devices} devices of {job.device.slug}, {job.precision}, "
        f"{job.attention} attention, {job.activations} activations, {job.optimizer}; "
        f"links of {job.device.link / 1e9:.4g} GB/s, "
        f"{job.device.latency * 1e6:.4g} us a message",
        "",
        f"layout   data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x "
        f"context {layout.context}, {layout.microbatches} micro-batches of "
        f"{job.batch // layout.data // layout.microbatches} sequences",
        f"         {layout.sharding}, checkpointing {layout.checkpointing}"
        f"{f', {layout.chunks} pieces of the model on a device' if layout.chunks > 1 else ''}"
        f"{', no sequence parallelism' if layout.tensor > layout.rows else ''}"
        f"{f', experts over {layout.expert} devices' if layout.expert > 1 else ''}"
        f"{f', schedule {layout.schedule}' if layout.schedule != '1f1b' else ''}",
        *(
            []
            if plan.tried
            else [
                f"         of more layouts than can be tried (some {MOST_COUNTED:,}) the best "
                "found; hold some of its numbers to look closer"
            ]
        ),
        "",
        f"memory of the fullest device ({plan.moment}), GB",
        *(f"  {name:<18}{size / 1e9:>10.2f}" for name, size in plan.memory.items()),
        f"  {'total':<18}{plan.memory_bytes / 1e9:>10.2f} of {job.memory / 1e9:.2f} allowed: "
        f"{'fits' if plan.memory_bytes <= job.memory else 'does not fit'}; at most "
        f"{largest_batch(job, layout):,} sequences would, in as many micro-batches",
        "",
        f"products at {100 * job.efficiency:.3g} % of the peak"
        + (", as measured in feed-forward layers" if job.efficiency == EFFICIENCY else ""),
        f"step     {_step(job, layout, plan.expected_s)} if all messages but those of "
        "tensor, context and expert hide",
        f"         {_step(job, layout, plan.step_s)} at least, if all do",
        f"         {_step(job, layout, plan.serial_s)} with nothing hidden",
        f"bound    {plan.bound}",
        "busy, s",
        *(f"  {name:<18}{seconds:>10.4g}" for name, seconds in plan.busy.items()),
        "",
        "assumed; compared with measured memory on one GPU, and with published trainings",
        *(f"  {line}" for line in ASSUMPTIONS),
    ]
    return "\n".join(lines)


def _step(job: Job, layout: Layout, seconds: float) -> str:
    share = flops_share(job, layout, seconds)
    rate = share * job.peak / 1e12
    return f"{seconds:.4g} s (MFU {100 * share:.0f} %, {rate:.0f} TFLOP/s a device)"


def _hidden(text: str) -> str | float:
    if text in HIDDEN:
        return text
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share <= 1:
        raise ValueError(f"hidden {text!r}: allowed are {', '.join(HIDDEN)}, numbers from 0 to 1")
    return share


def _device(given: argparse.Namespace) -> Device:
    device = named_device(given.device)
    link = device.link if given.bandwidth is None else given.bandwidth
    return replace(device, link=link, latency=given.latency_us / 1e6)


def _shape(given: argparse.Namespace) -> Shape:
    words = {"d_model": given.d_model, "d_ff": given.d_ff, "num_layers": given.layers,
             "num_heads": given.heads, "num_kv_heads": given.kv_heads, "vocab_size": given.vocab,
             "tied": given.tied or None,
             **{name: getattr(given, name) for name in EXPERTS}}  # fmt: skip
    changed = {name: value for name, value in words.items() if value is not None}
    return GroupedShape(**(asdict(named_size(given.size, PRESETS)) | changed))


def _held(given: argparse.Namespace) -> dict[str, int | str]:
    values = {**vars(given), "context": given.context_parallel,
              "sequence": False if given.no_sequence_parallel else None}  # fmt: skip
    names = (field.name for field in fields(Layout))
    return {name: values[name] for name in names if values[name] is not None}
