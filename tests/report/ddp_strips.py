"""Strips of traces, made by hand, in round microseconds."""

from a2lib.measure import bulk, read_runs


def piece(start, end, kind, stream):
    return {"start_us": float(start), "duration_us": float(end - start), "stream": stream,
            "kind": kind, "phase": "backward", "part": "backward"}  # fmt: skip


# Sent for 4 to 9 ms and 12 to 14; beside it products until 6, and a copy from 13 to 20.
STRIP = [piece(0, 5000, "matmul", "7"), piece(3000, 6000, "copy", "9"),
         piece(4000, 9000, "communication", "20"), piece(12000, 14000, "communication", "20"),
         piece(13000, 20000, "copy", "7")]  # fmt: skip


def put(root, wrapper, bucket_mb=0, capture=False, carrier="backend", rows=STRIP):
    (known,) = read_runs(root)
    for ranks, found in ((2, rows), (4, STRIP[:1])):  # the page is that of two
        about = {"section": "ddp", "wrapper": wrapper, "bucket_mb": bucket_mb, "capture": capture,
                 "carrier": carrier, "sent_dtype": "fp32", "model": "xl25", "world_size": ranks,
                 "batch": 4, "context": 512}  # fmt: skip
        name = f"ddp-{ranks}-{wrapper}-{bucket_mb}-{capture}-{carrier}"
        bulk.put("strip", "nvidia-h200", name, found, run=known["run"], about=about, data=root)


BLOCK = [("copy", 10), ("matmul", 100), ("fused", 50), ("attention", 60), ("matmul", 80)]
# By place, beside a message.
SLOWER = {1: 200, 2: 60}


def blocks(durations=(), count=3, start=0.0):
    """Kernels of so many blocks, one after another, and from where to where each block's first
    product and what is fused behind it lie."""
    durations, rows, spans = dict(durations), [], []
    for _ in range(count):
        ends = []
        for i, (kind, usual) in enumerate(BLOCK):
            rows.append(piece(start, start + durations.get(i, usual), kind, "7"))
            ends.append(start := start + durations.get(i, usual))
        spans.append((ends[0], ends[2]))
    return rows, spans


def replay():
    """Four blocks with a message each; 30 us of a last one, and 10 us later the update."""
    rows, spans = blocks(SLOWER, 4)
    sent = [piece(*span, "communication", "20") for span in spans]
    end = max(one["start_us"] + one["duration_us"] for one in rows)
    sent.append(piece(end, end + 30, "communication", "20"))
    return [*rows, *sent, piece(end + 40, end + 90, "optimizer", "7")]
