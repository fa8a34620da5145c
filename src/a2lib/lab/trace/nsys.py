"""Read the SQLite export of Nsight Systems.

    nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \\
        --capture-range-end=stop -o report python -m a2lib.benchmark --nvtx modules --cuda-profiler
    nsys export --type sqlite -o report.sqlite report.nsys-rep

Tables and columns as in NVIDIA's "SQLite Schema Reference" of Nsight Systems 2025: a table that
would be empty is not made, so a missing one is no error; a missing column is.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from a2lib.lab.trace.kernels import WAIT, Kernel, Span, Trace, TraceError, assembled

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
PUSH_POP = 59  # eventType of a range of push and pop, the one kind that nests in its thread
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_EVENT = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_NEEDED = {
    KERNELS: (*_EVENT, "demangledName"),
    MEMCPY: (*_EVENT, "copyKind"),
    MEMSET: _EVENT,
    RUNTIME: ("start", "end", "correlationId", "globalTid"),
    "NVTX_EVENTS": ("start", "end", "eventType", "text", "globalTid"),
    "StringIds": ("id", "value"),
}
_PROCESS = ~0xFFFFFF  # globalTid without the thread is globalPid


def read_nsys(path: str | Path) -> Trace:
    """The kernels, copies and memsets of an export, each with the ranges of its launch.

    Correlation ids are numbers of one process; launches are found by both. Raises TraceError, in
    one line, for a file that is no such export, lacks a column, or holds no kernel.
    """
    try:
        where = f"{Path(path).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(where, uri=True)) as base:
            return _read(base)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (sqlite3.Error, KeyError, TypeError, ValueError) as error:
        reason = f"no SQLite export of Nsight Systems, or an event without time or name ({error})"
        raise TraceError(f"{path}: {reason}") from None


def _read(base: sqlite3.Connection) -> Trace:
    tables = {
        name: {row[1] for row in base.execute(f"pragma table_info({name})")}
        for (name,) in base.execute("select name from sqlite_master where type in ('table','view')")
        if name.isidentifier()
    }
    if KERNELS not in tables:
        there = ", ".join(sorted(tables)) or "none"
        raise TraceError(f"no table {KERNELS}: no kernel was traced; the tables are {there}"[:300])
    for table, columns in _NEEDED.items():
        missing = [c for c in columns if table in tables and c not in tables[table]]
        if missing:
            raise TraceError(f"table {table} lacks {', '.join(missing)}")

    def rows(table: str, *columns: str):
        if table not in tables:
            return []
        wanted = ", ".join(f'"{c}"' if c in tables[table] else "null" for c in columns)
        return base.execute(f"select {wanted} from {table}")

    words = dict(rows("StringIds", "id", "value"))
    launches, waits = {}, []
    for start, end, correlation, tid, name_id in rows(RUNTIME, *_NEEDED[RUNTIME], "nameId"):
        call = Span(words.get(name_id, ""), (tid & _PROCESS, tid), start, end)
        launches[tid & _PROCESS, correlation] = call
        if WAIT in call.name:
            waits.append(call)
    kernels = []
    for table in (KERNELS, MEMCPY, MEMSET):
        *columns, what = (*_EVENT, {KERNELS: "demangledName", MEMCPY: "copyKind"}.get(table, "end"))
        for start, end, device, stream, correlation, process, word in rows(table, *columns, what):
            if table == KERNELS:
                name = words[word]
            else:
                name = f"Memcpy {COPIES.get(word, word)}" if table == MEMCPY else "Memset"
            launch = launches.get((process, correlation))
            kernels.append(Kernel(name, device, str(stream), start, end - start, launch))
    spans = []
    for start, end, kind, text, thread, text_id in rows(
        "NVTX_EVENTS", *_NEEDED["NVTX_EVENTS"], "textId"
    ):
        name = text if text is not None else words.get(text_id)
        if kind == PUSH_POP and end is not None and name is not None:
            spans.append(Span(name, (thread & _PROCESS, thread), start, end))
    if not kernels:
        raise TraceError("no kernel was traced")
    # Processes that the traced one starts have notes of their own.
    traced = {span.thread[0] for span in spans}
    notes = [
        f"{text} (another process)" if process is not None and process not in traced else str(text)
        for text, process in rows("DIAGNOSTIC_EVENT", "text", "globalPid")
        if text
    ]
    return assembled("nsys", kernels, spans, waits, notes)
