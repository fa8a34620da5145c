"""AdamW's kernel, compiled for a Hopper GPU on this machine's CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

# aot first: it takes the interpreter out of the environment, before any kernel is defined.
SCRIPT = """
import json, re
from aot import assembled
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
from a2lib.optim.kernels import BLOCK, OPTIONS, adamw

for n, has_master in ((4096, True), (4096, False), (2**31 + 4096, True)):
    numbers = dict.fromkeys(adamw.arg_names[6:11], mangle_type(0.5)) | {"n": mangle_type(n)}
    weight = "*bf16" if has_master else "*fp32"
    signature = {"weight": weight, "grad": weight, "normaliser": "*fp64", **numbers}
    constants = {"HAS_MASTER": has_master, "BLOCK": BLOCK}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature.get(name, "*fp32") for name in adamw.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(adamw.arg_names) if signature[name][0] == "*" or name == "n"
    }
    source = ASTSource(fn=adamw, signature=signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    ptx = made.asm["ptx"]
    moves = re.findall(r"\\b((?:ld|st)\\.(?:global|shared)\\.\\S+)", ptx)
    print(json.dumps({"n": signature["n"], "master": has_master, "moves": moves,
                      **assembled(made)}))
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another compiler")
def test_a_thread_moves_four_elements_at_once_and_reads_before_it_writes():
    tests = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests / "attention"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = [("i32", True), ("i32", False), ("i64", True)]
    assert [(x["n"], x["master"]) for x in found] == wanted
    wide, half, sums = "global.v4.b32", "global.v2.b32", "ld.global.b64"
    for one in found:
        # The two sums of weights; then 16 bytes of float32, 8 of bfloat16; none through shared.
        read, written = ([half, wide, wide, wide], [wide, wide, wide, half])
        if not one["master"]:
            read, written = [wide] * 4, [wide] * 3
        reads, writes = ([f"{way}.{what}" for what in of] for way, of in
                         (("ld", read), ("st", written)))  # fmt: skip
        assert one["moves"] == [sums, sums, *reads, *writes], one
        assert one["registers"] and one["spills"] == 0, one
