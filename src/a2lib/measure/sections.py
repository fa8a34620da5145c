"""The registry: every section of the report, each named once.

A section is one table of ``data/measured``: a folder of CSV files, one file per device. The key
columns say what was measured, the value columns what came of it beside the time, and the common
columns are the same in all. Beside its columns it says who measures it (a function that a worker
finds by its name), in which notebook, which pages show it and which questions it answers: make's
notebooks, the index of questions, the tables of data/README.md and the tests over all notebooks and
pages are held against this.
"""

from __future__ import annotations

from a2lib.measure.columns import COLUMNS
from a2lib.measure.section import Answer, Section

_SHAPE = ("dtype", "batch", "heads", "seq_len", "head_dim", "causal")
_FLASH = "a2lib.experiments.flash.handlers"

FLASH = Section(
    "flash",
    ("implementation", *_SHAPE, "pass"),
    ("peak_bytes", "ms_graph", "ms_host", "sm_mhz", "note"),
    handler=f"{_FLASH}:compare",
    notebook="flash",
    pages=("flash", "flash-derivation", "flash-why", "flash-shapes", "flash-published"),
    answers=(
        Answer("flash_forward (a)–(c) · 25, 26", "The forward pass", "flash-forward"),
        Answer("flash_backward · 25, 26", "The backward pass", "flash-backward"),
        Answer("flash_benchmarking · 25, 26", "The benchmark", "flash-benchmarking"),
        Answer("leaderboard · 25", "The leaderboard's shape", "flash-leaderboard"),
    ),
)

FLASH_PROTOCOL = Section(
    "flash_protocol",
    ("protocol", "implementation", *_SHAPE, "pass", "second"),
    ("ms_mean", "sm_mhz", "power_w", "note"),
    handler=f"{_FLASH}:protocol",
    notebook="flash",
    pages=("flash", "flash-shapes"),
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
    pages=("flash", "flash-why"),
)

CEILING = Section(
    "ceiling",
    ("operation", "dtype", "size"),
    ("sm_mhz", "note"),
    handler="a2lib.experiments.ceilings:measure",
    notebook="flash",
    pages=("flash", "flash-why"),
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
    answers=(
        Answer(
            "mixed_precision_accumulation · 25, 26",
            "Sums of small numbers",
            "mixed-precision-accumulation",
        ),
    ),
)

AUTOCAST_DTYPES = Section(
    "autocast_dtypes",
    ("autocast", "quantity"),
    ("observed", "note"),
    timed=False,
    handler=f"{_MIXED}:observe",
    notebook="mixed_precision",
    pages=("mixed_precision",),
    answers=(
        Answer(
            "benchmarking_mixed_precision (a) · 25, 26",
            "Dtypes under autocast",
            "mixed-precision-dtypes",
        ),
    ),
)

LAYERNORM = Section(
    "layernorm",
    ("quantity", "setting", "dtype", "features"),
    ("computed", "truth", "note"),
    timed=False,
    handler=f"{_MIXED}:normalise",
    notebook="mixed_precision",
    pages=("mixed_precision",),
    answers=(
        Answer(
            "benchmarking_mixed_precision (b) · 25, 26",
            "What layer norm needs",
            "mixed-precision-layernorm",
        ),
    ),
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
    pages=("benchmark", "mixed_precision"),
    answers=(
        Answer("benchmarking_script (a) · 25, 26", "The command", "benchmark-command"),
        Answer("benchmarking_script (b) · 25, 26", "Every size and context", "benchmark-table"),
        Answer(
            "benchmarking_mixed_precision (c) · 25, 26",
            "The gain by model size",
            "mixed-precision-speed",
        ),
    ),
)

BENCHMARK_STEPS = Section(
    "benchmark_steps",
    (*_CONFIGURATION, "warmup", "step_number", "phase"),
    ("reserved_bytes", "note"),
    handler=f"{_BENCHMARK}:steps",
    notebook="benchmark",
    pages=("benchmark",),
    answers=(Answer("benchmarking_script (c) · 25, 26", "Warm-up", "benchmark-warmup"),),
)

BENCHMARK_FIRST = Section(
    "benchmark_first",
    (*_CONFIGURATION, "prepared", "repeat", "part"),
    ("note",),
    handler=f"{_BENCHMARK}:first",
    notebook="benchmark",
    pages=("benchmark",),
)

BENCHMARK_POWER = Section(
    "benchmark_power",
    _CONFIGURATION,
    ("ms_mean", "joules", "power_limit_w", "capped_percent", "sm_mhz", "note"),
    handler=f"{_BENCHMARK}:power",
    notebook="benchmark",
    pages=("benchmark",),
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
    answers=(Answer("nsys_profile (a)–(e) · 25, 26", "A step, kernel by kernel", "nsys-profile"),),
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
    answers=(
        Answer("pytorch_attention · 25, 26", "Attention in plain PyTorch", "pytorch-attention"),
    ),
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
    answers=(Answer("torch_compile (a), (b) · 25, 26", "torch.compile", "torch-compile"),),
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
    pages=("memory", "memory-published"),
    answers=(
        Answer("memory_profiling (a)–(e) · 25, 26", "Where the memory goes", "memory-profiling"),
    ),
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
    pages=("memory-block",),
    answers=(Answer("memory_profiling (f) · 26", "What one block keeps", "memory-of-a-block"),),
)

CHECKPOINTING = Section(
    "checkpointing",
    ("model", "layers", "context", "batch", "precision", "attention", "strategy", "gradients"),
    ("ms_forward", "ms_backward", "held_bytes", "kept_bytes", "peak_bytes", "reserved_bytes")
    + ("note",),
    handler="a2lib.experiments.checkpointing.handlers:measure",
    notebook="checkpointing",
    pages=("checkpointing",),
    answers=(
        Answer("gradient_checkpointing (a), (b) · 26", "Checkpointing", "gradient-checkpointing"),
    ),
)

COLLECTIVES = Section(
    "collectives",
    ("operation", "backend", "world_size", "dtype", "size"),
    ("ms_rank_min", "ms_rank_median", "ms_rank_max", "ms_queued", "conditions", "note"),
    handler="a2lib.experiments.collectives.handlers:measure",
    notebook="collectives",
    pages=("collectives",),
    answers=(
        Answer(
            "distributed_communication_single_node · 25, 26",
            "Collectives on one node",
            "collectives-one-node",
        ),
        Answer("ddp_bucketed_benchmarking (b) · 25", "The best bucket", "bucket-size"),
    ),
)

_DDP_BENCHMARK = "ddp_overlap_individual_parameters_benchmarking (a), (b) · 25, 26"

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
    answers=(
        Answer("naive_ddp · 25, 26", "One all-reduce a parameter", "ddp-naive"),
        Answer("naive_ddp_benchmarking · 25, 26", "One all-reduce a parameter", "ddp-naive"),
        Answer("minimal_ddp_flat_benchmarking · 25, 26", "One all-reduce in all", "ddp-flat"),
        Answer("ddp_overlap_individual_parameters · 25, 26", "During backward", "ddp-overlap"),
        Answer(_DDP_BENCHMARK, "During backward", "ddp-overlap"),
        Answer("ddp_overlap_bucketed · 25", "In buckets", "ddp-buckets"),
        Answer("ddp_bucketed_benchmarking (a) · 25", "In buckets", "ddp-buckets"),
    ),
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
    answers=(
        Answer("optimizer_state_sharding · 25, 26", "How it works", "sharding-how"),
        Answer(
            "optimizer_state_sharding_accounting (b) · 25, 26", "A step's time", "sharding-time"
        ),
        Answer(
            "optimizer_state_sharding_accounting (c) · 25, 26",
            "Against ZeRO's first stage",
            "sharding-zero",
        ),
    ),
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
    answers=(
        Answer("optimizer_state_sharding_accounting (a) · 25, 26", "Memory", "sharding-memory"),
    ),
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
    answers=(
        Answer("fsdp · 26", "Fully sharded data parallel", "fsdp-chapter"),
        Answer("fsdp_accounting (a) · 26", "What a rank holds", "fsdp-memory"),
        Answer("fsdp_accounting (b) · 26", "In time?", "fsdp-gathers"),
    ),
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
        PARALLELISM,
    )
}

# Pages that derive and measure nothing, and the questions they answer.
DERIVED = {
    "parallelism": (
        Answer("alternate_ring_all_reduce · 26", "The other ring", "parallelism-ring"),
        Answer("data_parallel_calcs · 26", "Data parallelism", "parallelism-data"),
        Answer("fsdp_calcs · 26", "Fully sharded", "parallelism-fsdp"),
        Answer("tp_calcs · 26", "Tensor parallelism", "parallelism-tensor"),
        Answer("fsdp_tp_calcs · 26", "Both axes", "parallelism-mesh"),
    ),
    "communication": (
        Answer(
            "communication_accounting (a)–(d) · 25",
            "A model of 220 billion parameters",
            "communication-accounting",
        ),
    ),
    "parallelism-axes": (),
    "calculator": (),
}


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


def answers() -> dict[str, Answer]:
    """The label of each question that is answered -> its answer."""
    measured = (s.answers for s in SECTIONS.values())
    return {answer.label: answer for group in (*measured, *DERIVED.values()) for answer in group}


def readme_table(section: Section) -> str:
    """The columns of ``section`` as data/README.md has them: the key, then the values."""
    lines = ["| column | meaning |", "|---|---|"]
    for column in (*section.key, *section.values):
        key = " (key)" if column in section.key else ""
        lines.append(f"| `{column}`{key} | {COLUMNS[column].meaning} |")
    return "\n".join(lines)
