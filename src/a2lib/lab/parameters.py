"""Check the parameters of a notebook: one line says what is wrong and what is allowed.

papermill hands over any value: `-p seed 1e1` arrives as the float 10.0, `-p seq_len null` as text.
Each function returns the value to go on with.

    length = whole("seq_len", seq_len, 1, 2**24, default=128)
    kind = choice("dtype", dtype, ("bf16", "fp32"))
    names = choices("implementations", implementations, MAKE)
"""

from collections.abc import Iterable, Sequence
from typing import Any

from a2lib.errors import OneLine, closest

LARGEST = 2**63 - 1  # the tables hold no larger whole number
BLANK = (None, "", "auto", "null", "none", "None")


class ParameterError(OneLine, ValueError):
    """A parameter that is not allowed. The message is one line and names what is."""


def whole(
    name: str, value: Any, least: int = 0, most: int = LARGEST, default: int | None = None
) -> int:
    """Return `value` as a whole number from `least` to `most`; `default`, if there is one, for None
    or "auto". Raises ParameterError."""
    if default is not None and _is_blank(value):
        return default
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not least <= value <= most:
        blank = ", or None" if default is not None else ""
        raise _refusal(name, value, f"a whole number from {least} to {most}{blank}")
    return int(value)


def wholes(name: str, value: Any, least: int = 0, most: int = LARGEST) -> list[int]:
    """Return a comma list such as "128,256", a number or a list of them as whole numbers from
    `least` to `most`. Raises ParameterError."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        parts = [parts]
    numbers = []
    for part in parts:
        text = part.strip() if isinstance(part, str) else part
        number = int(text) if isinstance(text, str) and text.isdecimal() else text
        try:
            numbers.append(whole(name, number, least, most))
        except ParameterError:
            allowed = f"whole numbers from {least} to {most}, with commas between them"
            raise _refusal(name, value, allowed) from None
    return list(dict.fromkeys(numbers))


def flag(name: str, value: Any) -> bool:
    """Return `value` as True or False: `-p causal false` arrives as text, which Python counts as
    true. Raises ParameterError."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


def choice(name: str, value: Any, allowed: Iterable[str], default: str | None = None) -> str:
    """Return `value`, one of `allowed`; `default`, if there is one, for None or "auto". Raises
    ParameterError."""
    allowed = list(allowed)
    if default is not None and _is_blank(value) and value not in allowed:
        return default
    if value not in allowed:
        raise _unknown(name, value, value, ["auto", *allowed] if default is not None else allowed)
    return value


def choices(
    name: str, value: Any, allowed: Iterable[str], default: Sequence[str] | None = None
) -> list[str]:
    """Return the entries of a comma list or a list, each one of `allowed` and once; all of them for
    "all"; `default`, if there is one, for None or "auto". Raises ParameterError."""
    allowed = list(allowed)
    words = ["auto", "all", *allowed] if default is not None else ["all", *allowed]
    if default is not None and _is_blank(value):
        return list(default)
    if value == "all":
        return allowed
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise _unknown(name, value, str(value), words)
    for part in parts:
        if not isinstance(part, str) or part.strip() not in allowed:
            raise _unknown(name, value, str(part), words)
    return list(dict.fromkeys(part.strip() for part in parts))


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in BLANK)


def _unknown(name: str, value: Any, part: str, allowed: Sequence[str]) -> ParameterError:
    meant = closest(part, allowed)
    hint = f"; did you mean {meant}?" if meant else ""
    return _refusal(name, value, f"{', '.join(allowed)}{hint}")


def _refusal(name: str, value: Any, allowed: str) -> ParameterError:
    return ParameterError(f"{name} = {value!r}: allowed: {allowed}")
