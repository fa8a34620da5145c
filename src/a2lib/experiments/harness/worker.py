"""What a worker's process does with a task: it calls a function, which measures and puts rows.

Measuring happens there and not in the notebook, because a kernel can end its process (an assertion
in a compiler aborts, an illegal access spoils the CUDA context for good, the system kills what
takes the memory). The notebook then starts another worker, and the sweep goes on after the
culprit's row.

    {"do": "module:function", "spec": {...}, "device": "cuda", "seed": 0, ...}

calls that function with a ``Job``; what it puts are the rows of ``section``. The events of a task
are {"begin": culprit} and {"row": {...}} as its function says, {"raised": note, "status": ...}
where that raises, and {"fatal": why} where going on makes no sense, for instance since the disk is
full.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from a2lib.experiments.launching.lifeline import abandoned, locked
from a2lib.lab import Section, Store, bulk, memory
from a2lib.lab.failures import LostContext, classify, is_lost, note
from a2lib.lab.memory import free_memory
from a2lib.lab.sections import section_of
from a2lib.paths import cache_dir, quote_torch

AT_WORK = "a2lib-at-work-"
COMPILED = (".so", ".o", ".gch")
Row = dict[str, object]


@dataclass(frozen=True)
class Job:
    """What a handler is given: ``spec`` says what to measure on ``device`` ("cuda" or "cpu").

    ``wanted`` holds the keys of the rows still wanted, by culprit; ``in_turns`` says whether the
    culprits may be measured side by side. Events go out through ``emit``; ``store`` is None where
    no row is expected.
    """

    spec: Mapping[str, object]
    device: str
    emit: Callable[[dict], None] = lambda event: None
    seed: int = 0
    wanted: Mapping[str, list[dict]] = dataclasses.field(default_factory=dict)
    in_turns: bool = False
    until: float | None = None
    run: str = ""
    store: Store | None = None

    def put(self, *rows: Mapping[str, object]) -> None:
        """Store rows, which costs as much as one, and report them. Raises StoreError."""
        self.store.put(*({**row, "run": self.run} for row in rows))
        for row in rows:
            self.emit({"row": dict(row)})

    def picture(
        self, table: str, name: str, rows: Iterable[Mapping], about: Mapping[str, object]
    ) -> None:
        """Store ``rows`` as the bulk table ``table`` under ``name``. Raises StoreError."""
        where = {"run": self.run, "data": self.store.data}
        bulk.put(table, self.store.device, name, rows, about=about, **where)

    @property
    def keys(self) -> list[Mapping[str, object]]:
        """The keys of the rows still wanted, of all culprits."""
        return [key for keys in self.wanted.values() for key in keys]

    def each(self) -> Iterator[list[Mapping[str, object]]]:
        """The keys of one culprit after another, who is then at work, until the time limit."""
        for culprit, keys in self.wanted.items():
            if self.expired():
                return
            self.begin(culprit)
            yield keys

    def groups(self) -> Iterator[list[str]]:
        """The culprits that are measured together: all of them in turns, or one after another,
        until the time limit."""
        names = list(self.wanted)
        for group in [names] if self.in_turns else [[name] for name in names]:
            if not self.expired():
                yield group

    def refuse(self, status: str, why: str, keys: Iterable[Mapping] | None = None) -> None:
        """Put a row without values for each of ``keys``, or of all that are wanted: ``status``, and
        ``why`` as its note."""
        reason = {"status": status, "note": note(why)}
        self.put(*({**key, **reason} for key in (self.keys if keys is None else keys)))

    def fail(self, error: Exception, keys: Iterable[Mapping], warned: Iterable[str] = ()) -> None:
        """``refuse`` for ``error``, which ``warned`` came before. Raises LostContext, the rows
        stored, where the device has to be reset."""
        status, why = classify(error, warned)
        self.refuse(status, why, keys)
        if is_lost(error):
            raise LostContext(why)

    def would_swap(self, needed: int, keys: Iterable[Mapping] | None = None) -> bool:
        """Whether a CPU has too little memory left for ``needed`` bytes; then the rows say so, as
        ``refuse``. A GPU refuses what is too much, and is asked."""
        available = memory.available_bytes() if self.device == "cpu" else needed
        if needed > available:
            why = f"not tried: needs {needed / 1e9:.3g} GB, {available / 1e9:.3g} GB are left"
            self.refuse("oom", why, keys)
        return needed > available

    def begin(self, culprit: str | None) -> None:
        """Say who is to blame if the process ends now; None where several take turns."""
        self.emit({"begin": culprit})

    def expired(self) -> bool:
        """Whether nothing more should be started."""
        return self.until is not None and time.time() > self.until


@functools.cache
def load(handler: str) -> Callable[[Job], None]:
    """The function of "module:function". ``prepare()`` of the module, if it has one, is called
    before."""
    module, _, name = handler.partition(":")
    loaded = importlib.import_module(module)
    if "torch" in sys.modules:  # what a process does first may be to import it
        quote_torch()
    getattr(loaded, "prepare", lambda: None)()
    return getattr(loaded, name)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Have a locked file in Inductor's cache say that this process may compile.

    The compiler writes under the final name there, and what has that name counts as whole. A file
    that nobody locks any more is of a process that was killed, maybe in mid-compilation: what is
    compiled then goes, and is compiled again.
    """
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache_dir() / "inductor"))
    cache.mkdir(parents=True, exist_ok=True)
    for left in abandoned(cache.glob(f"{AT_WORK}*")):
        with contextlib.suppress(OSError):
            for path in cache.rglob("*"):
                if path.suffix in COMPILED:
                    path.unlink(missing_ok=True)
            left.unlink()
    own = cache / f"{AT_WORK}{os.getpid()}"
    lock = locked(own)
    try:
        yield
    finally:
        own.unlink(missing_ok=True)
        os.close(lock)


def fields(task: dict) -> dict[str, object]:
    """What a ``Job`` knows from its task."""
    given = {name: task[name] for name in ("spec", "device", "seed")}
    if "section" in task:
        given |= {name: task[name] for name in ("wanted", "in_turns", "until", "run")}
        given["store"] = store_of(section_of(**task["section"]), task["slug"], Path(task["data"]))
    return given


@functools.cache
def store_of(section: Section, device: str, data: Path) -> Store:
    """Always the same: another would read the whole file again."""
    return Store(section, device, data)


def settle(device: str = "cpu") -> None:
    """``free_memory`` between two tasks. What is there then, modules above all, no collection looks
    through until the next: within a task many free what that task has made."""
    gc.unfreeze()
    free_memory(device)
    gc.freeze()
