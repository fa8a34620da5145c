"""AdamW's kernel, compiled for a Hopper GPU on this machine's CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from a2lib.optim.kernels import TURN

COMPILER = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another compiler")
# aot first: it takes the interpreter out of the environment, before any kernel is defined.
SCRIPT = """
import itertools, json, re
from aot import assembled
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
from a2lib.optim import kernels

whole = kernels.adamw, {"BLOCK": kernels.BLOCK}, kernels.OPTIONS
turns = kernels.adamw_in_turns, kernels.TURN, kernels.TURN_OPTIONS
for (adamw, given, options), n in itertools.product((whole, turns), (4096, 2**31 + 4096)):
    for has_master in (True, False):
        numbers = dict.fromkeys(adamw.arg_names[6:11], mangle_type(0.5)) | {"n": mangle_type(n)}
        weight = "*bf16" if has_master else "*fp32"
        signature = {"weight": weight, "grad": weight, "normaliser": "*fp64", **numbers}
        constants = {"HAS_MASTER": has_master, **given}
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature.get(name, "*fp32") for name in adamw.arg_names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(adamw.arg_names) if signature[name][0] == "*" or name == "n"
        }
        source = ASTSource(fn=adamw, signature=signature, constexprs=constants, attrs=attrs)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        moves = re.findall(r"\\b((?:ld|st|cp\\.async\\.c[ag])\\.(?:global|shared)\\.\\S+)", ptx)
        print(json.dumps({"kernel": adamw.__name__, "n": signature["n"], "master": has_master,
                          "moves": moves, "shared": made.metadata.shared, **assembled(made)}))
"""


@pytest.fixture(scope="module")
def found():
    tests = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests / "attention"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_kernel(found, name):
    """What was compiled of one kernel, for both widths of a count and both kinds of weights; none
    may spill."""
    those = [x for x in found if x["kernel"] == name]
    assert [(x["n"], x["master"]) for x in those] == [
        (n, master) for n in ("i32", "i64") for master in (True, False)
    ]
    assert all(x["registers"] and x["spills"] == 0 for x in those), those
    return those


@COMPILER
def test_a_thread_moves_four_elements_at_once_and_reads_before_it_writes(found):
    wide, half, sums = "global.v4.b32", "global.v2.b32", "ld.global.b64"
    for one in of_kernel(found, "adamw"):
        # The two sums of weights; then 16 bytes of float32, 8 of bfloat16; none through shared.
        read, written = ([half, wide, wide, wide], [wide, wide, wide, half])
        if not one["master"]:
            read, written = [wide] * 4, [wide] * 3
        reads, writes = ([f"{way}.{what}" for what in of] for way, of in
                         (("ld", read), ("st", written)))  # fmt: skip
        assert one["moves"] == [sums, sums, *reads, *writes], one


@COMPILER
def test_a_program_of_many_turns_reads_ahead_and_fits_the_smallest_shared_memory(found):
    for one in of_kernel(found, "adamw_in_turns"):
        ahead = [move for move in one["moves"] if move.startswith("cp.async")]
        assert len(ahead) == 4 * TURN["STAGES"], one  # before the loop all but one, in it one
        assert not any(move.startswith("ld.global.v") for move in one["moves"]), one
        assert one["shared"] <= 99 * 1024, one
