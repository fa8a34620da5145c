"""When the Gluon kernels run and in which order they take tiles, without a GPU. The kernels
themselves run in tests/gpu/test_attention_hopper.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from attention_standins import call
from hypothesis import given
from hypothesis import strategies as st

from a2lib.attention import dispatch, forms, hopper_forward, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


def served(q, k, do):
    """Return whether the kernels for Hopper run the forward and the backward."""
    forward = forms.Tensors(q, k, k, torch.empty_like(q), torch.zeros(q.shape[:-1]))
    is_hopper = dispatch.forward_form(launches.call_of(forward, True)) == "hopper"
    backward = launches.call_of(forward._replace(do=do), True)
    is_one_sweep = dispatch.backward_form(backward) == "one_sweep"
    return is_hopper, is_one_sweep


def test_not_what_the_copy_engine_cannot_address(monkeypatch):
    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: False)
    q = torch.zeros(3, 1024, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.zeros(3, 2, 1024, 68, dtype=q.dtype)[..., :64]
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 1024, 2, 64).transpose(1, 2)
    assert served(q, q, q) == (True, True)
    for wrong in (odd, shifted, q[:, :, :1].expand_as(q)):
        assert served(q, wrong, q) == (False, False)
        assert served(q, q, wrong) == (True, False)


def test_the_stride_of_a_dimension_of_one_is_nobodys():
    x = torch.zeros(2**16, dtype=torch.bfloat16).as_strided((1, 2, 128, 64), (3, 8192, 64, 1))
    assert forms.is_addressable(x)
    assert not forms.is_addressable(x.as_strided((2, 2, 128, 64), (3, 8192, 64, 1)))
    seen = forms.descriptor_of(x, (1, 1, 64, 64), 64)
    assert (seen.shape, seen.strides) == ((1, 2, 128, 64), (64, 8192, 64, 1))


@given(
    st.integers(1, 2**10), st.integers(1, 2**17), st.sampled_from(range(40, 129, 8)), st.booleans()
)
def test_only_forms_that_exist_and_are_compiled(heads, n, d, causal):
    one = call("bf16", heads, n, d, causal)
    consumers, stay = dispatch.forward_consumers(one)
    assert consumers in ((0, 1, 3) if d <= 64 else (0, 1, 2))
    pairs = (stay and consumers < 3) or dispatch.hopper_backward_stays(one)
    pairs |= dispatch.hopper_backward_stays(one._replace(heads=2 * heads))
    assert not (causal and heads % 2 and pairs), "pairs are of two heads"


few = st.integers(1, 9)


def as_program(patch, number, n_programs):
    """Have the schedule's functions, Python but for this, believe that they are one program."""
    gl = SimpleNamespace(minimum=min, constexpr=None)
    gl.program_id = lambda axis: number
    gl.num_programs = lambda axis: n_programs
    patch.setattr(hopper_forward, "gl", gl)


@given(few, few, st.integers(1, 7), few, st.booleans(), st.booleans())
def test_every_tile_is_done_once_and_causal_programs_have_as_much_to_do(
    n_tiles, n_heads, n_programs, together, causal, stay
):
    pairs = stay and causal
    n_heads *= 1 + pairs
    n_programs = min(n_programs, n_tiles * n_heads // (1 + pairs)) if stay else n_tiles * n_heads
    done, lengths = [], []
    with pytest.MonkeyPatch.context() as patch:
        for program in range(n_programs):
            as_program(patch, program, n_programs)
            length = 0
            for turn in range(hopper_forward.n_turns.fn(n_tiles, n_heads, causal, stay)):
                tile, head = hopper_forward.tile_and_head.fn(
                    program, turn, n_tiles, n_heads, together, causal, stay
                )
                done.append((tile, head))
                length += 1 + tile
            lengths.append(length)
    assert sorted(done) == list(itertools.product(range(n_tiles), range(n_heads)))
    if pairs:
        assert max(lengths) - min(lengths) <= n_tiles + 1, "one pair"


@given(few, few, few, st.booleans())
def test_a_program_waits_for_programs_that_began_before_it(n_tiles, n_heads, together, causal):
    """In a fixed order a tile waits for the lower tiles of its head, and numbers are given out as
    programs begin: nobody waits for one that may never begin."""
    next_tile = [0] * n_heads
    with pytest.MonkeyPatch.context() as patch:
        for number in range(n_tiles * n_heads):
            as_program(patch, number, n_tiles * n_heads)
            tile, head = hopper_forward.tile_and_head.fn(
                number, 0, n_tiles, n_heads, together, causal, False
            )
            assert tile == next_tile[head]
            next_tile[head] += 1
    assert next_tile == [n_tiles] * n_heads
