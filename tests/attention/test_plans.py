"""A pass that ran before launches the same kernels with the same arguments, worked out once."""

import math

import pytest
import torch
from attention_standins import run, stand_in
from refusals import refused

from a2lib.attention import passes, plans
from a2lib.errors import UnsupportedError


@pytest.fixture(autouse=True)
def log(monkeypatch):
    found = []
    stand_in(monkeypatch, found)
    return found


@pytest.fixture
def long_way(monkeypatch):
    """How often a pass was worked out."""
    calls = []
    problem = passes._Problem
    monkeypatch.setattr(passes, "_Problem", lambda *args: calls.append(args) or problem(*args))
    return calls


def qkv(dtype=torch.bfloat16, length=40, heads=2, d=64):
    return [torch.zeros(3, length, heads, d, dtype=dtype).transpose(1, 2) for _ in range(3)]


def roles(log, tensors):
    """The log with each tensor replaced by its name here, or by where it lies."""
    names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}

    def role(x):
        return names.get(x.data_ptr(), x.data_ptr()) if isinstance(x, torch.Tensor) else x

    return [(name, n, [role(a) for a in args]) for name, n, args in log]


NEEDS = [(True, True, True), (False, True, False), (True, False, False), (False, True, True)]


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize(
    "dtype, d, length",
    [(torch.bfloat16, 64, 40), (torch.float32, 128, 40), (torch.float32, 128, 256)],
)
def test_the_second_time_the_same_is_launched_at_once(log, long_way, needs, dtype, d, length):
    seen = []
    for _ in range(3):
        named = run(*qkv(dtype, d=d, length=length), needs=needs)
        seen.append((roles(log, named), [x if x is None else x.stride() for x in named.values()]))
        log.clear()
    assert len(long_way) == 2, "the first forward and the first backward"
    # Delta has no name here, nor have the terms of fp32: they lie anew each time. Where a gradient
    # is not wanted, terms stand in its place too.
    terms = dtype == torch.float32
    anew = {"forward": 2 * terms, "backward": 1 + 5 * terms, "split": 2}
    if length == 256:  # rows and sums of two terms; a gradient that is not wanted is one of these
        anew |= {"prepare": 4, "backward": 4 + 4, "finish": 3 + needs.count(False)}
    first, *others = [[(n, g, [str(a) for a in args]) for n, g, args in calls] for calls, _ in seen]
    for calls, (_, strides) in zip(others, seen[1:], strict=True):
        assert strides == seen[0][1]
        for (name, n, args), (wanted, m, expected) in zip(calls, first, strict=True):
            assert (name, n, len(args)) == (wanted, m, len(expected))
            different = [(a, b) for a, b in zip(args, expected, strict=True) if a != b]
            assert len(different) <= anew[name.partition("_")[0]], different


@pytest.mark.parametrize("quick", [True, False])
def test_what_is_made_the_second_time_is_what_the_first_made(monkeypatch, quick):
    if not quick:  # a torch without what makes tensors past the dispatcher
        monkeypatch.setattr(torch._C, "_dynamo", None)

    def about(x):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference()

    with torch.inference_mode():
        first, second = ([about(x) for x in run(*qkv(torch.float32)).values()] for _ in range(2))
    assert first == second


def test_a_backward_in_chunks_is_launched_at_once_too(log, long_way, monkeypatch):
    monkeypatch.setattr(passes, "in_one_launch", lambda *_: False)
    monkeypatch.setattr(passes, "in_chunks", lambda *_: True)
    seen, own = [], []
    for _ in range(3):
        named = run(*qkv())
        calls = roles(log[1:], named)
        names = {q: f"own {i}" for i, q in enumerate(dict.fromkeys(calls[0][2][3:7]))}
        own.append(len(names))
        seen.append([(name, n, [names.get(a, a) for a in args]) for name, n, args in calls])
        log.clear()
    assert len(long_way) == 2 and own == [4] * 3, "rows and three sums, which lie anew each time"
    assert [name for name, *_ in seen[0]] == ["prepare_chunks", "backward_chunks", "finish_chunks"]
    for calls in seen[1:]:
        for (name, n, args), (wanted, m, expected) in zip(calls, seen[0], strict=True):
            # What was kept has the constants behind.
            assert (name, n, args[: len(expected)]) == (wanted, m, expected)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("length, d, one", [(128, 64, 1), (129, 64, 0), (256, 32, 1), (128, 65, 1)])
def test_few_tokens_are_one_launch_in_any_order(log, monkeypatch, fixed, length, d, one):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed)
    q, k, v = qkv(length=length, d=d)
    run(q, k[:, :1], v[:, :1])
    launched = [(name, n) for name, n, _ in log[1:]]
    rows = 64 if d <= 64 else 16
    assert launched == [("backward", length // rows * (6 + 3))] if one else len(launched) == 2
    log.clear()
    run(q, k, v, needs=(True, False, True))
    assert [name for name, *_ in log[1:]] == ["backward_dq", "backward_dkdv"]


@pytest.fixture
def launched(monkeypatch):
    """What tells launches apart and their options, by name, on a GPU of 132 multiprocessors."""
    found, real = {}, passes.launch

    def launch(kernel, apart, *rest):
        found[apart[0]] = apart, rest[4]
        return real(kernel, apart, *rest)

    monkeypatch.setattr(passes, "launch", launch)
    monkeypatch.setattr(passes, "launches_early", lambda _: True)
    monkeypatch.setattr(passes, "n_multiprocessors", lambda _: 132)
    return found


def test_tiles_of_rows_in_chunks(launched):
    usual = (64, 64, 8, 3)
    for length, heads, tile in (
        (512, 1, (64, 32, 4, 3)),  # 72 programs
        (512, 4, usual),  # would be 160
        (641, 1, usual),
        (2047, 1, usual),
        (2048, 1, (32, 64, 4, 3)),
    ):
        run(*(x[:1] for x in qkv(length=length, heads=heads, d=128)))
        assert launched.pop("backward_chunks")[0][-1] == tile, (length, heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "length, is_causal, early", [(4096, True, 1), (4097, True, 0), (512, False, 1), (513, False, 0)]
)
def test_kernels_of_short_chunks_are_launched_early(launched, dtype, length, is_causal, early):
    run(*(x[:1] for x in qkv(dtype, length=length, heads=1)), causal=is_causal)
    early &= dtype == torch.bfloat16
    chunks = [name for name in launched if name.endswith("chunks")]
    assert chunks == ["prepare_chunks", "backward_chunks", "finish_chunks"]
    options = [launched[name][1].get("launch_pdl", False) for name in chunks]
    assert options == [False, early, early]


def test_parts_of_chunks_are_made_anew_for_each_call(log, long_way, monkeypatch):
    monkeypatch.setattr(passes, "keys_per_chunk", lambda *_: 128)
    seen = []
    for _ in range(2):
        q, k, v = qkv(length=300)
        o, lse = passes.forward(q, k, v, True, None)
        seen.append(roles(log, dict(q=q, k=k, v=v, o=o, lse=lse)))
        log.clear()
    assert len(long_way) == 1
    (chunk, combine), again = seen
    assert [chunk[0], combine[0]] == ["forward_chunk", "combine"]
    assert combine[2][:2] == chunk[2][3:5], "the parts that the first has written"
    for first, second in zip((chunk, combine), again, strict=True):
        different = [i for i, x in enumerate(second[2]) if x != first[2][i]]
        assert first[:2] == second[:2] and set(different) <= {0, 1, 3, 4}
        assert again[1][2][:2] == again[0][2][3:5]


def test_one_tensor_given_twice_does_not_bind_the_next_call(log):
    q, k, v = qkv()
    passes.forward(q, q, q, True, None)
    log.clear()
    o, lse = passes.forward(q, k, v, True, None)
    ((_, _, args),) = log
    assert all(x is y for x, y in zip(args, (q, k, v, o, lse), strict=False))


def test_what_differs_is_worked_out(long_way):
    q, k, v = qkv()
    passes.forward(q, k, v, True, None)
    others = (
        (q, k, v, False, None),
        (q, k, v, True, 0.5),
        (q.contiguous(), k, v, True, None),
        (q, k, v.contiguous(), True, None),
        (q[:, :, :39], k, v, True, None),
        (q.half(), k.half(), v.half(), True, None),
        (q, k[:, :1], v[:, :1], True, None),
    )
    for number, other in enumerate(others, 2):
        for _ in range(2):
            passes.forward(*other)
            passes.forward(q, k, v, True, None)
        assert len(long_way) == number


def test_whether_gradients_are_wanted_changes_no_plan(long_way):
    q, k, v = qkv()
    for wanted in (False, True, True, False, True):
        passes.forward(q.detach().requires_grad_(wanted), k, v, True, None)
    assert len(long_way) == 1


@pytest.mark.parametrize("block, own", [(2**20, 1), (0, 4)])
def test_shortcuts_are_given_what_they_write_to_apart(monkeypatch, block, own):
    monkeypatch.setattr(passes, "in_one_launch", lambda *_: False)
    monkeypatch.setattr(passes, "in_chunks", lambda *_: True)
    monkeypatch.setattr(plans, "BLOCK_BYTES", block)
    monkeypatch.setattr(plans, "stream_of", lambda gpu: 5)
    given, made, bytes_of = [], [], {}
    monkeypatch.setattr(
        plans, "shortcut_of", lambda *_: lambda addresses, _: given.append(addresses)
    )

    def empty(shape, strides, dtype):
        made.append(shape)
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(plans, "_empty_on", lambda device: empty)
    add = passes._Problem.add
    monkeypatch.setattr(passes._Problem, "add", lambda p, **x: bytes_of.update(x) or add(p, **x))
    q, k, v = qkv()
    run(q, k, v)
    bytes_of = [x.nbytes for x in bytes_of.values()]
    made.clear()
    _, _, _, o, lse, *gradients = run(q, k, v).values()
    assert len(made) == 2 + 3 + own, "o, lse, three gradients, and what only kernels see"
    addresses = given[-1]
    inputs = (o, q, k, v, o, lse)
    assert addresses[:9] == [x.data_ptr() for x in (*inputs, *gradients)]
    found = [(x.data_ptr(), x.nbytes) for x in {id(x): x for x in (*inputs, *gradients)}.values()]
    found = sorted((*found, *zip(addresses[9:], bytes_of, strict=True)))
    assert all(at % 16 == 0 for at, _ in found)
    assert all(at + n <= later for (at, n), (later, _) in zip(found, found[1:], strict=False))


def test_tf32_is_part_of_the_form(long_way, monkeypatch):
    q, k, v = qkv(torch.float32)
    for allowed in (False, True, True):
        monkeypatch.setattr(passes, "_allow_tf32", lambda allowed=allowed: allowed)
        passes.forward(q, k, v, True, None)
    assert len(long_way) == 2


def test_the_scale_reaches_the_kernel_both_times(log):
    for scale, wanted in ((None, 1 / math.sqrt(64)), (0.25, 0.25), (None, 1 / math.sqrt(64))):
        log.clear()
        passes.forward(*qkv(), True, scale)
        assert wanted in [x for x in log[0][2] if isinstance(x, float)]


def test_what_is_misaligned_or_has_to_be_copied_goes_the_long_way_each_time(long_way):
    q, k, v = qkv()
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 40, 2, 64).transpose(1, 2)
    copied = torch.zeros(3, 2, 64, 40, dtype=q.dtype).transpose(2, 3)
    for other in (shifted, q, shifted, copied, copied):
        passes.forward(other, k, v, True, None)
    assert len(long_way) == 5


def test_nothing_is_kept_where_nothing_runs():
    passes.forward(*qkv(length=0), True, None)
    assert not plans._plans


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(plans, "CAPACITY", 3)
    for length in range(1, 9):
        passes.forward(*qkv(length=length), True, None)
    assert 0 < len(plans._plans) <= 3


def test_what_cannot_run_is_still_refused():
    q, k, v = qkv()
    passes.forward(q, k, v, True, None)
    refused("same shape", passes.forward, q, k, v[:, :, :7], True, None)
    for wrong in ((None, k, v), (q, k, "v")):
        refused("tensors", passes.forward, *wrong, True, None, error=TypeError)
    for wrong, words in (
        ([x.double() for x in (q, k, v)], "runs bfloat16, float16, float32; got torch.float64"),
        (qkv(d=129), "runs head_dim 1 to 128; got 129"),
    ):
        refused(words, passes.forward, *wrong, True, None, error=UnsupportedError)
