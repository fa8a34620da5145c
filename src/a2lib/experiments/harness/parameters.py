"""The parameters of a notebook: typed, documented once, and checked before anything is measured.

papermill hands over any value: `-p seed 1e1` arrives as the float 10.0. A notebook therefore
declares its parameters as a dataclass of ``parameter`` fields and calls ``check(globals(),
TheDataclass)`` in the cell after its parameters cell, whose text is ``cell_source(TheDataclass)``.
What every experiment has, ``run`` reads: ``Common``, the base of all of them. Beside it are
``WithSweep`` and, where several processes measure together, ``OnRanks``.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from a2lib.errors import OneLine, closest
from a2lib.experiments.harness.ranks import Ranks
from a2lib.lab import gpu_count

_LARGEST = 2**63 - 1  # the tables hold no larger whole number
_SHOWN = 60  # characters of a refused value
MOST_RANKS = 64  # more than one host has GPUs, or cores to measure a collective with
OF_RANKS = ("world_size", "backend")


class ParameterError(OneLine, ValueError):
    """A parameter that is missing, of the wrong type or not allowed. The message is one line."""


def parameter(
    default: Any,
    help: str,
    *,
    minimum: int = -_LARGEST,
    maximum: int = _LARGEST,
    choices: Sequence[str] = (),
    many: Sequence[str] = (),
) -> Any:
    """A dataclass field for one parameter.

    Its default is an int, bool or str, as it is; None is an int's, which may then be None. An int
    is from ``minimum`` to ``maximum``; a str is one of ``choices``, or with ``many`` one of
    ``choices`` or a comma list of names in ``many``. ``help`` becomes the comment that
    ``papermill --help-notebook`` shows.
    """
    rules = {"help": help, "minimum": minimum, "maximum": maximum, "optional": default is None}
    rules |= {"kind": int if default is None else type(default)}
    rules |= {"choices": tuple(choices), "many": tuple(many)}
    return dataclasses.field(default=default, metadata=rules)


def count(usual: int | None, help: str, most: int, least: int = 1) -> Any:
    """The field of a whole number up to ``most``; where ``usual`` is None, None too."""
    return parameter(usual, help, minimum=least, maximum=most)


@dataclass(frozen=True)
class Common:
    """The base of all parameters: what every notebook has, at the end of its cell."""

    remeasure: bool = parameter(False, "measure again what is stored already")
    time_limit_s: int = count(
        0, "start nothing more after this many seconds; 0: no limit", 366 * 24 * 3600, 0
    )
    seed: int = count(0, "of all that is random", _LARGEST, 0)


@dataclass(frozen=True)
class OnRanks(Common):
    """The base where several processes measure together."""

    world_size: int = count(2, "processes; with nccl a GPU for each", MOST_RANKS)
    backend: str = parameter(
        "auto",
        "gloo: on the CPU; nccl: on GPUs; auto: nccl where there are as many GPUs",
        choices=("auto", "gloo", "nccl"),
    )

    def ranks(self) -> Ranks:
        """What a task is to have of them on this machine.

        Raises ParameterError for nccl with more processes than there are GPUs.
        """
        gpus = gpu_count()
        if self.backend == "nccl" and self.world_size > gpus:
            allowed = f"from 1 to {gpus}, the GPUs here" if gpus else "gloo alone, without a GPU"
            raise ParameterError(
                f"world_size = {self.world_size} with backend nccl: allowed is {allowed}"
            )
        auto = "nccl" if self.world_size <= gpus else "gloo"
        return Ranks(self.world_size, auto if self.backend == "auto" else self.backend)


def sweep(names: Sequence[str], what: str = "the one above") -> Any:
    """The field ``sweep`` of an experiment that measures one configuration, ``what``, or a sweep of
    ``names``."""
    return parameter("shape", f"shape: {what}; or {', '.join(names)}", choices=("shape", *names))


@dataclass(frozen=True)
class WithSweep(Common):
    """The base of parameters with a ``sweep``, which has its own values of all others but for the
    common ones and those ``beside`` it: ParameterError where one of them is changed too."""

    beside: ClassVar[Sequence[str]] = ()
    sweep: str = sweep(())

    def __post_init__(self) -> None:
        free = {"sweep", *self.beside, *(field.name for field in fields(Common))}
        for name in changed(self) if self.sweep != "shape" else ():
            if name not in free:
                raise ParameterError(
                    f"{name} = {getattr(self, name)!r}: sweep {self.sweep} has its own;"
                    f" leave {name} out, or leave sweep at shape"
                )

    def has(self, sweep: str) -> bool:
        """Whether ``sweep`` is asked for, or all are."""
        return self.sweep in (sweep, "all")


def fields(declared: Any) -> list[dataclasses.Field]:
    """The parameters of a class, or of what was checked: its own before those of its bases."""
    kind = declared if isinstance(declared, type) else type(declared)
    depth: dict[str, int] = {}
    for i, cls in enumerate(reversed(kind.__mro__)):
        for name in inspect.get_annotations(cls):
            depth.setdefault(name, i)
    return sorted(dataclasses.fields(kind), key=lambda field: -depth[field.name])


def cell_source(declared: type) -> str:
    """The text of the parameters cell: one annotated literal with its comment per parameter."""
    lines = []
    for field in fields(declared):
        kind, text = field.metadata["kind"].__name__, field.metadata["help"]
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        lines.append(f"{field.name}: {kind} = {default}  # {text}")
    return "\n".join(lines)


def check(namespace: Mapping[str, Any], declared: type) -> Any:
    """The values of ``namespace`` (a notebook's globals) as an instance of ``declared``.

    Raises ParameterError for a missing one and for a value that is not allowed. A name that is no
    parameter is refused by papermill's plugin, ``a2lib.papermill_default``.
    """
    values = {}
    for field in fields(declared):
        if field.name not in namespace:
            raise ParameterError(f"{field.name} is missing: run the parameters cell first")
        values[field.name] = _value(field.name, namespace[field.name], field.metadata)
    result = declared(**values)
    object.__setattr__(result, "_namespace", namespace)  # for ``check_current``, also if frozen
    return result


def check_current(given: Any) -> None:
    """Raise ParameterError where the notebook has other values by now than ``given``, which was
    checked there; also where the check would not pass any more."""
    namespace = getattr(given, "_namespace", None)
    if namespace is None:
        return
    now = check(namespace, type(given))
    for field in fields(given):
        new, old = getattr(now, field.name), getattr(given, field.name)
        if new != old:
            raise ParameterError(
                f"{field.name} is {_shown(new)} by now, and was {_shown(old)} when this run began:"
                " run the cells again from the check of the parameters on"
            )


def changed(given: Any) -> dict[str, Any]:
    """The parameters of a checked ``given`` that differ from their default."""
    return {f.name: v for f in fields(given) if (v := getattr(given, f.name)) != f.default}


def filled(given: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    """``usual``, with what ``given`` names in place: neither None nor "auto"."""
    named = {name: getattr(given, name, None) for name in usual}
    return {name: usual[name] if v in (None, "auto") else v for name, v in named.items()}


def names(value: str) -> tuple[str, ...]:
    """The entries of a comma list that was checked, in order, each once."""
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def _value(name: str, value: Any, rules: Mapping[str, Any]) -> Any:
    # `-p size null` arrives as the text "null": papermill itself translates None alone.
    blank = value is None or (isinstance(value, str) and value.lower() in ("null", "none"))
    if blank and rules["optional"]:
        return None
    return {bool: _bool, int: _int, str: _str}[rules["kind"]](name, value, rules)


def _bool(name: str, value: Any, rules: Mapping[str, Any]) -> bool:
    # `-p remeasure false` arrives as the text "false", which Python counts as true.
    text = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(text, bool):
        raise ParameterError(f"{name} = {_shown(value)}: allowed are True and False")
    return text


def _int(name: str, value: Any, rules: Mapping[str, Any]) -> int:
    low, high = rules["minimum"], rules["maximum"]
    allowed = f"a whole number from {low} to {high}" + (", or None" if rules["optional"] else "")
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not (whole and low <= value <= high):
        raise ParameterError(f"{name} = {_shown(value)}: must be {allowed}")
    return int(value)


def _str(name: str, value: Any, rules: Mapping[str, Any]) -> str:
    choices, many = rules["choices"], rules["many"]
    allowed = f"allowed are {', '.join((*choices, *many))}"
    if many:
        allowed += "; several with commas between them"
        if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
            value = ",".join(value)
    if not isinstance(value, str):
        raise ParameterError(f"{name} = {_shown(value)}: {allowed}")
    if value in choices:
        return value
    for part in value.split(",") if many else [value]:
        if part.strip() not in many:
            meant = closest(part, (*choices, *many))
            hint = f"; did you mean {meant}?" if meant else ""
            raise ParameterError(f"{name} = {_shown(value)}: {allowed}{hint}")
    return ",".join(names(value))


def _shown(value: Any) -> str:
    """``value`` as it would be written, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number too long to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
