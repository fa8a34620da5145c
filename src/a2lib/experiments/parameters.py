"""The parameters of a notebook: typed, documented once, and checked before anything is measured.

papermill accepts any name and any value: a misspelt `-p seqlen 512` measures the default and exits
0, and `-p heads 1e1` arrives as the float 10.0. A notebook therefore declares its parameters as a
dataclass of ``parameter`` fields and calls ``check(globals(), TheDataclass)`` in the cell after its
parameters cell, whose text is ``cell_source(TheDataclass)``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# What papermill can inject. Anything else among the globals is an import or a result.
_LITERALS = (bool, int, float, str, list, tuple, dict, type(None))
# IPython's own names, and those of `papermill --inject-paths`.
_NOT_PARAMETERS = re.compile(r"_.*|In|Out|exit|quit|open|get_ipython|PAPERMILL_.*")
_CHECKED = "_parameters_checked"


class ParameterError(ValueError):
    """A parameter that is unknown, of the wrong type or not allowed. The message is one line."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of the traceback, and papermill repeats them.
        return [f"{type(self).__name__}: {self}"]


def parameter(
    default: Any,
    help: str,
    *,
    kind: type,
    minimum: int | None = None,
    choices: Sequence[str] = (),
    many: Sequence[str] = (),
    optional: bool = False,
) -> Any:
    """A dataclass field for one parameter.

    ``kind`` is int, bool or str. An int is at least ``minimum``; a str is one of ``choices``, or
    with ``many`` one of ``choices`` or a comma list of names in ``many``. ``optional`` admits None.
    ``help`` becomes the comment that ``papermill --help-notebook`` shows.
    """
    rules = {
        "help": help,
        "kind": kind,
        "minimum": minimum,
        "choices": tuple(choices),
        "many": tuple(many),
        "optional": optional,
    }
    return dataclasses.field(default=default, metadata=rules)


def cell_source(declared: type) -> str:
    """The text of the parameters cell: one annotated literal with its comment per parameter."""
    lines = []
    for field in dataclasses.fields(declared):
        kind, text = field.metadata["kind"].__name__, field.metadata["help"]
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        lines.append(f"{field.name}: {kind} = {default}  # {text}")
    return "\n".join(lines)


def check(namespace: MutableMapping[str, Any], declared: type[T]) -> T:
    """The values of ``namespace`` (a notebook's globals) as an instance of ``declared``.

    Raises ParameterError for a name that is no parameter, a missing one, or a value that is not
    allowed. In a fresh kernel every other literal counts as a misspelt parameter; once a check has
    passed, so that someone is working in the notebook, only a name close to a parameter's does.
    """
    fields = {field.name: field for field in dataclasses.fields(declared)}
    for name, value in namespace.items():
        if name in fields or _NOT_PARAMETERS.fullmatch(name) or not isinstance(value, _LITERALS):
            continue
        meant = closest(name, fields)
        if meant or _CHECKED not in namespace:
            hint = f" (did you mean {meant}?)" if meant else ""
            raise ParameterError(f"unknown parameter {name}{hint}; allowed are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name not in namespace:
            raise ParameterError(f"{name} is missing: run the parameters cell first")
        values[name] = _value(name, namespace[name], field.metadata)
    result = declared(**values)
    namespace[_CHECKED] = True
    return result


def closest(name: str, allowed: Sequence[str] | Mapping[str, Any]) -> str | None:
    """The entry of ``allowed`` that ``name`` probably stands for: case, underscores, a typo."""
    plain = {re.sub(r"[\W_]", "", entry).lower(): entry for entry in allowed}
    found = difflib.get_close_matches(
        re.sub(r"[\W_]", "", str(name)).lower(), plain, n=1, cutoff=0.7
    )
    return plain[found[0]] if found else None


def names(value: str) -> tuple[str, ...]:
    """The entries of a comma list that was checked, in order, each once."""
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def _value(name: str, value: Any, rules: Mapping[str, Any]) -> Any:
    # `-p seq_len null` arrives as the text "null": papermill itself translates None alone.
    blank = value is None or (isinstance(value, str) and value.lower() in ("null", "none"))
    if blank and rules["optional"]:
        return None
    if rules["kind"] is bool:
        return _bool(name, value)
    if rules["kind"] is int:
        return _int(name, value, rules)
    return _str(name, value, rules)


def _bool(name: str, value: Any) -> bool:
    # `-p causal false` arrives as the text "false", which Python counts as true.
    text = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(text, bool):
        raise ParameterError(f"{name} = {value!r}: allowed are True and False")
    return text


def _int(name: str, value: Any, rules: Mapping[str, Any]) -> int:
    minimum = rules["minimum"]
    allowed = "a whole number" + ("" if minimum is None else f" of at least {minimum}")
    if rules["optional"]:
        allowed += ", or None"
    integral = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (isinstance(value, int) or integral):
        raise ParameterError(f"{name} = {value!r}: must be {allowed}")
    if minimum is not None and value < minimum:
        raise ParameterError(f"{name} = {value!r}: must be {allowed}")
    return int(value)


def _str(name: str, value: Any, rules: Mapping[str, Any]) -> str:
    choices, many = rules["choices"], rules["many"]
    allowed = f"allowed are {', '.join((*choices, *many))}"
    if many:
        allowed += "; several with commas between them"
        if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
            value = ",".join(value)
    if not isinstance(value, str):
        raise ParameterError(f"{name} = {value!r}: {allowed}")
    if value in choices:
        return value
    if not many:
        raise ParameterError(f"{name} = {value!r}: {allowed}{_hint(value, choices)}")
    for part in value.split(","):
        if part.strip() not in many:
            raise ParameterError(f"{name} = {value!r}: {allowed}{_hint(part, (*choices, *many))}")
    return ",".join(names(value))


def _hint(value: str, allowed: Sequence[str]) -> str:
    meant = closest(value, allowed)
    return f"; did you mean {meant}?" if meant else ""
