"""Check sizes and names, for the library and its formulas."""

from collections.abc import Collection


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")


def check_name(what: str, name: object, allowed: Collection[str]) -> None:
    """Raise ValueError for a name that is not ``allowed``; its message lists the allowed names."""
    if name not in tuple(allowed):
        raise ValueError(f"{what} {name!r}: allowed are {', '.join(allowed)}")
