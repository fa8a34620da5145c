"""Tell by its name what kind of work a kernel does.

The first rule that matches counts; what none knows is "other". Names are those of PyTorch, cuBLAS,
cuDNN, Triton and NCCL on Hopper as their sources and public traces have them. A name shows what a
kernel is, not what it is for: a softmax or a norm written out is elementwise and reductions, and
only its range tells.
"""

import functools
import re

KINDS = (
    *("matmul", "attention", "softmax", "normalisation", "elementwise", "reduction", "copy"),
    *("fused", "loss", "embedding", "optimizer", "communication", "other"),
)

# (kind, pattern); case counts. Attention before matmul: its kernels are cutlass templates. What is
# before "elementwise" is there because that word stands in the name of most kernels.
RULES = (
    (
        "communication",
        r"^nccl|ncclDevKernel|ncclKernel|all_reduce_kernel|c10d::|gloo:|^Memcpy PtoP|"
        # Of copy engines: the mean that they have brought together, and PyTorch's barriers.
        r"^_mean_kernel$|barrier_kernel",
    ),
    (
        "attention",
        # What is fused around a call of attention has its name.
        r"flash_(fwd|bwd)|Flash_(fwd|bwd)|FlashAttn|fmha|sdpa|^(?!triton_(poi|per|red)_).*attention|"
        r"compute_dot_do_o|convert_dq_to_16bits|"
        r"^(forward|backward|backward_dq|backward_dkdv|prepare|finish|split|chunk|combine)_kernel$|"
        r"^backward_(chunks|wide)_kernel$",
    ),
    ("loss", r"nll_loss|LogSoftMax|log_softmax|cross_entropy"),
    ("softmax", r"softmax|SoftMax"),
    ("optimizer", r"multi_tensor_apply_kernel|[Ff]used_?[Aa]dam|^adamw$|aten::_f(used|oreach)_"),
    (
        "matmul",
        r"nvjet|gemm|gemv|cutlass|splitK|cublas|xmma|triton_tem_|dot_kernel|"
        r"^aten::(addmm|mm|bmm|baddbmm|matmul)$",
    ),
    ("fused", r"^triton_"),
    (
        "normalisation",
        r"(layer|rms|batch|group)_norm|(Layer|RMS|Batch|Group)Norm|RowwiseMoments|GammaBeta",
    ),
    (
        "embedding",
        r"embedding|indexSelect|index_select|vectorized_gather|RadixSort|radix_sort|"
        r"krn_partial|compute_grad_weight|sum_and_scatter|compute_num_of_partial|"
        # Of many tokens, whose gradients are sorted by token and added up.
        r"cub::\S*Device(UniqueByKey|Select|Compact|Scan)",
    ),
    (
        "copy",
        r"^Mem(cpy|set)|copy_kernel|CatArray|FillFunctor|^aten::(copy_|cat|fill_|zero_|clone)$|"
        r"transpose_readWrite",
    ),
    ("reduction", r"reduce_kernel|DeviceReduce|^aten::(sum|mean|amax|max|min|norm)$"),
    (
        "elementwise",
        r"elementwise|pointwise|CUDAFunctor|^aten::(add|sub|mul|div|pow|rsqrt|silu|neg|exp|where|"
        r"masked_fill|gt|sigmoid|sqrt|lerp|addcmul|addcdiv|arange|silu_backward|random)_?$",
    ),
)


@functools.lru_cache(maxsize=65_536)
def kind_of(name: str) -> str:
    """Return the class of a kernel's (demangled) name, one of ``KINDS``."""
    for kind, pattern in RULES:
        if re.search(pattern, name):
            return kind
    return "other"


# Nsight's demangler writes "<unnamed>" and "(int)4" where that of torch.profiler has "(anonymous
# namespace)" and "4".
_NOISE = re.compile(
    r"(\(anonymous namespace\)|<unnamed>)::|at::native::|at_cuda_detail::|binary_internal::|"
    r"^void |(?<=[<,(])void |(?<=[<,] )void |\((int|bool|unsigned int)\)(?=\d)"
)
LENGTH = 128  # enough for cuBLAS's, whose end tells a product from one that is split


def plain(name: str) -> str:
    """Return a kernel's name without return type and the commonest namespaces, the same from both
    profilers."""
    return _NOISE.sub("", name)


def shorten(name: str, length: int = LENGTH) -> str:
    """Return a kernel's ``plain`` name for a table, without its arguments, cut to ``length``."""
    name = plain(name)
    name = re.sub(r"\([^()]*\)( const)?( \[clone.*\])?$", "", name) or name
    return name if len(name) <= length else name[: length - 1] + "…"
