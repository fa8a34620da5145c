"""Traces that a person can add up, in both forms: which kernel belongs where, and what is said of
files that are none."""

import gzip
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from profiles import make
from refusals import refused

from a2lib.lab import trace
from a2lib.lab.trace.classes import KINDS, kind_of, plain, shorten
from a2lib.lab.trace.kernels import Span, attribute, covered_ns
from a2lib.lab.trace.summary import PhaseTimes

HERE = Path(make.__file__).parent
BOTH = ["report.sqlite", "gpu_trace.json"]
# name, start and duration in us, phase, range, kind. The first event is the step's, at 0.
WANT = [
    ("nvjet", 100, 100, "forward", "layers.0.attn.q_proj", "matmul"),
    ("mystery", 120, 20, "", "", "other"),
    ("void (anony", 210, 50, "forward", "layers.0.attn.attention.softmax", "softmax"),
    ("Memcpy", 270, 10, "forward", "forward", "copy"),
    ("nvjet", 500, 100, "backward", "layers.0.attn.q_proj.bwd", "matmul"),
    ("nvjet", 610, 50, "backward", "backward", "matmul"),
    ("void at::na", 800, 40, "optimizer", "optimizer", "optimizer"),
    ("Memset", 960, 5, "step 0", "step 0", "copy"),
    ("nvjet", 1000, 25, "no launch", "", "matmul"),
]


@pytest.fixture(params=BOTH)
def found(request):
    return trace.read(HERE / request.param)


def test_each_kernel_is_where_its_launch_was(found):
    assert len(found.kernels) == len(WANT)
    for kernel, (name, start, duration, phase, range_, kind) in zip(
        found.kernels, WANT, strict=True
    ):
        assert kernel.name.startswith(name)
        assert (kernel.start_ns, kernel.duration_ns) == (start * 1000, duration * 1000)
        assert (kernel.phase, kernel.range, kernel.kind) == (phase, range_, kind), name

    # Launched by another thread, inside the phase that the main one is in.
    (in_backward,) = (k for k in found.kernels if k.range == "layers.0.attn.q_proj.bwd")
    assert in_backward.path == ("step 0", "backward", "layers.0.attn.q_proj.bwd")
    assert in_backward.part == "attn.q_proj" and in_backward.step == "step 0"
    assert in_backward.launch.thread != found.kernels[0].launch.thread


def test_what_could_not_be_filed(found):
    said = trace.coverage(found.kernels)
    assert (said.no_launch, said.no_range, said.no_class) == (25 / 400, 20 / 400, 20 / 400)
    assert said.unknown == ("mystery_kernel",)


def test_overlap_counts_once(found):
    assert trace.busy(found.kernels) == (925_000, 380_000)  # 100 to 1025; 400 less 20 at once
    assert trace.busy([]) == (0, 0)
    assert covered_ns([(7, 8), (0, 10), (30, 31), (5, 20)]) == 21  # one within, one half within


def test_each_phase_by_the_gpu_and_by_the_host(found):
    (phases,) = trace.phase_times(found).values()
    assert list(phases) == ["forward", "backward", "optimizer", "step"]
    assert {step: len(kernels) for step, kernels in found.steps().items()} == {"step 0": 7}
    # From 100 to 280, 160 of work, launched in 190 by three calls of 5; they waited 65, 135, 115.
    assert phases["forward"] == PhaseTimes(3, 180_000, 160_000, 190_000, 15_000, 0, 115_000)
    assert phases["backward"] == PhaseTimes(2, 160_000, 150_000, 300_000, 10_000, 0, 160_000)
    step = phases["step"]
    assert (step.kernels, step.span_ns, step.busy_ns) == (7, 865_000, 355_000)
    assert (step.range_ns, step.launching_ns, step.waiting_ns) == (1_000_000, 35_000, 25_000)


PATHS = [
    (("step 0", "backward", "layers.0"), "backward", "step 0", "block"),
    (("step 1",), "step 1", "step 1", "step 1"),
    (("ProfilerStep#3", "mine", "inner"), "mine", "ProfilerStep#3", "inner"),
    # A library's own range names neither.
    (("ProfilerStep#3", "Optimizer.step#Adam"), "ProfilerStep#3", *["ProfilerStep#3"] * 2),
    (("step 0", "backward", "cub::Unique"), "backward", "step 0", "backward"),
    (("layers.3.ffn.bwd", "cub::DeviceScan"), "layers.3.ffn.bwd", "", "ffn"),
    (("thrust::sort",), "thrust::sort", "", "thrust::sort"),
    ((), "", "", ""),
]


@pytest.mark.parametrize(("path", "phase", "step", "part"), PATHS)
def test_phase_step_and_part_are_what_the_program_says(path, phase, step, part):
    kernel = trace.Kernel("k", 0, "7", 0, 1, Span("", (1, 1), 0, 1), path)
    assert (kernel.phase, kernel.step, kernel.part) == (phase, step, part)


def test_rows_of_a_step_keep_the_sum(found):
    rows = trace.kernel_rows(found.kernels, least_share=0.06)
    assert sum(row["ms"] for row in rows) == pytest.approx(0.4)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sum(row["calls"] for row in rows) == 9
    rest = [row for row in rows if row["kernel"] == "rest"]
    assert {row["kind"] for row in rest} == {"other", "copy"}
    (softmax,) = (row for row in rows if row["kind"] == "softmax")
    assert softmax["kernel"] == "softmax_warp_forward<float, float, 9, false, false>"


def test_a_strip_has_the_window_and_the_launches(found):
    rows = trace.strip_rows(found.kernels, start_ns=90_000, length_ns=190_000)
    shown = [(r["start_us"], r["duration_us"], r["stream"], r["kind"]) for r in rows]
    assert shown == [
        (10, 100, "7", "matmul"),
        (20, 5, "host", "other"),
        (30, 20, "14", "other"),
        (60, 5, "host", "copy"),
        (120, 50, "7", "softmax"),
        (180, 10, "7", "copy"),
    ]
    assert len(trace.strip_rows(found.kernels, rows=3)) == 3


def test_neighbours_of_a_kind_are_one_row_unless_something_is_between():
    def kernel(start, name="nvjet"):
        return trace.Kernel(name, 0, "7", start, 1000)

    near = [kernel(0), kernel(2500), kernel(8000)]
    assert [r["duration_us"] for r in trace.strip_rows(near)] == [3.5, 1]
    between = [kernel(0), kernel(1000, "softmax"), kernel(2000)]
    assert [r["kind"] for r in trace.strip_rows(between)] == ["matmul", "softmax", "matmul"]


def test_the_sweep_agrees_with_looking_at_every_range():
    spans = [Span(f"{a}-{b}", (1, 1), a, b) for a in range(0, 40, 3) for b in (a + 2, a + 9)]
    # Ranges of one thread nest; of those above, each pair that crosses is left out.
    crossing = [s for s in spans for o in spans if o.start_ns < s.start_ns < o.end_ns < s.end_ns]
    spans = [s for s in spans if s not in crossing]
    kernels = [trace.Kernel("k", 0, "7", 0, 1, Span("", (1, 1), at, at + 1)) for at in range(45)]
    attribute(kernels, spans)
    for kernel in kernels:
        at = kernel.launch.start_ns
        around = [s for s in spans if s.start_ns <= at < s.end_ns]
        around.sort(key=lambda s: (s.start_ns, -s.end_ns))
        assert kernel.path == tuple(s.name for s in around), at


@pytest.mark.parametrize("name", make.MADE)
def test_the_committed_files_are_those_of_the_script(name, tmp_path):
    make.MADE[name](tmp_path / name)
    if name.endswith(".sqlite"):
        dumps = [list(sqlite3.connect(folder / name).iterdump()) for folder in (tmp_path, HERE)]
        assert dumps[0] == dumps[1]
    else:
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


def test_a_real_trace_of_a_cpu_has_operators_for_kernels():
    found = trace.read(HERE / "cpu_trace.json.gz")
    assert found.source == "chrome, cpu"
    products = [k for k in found.kernels if k.kind == "matmul"]
    # One block and the head: 7 + 2 + 1 products, and two for each in backward.
    assert [sum(k.phase == p for k in products) for p in ("forward", "backward")] == [10, 20]
    by_part = Counter((k.phase, k.part) for k in products)
    assert by_part["forward", "attn.attention.scores"] == 1
    assert by_part["backward", "attn.attention.scores"] == 2
    assert by_part["backward", "ffn.w2"] == 2
    said = trace.coverage(found.kernels)
    assert said.no_launch == said.no_class == 0
    assert {k.kind for k in found.kernels if k.phase == "optimizer"} >= {"optimizer"}


ATTENTION = Path(trace.__file__).parents[2] / "attention"
OUR_ATTENTION = {
    name
    for path in ATTENTION.glob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.M)
}
NAMES = {
    "matmul": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNN", "ampere_sgemm_128x64_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(int)", "triton_tem_fused_mm",
        "void gemv2T_kernel_val<int, int, float, float>(int)", "aten::bmm", "aten::addmm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>()",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(AttentionKernel<cutlass::arch::Sm80>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
        *OUR_ATTENTION, "triton_tem_fused_flex_attention_1",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "softmax": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)",
        "void (anonymous namespace)::softmax_warp_backward<float, 9>(float*)", "aten::_softmax",
    ],
    "loss": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>()",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>()",
    ],
    "normalisation": ["void at::native::vectorized_layer_norm_kernel<float, float>(int)"],
    "reduction": ["void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>(R)"],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>(int)",
        "void at::native::unrolled_elementwise_kernel<CUDAFunctor_add<float>>(int)", "aten::mul",
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(TensorIterator&)>()",
        "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2>(float*)",
        "Memcpy HtoD (Pageable -> Device)", "Memset (Device)",
    ],
    "optimizer": [make.ADAM, "aten::_fused_adamw_", "aten::_foreach_add_", "adamw"],
    "embedding": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>(long*)",
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy>(int)",
        "void at_cuda_detail::cub::detail::unique_by_key::DeviceUniqueByKeySweepKernel<Policy>()",
        "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<Policy, int *>(int)",
        "cub::DeviceSelect::UniqueByKey",
    ],
    "fused": ["triton_poi_fused_add_mul_3", "triton_red_fused__to_copy_mean_pow_rsqrt_0"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)",
                      "Memcpy PtoP (Device -> Device)", "_mean_kernel",
                      "c10d::symmetric_memory::barrier_kernel(unsigned int **, int, int)"],
    "other": ["some_kernel"],
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_and_their_classes(kind):
    assert {name: kind_of(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)
    assert set(NAMES) == set(KINDS)


# The same kernel as Nsight Systems and as torch.profiler has it, and in a table.
SAME = [
    ("void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel<"
     "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor"
     "<float>>>>(int, T3)",
     "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel<at::native::BinaryFunctor"
     "<float, float, float, at::native::binary_internal::MulFunctor<float>>>>(int, T3)",
     "elementwise_kernel<128, 2, gpu_kernel<BinaryFunctor<float, float, float, MulFunctor"
     "<float>>>>"),
    ("void <unnamed>::nll_loss<float>(float *)", "void (anonymous namespace)::nll_loss<float>(f)",
     "nll_loss<float>"),
]  # fmt: skip


@pytest.mark.parametrize(("nsys", "torch", "want"), SAME)
def test_names_are_the_same_from_both_profilers(nsys, torch, want):
    assert shorten(nsys) == shorten(torch) == want
    assert plain(want) == want


def broken_sqlite(statement):
    def write(path):
        shutil.copy(HERE / "report.sqlite", path)
        base = sqlite3.connect(path)
        base.executescript(statement)
        base.commit()
        base.close()

    return write


def written(content):
    return lambda path: path.write_bytes(content)


KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
BROKEN = {
    "no kernels": (broken_sqlite(f"drop table {KERNEL}"), "no kernel was traced; the tables are"),
    "a column": (broken_sqlite(f"alter table {RUNTIME} drop column globalTid"), "lacks globalTid"),
    "no name": (broken_sqlite("delete from StringIds"), "an event without time or name"),
    "backwards": (broken_sqlite(f"update {KERNEL} set end = start - 1"), "ends before it starts"),
    "cut": (written((HERE / "report.sqlite").read_bytes()[:900]), "no SQLite export of Nsight"),
    "a report": (written(b"\x00\x01nsys-rep"), "neither an SQLite export nor JSON"),
    "not exported": (written(b"\x00\x01nsys"), "what `nsys export --type sqlite x.nsys-rep` makes"),
    "packed": (written(gzip.compress(b"{}")[:-9]), "neither an SQLite export nor JSON"),
    "other JSON": (written(b'{"a": 1}'), "it lacks 'traceEvents'"),
    "no event": (written(b'{"traceEvents": []}'), "no kernel and no operator was traced"),
    "numbers": (written(b"[1, 2]"), "no chrome trace of torch.profiler"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_trace_is_one_line(what, tmp_path):
    write, words = BROKEN[what]
    path = tmp_path / ("x.nsys-rep" if what == "not exported" else "x")
    write(path)
    raised = refused(words, trace.read, path, error=trace.TraceError)
    assert str(raised).startswith(str(path))
    assert raised._render_traceback_() == [f"TraceError: {raised}"]


def test_tables_that_would_be_empty_are_missing(tmp_path):
    path = tmp_path / "x.sqlite"
    broken_sqlite("drop table CUPTI_ACTIVITY_KIND_MEMSET; drop table NVTX_EVENTS")(path)
    found = trace.read(path)
    assert len(found.kernels) == 8 and not found.spans
    assert trace.coverage(found.kernels).no_range == 370 / 395
    broken_sqlite(f"delete from {KERNEL}")(path)  # copies and memsets are there still
    assert {k.kind for k in trace.read(path).kernels} == {"copy"}
