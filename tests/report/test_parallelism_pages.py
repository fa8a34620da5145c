"""The layout of 405B parameters, and what is derived from rows of passes made by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import schedules

from a2lib.report import data
from a2lib.report.page import one
from a2lib.report.pages import parallelism_measured as page
from a2lib.shapes import PRESETS
from a2lib.theory.devices import DEVICES
from a2lib.theory.estimate import evaluate
from a2lib.theory.layouts import Layout, Training
from a2lib.theory.published import published_run


def exposed_s(estimate):
    return estimate.step_s - sum(estimate.time.work.values())


def test_the_405b_layout_fits_by_its_last_cut_alone_and_pipelines_pay():
    training, device = Training(PRESETS["Llama-3-405B"], 2048, 8192), DEVICES["H100"]
    layout = Layout(data=128, tensor=8, pipeline=16, microbatches=16, sharding="zero2", chunks=8)

    def estimate(batch=2048, **changed):
        return evaluate(replace(training, batch=batch), replace(layout, **changed), device)

    found, once = estimate(), estimate(sharding="zero1")
    assert once.memory_bytes > 80e9 > found.memory_bytes
    # gradients sent once and a quarter of the layers recomputed: fits, and is faster
    once_again = estimate(sharding="zero1", checkpointing="block")
    freed = once.memory["activations"] - once_again.memory["activations"]
    buffers = once_again.memory["temporaries"] - once.memory["temporaries"]
    assert once.memory_bytes + buffers - freed / 4 < 80e9
    assert once.step_s + (once_again.step_s - once.step_s) / 4 < 0.8 * found.step_s
    # more memory makes ZeRO-2 needless, and even ZeRO-1
    larger = evaluate(training, replace(layout, sharding="none"), DEVICES["H200"])
    assert larger.memory_bytes < 141e9
    # a stage has fewer layers of more micro-batches: no fewer activations
    rank = {"batch": 16, "data": 1, "sharding": "none"}
    whole = estimate(**rank, pipeline=1, chunks=1).memory["activations"]
    stages = estimate(**rank).memory["activations"]
    assert whole == pytest.approx(stages, rel=0.02)
    by_pieces = pd.Series({chunks: estimate(chunks=chunks).step_s for chunks in (1, 2, 4, 8)})
    assert by_pieces.is_monotonic_decreasing
    assert by_pieces[1] > estimate(chunks=1, schedule="zb-h1").step_s > by_pieces[4]
    flat = evaluate(training, Layout(data=2048, tensor=8, sharding="fsdp"), device)
    assert flat.memory_bytes < found.memory_bytes
    assert flat.time.network_s > sum(flat.time.work.values())
    assert flat.time.all_hidden_s > 1.1 * found.time.all_hidden_s
    assert flat.step_s > 1.1 * found.step_s
    cut = Layout(data=2048, tensor=8, checkpointing="block")
    flat_again = evaluate(training, cut, device)
    assert flat_again.memory_bytes < 10e9 and flat_again.step_s > flat.step_s
    # one stage a device is idle longer, and waits longer for communication; with 8 pieces most of
    # what is left is communication
    one_stage = estimate(chunks=1)
    assert one_stage.time.work["pipeline bubble"] > exposed_s(found) > 2
    assert one_stage.step_s > flat.step_s and exposed_s(one_stage) > exposed_s(found)
    assert found.time.work["pipeline bubble"] < exposed_s(found) / 4
    # gradients in bf16 halve what zero2 sends of them, and matter little to zero1
    narrow = replace(training, sent_gradients="bf16")
    assert evaluate(narrow, layout, device).step_s < 0.9 * found.step_s
    sent_once = replace(layout, sharding="zero1")
    assert evaluate(narrow, sent_once, device).step_s > 0.98 * once.step_s
    # what sequence parallelism saves, of the norms' work too; recomputing costs more
    plain, again = estimate(sequence=False), estimate(checkpointing="block")
    assert plain.memory_bytes > 2 * 80e9
    assert found.step_s < plain.step_s < 1.05 * found.step_s < again.step_s


def test_published_steps_beside_their_estimates():
    rows = data.load_reference("trainings").query("expert == '1'").to_dict("records")
    runs = list(map(published_run, rows))
    ratios, outside = {}, 0
    for run in runs:
        ratios[run.name] = run.ratio()
        time = run.estimate.time
        outside += not time.all_hidden_s <= run.seconds() <= time.none_hidden_s
    assert outside > len(runs) / 2
    ratios = pd.Series(ratios)
    slower = ratios[ratios > 1].index
    assert len(slower) == 6 and set(slower.str.extract(r"^(\w+)")[0]) == {"GPT", "MPT"}
    assert ratios.idxmax() == "MPT 7B" and ratios["GPT 1T"] < ratios["GPT 530B"] < 1
    # whether gradients are sent for each micro-batch decides on which side of Meta the estimate is
    [meta] = filter(lambda run: "16,384" in run.name, runs)
    once = evaluate(meta.training, replace(meta.layout, sharding="zero1"), meta.device)
    assert meta.seconds() > 1.2 * once.step_s and meta.ratio() < 0.9
    # one rate for all, the mean MFU of the other trainings, is near as often; by a count of all
    # scores more often
    for flops, by_estimate in (("causal", 9), ("full", 8)):
        reached = np.log([run.share(run.seconds(flops), flops) for run in runs])
        others = (reached.sum() - reached) / (len(runs) - 1)
        estimated = np.log([run.ratio(flops) for run in runs])
        assert (abs(others - reached) < np.log(1.2)).sum() == 9
        assert (abs(estimated) < np.log(1.2)).sum() == by_estimate


def test_our_own_steps_take_longest_by_pytorch_and_from_python():
    steps = data.load("fsdp").query("not local")
    for model in ("2.7B", "xl25"):
        for captured in (True, False):
            ours = page.fsdp_step(steps, model, captured=captured).ms
            copies = page.fsdp_step(steps, model, page.COPIES, captured=captured).ms
            torch = page.fsdp_step(steps, model, "fsdp2", captured=captured).ms
            assert torch > max(ours, copies)
    # FSDP's forward computes faster than the rate that the evaluator takes
    t = page.columns(data.load("parallelism").query("not local"))
    gathers = page.sending(t).query("scheme == 'fsdp'")
    assert (gathers["compute"] / gathers["ms_without"]).max() > 1.01


def row(scheme, pass_, tokens, ms, without, sent=float("nan"), d_ff=1000, **over):
    mesh = {"dp": "2x1", "fsdp": "2x1", "tp": "1x2"}.get(scheme)
    ranks = {"implementation": "a2lib", "mesh": mesh, "backend": "nccl", "world_size": 2}
    sizes = {"dtype": "bf16", "layers": 2, "d_model": 1000, "d_ff": d_ff, "tokens": tokens}
    times = {"ms": ms, "ms_p20": ms, "ms_p80": ms, "ms_without": without, "ms_communication": sent}
    return {"scheme": scheme, "pass": pass_, "n": 9, **ranks, **sizes, **times, **over}


# Two layers of 1,000 by 1,000 on two ranks at C = 1 TFLOP/s and W = 1 GB/s. A product over B tokens
# has 2e6 B operations, so that a pass takes 6 B (forward) or 12 B (backward) microseconds in all. A
# layer's gradients are 6 MB and, of two ranks, as long on the wire: 6 ms, for both layers 12.
BY_BATCH = [
    row("dp", "forward", 500, 3, 3), row("dp", "forward", 2000, 12, 12),
    row("dp", "backward", 500, 15, 6, 12), row("dp", "backward", 2000, 33, 24, 12),
    row("dp", "end_to_end", 500, 18, 9, 12), row("dp", "end_to_end", 2000, 42, 36, 12),
    # A gather is 3 ms a layer; at 500 tokens as long as what it should hide behind takes twice.
    row("fsdp", "forward", 500, 7.5, 3, 6), row("fsdp", "forward", 2000, 18, 12, 6),
    row("fsdp", "backward", 500, 13.5, 6, 12), row("fsdp", "backward", 2000, 30, 24, 6),
]  # fmt: skip
# Of 1,000 tokens 2 MB pass for each sum: 4 ms in all, either pass. Forward 6 ms at 1,000 columns.
BY_WIDTH = [
    row("tp", "forward", 1000, 8, 6, 4), row("tp", "forward", 1000, 5, 1.5, 4, d_ff=250),
    row("tp", "backward", 1000, 14, 12, 4), row("tp", "backward", 1000, 5, 3, 4, d_ff=250),
]  # fmt: skip


@pytest.fixture
def rows():
    return page.columns(pd.DataFrame([*BY_BATCH, *BY_WIDTH]))


def test_c_and_w_are_measured_in_the_run(rows):
    layer = page.measured_layer(rows)
    assert (layer.flops, layer.bandwidth) == pytest.approx((1e12, 1e9))
    # Without a message of data parallelism there is no W.
    with pytest.raises(LookupError):
        page.columns(pd.DataFrame(BY_WIDTH))
    # The best rate, the middle of what is sent; four bytes are twice as long on the wire.
    slow = [row("dp", "backward", 500, 20, 12, 12), row("dp", "backward", 2000, 33, 24, 12)]
    slow = page.measured_layer(pd.DataFrame(slow).assign(dtype="fp32"))
    assert (slow.flops, slow.bandwidth) == pytest.approx((1e12, 2e9))


def test_what_is_predicted_and_what_hid(rows):
    few = one(rows, scheme="dp", pass_="backward", tokens=500)
    assert (few.compute, few.communication) == pytest.approx((6, 12))
    assert few.hidden == pytest.approx(0.5)
    # Half of the shorter part, 3 of 6 ms, hides.
    assert page.by_rule(few) == pytest.approx(15)


def test_a_step_over_the_rule_has_a2libs_parts_for_pytorch_too(rows):
    torch = row("dp", "end_to_end", 500, 30, float("nan"), implementation="torch")
    found = page.end_to_end(pd.concat([rows, pd.DataFrame([torch])]))
    # the rule: 12 ms of messages and half of 9 ms of multiplies
    assert found.loc[500, ("a2lib", "dp")] == pytest.approx(18 / 16.5)
    assert found.loc[500, ("torch", "dp")] == pytest.approx(30 / 16.5)


def on_a_clock(scheme, is_backward, compute, sent):
    """Return the tasks of a pass over four layers, run event by event."""
    if scheme == "tp":
        weights = compute / 2 if is_backward else 0
        return schedules.tensor(4, compute - weights, sent, parts=2, weights_s=weights)
    if scheme == "dp":
        return schedules.data_parallel_backward(4, compute, sent)
    return schedules.fsdp(4, compute, *([sent / 2] * 2 if is_backward else [sent]))


@pytest.mark.parametrize("sent", [0.1, 0.7, 1.4, 9.0])
@pytest.mark.parametrize("scheme, pass_", page.THRESHOLDS)
def test_a_perfect_schedule_of_four_layers_hides_three_quarters_or_more(scheme, pass_, sent):
    seconds = schedules.seconds_of(on_a_clock(scheme, pass_ == "backward", 1.0, sent))
    hidden = (4 + 4 * sent - seconds) / min(4, 4 * sent)
    assert 0.75 - 1e-9 < hidden < 1 + 1e-9


def test_from_which_batch_the_rule_holds():
    over = pd.Series({512: 1.0, 1024: 1.2, 2048: 0.93, 4096: 1.07})
    assert page.holds_from(over) == 2048
    with pytest.raises(LookupError):
        page.holds_from(over.head(2))


def test_thresholds_by_scheme(rows):
    layer = page.measured_layer(rows)
    found = {}
    for key in page.THRESHOLDS:
        found[key] = page.threshold(layer, *key), page.crossing(rows, *key)
    assert found["dp", "backward"] == pytest.approx((1000, 1000))
    assert found["fsdp", "forward"] == pytest.approx((1000, 1000))
    # FSDP's messages are as predicted at 500 and half at 2,000, by which the threshold is lower.
    assert found["fsdp", "backward"] == pytest.approx((1000, 794), rel=1e-3)
    assert found["tp", "forward"] == pytest.approx((2000 / 3, 2000 / 3))
    assert found["tp", "backward"] == pytest.approx((1000 / 3, 1000 / 3))
    with pytest.raises(LookupError):
        page.crossing(rows[rows["tokens"] < 2000], "dp", "backward")


def test_near_a_threshold_is_within_a_factor_of_two_of_the_sheets(rows):
    layer = page.measured_layer(rows)
    near = page.near_a_threshold(rows, layer)
    found = set(zip(near["scheme"], near["pass"], near["d_ff"], near["tokens"], strict=True))
    # 500 and 2,000 tokens are half and twice the threshold, 1,000 columns 1.5 and 3 times theirs
    by_batch = set()
    for scheme, pass_ in page.THRESHOLDS[:3]:
        by_batch |= {(scheme, pass_, 1000, 500), (scheme, pass_, 1000, 2000)}
    by_width = {("tp", "forward", 1000, 1000), ("tp", "backward", 250, 1000)}
    assert found == by_batch | by_width and near["sheet_right"].all()
    # a sheet with a link three times as fast names the wrong part at 500, and 2,000 are far from it
    faster = replace(layer, bandwidth=3e9)
    near = page.near_a_threshold(rows, faster)
    assert not near.query("tokens == 2000").size
    assert not one(near, scheme="dp", pass_="backward", tokens=500).sheet_right


def test_the_mean_beside_the_sheet_is_of_many_tokens_at_one_width(rows):
    many = [row("dp", "backward", n, ms, 6, 12) for n, ms in ((4000, 60), (8000, 192))]
    found = page.columns(pd.DataFrame([*BY_BATCH, *many]).assign(d_ff=page.WIDTH))
    layer = page.measured_layer(rows)
    sheet = replace(layer, flops=layer.flops * 2)
    over = page.with_sheet(found, sheet).query("tokens >= 2048")["over"]
    assert len(over) == 2 and page.by_sheet(found, sheet)["dp"] == pytest.approx(over.mean())


def test_an_estimate_sends_gradients_as_wide_as_its_wrapper_does():
    seconds = {}
    for wrapper in ("fsdp", "fsdp2", "fsdp_copies"):
        seconds[wrapper] = page.estimate("xl25", wrapper=wrapper).step_s
    assert seconds["fsdp"] == seconds["fsdp2"] > seconds["fsdp_copies"]
