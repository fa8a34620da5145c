"""A small trace as Nsight Systems exports it: nine kernels, which a person can add up. It follows
the format's documentation, since it comes from no GPU."""

import sqlite3
from pathlib import Path

US = 1000  # nanoseconds
MAIN, ENGINE, OTHER = (7, 1), (7, 2), (8, 1)  # process and thread
SPANS = [  # name, thread, start and end in microseconds
    ("step 0", MAIN, 0, 1000),
    ("forward", MAIN, 10, 200),
    ("layers.0.attn.q_proj", MAIN, 20, 60),
    ("layers.0.attn.attention.softmax", MAIN, 60, 100),
    ("backward", MAIN, 300, 600),
    ("layers.0.attn.q_proj", ENGINE, 320, 400),
    ("optimizer", MAIN, 700, 900),
]
NVJET = "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, 9, false, false>(int)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int, float)"
KERNELS = [  # name, stream, start, duration, correlation, thread and time of the launch
    (NVJET, 7, 100, 100, 1, MAIN, 30),
    (SOFTMAX, 7, 210, 50, 2, MAIN, 70),
    ("Memcpy DtoD", 7, 270, 10, 3, MAIN, 150),
    (NVJET, 7, 500, 100, 4, ENGINE, 330),
    (NVJET, 7, 610, 50, 5, ENGINE, 450),
    (ADAM, 7, 800, 40, 6, MAIN, 710),
    ("Memset", 7, 960, 5, 7, MAIN, 950),
    ("mystery_kernel", 14, 120, 20, 8, OTHER, 110),
    (NVJET, 7, 1000, 25, 9, None, None),
]
WAIT = (970, 25)  # the main thread in cudaDeviceSynchronize


def write_nsys(path: Path, diagnostic: str = "Profiling has started.") -> None:
    """The other process's correlation id is one that this process has too."""
    base = sqlite3.connect(path)
    base.execute("pragma page_size = 512")
    common = "start integer, end integer, deviceId integer, streamId integer, "
    common += "correlationId integer, globalPid integer"
    for table, columns in {
        "StringIds": "id integer, value text",
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{common}, demangledName integer, shortName integer",
        "CUPTI_ACTIVITY_KIND_MEMCPY": f"{common}, bytes integer, copyKind integer",
        "CUPTI_ACTIVITY_KIND_MEMSET": f"{common}, bytes integer",
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "start integer, end integer, globalTid integer, correlationId integer, nameId integer"
        ),
        "NVTX_EVENTS": (
            "start integer, end integer, eventType integer, text text, textId integer, "
            "globalTid integer, endGlobalTid integer"
        ),
        "DIAGNOSTIC_EVENT": "timestamp integer, text text",
    }.items():
        base.execute(f"create table {table} ({columns})")
    words = {}

    def insert(table, *row):
        base.execute(f"insert into {table} values ({', '.join('?' * len(row))})", row)

    def word(text):
        if text not in words:
            words[text] = len(words) + 1
            insert("StringIds", words[text], text)
        return words[text]

    def process(thread):
        return thread[0] << 24

    for name, stream, start, duration, correlation, thread, launched in KERNELS:
        correlation = 1 if thread == OTHER else correlation
        row = [start * US, (start + duration) * US, 0, stream, correlation, process(thread or MAIN)]
        if name == "Memcpy DtoD":
            insert("CUPTI_ACTIVITY_KIND_MEMCPY", *row, 64, 8)
        elif name == "Memset":
            insert("CUPTI_ACTIVITY_KIND_MEMSET", *row, 64)
        else:
            insert("CUPTI_ACTIVITY_KIND_KERNEL", *row, word(name), word(name[:9]))
        if thread:
            row = launched * US, (launched + 5) * US, process(thread) | thread[1], correlation
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", *row, word("cudaLaunchKernel"))
    row = WAIT[0] * US, sum(WAIT) * US, process(MAIN) | MAIN[1], 99
    insert("CUPTI_ACTIVITY_KIND_RUNTIME", *row, word("cudaDeviceSynchronize_v3020"))
    for i, (name, thread, start, end) in enumerate(SPANS):
        # Registered strings have an id in the place of a text.
        text = (None, word(name)) if i % 2 else (name, None)
        insert("NVTX_EVENTS", start * US, end * US, 59, *text, process(thread) | thread[1], None)
    # A range of another kind, and one that was never closed: neither is around anything.
    for kind, end in ((60, 500 * US), (59, None)):
        insert("NVTX_EVENTS", 15 * US, end, kind, "no range", None, process(MAIN) | 1, None)
    insert("DIAGNOSTIC_EVENT", 0, diagnostic)
    base.commit()
    base.close()
