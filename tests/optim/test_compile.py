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

for n in (4096, 2**31 + 4096):
    for has_master in (True, False):
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
        moves = re.findall(r"\\b((?:ld|st)\\.global\\.\\S+)", ptx)
        print(json.dumps({"n": signature["n"], "master": has_master, "moves": moves,
                          **assembled(ptx)}))
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another compiler")
def test_memory_is_moved_16_bytes_at_a_time_and_no_register_spills():
    tests = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests / "attention"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(x["n"], x["master"]) for x in found] == [
        (n, master) for n in ("i32", "i64") for master in (True, False)
    ]
    for one in found:
        wide = [move for move in one["moves"] if ".v4.b32" in move]
        narrow = [move for move in one["moves"] if ".v4.b32" not in move]
        # The two sums of weights, which every program reads.
        assert len(narrow) == 2 and all("ld.global" in m and "64" in m for m in narrow), one
        # Of eight elements a thread float32 takes two moves, bfloat16 one: with a master four
        # arrays read and four written, of each one in bfloat16; else four and three of float32.
        assert len(wide) == 14, one
        assert one["registers"] and one["spills"] == 0, one
