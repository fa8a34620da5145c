"""Where there is no Triton (macOS): what is imported, what runs, and what is said of the rest."""

import pytest
from programs import printed

HIDE = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
EVERYTHING_BUT_THE_KERNELS = """
import torch
from a2lib.attention import FlashAttentionPyTorch, FlashAttentionTriton, UnsupportedError
from a2lib.attention import attention_reference, flash_attention, ladder, peers, sanity
import a2lib.attention

assert set(a2lib.attention.__all__) <= set(dir(a2lib.attention))
q, k, v = torch.randn(3, 2, 20, 16)
torch.testing.assert_close(FlashAttentionPyTorch.apply(q, k, v), attention_reference(q, k, v))
for call in (flash_attention, FlashAttentionTriton.apply):
    try:
        call(q, k, v)
    except UnsupportedError as error:
        print(error)
with torch.device("meta"):
    q = torch.empty(2, 20, 16)
assert flash_attention(q, q, q).shape == q.shape
assert "triton" not in sys.modules
"""
TABLE = """
from a2lib.attention import dispatch
import sys
case = dispatch.Case("bf16", 1, 16, 16, 4096, 4096, 64, True, dispatch.HOPPER)
print(dispatch.forward_form(case), dispatch.backward_form(case))
assert not {"torch", "triton", "numpy"} & set(sys.modules)
"""


def test_a_call_of_a_kernel_says_in_one_line_that_triton_is_missing(python):
    said = printed(python(HIDE + EVERYTHING_BUT_THE_KERNELS), 300).splitlines()
    assert len(said) == 2
    assert all(line.startswith("flash_attention needs Triton, which is missing:") for line in said)


@pytest.mark.parametrize("hide", ["", HIDE])
def test_the_table_needs_no_torch(python, hide):
    assert printed(python(hide + TABLE)) == "hopper hopper\n"
