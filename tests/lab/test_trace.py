"""Traces that a person can add up, from Nsight Systems and from torch.profiler: which kernel
belongs where; and what kind of work a kernel does, by its name."""

import contextlib
import re
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import traced_by_hand
from refusals import refused
from tables import values
from torch.autograd import DeviceType

from a2lib.lab import trace
from a2lib.lab.kernel_names import KINDS, kind_of, plain, shorten
from a2lib.lab.ranges import annotate
from a2lib.lab.steps import StepConfig, TrainingStep
from a2lib.lab.trace import Kernel, Span
from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import Shape

# name, start and duration in us, phase, part, kind. The first event is the step's, at 0.
WANT = [
    ("nvjet", 100, 100, "forward", "attn.q_proj", "matmul"),
    ("mystery", 120, 20, "forward", "forward", "other"),
    ("void (anony", 210, 50, "forward", "attn.attention.softmax", "softmax"),
    ("Memcpy", 270, 10, "forward", "forward", "copy"),
    ("nvjet", 500, 100, "backward", "attn.q_proj", "matmul"),
    ("nvjet", 610, 50, "backward", "backward", "matmul"),
    ("void at::na", 800, 40, "optimizer", "optimizer", "optimizer"),
    ("Memset", 960, 5, "step 0", "step 0", "copy"),
    ("nvjet", 1000, 25, "no launch", "", "matmul"),
]


def played_profiler():
    """Return what torch.profiler's events are of the kernels of traced_by_hand.py."""
    events = []

    def event(name, start, length, device=DeviceType.CPU, **others):
        at = SimpleNamespace(start=start, end=start + length)
        plain = {"id": -1, "is_user_annotation": False, "device_resource_id": 0}
        events.append(
            SimpleNamespace(name=name, time_range=at, device_type=device, **{**plain, **others})
        )

    for name, _, start, end in traced_by_hand.SPANS:
        event(name, start, end - start, is_user_annotation=True)
        event(name, start, end - start, DeviceType.CUDA, is_user_annotation=True)
    for name, stream, start, length, correlation, thread, launched in traced_by_hand.KERNELS:
        event(name, start, length, DeviceType.CUDA, id=correlation, device_resource_id=stream)
        if thread:
            event("cudaLaunchKernel", launched, 5, id=correlation)
            event("aten::something", launched, 6, id=correlation)
    event("cudaDeviceSynchronize", *traced_by_hand.WAIT, id=99)
    return SimpleNamespace(events=lambda: events)


@pytest.fixture(params=["nsys", "torch"])
def traced(request, tmp_path):
    if request.param == "nsys":
        traced_by_hand.write_nsys(tmp_path / "report.sqlite")
        return trace.from_nsys(tmp_path / "report.sqlite")
    return trace.from_profiler(played_profiler())


def test_each_kernel_is_where_its_launch_was(traced):
    assert len(traced.kernels) == len(WANT)
    for kernel, (name, start, duration, phase, part, kind) in zip(
        traced.kernels, WANT, strict=True
    ):
        assert kernel.name.startswith(name)
        assert (kernel.start_ns, kernel.duration_ns) == (start * 1000, duration * 1000)
        assert (kernel.phase, kernel.part, kernel.kind) == (phase, part, kind), name
    # Launched by another thread, inside the phase that the main one is in.
    paths = map(attrgetter("path"), traced.kernels)
    assert ("step 0", "backward", "layers.0.attn.q_proj") in paths


def test_overlap_counts_once(traced):
    assert trace.span_ns(traced.kernels) == 925_000  # 100 to 1025
    assert trace.busy_ns(traced.kernels) == 380_000  # 400 less 20 at once
    # One within, one half within.
    assert trace.union([(7, 8), (0, 10), (30, 31), (5, 20)]) == [(0, 20), (30, 31)]


PATHS = [
    (("step 0", "backward", "layers.0"), "backward", "step 0", "block"),
    (("step 3", "mine", "inner"), "mine", "step 3", "inner"),
    # A library's own range names neither.
    (("step 3", "Optimizer.step#Adam"), "step 3", "step 3", "step 3"),
    (("step 0", "backward", "cub::Unique"), "backward", "step 0", "backward"),
    (("layers.3.ffn", "cub::DeviceScan"), "layers.3.ffn", "", "ffn"),
    ((), "", "", ""),
]


@pytest.mark.parametrize(("path", "phase", "step", "part"), PATHS)
def test_phase_step_and_part_are_what_the_program_says(path, phase, step, part):
    kernel = Kernel("k", "7", 0, 1, Span("", 0, 1), path)
    assert (kernel.phase, kernel.step, kernel.part) == (phase, step, part)


def test_rows_of_a_step_keep_the_sum(traced, monkeypatch):
    monkeypatch.setattr(trace, "LEAST_SHARE", 0.06)
    rows = pd.DataFrame(trace.kernel_rows(traced.kernels))
    assert rows["ms"].sum() == pytest.approx(0.4)
    assert rows["share"].sum() == pytest.approx(1)
    assert rows["calls"].sum() == 9
    assert set(rows.query("kernel == 'rest'")["kind"]) == {"other", "copy"}
    (softmax,) = rows.query("kind == 'softmax'")["kernel"]
    assert softmax == "softmax_warp_forward<float, float, 9, false, false>"


def test_a_strip_has_the_window_and_the_launches(traced):
    rows = trace.strip_rows(traced.kernels, start_ns=90_000, length_ns=190_000)
    assert values(rows, "start_us", "duration_us", "stream", "kind") == [
        (10, 100, "7", "matmul"),
        (20, 5, "host", "other"),
        (30, 20, "14", "other"),
        (60, 5, "host", "copy"),
        (120, 50, "7", "softmax"),
        (180, 10, "7", "copy"),
    ]
    assert len(trace.strip_rows(traced.kernels, 0, 10**9, most=3)) == 3


SHAPE = Shape(d_model=8, d_ff=12, num_layers=1, num_heads=2, vocab_size=11)


def test_ranges_around_its_parts_change_no_bit_of_a_model():
    plain = TransformerLM.from_size(SHAPE, 6, seed=0)
    annotated = TransformerLM.from_size(SHAPE, 6, seed=0)
    annotate(annotated, lambda name: contextlib.nullcontext())
    tokens = torch.randint(11, (2, 6))
    for model in (plain, annotated):
        cross_entropy(model(tokens), tokens).backward()
    for want, got in zip(plain.parameters(), annotated.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def test_on_a_cpu_operators_stand_for_kernels():
    step = TrainingStep(StepConfig(model=SHAPE, context=6, batch=2), "cpu")
    within = torch.profiler.record_function
    annotate(step.model, within)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with within("step 0"):
            step(within)
    traced = trace.from_profiler(profiler)
    assert traced.source == "torch, cpu"
    assert list(traced.steps()) == ["step 0"]
    for kernel in traced.kernels:
        assert kernel.launch and kernel.path and kernel.kind != "other"
    columns = ("kind", "phase", "part")
    kernels = pd.DataFrame(map(attrgetter(*columns), traced.kernels), columns=columns)
    products = kernels.query("kind == 'matmul'")[["phase", "part"]].value_counts()
    # One block and the head: 7 + 2 + 1 products, and two for each in backward.
    assert products["forward"].sum() == 10 and products["backward"].sum() == 20
    assert products["forward", "attn.attention.scores"] == 1
    assert products["backward", "backward"] == 20
    assert "optimizer" in set(kernels.query("phase == 'optimizer'")["kind"])
    assert set(kernels["phase"]) == set(trace.PHASES)


def test_a_trace_that_lost_events_is_refused(tmp_path):
    traced_by_hand.write_nsys(tmp_path / "report.sqlite", "CUPTI events were lost")
    words = "not whole: CUPTI events were lost"
    refused(words, trace.from_nsys, tmp_path / "report.sqlite")


ATTENTION = Path(trace.__file__).parents[1] / "attention"
OUR_ATTENTION = []
for path in ATTENTION.glob("*.py"):
    OUR_ATTENTION += re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.M)
NAMES = {
    "matmul": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNN", "ampere_sgemm_128x64_tn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(int)", "triton_tem_fused_mm",
        "void gemv2T_kernel_val<int, int, float, float>(int)", "aten::addmm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>()",
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
        "aten::mul",
    ],
    "copy": [
        "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(TensorIterator&)>()",
        "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int)",
        "Memcpy HtoD (Pageable -> Device)",
    ],
    "optimizer": [traced_by_hand.ADAM, "aten::_fused_adamw_", "aten::_foreach_add_", "adamw"],
    "embedding": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>(long*)",
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy>(int)",
    ],
    "fused": ["triton_poi_fused_add_mul_3", "triton_red_fused__to_copy_mean_pow_rsqrt_0"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)",
                      "Memcpy PtoP (Device -> Device)", "_mean_kernel",
                      "c10d::symmetric_memory::barrier_kernel(unsigned int **, int, int)"],
    "other": ["some_kernel"],
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_and_their_classes(kind):
    for name in NAMES[kind]:
        assert kind_of(name) == kind, name
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
]  # fmt: skip


@pytest.mark.parametrize(("nsys", "torch", "want"), SAME)
def test_names_are_the_same_from_both_profilers(nsys, torch, want):
    assert shorten(nsys) == shorten(torch) == want
    assert plain(want) == want
