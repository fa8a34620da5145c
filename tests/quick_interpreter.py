"""Triton's interpreter without work whose results nobody sees, which is two thirds of its time.

It changes the language's functions for its own when a kernel starts, puts them back at the end, and
changes them once more at each call of a function in between. It computes whether a sum of integers
overflows, and drops the answer. It makes a table of all dtypes for each load, a type for the shape
of each tensor, and shifts bfloat16 out of float32 as it converts any two formats. What a kernel
computes is the same to the bit, but for subnormal numbers, which it converts wrongly.
"""

import functools

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def install():
    if not triton.__version__.startswith("3.6."):  # what another version wastes is unknown
        return
    _patch_the_language_once()
    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _know_dtypes()
    _shift_bfloat16()
    _know_shapes()


@functools.cache
def _languages(fn):
    return frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)


def _patch_the_language_once():
    """Once for each set of modules that the functions of a kernel see."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        seen = _languages(fn)
        if seen in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch(fn)

    @functools.wraps(launch)
    def start(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, start


def _know_dtypes():
    find, found = interpreter._get_np_dtype, {}

    def get(dtype):
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = get


def _shift_bfloat16():
    convert = interpreter._convert_float

    def shift(x, of, to, rounding):
        if rounding is None and (of, to) == (tl.float32, tl.bfloat16):
            return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
        if rounding is None and (of, to) == (tl.bfloat16, tl.float32):
            return x.astype(np.uint32) << 16
        return convert(x, of, to, rounding)

    interpreter._convert_float = shift


def _know_shapes():
    """A shape is a tuple of Triton's: its own type is made where it is asked for."""
    tuple_init, block_init = core.tuple.__init__, core.block_type.__init__
    unwrap, known = core._unwrap_if_constexpr, {}

    def init_tuple(self, args, type=None):
        if type is None:
            self.values = [*args]
        else:
            tuple_init(self, args, type)

    def type_of(self):
        return self.__dict__.get("type") or core._type_for_tuple_values(self.values)

    def unwrap_at_once(x):
        return x if type(x) is int else unwrap(x)

    def init_block(self, element_ty, shape):
        key = element_ty.name, *map(unwrap_at_once, shape)
        if key not in known:
            block_init(self, element_ty, shape)
            known[key] = self.__dict__.copy()
        self.__dict__.update(known[key])

    core.tuple.__init__, core.block_type.__init__ = init_tuple, init_block
    core.tuple.type = property(type_of, lambda self, type: self.__dict__.update(type=type))
    core._unwrap_if_constexpr = unwrap_at_once
