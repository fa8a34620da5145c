"""Compile the attention kernels for a Hopper GPU where there is none, and report their resources.

    python tests/attention/aot.py forward bf16 64 causal 128 128 8 2   # one kernel, tile given
    python tests/attention/aot.py      # every tile of the table, every form of the Gluon kernels

One JSON object a line: spilled bytes, serialised-wgmma warnings of ptxas (C7510 to C7515),
registers, shared memory. Without arguments AdamW's kernel too, and without a GPU what a tensor of
the CPU is told. A process of its own, since a failed compiler assertion aborts Python.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

from a2lib.attention import dispatch, flash, hopper_backward, hopper_forward, passes  # noqa: E402
from a2lib.attention.dispatch import HOPPER, Case, HopperForward, Tile  # noqa: E402
from a2lib.errors import UnsupportedError  # noqa: E402
from a2lib.optim import kernels as optim  # noqa: E402

# What dispatch.hopper_consumers chooses: consumers, and whether programs stay.
FORMS = {
    (64, True): [(1, False), (1, True)],
    (64, False): [(1, True), (3, False)],
    (128, True): [(1, False), (2, False), (2, True)],
    (128, False): [(1, False), (2, False), (2, True)],
}
OWN = "forward", "forward_chunk"  # which split their queries themselves
# By dtype, and fp16x3: fp32 as two terms of fp16, three products.
TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp16x3": "fp32"}
TERMS = {"fp32": "*bf16", "fp16x3": "*fp16"}
# Constants that a kernel has beside those of its tile.
SPECIALISED = {
    "forward_chunk": {"EARLY": True},
    "backward_dq": {"NEEDS_DQ": True},
    "backward_dkdv": {"NEEDS_DK": True, "NEEDS_DV": True},
    "backward_dk": {"NEEDS_DK": True, "NEEDS_DV": False},
    "backward_dv": {"NEEDS_DK": False, "NEEDS_DV": True},
    "backward_chunks": {"EARLY": True},
}


def _ptxas(self, ptx, *_):
    """In place of Triton's own call of ptxas, which keeps the code and not what was said of it:
    bytes spilled, registers, wgmma that it serialised."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        log = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", log)
    said = {
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "serialised": re.findall(r"\((C751[0-5])\)", log),
        "registers": int(registers.group(1)) if registers else None,
    }
    return json.dumps(said).encode()


CUDABackend.make_cubin = _ptxas
knobs.cache.dir = os.path.join(knobs.cache.dir, "a2lib-ptxas")  # away from kernels that can run


def compile_kernel(kernel, dtype, head_dim, causal, tile):
    """Compile one specialisation for sm_90a; returns its resources as a dict."""
    fn = passes.KERNELS[kernel]
    split = () if kernel in OWN else ("Q",)
    sums = ("DQ", "DK", "DV") if kernel in ("backward_chunks", "backward_wide") else ()
    lengths = (4096, 4096) if dtype == "fp16x3" else (4096, 128)  # two terms want many keys
    case = Case(TYPES[dtype], 1, 1, 1, *lengths, head_dim, causal, HOPPER)
    options = passes._options(case, tile)
    constants = {name: options.pop(name) for name in fn.arg_names if name in options}
    constants |= SPECIALISED.get(kernel, {})
    if kernel == "backward_chunks":
        constants["LOOPS"] = dispatch.chunk_loops(case)
    signature = {}
    for name in fn.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("LSE", "DELTA", "ROWS", "PARTS", *sums):
            signature[name] = "*fp32"
        elif name in ("K", "V", "DO", *split) and dtype in TERMS:
            signature[name] = TERMS[dtype]
        elif name.isupper() and name not in ("H", "GROUP"):
            signature[name] = "*" + TYPES[dtype]
        elif "scale" in name:
            signature[name] = "fp32"
        elif name == "GROUP":
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
    found = resources(ASTSource, fn, signature, constants, options)
    told = dict(kernel=kernel, dtype=dtype, head_dim=head_dim, causal=causal, tile=list(tile))
    return told | found


def resources(source, fn, signature, constants, options, aligned=("stride",)):
    """What the compiled kernel needs, and which instructions it has; all strides are aligned."""
    divisible = [n for n, t in signature.items() if t.startswith("*") or n.startswith(aligned)]
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    compiled = triton.compile(
        source(fn=fn, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    ptx = compiled.asm["ptx"]
    return {
        **json.loads(compiled.asm["cubin"]),
        "loose": [loose_arrivals(ptx), loose_arrivals(ptx.replace("bar.sync", ""))],
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "mma_sync": "mma.sync" in ptx,
        "adds": "add.v4.f32" in ptx,
        "reduce": "cp.reduce.async.bulk" in ptx,
        "moves": re.findall(r"\b((?:ld|st)\.(?:global|shared)\.\S+)", ptx),
    }


def loose_arrivals(ptx):
    """How many arrivals at a barrier in shared memory, which one thread makes for its warpgroup,
    follow the group's accesses there without all of it having met in between."""
    found, loose = 0, False
    for op in re.findall(r"bar(?:rier)?\.sync|mbarrier\.arrive\.sh|(?:ld|st)(?:matrix|\.sh)", ptx):
        if op.startswith("mbarrier"):
            found += loose
        else:
            loose = not op.startswith("bar")
    return found


def gluon_calls():
    """What is launched of Gluon: how it is told apart, and the kernel with its arguments."""
    calls = []
    for name in ("hopper_forward", "hopper_backward"):
        function = getattr(dispatch, name)
        setattr(dispatch, name, function.__wrapped__)  # nothing is kept
    stays_of = dispatch.hopper_backward_stays
    for d, causal, ragged in itertools.product((64, 128), (True, False), (True, False)):
        told = {"dtype": "bf16", "head_dim": d, "causal": causal, "ragged": ragged}
        dispatch.hopper_backward_stays = stays_of
        calls += ordered_and_grouped_calls(d, causal, ragged, told)
        case, tensors = problem(d, causal, ragged)
        q, k, v, o, lse = tensors.q, tensors.k, tensors.v, tensors.o, tensors.lse
        for form in FORMS[d, causal]:
            consumers, stays = form
            Bk = 64 if consumers == 1 and d > 64 else 128
            chosen = HopperForward(consumers, stays, Bk, n_programs=1, heads_together=1)
            dispatch.hopper_forward = lambda case, chosen=chosen: chosen
            with recorded(calls, told | {"kernel": "forward", "form": form}):
                passes._forward_hopper(case, 1.0, q, k, v, o, lse)
        told |= {"kernel": "backward"}
        shapes = case._replace(n_keys=128), case._replace(n_keys=512, batch=1024)
        for stays in {stays_of(shape) for shape in shapes}:
            dispatch.hopper_backward_stays = lambda case, stays=stays: stays
            with recorded(calls, told | {"stays": stays}):
                sweep(case, tensors)
        if ragged == causal:  # each with and without, once: they are apart in the kernel
            with recorded(calls, told | {"chunk": 256}):
                sweep(case, tensors, chunk=256)
    return calls


def problem(d, causal, ragged, heads=1, ordered=False):
    """A backward's case and tensors, of more queries than keys: some are past the keys."""
    x, lse = (
        torch.empty(1, 1, 128 + ragged, d, dtype=torch.bfloat16),
        torch.empty(1, heads, 256),
    )
    more = x.new_empty(1, heads, 256, d)
    case = passes.case_of((more, x), causal)._replace(gpu=HOPPER, is_deterministic=ordered)
    return case, passes.Tensors(more, more, x, x, more, lse, more, x, x)


def sweep(case, tensors, chunk=0):
    rows, sums = passes.scratch(tensors.q, is_permuted=case.head_dim > 64)
    dk, dv = (x.float() if chunk else x for x in (tensors.dk, tensors.dv))
    turns = passes.turns_of(rows) if case.is_deterministic else rows
    passes._sweep_hopper(case, 1.0, tensors, (rows, sums, dk, dv), chunk, turns)


def ordered_and_grouped_calls(d, causal, ragged, told):
    """The backward in a fixed order, and of heads of keys that two query heads share."""
    calls = []
    for heads, ordered in ((1, True), (2, False)):
        case, tensors = problem(d, causal, ragged, heads, ordered)
        with recorded(calls, told | {"kernel": "backward", "ordered": ordered, "group": heads}):
            sweep(case, tensors)
    return calls


@contextlib.contextmanager
def recorded(calls, told):
    """Have launches of the Gluon kernels added to ``calls``."""
    real = hopper_forward.forward_kernel, hopper_backward.backward_kernel
    hopper_forward.forward_kernel, hopper_backward.backward_kernel = (
        Recorder(kernel, calls, told) for kernel in real
    )
    yield
    hopper_forward.forward_kernel, hopper_backward.backward_kernel = real


class Recorder:
    def __init__(self, kernel, calls, told):
        self.kernel, self.calls, self.told = kernel, calls, told

    def __getitem__(self, grid):
        return lambda *args, **named: self.calls.append((self.told, (self.kernel, args, named)))


def compile_gluon(told, call):
    fn, args, named = call
    constants = {name: named.pop(name) for name in fn.arg_names if name in named}
    types = [type_of(x) for x in args] + ["constexpr"] * len(constants)
    signature = dict(zip(fn.arg_names, types, strict=True))
    options = {"num_warps": constants["num_warps"], **named}
    return {"gluon": True, **told, **resources(GluonASTSource, fn, signature, constants, options)}


def type_of(x):
    of = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    if isinstance(x, torch.Tensor):
        return "*" + of[x.dtype]
    if hasattr(x, "block_shape"):
        return f"tensordesc<{of[x.base.dtype]}{x.block_shape},{x.layout!r}>"
    return "fp32" if isinstance(x, float) else "i32"


def compile_adamw(n, has_master):
    """AdamW's kernel for that many elements: what it moves to and from memory, in order."""
    numbers = dict.fromkeys(optim.adamw.arg_names[6:11], mangle_type(0.5)) | {"n": mangle_type(n)}
    weight = "*bf16" if has_master else "*fp32"
    signature = {"weight": weight, "grad": weight, "normaliser": "*fp64", **numbers}
    constants = {"HAS_MASTER": has_master, "BLOCK": optim.BLOCK}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature.get(name, "*fp32") for name in optim.adamw.arg_names}
    found = resources(ASTSource, optim.adamw, signature, constants, optim.OPTIONS, ("n",))
    return {"adamw": [signature["n"], has_master], **found}


def table_jobs():
    """Every row of the table in bfloat16, which needs what float16 does, and in float32; without
    the causal mask where registers are tight."""
    for row in dispatch.TILES:
        for columns in row.columns:
            for causal in (True, False):
                is_there = row.is_causal in (None, causal) and (causal or columns >= 64)
                if is_there:
                    yield row.kernel, row.family.replace("16bit", "bf16"), columns, causal, row.tile


def main(argv):
    if argv:
        kernel, dtype, head_dim, causal, *tile = argv
        assert kernel in passes.KERNELS, f"kernels: {list(passes.KERNELS)}"
        job = kernel, dtype, int(head_dim), causal == "causal", Tile(*map(int, tile))
        work = [(compile_kernel, job)]
    else:
        work = [(compile_gluon, call) for call in gluon_calls()]
        work += [(compile_kernel, job) for job in table_jobs()]
        adamw = (4096, True), (4096, False), (2**31 + 4096, True)
        work += [(compile_adamw, job) for job in adamw]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda todo: todo[0](*todo[1]), work):
            print(json.dumps(result), flush=True)
    if not argv and not torch.cuda.is_available():
        for attention in (flash.flash_attention, flash.FlashAttentionTriton.apply):
            try:
                attention(*torch.zeros(3, 1, 8, 16).unbind(0))
            except UnsupportedError as error:
                print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
