"""The registry: every section of the report, each named once.

A section is one table of ``data/measured``: a folder of CSV files, one file per device. The key
columns say what was measured, the value columns what came of it beside the time, and the common
columns are the same in all. Beside its columns it says who measures it (a function that a worker
finds by its name), in which notebook, and which pages show it: make's
notebooks, the tables of data/README.md and the tests over all notebooks and pages are held against
this.
"""

from __future__ import annotations

from a2lib.measure.columns import COLUMNS
from a2lib.measure.section import Section

_SHAPE = ("dtype", "batch", "heads", "seq_len", "head_dim", "causal")
_FLASH = "a2lib.experiments.flash.handlers"

FLASH = Section(
    "flash",
    ("implementation", *_SHAPE, "pass"),
    ("peak_bytes", "ms_graph", "ms_host", "sm_mhz", "note"),
    handler=f"{_FLASH}:compare",
    notebook="flash",
    pages=("flash", "flash-derivation", "flash-shapes"),
)

FLASH_PROTOCOL = Section(
    "flash_protocol",
    ("protocol", "implementation", *_SHAPE, "pass", "second"),
    ("ms_mean", "sm_mhz", "power_w", "note"),
    handler=f"{_FLASH}:protocol",
    notebook="flash",
    pages=("flash",),
)

FLASH_ACCURACY = Section(
    "flash_accuracy",
    ("implementation", *_SHAPE, "score_scale", "tensor"),
    ("error", "error_max", "note"),
    timed=False,
    handler=f"{_FLASH}:error",
    notebook="flash",
    pages=("flash", "flash-shapes"),
)

FLASH_COUNTERS = Section(
    "flash_counters",
    ("implementation", *_SHAPE, "pass", "launch"),
    ("kernel", "device_bytes", "l2_bytes", "tensor_percent", "exp_percent", "issue_percent")
    + ("warps_percent", "note"),
    timed=False,
    handler=f"{_FLASH}:count",
    notebook="flash",
    pages=("flash",),
)

CEILING = Section(
    "ceiling",
    ("operation", "dtype", "size"),
    ("sm_mhz", "note"),
    handler="a2lib.experiments.ceilings:measure",
    notebook="flash",
    pages=("flash",),
)

_MIXED = "a2lib.experiments.mixed_precision.handlers"

ACCUMULATION = Section(
    "accumulation",
    ("sum_dtype", "addend_dtype", "cast", "terms", "addend"),
    ("computed", "note"),
    timed=False,
    handler=f"{_MIXED}:accumulate",
    notebook="mixed_precision",
    pages=("mixed_precision",),
)

AUTOCAST_DTYPES = Section(
    "autocast_dtypes",
    ("autocast", "quantity"),
    ("observed", "note"),
    timed=False,
    handler=f"{_MIXED}:observe",
    notebook="mixed_precision",
    pages=("mixed_precision",),
)

LAYERNORM = Section(
    "layernorm",
    ("quantity", "setting", "dtype", "features"),
    ("computed", "truth", "note"),
    timed=False,
    handler=f"{_MIXED}:normalise",
    notebook="mixed_precision",
    pages=("mixed_precision",),
)

_CONFIGURATION = ("model", "context", "batch", "mode", "precision", "attention")
_CONFIGURATION += ("compile", "capture")
_BENCHMARK = "a2lib.experiments.benchmark.handlers"

BENCHMARK = Section(
    "benchmark",
    (*_CONFIGURATION, "warmup", "phase"),
    ("ms_mean", "ms_std", "ms_min", "ms_host", "peak_bytes", "note"),
    handler=f"{_BENCHMARK}:summary",
    notebook="benchmark",
    pages=("benchmark", "last-20-ms", "mixed_precision"),
)

BENCHMARK_STEPS = Section(
    "benchmark_steps",
    (*_CONFIGURATION, "warmup", "step_number", "phase"),
    ("reserved_bytes", "note"),
    handler=f"{_BENCHMARK}:steps",
    notebook="benchmark",
    pages=("benchmark", "last-20-ms"),
)

BENCHMARK_FIRST = Section(
    "benchmark_first",
    (*_CONFIGURATION, "prepared", "repeat", "part"),
    ("note",),
    handler=f"{_BENCHMARK}:first",
    notebook="benchmark",
    pages=("last-20-ms",),
)

BENCHMARK_POWER = Section(
    "benchmark_power",
    _CONFIGURATION,
    ("ms_mean", "joules", "power_limit_w", "capped_percent", "sm_mhz", "note"),
    handler=f"{_BENCHMARK}:power",
    notebook="benchmark",
    pages=("last-20-ms",),
)

PROFILE = Section(
    "profile",
    ("model", "context", "batch", "mode", "precision", "attention", "compile", "profiler")
    + ("phase",),
    ("ms_timer", "ms_traced", "ms_busy", "ms_range", "ms_host", "ms_launching", "ms_waiting")
    + ("us_queued", "launches", "no_launch_percent", "no_range_percent", "no_class_percent")
    + ("note",),
    handler="a2lib.experiments.profile.handlers:measure",
    notebook="profile",
    pages=("profile", "profile-kernels"),
)

_PLAIN = ("implementation", "dtype", "batch")
_ATTENTION = "a2lib.experiments.attention.handlers"

ATTENTION = Section(
    "attention",
    (*_PLAIN, "seq_len", "head_dim", "causal", "pass"),
    ("ms_mean", "ms_std", "ms_min", "ms_event", "ms_graph", "ms_host", "held_bytes")
    + ("peak_bytes", "note"),
    handler=f"{_ATTENTION}:passes",
    notebook="attention",
    pages=("attention",),
)

ATTENTION_SAVED = Section(
    "attention_saved",
    (*_PLAIN, "seq_len", "head_dim", "causal", "tensor"),
    ("saved_bytes", "note"),
    timed=False,
    handler=f"{_ATTENTION}:saved",
    notebook="attention",
    pages=("attention",),
)

ATTENTION_LIMIT = Section(
    "attention_limit",
    (*_PLAIN, "head_dim", "causal", "pass", "allocator"),
    ("room_bytes", "tensors_len", "predicted_len", "fits_len", "fails_len", "note"),
    timed=False,
    handler="a2lib.experiments.attention.limits:limit",
    notebook="attention",
    pages=("attention",),
)

_COST = ("ms_cold", "ms_warm", "kernels_written", "kernels_called", "library_calls", "attentions")
_COST += ("moved_bytes",)
_COMPILE = "a2lib.experiments.compile"

COMPILE_ATTENTION = Section(
    "compile_attention",
    ("implementation", "written", "dtype", "batch", "seq_len", "head_dim", "pass"),
    ("peak_bytes", "ms_graph", "ms_host", "sm_mhz", "launches", *_COST, "note"),
    handler=f"{_COMPILE}.attention:measure",
    notebook="compile",
    pages=("compile",),
)

COMPILE_MODEL = Section(
    "compile_model",
    ("model", "context", "batch", "mode", "precision", "attention", "compile", "phase"),
    ("ms_mean", "ms_std", "ms_min", "ms_host", "peak_bytes", *_COST, "note"),
    handler=f"{_COMPILE}.model:measure",
    notebook="compile",
    pages=("compile",),
)

_STEP = ("model", "context", "batch", "mode", "precision", "attention")
_MEMORY = "a2lib.experiments.memory.handlers"

MEMORY = Section(
    "memory",
    (*_STEP, "step_number", "phase"),
    ("tensor_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes", "note"),
    timed=False,
    handler=f"{_MEMORY}:peaks",
    notebook="memory",
    pages=("memory",),
)

MEMORY_RECORDING = Section(
    "memory_recording",
    (*_STEP, "step_number"),
    ("tensor_bytes", "allocations", "unexplained_bytes", "note"),
    timed=False,
    handler=f"{_MEMORY}:recording",
    notebook="memory",
    pages=("memory",),
)

MEMORY_BLOCK = Section(
    "memory_block",
    ("model", "context", "batch", "precision", "attention"),
    ("saved_bytes", "grown_bytes", "gradient_bytes", "note"),
    timed=False,
    handler=f"{_MEMORY}:block",
    notebook="memory",
    pages=("memory",),
)

CHECKPOINTING = Section(
    "checkpointing",
    ("model", "layers", "context", "batch", "precision", "attention", "strategy", "gradients"),
    ("ms_forward", "ms_backward", "held_bytes", "kept_bytes", "peak_bytes", "reserved_bytes")
    + ("note",),
    handler="a2lib.experiments.checkpointing.handlers:measure",
    notebook="checkpointing",
    pages=("checkpointing",),
)

COLLECTIVES = Section(
    "collectives",
    ("operation", "backend", "world_size", "dtype", "size"),
    ("ms_rank_min", "ms_rank_median", "ms_rank_max", "ms_queued", "conditions", "note"),
    handler="a2lib.experiments.collectives.handlers:measure",
    notebook="collectives",
    pages=("collectives",),
)


DDP = Section(
    "ddp",
    ("wrapper", "bucket_mb", "carrier", "sent_dtype", "model", "batch", "context", "precision")
    + ("attention", "compile", "capture", "backend", "world_size"),
    ("ms_without", "ms_without_p20", "ms_without_p80", "ms_without_updating", "ms_communication")
    + ("ms_backward_without", "ms_host", "ms_rank_min", "ms_rank_median", "ms_rank_max")
    + ("sent_bytes", "conditions", "note"),
    handler="a2lib.experiments.ddp.handlers:measure",
    notebook="ddp",
    pages=("ddp",),
)

_SHARDING = ("optimizer", "wrapper", "bucket_mb", "carrier", "model", "batch", "context")

SHARDED_OPTIMIZER = Section(
    "sharded_optimizer",
    (*_SHARDING, "precision", "attention", "compile", "capture", "backend", "world_size"),
    ("ms_without", "ms_without_p20", "ms_without_p80", "ms_optimizer", "ms_host")
    + ("ms_rank_min", "ms_rank_median", "ms_rank_max", "conditions", "note"),
    handler="a2lib.experiments.sharded_optimizer.handlers:measure",
    notebook="sharded_optimizer",
    pages=("sharded_optimizer",),
)

SHARDED_OPTIMIZER_MEMORY = Section(
    "sharded_optimizer_memory",
    (*_SHARDING, "precision", "attention", "compile", "backend", "world_size", "moment", "on_rank"),
    ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "present_bytes")
    + ("tensor_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes")
    + ("reduced_bytes", "gathered_bytes", "broadcast_bytes", "note"),
    timed=False,
    handler="a2lib.experiments.sharded_optimizer.memory:measure",
    notebook="sharded_optimizer",
    pages=("sharded_optimizer",),
)

_SHARDED = ("model", "batch", "context", "precision", "attention", "compile")
_FSDP = "a2lib.experiments.fsdp.handlers"

FSDP = Section(
    "fsdp",
    ("wrapper", *_SHARDED, "capture", "backend", "world_size"),
    ("ms_without", "ms_without_p20", "ms_without_p80", "ms_waited", "ms_host")
    + ("ms_rank_min", "ms_rank_median", "ms_rank_max", "conditions", "note"),
    handler=f"{_FSDP}:measure",
    notebook="fsdp",
    pages=("fsdp",),
)

FSDP_MEMORY = Section(
    "fsdp_memory",
    ("wrapper", *_SHARDED, "backend", "world_size", "step_number", "moment"),
    ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "whole_bytes")
    + ("travelling_bytes", "present_bytes", "tensor_bytes", "allocated_bytes")
    + ("reserved_bytes", "driver_bytes", "note"),
    timed=False,
    handler=f"{_FSDP}:memory",
    notebook="fsdp",
    pages=("fsdp",),
)

PARALLELISM = Section(
    "parallelism",
    ("scheme", "implementation", "mesh", "backend", "world_size", "dtype", "layers", "d_model")
    + ("d_ff", "tokens", "pass"),
    ("ms_without", "ms_without_p20", "ms_without_p80", "ms_communication", "ms_data", "ms_tensor")
    + ("conditions", "note"),
    handler="a2lib.experiments.parallelism.handlers:measure",
    notebook="parallelism",
    pages=("parallelism-measured",),
)

LEADERBOARD = Section(
    "leaderboard",
    ("way", "model", "layers", "batch", "context", "attention", "dtype", "backend", "world_size"),
    ("ms_mean", "ms_min", "ms_forward", "ms_backward", "ms_optimizer", "ms_ready")
    + ("allocated_bytes", "reserved_bytes", "kept_bytes", "host_bytes", "products_again", "loss")
    + ("gradient_norm", "conditions", "note"),
    handler="a2lib.experiments.leaderboard.handlers:measure",
    notebook="leaderboard",
)

SECTIONS = {
    s.name: s
    for s in (
        *(FLASH, FLASH_PROTOCOL, FLASH_ACCURACY, FLASH_COUNTERS, CEILING),
        *(BENCHMARK, BENCHMARK_STEPS, BENCHMARK_FIRST, BENCHMARK_POWER, PROFILE),
        *(ACCUMULATION, AUTOCAST_DTYPES, LAYERNORM),
        *(ATTENTION, ATTENTION_SAVED, ATTENTION_LIMIT),
        *(COMPILE_ATTENTION, COMPILE_MODEL, CHECKPOINTING, COLLECTIVES, DDP),
        *(SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY),
        *(MEMORY, MEMORY_RECORDING, MEMORY_BLOCK),
        *(FSDP, FSDP_MEMORY),
        *(PARALLELISM, LEADERBOARD),
    )
}

# Pages that derive and measure nothing.
DERIVED = ("parallelism", "communication", "sequence-parallelism", "parallelism-axes",
           "layout-405b", "calculator")  # fmt: skip


def notebooks() -> tuple[str, ...]:
    """The names of the notebooks that measure a section, each once."""
    return tuple(dict.fromkeys(s.notebook for s in SECTIONS.values()))


def of_notebook(notebook: str) -> tuple[Section, ...]:
    """The sections that ``notebook`` measures."""
    return tuple(s for s in SECTIONS.values() if s.notebook == notebook)


def pages() -> tuple[str, ...]:
    """The pages of the book about sections, each once, and those that derive."""
    measured = (page for s in SECTIONS.values() for page in s.pages)
    return tuple(dict.fromkeys((*measured, *DERIVED)))


def readme_table(section: Section) -> str:
    """The columns of ``section`` as data/README.md has them: the key, then the values."""
    lines = ["| column | meaning |", "|---|---|"]
    for column in (*section.key, *section.values):
        key = " (key)" if column in section.key else ""
        lines.append(f"| `{column}`{key} | {COLUMNS[column].meaning} |")
    return "\n".join(lines)
