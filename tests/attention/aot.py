"""Compile the attention kernels for a Hopper GPU where there is none, and report their resources.

    python tests/attention/aot.py forward bf16 64 causal 128 128 8 2   # one kernel, tile given
    python tests/attention/aot.py      # every tile of the table, all that hopper.py asks of Gluon
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

from a2lib.attention import UnsupportedError, flash, hopper, passes  # noqa: E402
from a2lib.attention import tiles as table  # noqa: E402
from a2lib.attention.tiles import SPECIALISED, chunk_loops, options_of, precision_of  # noqa: E402
from a2lib.optim import kernels as optim  # noqa: E402

# What tiles.hopper_forward chooses: consumers, and whether programs stay.
FORMS = {
    (64, True): [(1, False), (1, True), (3, True)],
    (64, False): [(1, True), (3, False), (3, True)],
    (128, True): [(1, False), (2, False), (2, True)],
    (128, False): [(1, False), (2, False), (2, True)],
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
    fn, fixed = passes._kernel(kernel), SPECIALISED[kernel][1]
    split = () if kernel in OWN else ("Q",)
    in_chunks = kernel == "backward_chunks"
    sums = ("DQ", "DK", "DV") if in_chunks or kernel == "backward_wide" else ()
    BD = max(16, triton.next_power_of_2(head_dim))
    precision = precision_of(TYPES[dtype], allow_tf32=False, two_terms=dtype == "fp16x3")
    constants = dict(d=head_dim, BD=BD, Bq=tile.Bq, Bk=tile.Bk, CAUSAL=causal)
    constants |= dict(PRECISION=precision, STAGES=tile.stages, **fixed)
    if in_chunks:
        constants["LOOPS"] = chunk_loops(BD, dtype)
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
    found = resources(ASTSource, fn, signature, constants, options_of(tile, precision))
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
    """What hopper.py can launch of Gluon: how it is told apart, and the arguments of ``launch``;
    unless every one is asked for, heads of 128 with a mask and a ragged end, and of 64 without:
    between them each number of consumers, and programs that stay and that do not."""
    calls = []
    for d, causal, ragged in itertools.product((64, 128), (True, False), (True, False)):
        if not every and (ragged != causal or causal != (d == 128)):
            continue
        if every or causal:
            calls += gluon_backward_calls(d, causal, ragged)
        x, lse = torch.empty(1, 1, 128 + ragged, d, dtype=torch.bfloat16), torch.empty(1, 1, 256)
        more = x.new_empty(1, 1, 256, d)  # queries, so that some are past the keys
        names = ("q", "o", "do", "dq", "k", "v", "dk", "dv", "lse")
        problem = passes._Problem((*[more] * 4, *[x] * 4, lse), (), names, causal, None)
        problem.add(**dict(zip(("rows", "sums"), hopper.scratch(more), strict=True)))
        how = {"dtype": "bf16", "head_dim": d, "causal": causal, "ragged": ragged}
        for form in FORMS[d, causal]:
            hopper.hopper_forward = lambda *_, found=form: found
            hopper.launch = _keep(calls, how | {"kernel": "forward", "form": form})
            hopper.forward(problem)
        how |= {"kernel": "backward"}
        stay = table.hopper_backward_stays
        for stays in {stay(d, *shape, causal) for shape in ((1, 1), (4, 1024))}:
            hopper.hopper_backward_stays = lambda *_, found=stays: found
            hopper.launch = _keep(calls, how | {"stays": stays})
            hopper.backward(problem)
        problem.add(dq_sums=more[0].float(), dk_sums=x.float(), dv_sums=x.float())
        hopper.launch = _keep(calls, how | {"chunk": 256})
        if ragged == causal:  # each with and without, once: they are apart in the kernel
            hopper.backward_chunks(problem, 256)
    return calls


def gluon_backward_calls(d, causal, ragged):
    """The backward in a fixed order, and of heads of keys that two query heads share."""
    calls = []
    hopper.hopper_backward_stays = table.hopper_backward_stays
    for heads, ordered in ((1, True), (2, False)):
        x, lse = (
            torch.empty(1, 1, 128 + ragged, d, dtype=torch.bfloat16),
            torch.empty(1, heads, 256),
        )
        more = x.new_empty(1, heads, 256, d)
        names = ("q", "o", "do", "dq", "k", "v", "dk", "dv", "lse")
        problem = passes._Problem((*[more] * 4, *[x] * 4, lse), (), names, causal, None)
        problem.fixed_order = ordered
        problem.add(**dict(zip(("rows", "sums"), hopper.scratch(more), strict=True)))
        problem.add(turns=hopper.turns(problem.tensors["rows"]))
        how = {"dtype": "bf16", "head_dim": d, "causal": causal, "ragged": ragged}
        how |= {"kernel": "backward", "ordered": ordered, "group": heads}
        hopper.launch = _keep(calls, how)
        hopper.backward(problem)
    return calls


def _keep(calls, how):
    def launch(kernel, key, n_programs, tensors, numbers, constants, options, forms):
        if forms:
            calls.append((how, (kernel, tensors, numbers, constants, options, forms)))

    return launch


def compile_gluon(how, call):
    fn, tensors, numbers, constants, options, forms = call
    of = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    types = [
        f"tensordesc<{of[x.dtype]}{form.block},{form.layout!r}>"
        for x, form in zip(tensors, forms, strict=False)
    ]
    types += ["*" + of[x.dtype] for x in tensors[len(forms) :]]
    types += ["fp32" if isinstance(x, float) else "i32" for x in numbers]
    types += ["constexpr"] * len(constants)
    signature = dict(zip(fn.arg_names, types, strict=True))
    options = {"num_warps": constants["num_warps"], **options}
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
    without the causal mask where registers are tight. Or the first tile of the largest heads, in
    16 bits without the mask too, and with it of heads of 64."""
    entries = []
    for key, tiles in table.TILES.items():
        _, family, BD, causal = key
        if every:
            asked = causal or BD >= 64
        else:
            in_16_bits = family == "16bit"
            asked = (BD == 128 and (causal or in_16_bits)) or (BD == 64 and causal and in_16_bits)
        if asked:
            entries.append((key, tiles[0]))
    if every:
        entries += table.WHEN_FEW.items()
        for key, tiles in table.WHEN_SHORT.items():
            entries += [(key, tile) for tile in tiles.values()]
        for key, tiles in table.WHEN_LONG.items():
            entries += [((*key, True), tile) for tile in tiles.values()]
    for (kernel, family, BD, causal), tile in entries:
        yield kernel, family.replace("16bit", "bf16"), BD, causal, tile


def main(argv):
    if argv not in ([], ["some"]):
        kernel, dtype, head_dim, causal, *tile = argv
        assert kernel in SPECIALISED, f"kernels: {list(SPECIALISED)}"
        job = kernel, dtype, int(head_dim), causal == "causal", table.Tile(*map(int, tile))
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
