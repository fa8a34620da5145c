"""Triton's interpreter, without its patches of Triton's language at each call within a kernel.

It changes the language's functions for its own when a kernel starts, puts them back at the end, and
(3.6) changes them once more at each call of a function in between, two fifths of all its time: once
is enough for each set of modules that the functions of a kernel see.
"""

import functools

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _languages(fn):
    return frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)


def install():
    if not hasattr(interpreter, "_LangPatchScope"):  # another version, whose patches are others
        return
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        if (seen := _languages(fn)) in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch(fn)

    @functools.wraps(launch)
    def start(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, start
