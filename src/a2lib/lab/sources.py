"""Tell the code of a sweep from other code, and so a row of what is there now from an older one.

code = sources(measure)             # {"measure": "5e0f6a...", "eager": "...", "mine": "..."}
is_other(recorded, code, key)       # whether a run of which this was recorded had other code
"""

import dataclasses
import hashlib
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress


def sources(measure: Callable) -> dict[str, str]:
    """Return what tells the code of a sweep from other code, twelve digits by name: "measure" is
    that function with all functions and classes of its notebook (or module) that it uses, any other
    name an entry of a dict that it uses, as `MAKE["mine"]` is, with what that uses. An entry from a
    library counts by its name."""
    used = _used(measure, measure)
    digits = {"measure": _digits(map(_text, used))}
    for table in used:
        if isinstance(table, dict):
            for name, entry in table.items():
                code = _code_of(entry)
                if _is_own(code, measure) or _is_record(code):
                    digits[str(name)] = _digits(_texts_of_entry(code, measure))
                elif callable(code):
                    digits[str(name)] = _digits([_name_of(code)])
    return digits


def is_other(recorded: str, code: Mapping[str, str], key: Mapping[str, object]) -> bool:
    """Return whether the row of `key` was measured by other code, of which a run has recorded this.

    The code of a row is `measure` and the entries that its key names. Runs before 2026-11-30 have
    recorded twelve digits of their whole notebook, which tell nothing of one row: that code passes
    for the same.
    """
    if not recorded.startswith("{"):
        return False
    before = json.loads(recorded)
    for name in ("measure", *map(str, key.values())):
        if before.get(name) != code.get(name):
            return True
    return False


def _used(code: object, measure: Callable) -> list:
    """Return `code` and the functions, classes and dicts beside `measure` that its text names, and
    the text of those, each once."""
    used = [code]
    for thing in used:  # which grows meanwhile
        for name in sorted(set(re.findall(r"\w+", _text(thing)))):
            value = measure.__globals__.get(name)
            if not isinstance(value, dict):
                value = _code_of(value)
                if not _is_own(value, measure):
                    continue
            if all(value is not other for other in used):
                used.append(value)
    return used


def _texts_of_entry(code: object, measure: Callable) -> list[str]:
    """Return the text of an entry and of what it uses, and the values that these read: constants of
    the notebook, and what a function has from the one that made it."""
    texts = []
    for thing in _used(code, measure):
        texts.append(_text(thing))
        for name in sorted(_read_names(thing)):
            value = measure.__globals__.get(name)
            if isinstance(value, bool | int | float | str):
                texts.append(f"{name} = {value!r}")
        for cell in getattr(thing, "__closure__", None) or ():
            with suppress(ValueError):  # a variable that is not set yet
                texts.append(_text_of_value(cell.cell_contents))
    return texts


def _read_names(thing: object) -> set[str]:
    """Return the names beside its own variables that a function, or a class's methods, read: an
    argument may be called as a parameter of the notebook is."""
    functions = [thing]
    if isinstance(thing, type):
        functions = list(map(_function_of, vars(thing).values()))
    codes, names = [], set()
    for function in functions:
        if isinstance(function, types.FunctionType):
            codes.append(function.__code__)
    for code in codes:  # which grows by the functions within
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
    return names


def _text_of_value(value: object) -> str:
    """Return what is the same in each process."""
    if callable(value):
        return _text(value) or _name_of(value)
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _name_of(thing: object) -> str:
    """Return the name by which a library has a function, a class or an object of one."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"


def _code_of(thing: object) -> object:
    """Return a function or class itself, of `MyFunction.apply` the class, of a Triton kernel its
    function."""
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type):
        return owner
    return getattr(thing, "fn", thing)


def _is_own(thing: object, measure: Callable) -> bool:
    """Return whether this is a function or a class of the notebook or module of `measure`."""
    is_code = isinstance(thing, types.FunctionType | type)
    return is_code and thing.__module__ == measure.__module__


def _is_record(thing: object) -> bool:
    """Return whether this is an object of a dataclass, such as a shape or a way of a ladder, whose
    text is the same in each process."""
    if isinstance(thing, type) or not dataclasses.is_dataclass(thing):
        return False
    return " at 0x" not in repr(thing)


def _text(thing: object) -> str:
    """Return the source of a function, or of each method of a class: where a class of a notebook
    stands, Python does not know. Of a record return its values."""
    if _is_record(thing):
        return repr(thing)
    functions = [thing]
    if isinstance(thing, type):
        functions = list(map(_function_of, vars(thing).values()))
    texts = []
    for function in functions:
        with suppress(OSError, TypeError):  # no function, or typed into no file
            texts.append(textwrap.dedent(inspect.getsource(function)))
    return "\n".join(texts)


def _function_of(member: object) -> object:
    """Return the function of a method, static or of the class, and of a property."""
    for name in ("__func__", "fget"):
        member = getattr(member, name, member)
    return member


def _digits(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:12]
