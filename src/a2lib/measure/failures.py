"""What an exception says about a configuration: out of memory, unsupported, or an error.

``outcome`` is the status of what is a result, for whoever lets other errors pass; ``classify``
makes a row of any exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from a2lib import paths
from a2lib.errors import UnsupportedError

NOTE_LENGTH = 200
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|Storage size calculation "
    r"overflowed"
)
_NO_KERNEL = re.compile(r"No available kernel|No viable backend")
# Triton reports the errors of the driver in words of its own.
_LOST = re.compile(
    r"CUDA error|illegal memory access|misaligned address|unspecified launch failure"
    r"|illegal instruction|device-side assert"
)


class LostContext(RuntimeError):
    """A CUDA error after which this process can do nothing more on the device."""


def outcome(error: BaseException) -> str | None:
    """Whether ``error``, or what led to it, is "oom" or "unsupported"; None for any other."""
    import torch

    chain = _chain(error)
    for link in chain:
        if isinstance(link, torch.OutOfMemoryError | MemoryError) or (
            isinstance(link, RuntimeError) and _OUT_OF_MEMORY.search(str(link))
        ):
            return "oom"
    if any(isinstance(link, UnsupportedError) or _NO_KERNEL.search(str(link)) for link in chain):
        return "unsupported"
    return None


def classify(error: BaseException, warned: Iterable[str] = ()) -> tuple[str, str]:
    """The status and the one-line note of a row whose call raised ``error``.

    ``warned`` are the warnings of that call: PyTorch gives its reasons for refusing a backend
    there.
    """
    if outcome(error) == "oom":
        return "oom", note("out of memory")
    chain = _chain(error)
    text = " ".join(str(link) for link in chain)
    first = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    for link in chain:
        if isinstance(link, UnsupportedError | NotImplementedError):
            return "unsupported", note(str(link))
    if _NO_KERNEL.search(text):
        reasons = "; ".join(_reasons(warned))
        return "unsupported", note(reasons or "this backend has no kernel for these inputs")
    kinds = {type(link).__name__ for link in chain}
    if kinds & {"OutOfResources", "NoValidChoicesError"} or "out of resource" in text:
        return "unsupported", note(f"no tile of this kernel fits the GPU: {first}")
    return "error", note(first)


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` leaves the CUDA context unusable: every later call would fail as well."""
    text = " ".join(str(link) for link in _chain(error))
    return classify(error)[0] == "error" and bool(_LOST.search(text))


def note(text: str) -> str:
    """``text`` on one line of bounded length, without the folders of this machine."""
    own = " ".join(text.split()).replace(f"{paths.ROOT}/", "/./")  # a name may have spaces
    text = re.sub(r"(?<![\w.:])/(?:[\w.+-]+/)+", "", own)
    return text if len(text) <= NOTE_LENGTH else text[: NOTE_LENGTH - 3] + "..."


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _reasons(warned: Iterable[str]) -> list[str]:
    reasons = []
    for text in warned:
        text = re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.S).strip()
        # The other backends are disabled here on purpose, and the headings say nothing.
        if text and "runtime disabled" not in text and not text.endswith("not used because:"):
            reasons.append(text)
    return list(dict.fromkeys(reasons))
