"""What the kernels say that are not the interpreter's, where there is no GPU.

`refused`: what each way to call them says to a tensor of the CPU. The rest is what torch.compile
finds when it traces them itself. `written`: the tensors that its analysis says each kernel writes
to. Where it fails it takes all of them, with a warning, and copies them; gradients were wrong for
that. `constant_scale`: whether each kernel can be read with the scale as a constant, which is how
torch 2.11 hands it over.

For the process of aot.py: the kernels must not be the interpreter's, and the driver is a stand-in.
"""

import logging

import torch
from torch._higher_order_ops import triton_kernel_wrap as wrap
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from a2lib.attention import FlashAttentionTriton, flash_attention, passes
from a2lib.attention.tiles import SPECIALISED
from a2lib.errors import UnsupportedError

TARGET = GPUTarget("cuda", 90, 32)
WIDE = "LSE", "DELTA", "ROWS", "PARTS"
TERMS = {"backward_wide_kernel": torch.float16}  # two of fp32 each


class Driver:
    """Answers what the analysis asks: which GPU it is."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0


def arguments(fn, fixed):
    """Tensors, numbers and constants of a call, by name."""
    constants = {"d": 64, "BD": 64, "Bq": 64, "Bk": 64, "CAUSAL": True, "PRECISION": "ieee"}
    constants |= {"STAGES": 2, **fixed} | ({"LOOPS": 1} if "LOOPS" in fn.arg_names else {})
    if "EARLY" in constants:
        constants["EARLY"] = False  # inline assembly: all would count as written
    tensors, numbers = {}, {}
    for name in fn.arg_names:
        if name in WIDE:
            tensors[name] = torch.zeros(64)
        elif name.isupper() and name not in ("H", "GROUP", *constants):
            tensors[name] = torch.zeros(64, dtype=TERMS.get(fn.__name__, torch.bfloat16))
        elif name not in constants:
            numbers[name] = 0.125 if name == "scale" else 16
    return tensors, numbers, constants


def written(fn, tensors, numbers, constants):
    table = wrap.kernel_side_table
    ids = table.add_kernel(fn), table.add_constant_args({**numbers, **constants})
    return wrap.get_mutated_tensors(*ids, tensors, {})


def read_with_constant_scale(fn, tensors, numbers, constants):
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    signature = {n: types[x.dtype] for n, x in tensors.items()}
    signature |= {n: "i32" for n in numbers} | {n: "constexpr" for n in (*constants, "scale")}
    signature = {name: signature[name] for name in fn.arg_names}
    source = ASTSource(fn, signature, {**constants, "scale": numbers["scale"]})
    backend = make_backend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    source.make_ir(TARGET, options, codegen, backend.get_module_map(), context)


def refused(call):
    x = torch.zeros(1, 8, 16)
    try:
        call(x, x, x)
    except UnsupportedError as error:
        return str(error)
    return "ran on the CPU"


def findings():
    out = {"written": {}, "constant_scale": {}}
    out["refused"] = [refused(call) for call in (flash_attention, FlashAttentionTriton.apply)]
    driver.set_active(Driver())
    logging.disable(logging.WARNING)
    for kernel, (name, fixed) in SPECIALISED.items():
        if name in out["written"]:
            continue
        fn = passes._kernel(kernel)
        call = arguments(fn, {"NEEDS_DK": True, "NEEDS_DV": True} if "dkdv" in name else fixed)
        out["written"][name] = sorted(written(fn, *call))
        try:
            read_with_constant_scale(fn, *call)
            out["constant_scale"][name] = "read"
        except Exception as error:
            out["constant_scale"][name] = str(error)[-300:]
    return out
