"""Compile the attention kernels for a Hopper GPU where there is none, and report their resources.

    python tests/attention/aot.py forward bf16 64 causal 128 128 8 2   # one kernel, tile given
    python tests/attention/aot.py      # every tile of the table, all that forms.py asks of Gluon
    python tests/attention/aot.py some # of each kernel and head size one tile: the gate of a CPU

One JSON object a line: spilled bytes, serialised-wgmma warnings of ptxas (C7510 to C7515),
registers, shared memory. Behind those of all and of some AdamW's kernel, and without a GPU what a
tensor of the CPU is told. A process of its own: a failed compiler assertion aborts Python.
"""

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

from a2lib.attention import UnsupportedError, dispatch, flash, forms, launches  # noqa: E402
from a2lib.optim import kernels as optim  # noqa: E402

# What dispatch.forward_consumers chooses: consumers, and whether programs stay.
FORMS = {
    (64, True): [(1, False), (1, True), (3, True)],
    (64, False): [(1, True), (3, False), (3, True)],
    (128, True): [(1, False), (2, False), (2, True)],
    (128, False): [(1, False), (2, False), (2, True)],
}
SHORT_AND_LONG = (1, 128), (1024, 512)  # heads and tokens
# The flags of a kernel that has any.
FLAGS = {
    "forward_chunk": {"EARLY": True},
    "backward_dq": {"NEEDS_DQ": True},
    "backward_dkdv": {"NEEDS_DK": True, "NEEDS_DV": True},
    "backward_dk": {"NEEDS_DK": True, "NEEDS_DV": False},
    "backward_dv": {"NEEDS_DK": False, "NEEDS_DV": True},
    "backward_chunks": {"EARLY": True},
}
OWN = "forward", "forward_chunk"  # which split their queries themselves
# By dtype, and fp16x3: fp32 as two terms of fp16, three products.
TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp16x3": "fp32"}
TERMS = {"fp32": "*bf16", "fp16x3": "*fp16"}


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
    fn = launches.kernel_of(kernel)
    split = () if kernel in OWN else ("Q",)
    in_chunks = kernel == "backward_chunks"
    sums = ("DQ", "DK", "DV") if in_chunks or kernel == "backward_wide" else ()
    BD = max(16, triton.next_power_of_2(head_dim))
    precision = {"fp32": "bf16x6", "fp16x3": "fp16x3"}.get(dtype, "ieee")
    constants = dict(d=head_dim, BD=BD, Bq=tile.Bq, Bk=tile.Bk, CAUSAL=causal)
    constants |= dict(PRECISION=precision, STAGES=tile.stages)
    constants |= FLAGS.get(kernel, {})
    if in_chunks:
        constants["LOOPS"] = dispatch.chunk_loops(BD, dtype)
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
    options = dispatch.options_of(tile, precision)
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


def gluon_calls(every):
    """What forms.py can launch of Gluon: how it is told apart, the step and its tensors; unless
    every one is asked for, heads of 128 with a mask and a ragged end, and of 64 without: between
    them each number of consumers, and programs that stay and that do not."""
    calls = []
    for d, causal, ragged in itertools.product((64, 128), (True, False), (True, False)):
        if not every and (ragged != causal or causal != (d == 128)):
            continue
        how = {"dtype": "bf16", "head_dim": d, "causal": causal, "ragged": ragged}
        for form in FORMS[d, causal]:
            dispatch.forward_consumers = lambda _, found=form: found
            one = pass_of(d, causal, ragged)
            one._forward_hopper()
            calls += calls_of(one, how | {"kernel": "forward", "form": form})
        how |= {"kernel": "backward"}
        stay = dispatch.hopper_backward_stays
        short, long = (dispatch.Call("bf16", 1, h, h, n, n, d, causal) for h, n in SHORT_AND_LONG)
        for stays in {stay(short), stay(long)}:
            dispatch.hopper_backward_stays = lambda _, found=stays: found
            one = pass_of(d, causal, ragged)
            one._backward_one_sweep()
            calls += calls_of(one, how | {"stays": stays})
        dispatch.hopper_backward_stays = stay
        if ragged == causal:  # each with and without, once: they are apart in the kernel
            one = pass_of(d, causal, ragged)
            rows, sums = one._rows_and_sums(d > 64)
            one._make(rows=rows, sums=sums, dk_sums=sums, dv_sums=sums)
            one._sweep(("sums", "dk_sums", "dv_sums"), 256)
            calls += calls_of(one, how | {"chunk": 256})
        if every or causal:
            # In a fixed order, and of heads of keys that two query heads share.
            for heads, ordered in ((1, True), (2, False)):
                one = pass_of(d, causal, ragged, heads, ordered)
                one._backward_one_sweep()
                calls += calls_of(one, how | {"ordered": ordered, "group": heads})
    return calls


def pass_of(d, causal, ragged, heads=1, fixed_order=False):
    """A pass over so many heads of 512 queries, so that some are past the keys, of a pair of tiles
    or more."""
    q = torch.empty(1, heads, 512, d, dtype=torch.bfloat16)
    k = q.new_empty(1, 1, 256 + ragged, d)
    tensors = dict.fromkeys(("q", "o", "do", "dq"), q) | dict.fromkeys(("k", "v", "dk", "dv"), k)
    call = launches.call_of(tensors, causal)
    call = call._replace(multiprocessors=132, fixed_order=fixed_order)
    return forms.Pass(tensors | {"lse": torch.empty(1, heads, 512)}, call, d**-0.5)


def calls_of(one, how):
    steps = [step for step in one.steps if step.forms]
    return [(how, (step, [one.tensors[name] for name in step.tensors])) for step in steps]


def compile_gluon(how, call):
    step, tensors = call
    fn, constants = launches.kernel_of(step.kernel), step.constants
    of = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    types = [
        f"tensordesc<{of[x.dtype]}{form.block},{form.layout!r}>"
        for x, form in zip(tensors, step.forms, strict=False)
    ]
    types += ["*" + of[x.dtype] for x in tensors[len(step.forms) :]]
    types += ["fp32" if isinstance(x, float) else "i32" for x in step.numbers]
    types += ["constexpr"] * len(constants)
    signature = dict(zip(fn.arg_names, types, strict=True))
    options = {"num_warps": constants["num_warps"], **step.options}
    return {"gluon": True, **how, **resources(GluonASTSource, fn, signature, constants, options)}


def compile_adamw(n, has_master):
    """AdamW's kernel for that many elements: what it moves to and from memory, in order."""
    numbers = dict.fromkeys(optim.adamw.arg_names[6:13], mangle_type(0.5)) | {"n": mangle_type(n)}
    weight = "*bf16" if has_master else "*fp32"
    signature = {"weight": weight, "grad": weight, **numbers}
    constants = {"HAS_MASTER": has_master, "BLOCK": optim.BLOCK}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature.get(name, "*fp32") for name in optim.adamw.arg_names}
    found = resources(ASTSource, optim.adamw, signature, constants, optim.OPTIONS, ("n",))
    return {"adamw": [signature["n"], has_master], **found}


def table_jobs(every):
    """Every entry of the tile table in bfloat16, which needs what float16 does, and in float32;
    without the causal mask where registers are tight. Or the plain tile of the largest heads, in
    16 bits without the mask too, and with it of heads of 64."""
    for (kernel, family, BD, causal), rows in dispatch.TILES.items():
        in_16_bits = family == "16bit"
        some = (BD == 128 and (causal or in_16_bits)) or (BD == 64 and causal and in_16_bits)
        for row in rows:
            asked = causal or (BD >= 64 and row.when != "long")
            if not every:
                asked = some and row.when == "always"
            if asked:
                yield kernel, family.replace("16bit", "bf16"), BD, causal, row.tile


def main(argv):
    if argv not in ([], ["some"]):
        kernel, dtype, head_dim, causal, *tile = argv
        assert kernel in dispatch.KERNELS, f"kernels: {list(dispatch.KERNELS)}"
        job = kernel, dtype, int(head_dim), causal == "causal", dispatch.Tile(*map(int, tile))
        work = [(compile_kernel, job)]
    else:
        every = not argv
        work = [(compile_gluon, call) for call in gluon_calls(every)]
        work += [(compile_kernel, job) for job in table_jobs(every)]
        adamw = (4096, True), (4096, False), (2**31 + 4096, True)
        work += [(compile_adamw, job) for job in adamw]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda todo: todo[0](*todo[1]), work):
            print(json.dumps(result), flush=True)
    if argv in ([], ["some"]) and not torch.cuda.is_available():
        for attention in (flash.flash_attention, flash.FlashAttentionTriton.apply):
            try:
                attention(*torch.zeros(3, 1, 8, 16).unbind(0))
            except UnsupportedError as error:
                print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
