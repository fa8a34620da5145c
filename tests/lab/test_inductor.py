"""Watching Inductor: its code read by value, its caches moved, filled and found."""

import os

import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from a2lib.lab import inductor

TRITON = """
# AOT ID: ['3_backward']
from torch._inductor.select_algorithm import extern_kernels
triton_red_fused__softmax_0 = async_compile.triton('triton_red_fused__softmax_0', '''
def triton_red_fused__softmax_0(in_out_ptr0, xnumel):
    tmp5 = triton_helpers.max2(_tmp4, 1)
    tl.store(out_ptr0, tmp5)
''', device_str='cuda')
async_compile.wait(globals())

def call(args):
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((8, 64, 64), (4096, 64, 1), torch.float32)
        # Original ATen: [aten.bmm] extern_kernels.bmm(never)
        extern_kernels.bmm(primals_1, reinterpret_tensor(primals_2, (8, 16, 64), (1, 1, 1), 0))
        stream0 = get_raw_stream(0)
        triton_red_fused__softmax_0.run(buf0, 512, 64, stream=stream0)
        triton_red_fused__softmax_0.run(buf1, 512, 64, stream=stream0)
        triton_poi_fused_mul_1.run(buf1, 512, stream=stream0)
        buf7 = torch.ops.aten._scaled_dot_product_efficient_attention.default(buf1, None)
        buf8 = buf7[0]
        assert_size_stride(buf8, (8, 1, 64, 16), (1024, 1024, 16, 1))
    return (buf8, )
"""
CPP = """
# AOT ID: ['0_forward']
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], '''
extern "C"  void  kernel(float* in_out_ptr0)
''')
        extern_kernels.mm(a, b, out=buf0)
        cpp_fused_add_0(buf0)
"""


def test_generated_code_is_counted_by_what_it_launches():
    assert inductor.read(TRITON, 7) == inductor.Graph(
        backward=True, written=2, called=3, library=2, attentions=1, bytes=7
    )
    assert inductor.read(CPP) == inductor.Graph(
        backward=False, written=1, called=1, library=1, attentions=0
    )


def test_what_is_compiled_again_is_found_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    # Seconds of the C++ compiler for each empty cache.
    quick = torch._inductor.config.patch(cpp_cache_precompile_headers=False)
    hits = []
    with inductor.caches_in(tmp_path), quick:
        for _ in range(2):
            inductor.forget()
            counters.clear()
            with inductor.watching() as graphs:
                torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
            hits.append((counters["inductor"]["fxgraph_cache_hit"], len(graphs)))
    assert hits == [(0, 1), (1, 0)]
    assert (graphs, os.environ["TORCHINDUCTOR_CACHE_DIR"]) == ([], "before")
    assert list((tmp_path / "inductor").rglob("*.so"))
