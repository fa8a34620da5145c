"""Plan the training of a Transformer: python -m a2lib.theory plan [--json].

Prints the layout of the shortest step that fits, what fills the fullest device, how long a step
takes at least and what binds it, and the assumptions all of that rests on.
"""

import argparse
import json
from dataclasses import asdict, fields, replace

from a2lib.command import Number, Parser, Whole, add_name, add_number
from a2lib.theory import layouts, transformer
from a2lib.theory.devices import DEVICES, named_device
from a2lib.theory.jobs import ACTIVATIONS, ATTENTIONS, EFFICIENCY, OPTIMIZERS, Job
from a2lib.theory.layouts import ASSUMPTIONS, HIDDEN, Layout, Plan, evaluate, flops_share
from a2lib.theory.memory.step import PRECISIONS
from a2lib.theory.planner import MOST_COUNTED, largest_batch, search
from a2lib.theory.transformer import PRESETS, GroupedShape, Shape, named_size

MOST_DEVICES, MOST_SEQUENCES = 2**20, 2**24
# Option -> the least and largest value, and what it is; of a size that is a field of a shape by the
# same name or by that of RENAMED.
RENAMED = {"layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads"}
RENAMED |= {"vocab": "vocab_size"}
SIZES = {
    "d-model": (1, 2**20, "its width"),
    "d-ff": (1, 2**24, "width of its FFN"),
    "layers": (1, 10**5, "its blocks"),
    "heads": (1, 2**16, "its heads"),
    "kv-heads": (1, 2**16, "its heads of keys and values"),
    "vocab": (1, 2**24, "its vocabulary"),
    "experts": (0, 2**20, "experts of a block"),
    "top-k": (0, 2**20, "experts that a token goes to"),
    "shared": (0, 2**20, "experts that every token goes to; both have d-ff together"),
    "dense": (0, 2**20, "layers at the beginning without experts"),
    "nodes": (0, 2**20, "nodes that a token's experts lie in at most"),
    "head-size": (0, 2**20, "width of a head"),
    "q-rank": (0, 2**20, "width that queries come of"),
    "kv-rank": (0, 2**20, "width that keys and values come of"),
    "rope": (0, 2**20, "width that turns, beside a head's"),
}
HELD = {
    "data": (1, MOST_DEVICES, "devices along data"),
    "tensor": (1, MOST_DEVICES, "devices along tensor"),
    "pipeline": (1, MOST_DEVICES, "devices along pipeline"),
    "context-parallel": (1, MOST_DEVICES, "devices along context"),
    "microbatches": (1, MOST_SEQUENCES, "micro-batches of a data rank in a step"),
    "chunks": (1, 10**5, "pieces of the model on a device, interleaved"),
    "expert": (1, MOST_DEVICES, "devices that a block's experts are cut over"),
}
NAMED = {"schedule": layouts.SCHEDULES, "sharding": layouts.SHARDINGS}
NAMED |= {"checkpointing": layouts.STRATEGIES}
CHOICES = {"precision": PRECISIONS, "attention": ATTENTIONS, "optimizer": OPTIMIZERS}
CHOICES |= {"activations": ACTIVATIONS}
SHOWN = ("devices", "batch", "context", *CHOICES, "efficiency", "frozen")
OF_PLAN = ("moment", "step_s", "expected_s", "serial_s", "bound", "flops_share")
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
  none   everything whole on each device; zero1 sends as much, in twice the messages

The best layout is that of the shortest step in which messages of FSDP, data parallelism and
pipeline hide behind computation as far as they are shorter, and those of tensor, context and expert
parallelism, which the next operation waits for, do not (--hidden data). "all" is the floor, where
all hide (--hidden all), "nothing" the other end (none); a share, --hidden 0.5, takes so much of the
way from the latter to the former.

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
        prog="python -m a2lib.theory plan", description=__doc__.partition("\n\n")[2], epilog=EPILOG
    )
    made.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    words = "no search: the layout given, 1 along what is not and fsdp, whether or not it fits"
    made.add_argument("--as-given", action="store_true", help=words)
    sizes = made.add_argument_group("model", "a size, and what is to be different of it; 0 is none")
    add_name(sizes, "--size", ", ".join(PRESETS), "8B")
    for name, (least, most, words) in SIZES.items():
        add_number(sizes, f"--{name}", Whole(least, most), words)
    sizes.add_argument("--tied", action="store_true", help="the head is the embedding")
    job = made.add_argument_group("training")
    add_name(job, "--device", ", ".join(DEVICES), "H200")
    add_number(job, "--devices", Whole(1, MOST_DEVICES), "how many there are", 2)
    add_number(job, "--batch", Whole(1, MOST_SEQUENCES), "sequences of a step, in all", 2)
    add_number(job, "--context", Whole(1, 2**28), "tokens of a sequence", 32_768)
    add_number(job, "--headroom", Number(0, 0.99), "share of a device's memory to leave free", 0.1)
    words = "share of the maker's peak at which products run"
    add_number(job, "--efficiency", Number(1e-4, 1), words, EFFICIENCY)
    words = "share of each matrix that is not trained"
    add_number(job, "--frozen", Number(0, 0.9999), words, 0.0)
    for name, values in CHOICES.items():
        add_name(job, f"--{name}", ", ".join(values), Job.__dataclass_fields__[name].default)
    words = "bytes a second that a device sends in its node, of all-reduces the bus bandwidth"
    add_number(job, "--bandwidth", Number(1e3, 1e18), f"{words}; else the maker's")
    words = "microseconds that a message takes beside its bytes"
    add_number(job, "--latency-us", Number(0, 1e9), words, 0.0)
    held = made.add_argument_group("held, not searched")
    for name, (least, most, words) in HELD.items():
        add_number(held, f"--{name}", Whole(least, most), words)
    for name, values in NAMED.items():
        add_name(held, f"--{name}", ", ".join(values))
    words = "the residual stream whole on tensor's devices"
    held.add_argument("--no-sequence-parallel", action="store_true", help=words)
    words = f"what hides: {', '.join(HIDDEN)}, or a share from 0 to 1 (data)"
    made.add_argument("--hidden", default="data", metavar="WHAT", help=words)
    words = "try tensor parallelism over more devices than a node has"
    made.add_argument("--across-nodes", action="store_true", help=words)
    return made


def main(arguments: list[str]) -> int:
    made = parser()
    given = made.parse_args(arguments)
    try:
        on = named_device(given.device)
        link = on.link if given.bandwidth is None else given.bandwidth
        on = replace(on, link=link, latency=given.latency_us / 1e6)
        values = vars(given) | {"shape": _shape(given), "device": on}
        job = Job(**{field.name: values[field.name] for field in fields(Job)})
        held, hidden = _held(given), _hidden(given.hidden)
        if given.as_given:
            plan = evaluate(job, Layout(**held))
        else:
            plan = search(job, held, hidden=hidden, across=given.across_nodes)
    except ValueError as error:
        made.error(str(error))
    if given.json:
        print(json.dumps(as_object(job, plan), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        print(table(job, plan))
    return 0


def as_object(job: Job, plan: Plan) -> dict:
    """Job and plan for JSON: bytes, seconds, shares."""
    shape, tokens = job.shape, job.batch * job.context
    model = asdict(shape) | {"num_kv_heads": shape.kv_heads}
    model["parameters"] = transformer.parameter_count(shape)
    model["active_parameters"] = transformer.active_parameter_count(shape)
    found = {name: value for name, value in vars(job).items() if name in SHOWN}
    return {
        "model": model,
        "device": asdict(job.device),
        **found,
        "layout": {**asdict(plan.layout), "devices": plan.layout.devices},
        "memory_bytes": {**plan.memory, "total": plan.memory_bytes, "allowed": job.memory},
        "fits": plan.memory_bytes <= job.memory,
        "largest_batch": largest_batch(job, plan.layout),
        **{name: getattr(plan, name) for name in OF_PLAN},
        "busy_s": plan.busy,
        "all_tried": plan.tried,
        "expected_flops_share": flops_share(job, plan.layout, plan.expected_s),
        "serial_flops_share": flops_share(job, plan.layout, plan.serial_s),
        "tokens_per_s": tokens / plan.step_s,
        "serial_tokens_per_s": tokens / plan.serial_s,
        "assumptions": list(ASSUMPTIONS),
    }


def table(job: Job, plan: Plan) -> str:
    """The same in lines."""
    found = as_object(job, plan)
    link, latency = job.device.link / 1e9, 1e6 * job.device.latency
    seconds = {"all but tensor, context, expert": plan.expected_s}
    seconds |= {"all": plan.step_s, "nothing": plan.serial_s}
    lines = [
        f"model    {_pairs(found['model'])}",
        f"training {_pairs({name: found[name] for name in SHOWN})}",
        f"device   {job.device.slug}, link {link:.4g} GB/s, latency {latency:.4g} us",
        f"layout   {_pairs(found['layout'])}",
        "" if plan.tried else f"         not all tried: the best of some {MOST_COUNTED:,} layouts",
        f"memory   of the fullest device ({plan.moment}), GB",
        *(f"  {name:<33}{size / 1e9:>10.2f}" for name, size in found["memory_bytes"].items()),
        f"  fits: {'yes' if found['fits'] else 'no'}; largest batch {found['largest_batch']:,}",
        "",
        "step     if what hides is",
        *(f"  {name:<33}{_step(job, plan.layout, s)}" for name, s in seconds.items()),
        f"bound    {plan.bound}",
        "busy, s",
        *(f"  {name:<33}{seconds:>10.4g}" for name, seconds in plan.busy.items()),
        "",
        "assumed; compared with measured memory on one GPU, and with published trainings",
        *(f"  {line}" for line in ASSUMPTIONS),
    ]
    return "\n".join(lines)


def _pairs(values: dict[str, object]) -> str:
    """By name what is not 0."""
    shown = {k: f"{v:,}" if type(v) is int else v for k, v in values.items() if v or v is False}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _step(job: Job, layout: Layout, seconds: float) -> str:
    share = flops_share(job, layout, seconds)
    rate = share * job.peak / 1e12
    return f"{seconds:>10.4g} s, MFU {100 * share:.0f} %, {rate:.0f} TFLOP/s a device"


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


def _shape(given: argparse.Namespace) -> Shape:
    said = {name: getattr(given, name) for name in (option.replace("-", "_") for option in SIZES)}
    changed = {RENAMED.get(name, name): size for name, size in said.items() if size is not None}
    changed |= {"tied": True} if given.tied else {}
    return GroupedShape(**(asdict(named_size(given.size, PRESETS)) | changed))


def _held(given: argparse.Namespace) -> dict[str, int | str]:
    sequence = False if given.no_sequence_parallel else None
    values = vars(given) | {"context": given.context_parallel, "sequence": sequence}
    names = (field.name for field in fields(Layout))
    return {name: values[name] for name in names if values[name] is not None}
