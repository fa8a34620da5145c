"""Read the chrome trace of torch.profiler.

    with torch.profiler.profile() as profiler:
        with torch.profiler.record_function("forward"): ...
    profiler.export_chrome_trace("trace.json.gz")

Ranges are those of ``record_function``; times are microseconds with decimals. A trace of a machine
without a GPU has no kernels, and is read as its operators.
"""

import gzip
import itertools
import json
import zlib
from collections import defaultdict
from pathlib import Path

from a2lib.lab.trace.kernels import WAIT, Kernel, Span, Trace, TraceError, assembled

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
_GZIP = b"\x1f\x8b"
# Operators that make a view or take memory, and compute nothing.
NO_WORK = frozenset(
    f"aten::{name}"
    for name in """
    as_strided view _unsafe_view reshape _reshape_alias expand select slice t transpose permute
    unsqueeze squeeze detach alias split empty empty_like empty_strided resize_ unbind unflatten
    flatten to result_type item _local_scalar_dense is_nonzero lift_fresh resolve_conj resolve_neg
    narrow view_as _nested_tensor_size stride
    """.split()
)


def read_chrome(path: str | Path) -> Trace:
    """The kernels, copies and memsets of a chrome trace, each with the ranges of its launch.

    Without any, the operators that call no other, in the place of kernels: their stream is their
    thread, and each is its own launch. Raises TraceError, in one line, for a file that is no such
    trace or holds neither.
    """
    content = Path(path).read_bytes()
    try:
        if content[:2] == _GZIP:
            content = gzip.decompress(content)
        found = json.loads(content)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        words = " ".join(str(error).split())
        raise TraceError(f"{path}: neither an SQLite export nor JSON: {words}"[:300]) from None
    try:
        events = found["traceEvents"] if isinstance(found, dict) else found
        return _read([event for event in events if event.get("ph") == "X"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        lacks = "it lacks " if isinstance(error, KeyError) else ""
        reason = f"no chrome trace of torch.profiler: {lacks}{error}"
        raise TraceError(f"{path}: {reason}"[:300]) from None


def _read(events: list[dict]) -> Trace:
    by_kind: dict[str, list[dict]] = defaultdict(list)
    for event in events:
        by_kind[event.get("cat", "")].append(event)
    spans = [_span(event) for event in by_kind["user_annotation"]]
    kernels = _on_device(by_kind)
    source = "chrome"
    if not kernels:
        source, kernels = "chrome, cpu", _operators(by_kind["cpu_op"])
    if not kernels:
        raise TraceError("no kernel and no operator was traced")
    waits = [_span(event) for event in by_kind["cuda_runtime"] if WAIT in event["name"]]
    return assembled(source, kernels, spans, waits)


def _on_device(by_kind: dict[str, list[dict]]) -> list[Kernel]:
    launches = {}
    for kind in ON_HOST:
        for event in by_kind[kind]:
            correlation = event.get("args", {}).get("correlation")
            if correlation is not None:
                launches[correlation] = _span(event)
    kernels = []
    for kind in ON_DEVICE:
        for event in by_kind[kind]:
            one, args = _span(event), event["args"]
            launch = launches.get(args.get("correlation"))
            stream = str(args.get("stream", event.get("tid")))
            device, took = int(args.get("device", 0)), one.end_ns - one.start_ns
            kernels.append(Kernel(one.name, device, stream, one.start_ns, took, launch))
    return kernels


def _operators(events: list[dict]) -> list[Kernel]:
    """Those that hold no other operator of their thread but views, and are no view."""
    threads: dict[tuple, list[Span]] = defaultdict(list)
    for event in events:
        if event["name"] not in NO_WORK and event["name"].startswith("aten::"):
            threads[event["pid"], event["tid"]].append(_span(event))
    kernels = []
    for thread, found in threads.items():
        found.sort(key=lambda one: (one.start_ns, -one.end_ns))
        for one, after in itertools.zip_longest(found, found[1:]):
            if after is not None and after.start_ns < one.end_ns and after.end_ns <= one.end_ns:
                continue
            took = one.end_ns - one.start_ns
            kernels.append(Kernel(one.name, 0, str(thread[1]), one.start_ns, took, one))
    return kernels


def _span(event: dict) -> Span:
    start = round(float(event["ts"]) * 1000)
    end = start + round(float(event["dur"]) * 1000)
    return Span(str(event["name"]), (event["pid"], event["tid"]), start, end)
