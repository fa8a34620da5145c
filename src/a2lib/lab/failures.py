"""Tell what an exception says about a configuration: out of memory, unsupported, or an error."""

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator

from a2lib.errors import UnsupportedError
from a2lib.lab.csv_file import clean
from a2lib.lab.memory import free_memory
from a2lib.lab.runs import scrub

NOTE_LENGTH = 200
NO_TILE = ("OutOfResources", "NoValidChoicesError")
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


def classify(error: BaseException, warned: Iterable[str] = ()) -> tuple[str, str]:
    """The status and the one-line note of a row whose call raised ``error``, or what led to it.

    ``warned`` are the warnings of that call: PyTorch gives its reasons for refusing a backend
    there.
    """
    chain = linked(error)
    text = " ".join(map(str, chain))
    first = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    for link in chain:
        told = isinstance(link, RuntimeError) and _OUT_OF_MEMORY.search(str(link))
        # torch's by its name: who has not loaded torch need not.
        if told or isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            return "oom", "out of memory"
    for link in chain:
        if isinstance(link, UnsupportedError | NotImplementedError):
            return "unsupported", note(str(link))
    if _NO_KERNEL.search(text):
        reasons = "; ".join(_reasons(warned))
        return "unsupported", note(reasons or "this backend has no kernel for these inputs")
    for link in chain:  # Triton's, and Inductor's; some say it in words
        if type(link).__name__ in NO_TILE or "out of resource" in str(link):
            return "unsupported", note(f"no tile of this kernel fits the GPU: {first}")
    return "error", note(first)


def failed(error: BaseException, warned: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns of a row whose call raised ``error``: its status and a note."""
    status, why = classify(error, warned)
    return {"status": status, "note": why}


@contextlib.contextmanager
def trial() -> Iterator[dict[str, str]]:
    """Try one of several implementations: where it fails the others go on.

    The dict that is given is filled at the end with ``failed(error)``, the warnings taken into
    account, or stays empty; what the failed call held is freed. An error that leaves the CUDA
    context unusable passes through.

        with trial() as failure:
            o = attention(q, k, v)
        if failure:
            yield {**key, **failure}
    """
    failure: dict[str, str] = {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            yield failure
        except Exception as error:
            if is_lost(error):
                raise
            failure.update(failed(error, [str(warning.message) for warning in caught]))
    if failure and "torch" in sys.modules:
        free_memory("cuda" if sys.modules["torch"].cuda.is_available() else "cpu")


def is_lost(error: BaseException) -> bool:
    """Return whether ``error`` leaves the CUDA context unusable: later calls would fail too."""
    if isinstance(error, LostContext):
        return True
    text = " ".join(map(str, linked(error)))
    return classify(error)[0] == "error" and bool(_LOST.search(text))


def note(text: str) -> str:
    """``text`` on one line of bounded length, without the folders of this machine."""
    text = clean(scrub(text))
    return text if len(text) <= NOTE_LENGTH else text[: NOTE_LENGTH - 3] + "..."


def detached(error: Exception) -> Exception:
    """``error`` without the frames that hold on to the failed call's tensors; its traceback is a
    note."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    for link in linked(error):
        link.__traceback__ = None
    return error


def linked(error: BaseException) -> list[BaseException]:
    """``error`` with its causes and what was being handled when each was raised, each once."""
    links: dict[int, BaseException] = {}
    new = [error]
    while new:
        link = new.pop()
        if link is not None and id(link) not in links:
            links[id(link)] = link
            new += [link.__cause__, link.__context__]
    return list(links.values())


def _reasons(warned: Iterable[str]) -> list[str]:
    reasons = []
    for text in warned:
        text = re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.S).strip()
        # The other backends are disabled here on purpose, and the headings say nothing.
        if text and "runtime disabled" not in text and not text.endswith("not used because:"):
            reasons.append(text)
    return list(dict.fromkeys(reasons))
