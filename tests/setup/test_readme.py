"""The README's results are those of the committed rows, and its snippet does what it says."""

import re

import committed
import pytest

from a2lib.attention import UnsupportedError, launches
from a2lib.paths import ROOT

TEXT = (ROOT / "README.md").read_text()
RESULTS = TEXT.partition("\n- **")[2].partition("\n## ")[0]
# <!-- name -->5.1 ms: the number behind a slot, and what follows it
SLOT = re.compile(r"<!-- ([\w ,-]+) -->([\d.,]+) (?:%|\w+)")
WRITTEN = dict(SLOT.findall(RESULTS))


def ms(section, value="ms", **key):
    """Return a value of the one row of the published GPU that has these cells."""
    found = []
    for row in committed.measured(section):
        for name, cell in key.items():
            if row[name].lower() != str(cell).lower():
                break
        else:
            found.append(row)
    assert len(found) == 1, f"{section}: {len(found)} rows of {key}"
    return float(found[0][value])


def attention(implementation):
    """The GPU's time: the shorter of a replay from a CUDA graph and a call, as in the book."""
    key = {"dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 16384, "head_dim": 64}
    key |= {"causal": True, "pass": "end_to_end", "implementation": implementation}
    return min(ms("flash", "ms", **key), ms("flash", "ms_graph", **key))


def step(precision, attention="eager", compile="none", capture=False):
    key = {"model": "2.7B", "context": 512, "batch": 4, "mode": "train-step", "phase": "wall"}
    key |= {"precision": precision, "attention": attention, "compile": compile}
    return ms("benchmark", **key, capture=capture)


def ddp(value, capture=True, **way):
    return ms("ddp", value, model="xl25", sent_dtype="fp32", capture=capture, **way)


def longer(without, **way):
    """By how many percent a step of two GPUs is longer than one GPU's."""
    return 100 * (ddp("ms", **way) / ddp(without, **way) - 1)


TORCH = {"wrapper": "torch_ddp", "carrier": "backend", "bucket_mb": 25}
DURING = {"wrapper": "updating", "carrier": "copy_engines", "bucket_mb": 100}
EXPECTED = {
    "ours": lambda: attention("a2lib"),
    "cuDNN": lambda: attention("sdpa_cudnn"),
    "FlashAttention-2": lambda: attention("sdpa_flash"),
    "FlashAttention-4": lambda: attention("fa4"),
    # Every gradient is sent once, in fp32.
    "billions, one GPU": lambda: (
        ms("ddp", "sent_bytes", model="2.7B", wrapper="flat", capture=False, precision="bf16") / 4e9
    ),
    "fp32": lambda: step("fp32"),
    "TF32": lambda: step("tf32"),
    "bf16": lambda: step("bf16"),
    "captured": lambda: step("bf16", "flash", "blocks", capture=True),
    "captured, PyTorch": lambda: step("bf16", "sdpa_flash", "blocks", capture=True),
    "billions, two GPUs": lambda: ddp("sent_bytes", **DURING) / 4e9,
    "DDP": lambda: longer("ms_without", **TORCH),
    "during": lambda: longer("ms_without_updating", **DURING),
    "during, launched": lambda: longer("ms_without", **DURING, capture=False),
    "8B": lambda: ms("leaderboard", way="own_copies") / 1e3,
    "8B, PyTorch": lambda: ms("leaderboard", way="recomputed") / 1e3,
}


def test_every_number_of_the_results_has_its_slot():
    """But for those that name a shape or a thing."""
    assert sorted(WRITTEN) == sorted(EXPECTED)
    assert len(WRITTEN) == len(SLOT.findall(RESULTS))
    rest = re.sub(r"<!--.*?-->", "", SLOT.sub("", RESULTS), flags=re.S)
    named = "FlashAttention-2 FlashAttention-4 2,048 4,096 16,384 32,768 8B 16 64 bf16 fp32 TF32"
    assert set(re.findall(r"\b(?:[\w,.-]*\d,)?[\w-]*\d\w*", rest)) == set(named.split())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_number_of_the_results_is_that_of_the_rows(name):
    decimals = len(WRITTEN[name].partition(".")[2])
    assert WRITTEN[name] == f"{EXPECTED[name]():,.{decimals}f}"


SNIPPET = re.search(r"```python\n(.*?flash_attention.*?)```", TEXT, re.S)[1]


def test_the_snippet_on_a_cpu_names_what_runs_there(monkeypatch):
    monkeypatch.setattr(launches, "_interpreted", lambda: False)
    with pytest.raises(UnsupportedError, match="need a CUDA GPU") as raised:
        exec(SNIPPET.replace('"cuda"', '"cpu"'), {})
    for name in ("FlashAttentionPyTorch", "attention_reference"):
        assert name in str(raised.value) and f"`{name}`" in TEXT


@pytest.mark.gpu
def test_the_snippet_on_a_gpu():
    names = {}
    exec(SNIPPET, names)
    assert names["o"].shape == names["q"].shape
    for name in "qkv":
        assert names[name].grad.isfinite().all()
