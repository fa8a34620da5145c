"""Compile the attention kernels for a Hopper GPU where there is none, and report their resources.

    python tests/attention/aot.py forward bf16 64 causal 128 128 8 2   # one kernel, tile given
    python tests/attention/aot.py                                      # every tile of the table

One JSON object a line: spilled bytes, serialised-wgmma warnings of ptxas (C7510 to C7515),
registers, shared memory. A process of its own, since a failed compiler assertion aborts Python.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ.pop("TRITON_INTERPRET", None)

import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from a2lib.attention import kernels  # noqa: E402
from a2lib.attention.tiles import SPECIALISED, TILES, WHEN_FEW, Tile, options_of, precision_of  # noqa: E402

TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def assembled(compiled):
    """What ptxas says of a kernel: bytes spilled, registers, wgmma that it serialised."""
    return json.loads(compiled.asm["cubin"])


def _ptxas(self, ptx, *_):
    """In place of Triton's own call of ptxas, which keeps the code and not what was said of it."""
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
    name, fixed = SPECIALISED[kernel]
    fn = getattr(kernels, name)
    constants = {
        "d": head_dim,
        "BD": max(16, triton.next_power_of_2(head_dim)),
        "Bq": tile.Bq,
        "Bk": tile.Bk,
        "CAUSAL": causal,
        "PRECISION": precision_of(dtype, allow_tf32=False),
        "STAGES": tile.stages,
        **fixed,
    }
    signature = {}
    for name in fn.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("LSE", "DELTA"):
            signature[name] = "*fp32"
        elif name.isupper() and name not in ("H", "GROUP"):
            signature[name] = "*" + TYPES[dtype]
        elif "scale" in name:
            signature[name] = "fp32"
        elif name == "GROUP":
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
    divisible = [n for n, t in signature.items() if t.startswith("*") or n.startswith("stride")]
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    compiled = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", 90, 32),
        options=options_of(tile, constants["PRECISION"]),
    )
    return {
        "kernel": kernel,
        "dtype": dtype,
        "head_dim": head_dim,
        "causal": causal,
        "tile": list(tile),
        **assembled(compiled),
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
        "mma_sync": "mma.sync" in compiled.asm["ptx"],
    }


def table_jobs():
    """Every entry of the tile table; float16, which needs what bfloat16 does, where it is tight."""
    for (kernel, family, BD, causal), tiles in TILES.items():
        half = ("bf16", "fp16") if BD >= 64 else ("bf16",)
        for dtype in ("fp32",) if family == "fp32" else half:
            yield kernel, dtype, BD, causal, tiles[0]
    for (kernel, _, BD, causal), tile in WHEN_FEW.items():
        yield kernel, "bf16", BD, causal, tile


def main(argv):
    if argv:
        kernel, dtype, head_dim, causal, *tile = argv
        jobs = [(kernel, dtype, int(head_dim), causal == "causal", Tile(*map(int, tile)))]
    else:
        jobs = list(table_jobs())
    assert all(job[0] in SPECIALISED for job in jobs), f"kernels: {list(SPECIALISED)}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda job: compile_kernel(*job), jobs):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
