"""Every column of the measured tables: its kind and what it means, the same in every section."""

from __future__ import annotations

from dataclasses import dataclass

TEXT, WHOLE, NUMBER, TRUTH = "text", "whole number", "number", "truth value"


@dataclass(frozen=True)
class Column:
    """``kind`` is TEXT, WHOLE (0 or more), NUMBER (0 or more, a result) or TRUTH."""

    kind: str
    meaning: str


COLUMNS = {
    # What was measured.
    "implementation": Column(
        TEXT,
        "`a2lib` (ours), `eager`, `compile`, `sdpa_flash`, `sdpa_cudnn`, `sdpa_efficient`,"
        " `flex`, each forced to be itself; `compiled_backward`: our forward, and a backward of"
        " whole matrices in PyTorch under torch.compile; `tiled` (plain PyTorch) on the CPU;"
        " `by_hand`: eager with the softmax written as a formula; `torch`: PyTorch's own wrapper",
    ),
    "dtype": Column(TEXT, "`bf16`, `fp16`, `fp32`"),
    "batch": Column(WHOLE, "sequences"),
    "heads": Column(WHOLE, "heads of a sequence"),
    "seq_len": Column(WHOLE, "tokens of a sequence"),
    "head_dim": Column(WHOLE, "size of a head"),
    "causal": Column(TRUTH, "`true`, `false`"),
    "pass": Column(TEXT, "`forward`, `backward`, `end_to_end` (both)"),
    "protocol": Column(TEXT, "`burst`, `sustained` or `board`, below"),
    "second": Column(WHOLE, "since the protocol's start, where it is followed over time; else 0"),
    "score_scale": Column(WHOLE, "what q was multiplied by, 1 or 10"),
    "tensor": Column(TEXT, "`o`, `dq`, `dk`, `dv`, or another by its name"),
    "launch": Column(WHOLE, "0, 1, ... for the kernels of a pass, in order"),
    "operation": Column(TEXT, "`matmul` of two square matrices, `copy`, or a collective"),
    "size": Column(
        WHOLE,
        "of a matrix's side; of a copy in bytes read, as many are written; of a collective in bytes"
        " of the whole tensor",
    ),
    "sum_dtype": Column(TEXT, "of the running sum: `bf16`, `fp16`, `fp32`"),
    "addend_dtype": Column(TEXT, "of what is added to it"),
    "cast": Column(TRUTH, "whether the program converts the addend itself: `true`, `false`"),
    "terms": Column(WHOLE, "how many are added"),
    "addend": Column(TEXT, "what is added, before it is rounded to `addend_dtype`"),
    "autocast": Column(TEXT, "`fp16`, `bf16`, or `none`, outside of autocast"),
    "quantity": Column(TEXT, "what was looked at, in words"),
    "setting": Column(
        TEXT,
        "random numbers of variance 1 with a mean of so much (`mean`) or multiplied by so much"
        " (`scale`), or the value of eps",
    ),
    "features": Column(WHOLE, "how many numbers a layer norm normalises"),
    "model": Column(TEXT, "a size by name; `tiny` is the CPU's"),
    "context": Column(WHOLE, "tokens of a sequence"),
    "mode": Column(
        TEXT,
        "`inference` (a forward that keeps nothing), `forward` (that keeps what a backward would"
        " need), `forward-backward`, `train-step` with AdamW, or `overlapped-step`, whose AdamW"
        " runs beside the backward; `block`: forward and backward of one block alone",
    ),
    "precision": Column(
        TEXT,
        "`fp32`, `tf32`, `bf16` (autocast), `bf16_weights` (autocast; the products' weights and"
        " gradients in bf16, with fp32 masters in the optimizer)",
    ),
    "attention": Column(TEXT, "`eager`, `flash` (ours), or another of `python -m a2lib.benchmark`"),
    "compile": Column(TEXT, "what is compiled: `none`, each of the `blocks`, or the whole `model`"),
    "capture": Column(TRUTH, "whether a step is the replay of one CUDA graph"),
    "warmup": Column(WHOLE, "steps before the measured ones"),
    "phase": Column(
        TEXT,
        "`forward`, `loss`, `backward`, `optimizer`, and of the whole step `step` (from the first"
        " phase's start to the last one's end, by the device's clock) and `wall` (from an idle"
        " device to an idle device, by the host's)",
    ),
    "step_number": Column(WHOLE, "0, 1, ... from the process's first on, warm-up included"),
    "prepared": Column(
        TEXT,
        "what the process did before: `nothing`; `modules`, load all kernels with the context; each"
        " of the others with those before it: a `product`, a step of one `block`, taking the"
        " `memory`; `cached`, where compiled: nothing, but the compiler's cache on disk was full",
    ),
    "part": Column(
        TEXT,
        "what was timed: `import` of PyTorch, making the `context`, the preparations (of the block"
        " its first step and its second), then the `first` step, the `second` and a `steady` one",
    ),
    "profiler": Column(
        TEXT, "who traced it: `nsys` (Nsight Systems), or `torch` (torch.profiler, by its trace)"
    ),
    "allocator": Column(
        TEXT,
        "how PyTorch's takes memory: in `blocks` of its own, its default, or `expandable`, in a"
        " range that grows page by page",
    ),
    "written": Column(
        TEXT,
        "how attention is written: `plain` (three dimensions, no mask), `causal` (with a mask), or"
        " `heads` (`plain` with a dimension of one head, which Inductor recognises)",
    ),
    "backend": Column(TEXT, "what carries messages: `gloo` (on the CPU), `nccl` (between GPUs)"),
    "world_size": Column(WHOLE, "processes, and with `nccl` GPUs"),
    "wrapper": Column(
        TEXT,
        "how gradients become their mean: after backward with an all-reduce for each (`naive`) or"
        " one for all (`flat`), during backward each by itself (`overlapped`) or `bucketed`, and"
        " the optimizer's update of each bucket beside the rest (`updating`);"
        " `torch_ddp`, and with `gradient_as_bucket_view` `torch_ddp_view`: PyTorch's; or what"
        " shards the model: `fsdp` (ours), `fsdp2` (PyTorch's `fully_shard`)",
    ),
    "bucket_mb": Column(WHOLE, "the most a bucket holds, in units of 2^20 bytes; 0: no buckets"),
    "carrier": Column(TEXT, "what carries gradients: the `backend`, or `copy_engines`"),
    "sent_dtype": Column(TEXT, "that gradients travel in, `fp32` or `bf16`; they are `fp32`"),
    "optimizer": Column(
        TEXT,
        "AdamW with its state whole on every rank (`plain`), divided by ours (`sharded`) or by"
        " PyTorch's `ZeroRedundancyOptimizer` (`zero`)",
    ),
    "moment": Column(
        TEXT,
        "of a step, the process's first where none is said: `init` (model, wrapper and optimizer"
        " are made), directly `before` and directly `after` the optimizer's step; `forward`, the"
        " end of that, and `peak`, its fullest moment; `step`, the whole of a later one",
    ),
    "on_rank": Column(WHOLE, "of which process, from 0"),
    "scheme": Column(
        TEXT,
        "how layers are spread: `dp` (data), `fsdp`, `tp` (tensor), or `fsdp_tp`, two axes of both",
    ),
    "mesh": Column(TEXT, "ranks along data x ranks along tensor"),
    "d_model": Column(WHOLE, "width of a layer"),
    "d_ff": Column(WHOLE, "width of its hidden"),
    "tokens": Column(WHOLE, "of a batch, over all ranks"),
    "repeat": Column(WHOLE, "0, 1, ...: another process, the same measurement"),
    "layers": Column(
        WHOLE, "blocks, in place of the size's own number; of a stack of alike layers, how many"
    ),
    "strategy": Column(TEXT, "what backward computes again: a name of `a2lib.model.checkpointing`"),
    "way": Column(
        TEXT,
        "to take the step, each with one change to the one before: `recomputed` (PyTorch's FSDP2,"
        " each block computed again, the head in chunks that are too), `attention_kept` (its"
        " results), `fused_head` (ours, nothing of it computed again), `own_fsdp`, `products_kept`"
        " (as many as fit), `offloaded` (to the host what it can take beside the computation),"
        " `own_attention`",
    ),
    "gradients": Column(
        TEXT, "`fresh`: made by the backward; `kept`: there before the step, as zeros"
    ),
    # What came of it.
    "peak_bytes": Column(WHOLE, "peak memory beyond what was allocated on entry"),
    "ms_graph": Column(
        NUMBER,
        "the GPU's own time: median of the same call replayed from a CUDA graph, timed as `ms`;"
        " blank where it cannot be captured (`note` then begins with `no graph:`) and on a CPU",
    ),
    "ms_host": Column(
        NUMBER,
        "the host's own time: median of what it takes to issue one call, without waiting for the"
        " GPU; blank on a CPU",
    ),
    "ms_mean": Column(NUMBER, "mean of the same `n` calls as `ms`"),
    "ms_std": Column(NUMBER, "standard deviation of the same, by n - 1"),
    "ms_min": Column(NUMBER, "the least of them"),
    "ms_event": Column(
        NUMBER, "median of the time between CUDA events around the same calls; blank on a CPU"
    ),
    "held_bytes": Column(
        WHOLE, "what tensors held before the pass, cuBLAS's workspaces apart; blank on a CPU"
    ),
    "kept_bytes": Column(WHOLE, "what forward and loss have left for the backward; blank on a CPU"),
    "ms_forward": Column(NUMBER, "median of the forward of the same steps, by CUDA events"),
    "ms_backward": Column(NUMBER, "median of their backward, which computes again"),
    "saved_bytes": Column(WHOLE, "what autograd saves of it for the backward"),
    "room_bytes": Column(WHOLE, "what was free on the device, by its driver"),
    "tensors_len": Column(WHOLE, "the longest sequence whose tensors fit that"),
    "predicted_len": Column(WHOLE, "the longest for which the allocator should find room"),
    "fits_len": Column(WHOLE, "the longest that ran"),
    "fails_len": Column(WHOLE, "the next one, which did not"),
    "tensor_bytes": Column(
        WHOLE,
        "most that tensors held at once, of the sizes they asked for; on a GPU cuBLAS's workspaces"
        " are in it, 32 MiB a thread on Hopper",
    ),
    "allocated_bytes": Column(
        WHOLE,
        "most that the allocator's blocks held at once: `torch.cuda.max_memory_allocated`; blank"
        " on a CPU",
    ),
    "driver_bytes": Column(
        WHOLE,
        "what the driver says is in use at the end of the step, the CUDA context included; blank"
        " on a CPU",
    ),
    "allocations": Column(WHOLE, "how many tensors the step made"),
    "unexplained_bytes": Column(
        WHOLE, "by how much the allocator's blocks and the recorded history differ at the end"
    ),
    "grown_bytes": Column(
        WHOLE,
        "what the allocator had given out more after the forward, the block's input included and"
        " its output not; blank on a CPU",
    ),
    "gradient_bytes": Column(WHOLE, "of the parameters' gradients"),
    "whole_bytes": Column(
        WHOLE, "of parameters that are whole for the time being; blank for PyTorch's wrapper"
    ),
    "travelling_bytes": Column(
        WHOLE,
        "of whole gradients, as they are made and as they are sent; blank for PyTorch's wrapper",
    ),
    "reserved_bytes": Column(WHOLE, "what PyTorch's allocator held after it; blank on a CPU"),
    "ms_cold": Column(
        NUMBER,
        "the first call, of the model the first step: where something is compiled, with nothing in"
        " the compiler's cache on disk",
    ),
    "ms_warm": Column(NUMBER, "the same in a process that finds that cache full"),
    "kernels_written": Column(WHOLE, "different kernels that Inductor generated"),
    "kernels_called": Column(WHOLE, "how often the generated code calls one of them"),
    "library_calls": Column(WHOLE, "how often it calls a library, for matrix products above all"),
    "attentions": Column(
        WHOLE, "how many of those are an attention that Inductor recognised and replaced"
    ),
    "moved_bytes": Column(
        WHOLE,
        "what all of them read and write by Inductor's count, each operand of a kernel once",
    ),
    "launches": Column(
        WHOLE, "kernels that the GPU ran in one call, by a profiler; blank on a CPU"
    ),
    "ms_timer": Column(NUMBER, "the same by the timer, in a process without a profiler: median"),
    "ms_traced": Column(NUMBER, "the same by the timer, of the steps that were traced: median"),
    "ms_busy": Column(NUMBER, "how long at least one kernel of it ran: median over the steps"),
    "ms_range": Column(NUMBER, "length of its range on the host: median over the steps"),
    "ms_launching": Column(
        NUMBER, "the host's time inside calls that launch a kernel, of the range; blank on a CPU"
    ),
    "ms_waiting": Column(
        NUMBER, "the host's time inside calls that wait for the GPU, of the range; blank for none"
    ),
    "us_queued": Column(
        NUMBER,
        "microseconds from the end of a launch to its kernel's start, median over the kernels: how"
        " far the host was ahead; blank on a CPU",
    ),
    "no_launch_percent": Column(NUMBER, "of kernel time, what has no launch in the trace"),
    "no_range_percent": Column(NUMBER, "of kernel time, what was launched outside of any range"),
    "no_class_percent": Column(NUMBER, "of kernel time, what has a name that no rule knows"),
    "sm_mhz": Column(
        WHOLE,
        "clock of the multiprocessors while `ms` was measured, median of the driver's readings;"
        " blank where it tells none",
    ),
    "power_w": Column(
        NUMBER, "median of the driver's readings, which it averages over about a second"
    ),
    "joules": Column(
        NUMBER,
        "energy that the GPU took a call, by the driver's counter around all of them; blank where"
        " it tells none",
    ),
    "power_limit_w": Column(NUMBER, "the power in watts that the driver keeps the GPU to"),
    "capped_percent": Column(
        NUMBER,
        "of the driver's readings meanwhile, those that say that the clock is kept low for that"
        " limit",
    ),
    "ms_rank_min": Column(
        NUMBER, "each rank has a median over the calls, from its own start: the least of them"
    ),
    "ms_rank_median": Column(NUMBER, "the median of them"),
    "ms_rank_max": Column(NUMBER, "the largest of them"),
    "ms_queued": Column(
        NUMBER,
        "per call of many in a row that the host issues without waiting, by CUDA events around all"
        " of them, on the slowest rank; blank on a CPU",
    ),
    "ms_without": Column(
        NUMBER, "median of the same without communication, measured in turns with `ms`"
    ),
    "ms_without_p20": Column(NUMBER, "its 20 % quantile"),
    "ms_without_p80": Column(NUMBER, "its 80 % quantile"),
    "ms_without_updating": Column(
        NUMBER,
        "and where each weight is updated as soon as its gradient is complete, beside backward, in"
        " turns with both; of `updating` that is captured alone",
    ),
    "ms_communication": Column(
        NUMBER,
        "the same messages with nothing beside them (in `ddp` after backward); blank where there"
        " are none, for PyTorch's wrapper, and for a step that is captured",
    ),
    "ms_data": Column(NUMBER, "of these those along data alone, where both axes have some"),
    "ms_tensor": Column(NUMBER, "and those along tensor"),
    "ms_backward_without": Column(
        NUMBER, "backward of the step without communication; blank for a step that is captured"
    ),
    "ms_waited": Column(
        NUMBER,
        "what the computation waited for all-gathers in a step, median of a few steps with events"
        " around each wait, the most of the ranks; blank for PyTorch's wrapper",
    ),
    "sent_bytes": Column(WHOLE, "of all gradients in the dtype that they travel in"),
    "ms_optimizer": Column(
        NUMBER,
        "the optimizer's step of a launched step, the exchange of its parameters included, which"
        " all ranks start together; the slowest rank's median",
    ),
    "parameter_bytes": Column(WHOLE, "of this rank's parameters"),
    "optimizer_bytes": Column(WHOLE, "of the optimizer's state on this rank"),
    "buffer_bytes": Column(
        WHOLE, "what wrapper and optimizer took when they were made; blank on a CPU"
    ),
    "present_bytes": Column(
        WHOLE, "what tensors ask of the allocator at that moment; blank on a CPU"
    ),
    "reduced_bytes": Column(
        WHOLE, "of the tensors that all-reduces of a step are given, counted from the calls"
    ),
    "gathered_bytes": Column(WHOLE, "of those that its all-gathers end with"),
    "broadcast_bytes": Column(WHOLE, "of those that its broadcasts are given"),
    "conditions": Column(
        TEXT, "the processor and its cores where the CPU sends; switches of NCCL that were set"
    ),
    "ms_ready": Column(
        NUMBER,
        "from an idle process to the end of its first step: making, sharding and compiling the"
        " model, with nothing in the compilers' caches; blank where they were left as they were",
    ),
    "products_again": Column(
        WHOLE,
        "of the five products of each block that a backward wants, how many of all it computes"
        " again; blank where blocks are computed again as a whole",
    ),
    "host_bytes": Column(WHOLE, "of activations that a rank sends to the host in a step"),
    "loss": Column(NUMBER, "of the batch with the weights as they are drawn, mean of the ranks"),
    "gradient_norm": Column(NUMBER, "of all gradients of it, over all ranks"),
    "error": Column(NUMBER, "Frobenius norm of the difference over that of the truth"),
    "error_max": Column(
        NUMBER, "largest absolute difference over the largest absolute value of the truth"
    ),
    "kernel": Column(TEXT, "its name"),
    "device_bytes": Column(WHOLE, "bytes that L2 read and wrote in device memory"),
    "l2_bytes": Column(WHOLE, "bytes that the multiprocessors asked of L2"),
    "tensor_percent": Column(NUMBER, "of what the tensor cores sustain"),
    "exp_percent": Column(NUMBER, "of what the units of the exponentials sustain"),
    "issue_percent": Column(NUMBER, "of the instructions that can be issued"),
    "warps_percent": Column(NUMBER, "of the warps that can be resident"),
    "computed": Column(TEXT, "what came out, in decimals; `inf` and `nan` by name"),
    "truth": Column(TEXT, "what float64 gives"),
    "observed": Column(TEXT, "the dtype it had"),
    "note": Column(TEXT, "the reason where something is missing"),
    # The same in all.
    "status": Column(TEXT, "`ok`, `oom`, `unsupported`, `error`"),
    "ms": Column(NUMBER, "median of the time, in milliseconds"),
    "ms_p20": Column(NUMBER, "its 20 % quantile"),
    "ms_p80": Column(NUMBER, "its 80 % quantile"),
    "n": Column(WHOLE, "how many times it was timed"),
    "run": Column(TEXT, "the row of `runs.csv`"),
}
