"""Plan the training of a Transformer: python -m a2lib.theory plan [--json].

Prints the layout of the shortest step that fits, what fills the fullest device, how long a step
takes at least and what binds it, and the assumptions all of that rests on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace

from a2lib.theory.collectives import positive
from a2lib.theory.devices import DEVICES, Device, named_device
from a2lib.theory.jobs import ATTENTIONS, OPTIMIZERS, Job
from a2lib.theory.layouts import (
    ASSUMPTIONS,
    SHARDINGS,
    STRATEGIES,
    Layout,
    Plan,
    evaluate,
    flops_share,
)
from a2lib.theory.planner import largest_batch, search
from a2lib.theory.saved import PRECISIONS
from a2lib.theory.transformer import SIZES, Shape, named_size, parameter_count

DEFAULT_SIZE = "8B"
EPILOG = """\
A layout is data x tensor x pipeline x context devices. Unless you hold some of its numbers, all
that keep the rules are tried: data divides the batch; tensor the heads, d_ff and the vocabulary;
pipeline the layers; twice context the length; micro-batches the sequences of a data rank. Fewer
devices than there are may be used, if no layout of all of them is faster.

  fsdp   parameters, gradients and moments cut over data x context, gathered block by block
  zero1  weights and gradients whole on each device, AdamW's state cut over data x context
  none   everything whole on each device; never tried, since zero1 sends as much and holds less

"at least" is a floor: all communication hides behind computation as far as it is shorter. "with
nothing hidden" is the other end. A real step lies between, or above where kernels are slow.

examples:
  python -m a2lib.theory plan --size 8B --device H200 --devices 2 --batch 2 --context 32768
  python -m a2lib.theory plan --device H100 --devices 4096 --batch 2048 --context 8192 \\
      --d-model 16384 --d-ff 53248 --layers 60 --heads 128 --vocab 128256 --tensor 8
  python -m a2lib.theory plan --size 8B --devices 8 --tensor 8 --bandwidth 3.6e11 --latency-us 20
  python -m a2lib.theory plan --as-given --size 2.7B --device H100 --devices 8 --data 8 --batch 8 \\
      --context 1024 --sharding none --precision fp32 --attention eager --optimizer sgd
"""


class Parser(argparse.ArgumentParser):
    """Ends with exit code 2 and one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")


def parser() -> Parser:
    made = Parser(
        prog="python -m a2lib.theory plan",
        description=__doc__.partition("\n\n")[2],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    made.add_argument("--size", default=DEFAULT_SIZE,
                      help=f"model: {', '.join(SIZES)} ({DEFAULT_SIZE})")  # fmt: skip
    for name, words in (("d-model", "its width"), ("d-ff", "width of its FFN"),
                        ("layers", "its blocks"), ("heads", "its heads"),
                        ("vocab", "its vocabulary")):  # fmt: skip
        made.add_argument(f"--{name}", type=int, help=f"{words}, in place of the size's")
    made.add_argument("--device", default="H200", help=f"{', '.join(DEVICES)} (H200)")
    made.add_argument("--devices", type=int, default=2, help="how many there are (2)")
    made.add_argument("--batch", type=int, default=2, help="sequences of a step, in all (2)")
    made.add_argument("--context", type=int, default=32_768, help="tokens of a sequence (32768)")
    made.add_argument("--headroom", type=float, default=0.1,
                      help="share of a device's memory to leave free (0.1)")  # fmt: skip
    for name, values in (("precision", PRECISIONS), ("attention", ATTENTIONS),
                         ("optimizer", OPTIMIZERS)):  # fmt: skip
        default = Job.__dataclass_fields__[name].default
        made.add_argument(f"--{name}", default=default, help=f"{', '.join(values)} ({default})")
    made.add_argument("--efficiency", type=float, default=1.0,
                      help="share of the maker's peak at which products run (1)")  # fmt: skip
    links = made.add_argument_group(
        "links of a node", "the maker's, or as fitted to measured collectives"
    )
    links.add_argument("--bandwidth", type=float,
                       help="bytes a second that a device sends, of a fit of all-reduces the bus "
                            "bandwidth")  # fmt: skip
    links.add_argument("--latency-us", type=float, default=0.0,
                       help="microseconds that a message takes beside its bytes (0)")  # fmt: skip
    held = made.add_argument_group("held, not searched")
    for name in ("data", "tensor", "pipeline"):
        held.add_argument(f"--{name}", type=int, help=f"devices along {name}")
    held.add_argument("--context-parallel", type=int, help="devices along context")
    held.add_argument("--microbatches", type=int, help="micro-batches of a data rank in a step")
    held.add_argument("--sharding", help=", ".join(SHARDINGS))
    held.add_argument("--checkpointing", help=", ".join(STRATEGIES))
    made.add_argument("--no-overlap", action="store_true",
                      help="the best layout if nothing hides, not by the floor")  # fmt: skip
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
        )
        held = _held(given)
        plan = (evaluate(job, Layout(**held)) if given.as_given
                else search(job, held, overlap=not given.no_overlap))  # fmt: skip
    except ValueError as error:
        made.error(str(error))
    if given.json:
        print(json.dumps(as_object(job, plan), ensure_ascii=False, indent=2))
    else:
        print(text(job, plan))
    return 0


def as_object(job: Job, plan: Plan) -> dict:
    """Job and plan for JSON: bytes, seconds, shares."""
    return {
        "model": {**asdict(job.shape), "parameters": parameter_count(job.shape)},
        "device": asdict(job.device),
        "devices": job.devices,
        "batch": job.batch,
        "context": job.context,
        "precision": job.precision,
        "attention": job.attention,
        "optimizer": job.optimizer,
        "efficiency": job.efficiency,
        "layout": {**asdict(plan.layout), "devices": plan.layout.devices},
        "memory_bytes": {**plan.memory, "total": plan.memory_bytes, "allowed": job.memory},
        "moment": plan.moment,
        "fits": plan.memory_bytes <= job.memory,
        "largest_batch": largest_batch(job, plan.layout),
        "step_s": plan.step_s,
        "serial_s": plan.serial_s,
        "busy_s": plan.busy,
        "bound": plan.bound,
        "flops_share": plan.flops_share,
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
        f"{shape.num_layers} layers, {shape.num_heads} heads, vocabulary {shape.vocab_size}), "
        f"{job.batch} sequences of {job.context} tokens",
        f"{layout.devices} of {job.devices} devices of {job.device.slug}, {job.precision}, "
        f"{job.attention} attention, {job.optimizer}; links of {job.device.link / 1e9:.4g} GB/s, "
        f"{job.device.latency * 1e6:.4g} us a message",
        "",
        f"layout   data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x "
        f"context {layout.context}, {layout.microbatches} micro-batches of "
        f"{job.batch // layout.data // layout.microbatches} sequences",
        f"         {layout.sharding}, checkpointing {layout.checkpointing}",
        "",
        f"memory of the fullest device ({plan.moment}), GB",
        *(f"  {name:<18}{size / 1e9:>10.2f}" for name, size in plan.memory.items()),
        f"  {'total':<18}{plan.memory_bytes / 1e9:>10.2f} of {job.memory / 1e9:.2f} allowed: "
        f"{'fits' if plan.memory_bytes <= job.memory else 'does not fit'}; at most "
        f"{largest_batch(job, layout):,} sequences would, in as many micro-batches",
        "",
        f"step     at least {plan.step_s:.4g} s, {plan.serial_s:.4g} s with nothing hidden; "
        f"{100 * plan.flops_share:.0f} % of the peak at the floor",
        f"bound    {plan.bound}",
        "busy, s",
        *(f"  {name:<18}{seconds:>10.4g}" for name, seconds in plan.busy.items()),
        "",
        "assumed; of a whole model only the memory on one GPU was compared with measurements",
        *(f"  {line}" for line in ASSUMPTIONS),
    ]
    return "\n".join(lines)


def _device(given: argparse.Namespace) -> Device:
    device = named_device(given.device)
    link = device.link if given.bandwidth is None else given.bandwidth
    positive(bandwidth=link)
    if not given.latency_us >= 0:
        raise ValueError(f"latency-us is {given.latency_us:g}; allowed are numbers from 0")
    return replace(device, link=link, latency=given.latency_us / 1e6)


def _shape(given: argparse.Namespace) -> Shape:
    words = {"d_model": given.d_model, "d_ff": given.d_ff, "num_layers": given.layers,
             "num_heads": given.heads, "vocab_size": given.vocab}  # fmt: skip
    changed = {name: value for name, value in words.items() if value is not None}
    return replace(named_size(given.size), **changed)


def _held(given: argparse.Namespace) -> dict[str, int | str]:
    values = {**vars(given), "context": given.context_parallel}
    names = (field.name for field in fields(Layout))
    return {name: values[name] for name in names if values[name] is not None}
