"""The planner's links in "Paper beside hardware", and the page with the rows of a real sweep."""

import functools

import pandas as pd
import pytest
from parallelism_rows import BY_BATCH, LINE, chapter, lines, sent

from a2lib.experiments.parallelism.configurations import PASSES, Parameters
from a2lib.measure import PARALLELISM
from a2lib.report.chapters.parallelism_measured import Beside, answer, compared, drawn, links, rows
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.parallelism import Layer
from a2lib.theory.transformer import SIZES


@pytest.fixture
def made(synthetic, tmp_path):
    return functools.partial(chapter, synthetic, tmp_path)


@pytest.fixture
def empty(tmp_path):
    return Beside([tmp_path])


@pytest.mark.parametrize("n", [2, 4])
def test_the_planners_messages_take_what_the_fitted_line_says(made, n):
    """Planned with the fit, the links are busy for exactly the line's time of each message."""
    device = links.device(made(BY_BATCH, collectives=sent(n)), n)
    assert device.latency == pytest.approx(20e-6)
    agrees(device, LINE, n)


def test_the_planner_agrees_with_the_line_through_this_checkouts_rows():
    p = Beside()
    line, rows_ = links.fitted(p), p.collectives.sums
    fitted = rows_[(rows_["ranks"] == "nccl 2") & rows_[links.COLUMN].notna()]
    assert len(fitted) > 10  # of all sizes
    agrees(links.device(p), line, 2)


def agrees(device, line, n):
    """The links are busy for the time that ``line`` gives each message, in every layout."""
    shape = SIZES["small"]
    job = Job(shape, device, n, n, 512)

    def busy(layout):
        return evaluate(job, layout).busy["node links"]

    # Two sums a block in either pass, the embedding's and the head's: an all-reduce of bf16 each.
    size = 2 * n * 512 * shape.d_model
    sums = 4 * shape.num_layers + 2
    assert busy(Layout(tensor=n)) == pytest.approx(sums * line.time_s(size), rel=1e-6)
    # The gradients, a message for each block and either table.
    weights = 2 * evaluate(job, Layout(data=n, sharding="none")).memory["parameters"] / 4
    messages = shape.num_layers + 2
    one = messages * line.overhead_s + weights / line.bandwidth
    assert busy(Layout(data=n, sharding="none")) == pytest.approx(one, rel=1e-6)
    # Gather and scatter are half an all-reduce each, and a message each.
    both = 2 * messages * line.overhead_s + weights / line.bandwidth
    assert busy(Layout(data=n, sharding="zero1")) == pytest.approx(both, rel=1e-6)
    three = 3 * messages * line.overhead_s + 1.5 * weights / line.bandwidth
    assert busy(Layout(data=n, sharding="fsdp")) == pytest.approx(three, rel=1e-6)


def test_what_is_said_of_the_planners_links(made, empty):
    p = made(BY_BATCH, collectives=sent())
    assert str(links.sentence(p)) == (
        "Fitted to NCCL's all-reduces between 2 H200, rows of other runs: 20.0 µs a message and "
        "200 GB/s that each sends, where the maker states 450. `python -m a2lib.theory plan --size "
        "8B --devices 2 --batch 2 --context 32768 --bandwidth 2e+11 --latency-us 20` plans with "
        "them. Its times "
        "of a message are off the measured ones by 0% to 0% in 5 all-reduces. To the gradients of "
        "one layer above, 6.00 MB, the line gives 0.0500 ms; they took 6.00 ms."
    )
    slow = [*sent()[:-1], {**sent()[-1], "ms_queued": 2 * sent()[-1]["ms_queued"]}]
    off = [
        1e3 * (found.latency + r["size"] / found.link) / r["ms_queued"] - 1
        for found in [links.device(made(BY_BATCH, collectives=slow))]
        for r in slow
    ]
    said = f"by {round(100 * min(off))}% to +{round(100 * max(off))}% in 5".replace("-", "−")
    assert said in str(links.sentence(made(BY_BATCH, collectives=slow))) and min(off) < -0.05
    found = lines(links.table(p, "c", "tab-c"), 1)
    makers = evaluate(Job(SIZES["8B"], DEVICES["H200"], 2, 2, 32_768), Layout(tensor=2))
    seconds = [float(cell) for cell in found["tensor",][:2]]
    assert seconds[0] == pytest.approx(makers.busy["node links"], rel=0.01)
    # 138 sums of 2 * 65,536 * 4,096 bytes: 138 (20 us + 2.684 ms)
    assert seconds[1] == pytest.approx(0.373, rel=0.01)
    assert "Not measured yet" in str(links.sentence(empty))
    assert links.table(empty, "c", "tab-c").frame.empty


# The page, with rows of every key of a real sweep.


def sweep(monkeypatch, backend="nccl", world_sizes=(2,)):
    """Rows of all sweeps by the formulas at 650 TFLOP/s and 340 GB/s, with what these leave out: 20
    us a message, products that lose by their size, a tenth of what hides."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8 if backend == "nccl" else 0)
    made = []
    for n in world_sizes:
        asked = Parameters(sweep="all", world_size=n, backend=backend).asked()
        for stack, batches in asked.items():
            for tokens in batches:
                for pass_ in PASSES[stack.implementation]:
                    key = stack.key(tokens, pass_)
                    made.append({**key, **_values(stack, tokens, pass_)})
    # The first batch's end_to_end, which only tables show.
    key = {name: made[2][name] for name in PARALLELISM.key}
    made[2] = {**key, "status": "oom", "note": "out of memory"}
    return made


def _values(stack, tokens, pass_):
    rates = (650e12, 340e9) if stack.ranks.backend == "nccl" else (60e9, 1.5e9)
    layer = Layer(tokens, stack.d_model, stack.d_ff, *rates, 2 if stack.dtype == "bf16" else 4)
    one = pd.Series({"scheme": stack.scheme, "along_data": stack.mesh[0],
                     "along_tensor": stack.mesh[1], "phase": pass_})  # fmt: skip
    costs = rows.costs(one, layer)
    compute = 1e3 * stack.layers * sum(c.compute_s for c in costs) * (1 + 200 / tokens)
    data, tensor = (1e3 * stack.layers * sum(getattr(c, f"{axis}_s") for c in costs)
                    for axis in ("data", "tensor"))  # fmt: skip
    sent = data + tensor + 0.02 * stack.layers * bool(data + tensor)
    ms = max(compute, sent) + 0.1 * min(compute, sent)
    value = {"status": "ok", "ms": ms, "ms_p20": 0.99 * ms, "ms_p80": 1.02 * ms, "n": 9}
    if stack.implementation == "torch":
        return value | {"ms": 1.2 * ms, "ms_p80": 1.3 * ms}
    value |= {"ms_without": compute, "ms_without_p20": compute, "ms_without_p80": compute}
    if sent:
        value["ms_communication"] = sent
    if data and tensor:
        value |= {"ms_data": data, "ms_tensor": tensor}
    return value


def real(synthetic, monkeypatch, tmp_path, world_sizes):
    """A folder with the rows of real sweeps, NCCL's and gloo's, and of collectives."""
    found = [*sweep(monkeypatch, world_sizes=world_sizes), *sweep(monkeypatch, backend="gloo")]
    return synthetic.by_hand(tmp_path, parallelism=found, collectives=sent())


def test_the_page_with_the_rows_of_two_gpus(shown_by, synthetic, monkeypatch, tmp_path):
    shown = shown_by("parallelism-measured", real(synthetic, monkeypatch, tmp_path, (2,)))
    missing = [text for text in shown if "Not measured yet" in text]
    assert len(missing) == 2 and missing[0].endswith("at once, on four GPUs or more.")
    assert missing[1].endswith("the peaks that the planner's memory is held against.")


def test_the_rows_of_two_four_and_eight_gpus(synthetic, monkeypatch, tmp_path):
    p = Beside([real(synthetic, monkeypatch, tmp_path, (2, 4, 8))])
    assert [(m.backend, m.world_size) for m in p.machines] == [
        ("nccl", 2), ("nccl", 4), ("nccl", 8), ("gloo", 2),
    ]  # fmt: skip
    for m in p.machines:
        rate, links_ = (650e12, 340e9) if m.backend == "nccl" else (60e9, 1.5e9)
        assert m.layer.flops == pytest.approx(rate, rel=0.4 if m.backend == "gloo" else 0.02)
        assert m.layer.bandwidth == pytest.approx(links_, rel=0.15)
    table = answer.thresholds(p, "c", "tab-c").frame
    # Five of each, and two of each mesh of both axes.
    assert list(table.groupby("ranks", sort=False).size()) == [5, 7, 9, 5]
    panels = [ax for ax in drawn.by_batch(p, "nccl").figure.axes if ax.lines]
    assert len(panels) == 3 + 4 + 5
    assert len([ax for ax in drawn.by_width(p).figure.axes if ax.lines]) == 4
    # The threshold of two GPUs is C / W of the rows, and is found near it.
    near = table[(table["ranks"] == "NCCL, 2 GPUs") & (table["scheme"] == "FSDP")]
    for cells in near.itertuples():
        predicted, at = (float(text.replace(",", "")) for text in cells[6:8])
        assert 1700 < predicted < 2100 and at == pytest.approx(predicted, rel=0.15)
    # Every pass is in a table; one of gloo's widths is that of its batches.
    lengths = [len(compared.times(p, m, "c", "tab-c").frame) for m in p.machines]
    assert lengths == [2 * (7 * n + 6) for n in (3, 4, 5)] + [2 * (6 * 3 + 3)]
    assert len(compared.peers(p, "c", "tab-c").frame) == 7 * (3 + 4 + 5) + 6 * 3 - 2
