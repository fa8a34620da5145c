"""What the chapter says of energy and power, by value."""

import pytest
from benchmark_rows import CEILING, key, times, whole

from a2lib.report.chapters.benchmark import power
from a2lib.report.tables import MISSING

NARROW = {"way": "ours", "precision": "bf16_weights"}


def energy(ms, joules, limit=700, capped=100, **where):
    return {**key(capture="true", **where), "ms": ms, "ms_mean": ms, "joules": joules,
            "power_limit_w": limit, "capped_percent": capped, "sm_mhz": 1500, "n": 60}  # fmt: skip


def narrow(model="2.7B"):
    """The steps at 700 W: no update, after the backward, beside it."""
    return [
        energy(100, 70, model=model, mode="forward-backward", **NARROW),
        energy(140, 98, model=model, **NARROW),
        energy(130, 91, model=model, mode="overlapped-step", **NARROW),
    ]


def said(b):
    return str(power.sentence(b))


def test_steps_at_the_limit_word_for_word(bench):
    measured = times(30, 60, 69, way="peer") + whole(155, way="ours")  # 160 ms, the plain step
    b = bench(benchmark=measured, benchmark_power=narrow(), ceiling=CEILING)
    assert said(b) == (
        "Repeated for some seconds, the 3 steps below take 700 W, where the driver allows 700 W: "
        "100% of it, and by 100% of its readings it keeps the clock low for that. So power is what "
        "they wait for: the clock falls until a step takes as long as its energy over the limit, "
        "whatever runs beside what, and only what spares energy spares time. 2.7B with 16-bit "
        "weights takes 70.0 J without an update, and the update 28.0 J (40.0 ms at the limit) "
        "after the backward and 21.0 J (30.0 ms at the limit) beside it. Its target, 120 ms, is "
        "84.0 J at the limit; the least that a step with an update takes is 91.0 J. On this GPU "
        "what the target lacks is 8% of that energy, not a better overlap."
    )


def test_a_target_within_its_energy_is_not_called_out_of_reach(bench):
    measured = times(50, 100, 49, way="peer") + whole(155, way="ours")  # 0.75 of it is 150 ms
    b = bench(benchmark=measured, benchmark_power=narrow(), ceiling=CEILING)
    assert "target" not in said(b) and "beside it." in said(b)


def test_steps_below_the_limit_do_not_wait_for_power(bench):
    rows = [*narrow(), energy(100, 50, way="ours", capped=10)]
    text = said(bench(benchmark_power=rows))
    assert text.endswith("Not all wait for power: 2.7B, ours could take more.")
    assert "the 4 steps below take 500 W to 700 W" in text and "10% to 100% of its" in text
    assert "71% to 100% of it" in text and "spares" not in text


def test_without_a_limit_or_energy_nothing_is_said(bench):
    silent = [{**row, "power_limit_w": ""} for row in narrow()]
    b = bench(benchmark_power=silent)
    assert said(b).startswith("**Not measured yet on an NVIDIA H200**: what a step takes of energy")
    assert len(power.table(b, "c", "tab-c").frame) == 3
    silent = [{**row, "joules": ""} for row in narrow()]
    b = bench(benchmark_power=silent)
    assert said(b).startswith("**Not measured yet") and not len(power.table(b, "c", "t").frame)
    unread = [{**row, "capped_percent": ""} for row in narrow()]
    assert "readings" not in said(bench(benchmark_power=unread))


@pytest.mark.parametrize("left_out", range(3))
def test_an_update_is_told_where_all_three_steps_are_there(bench, left_out):
    rows = narrow()
    del rows[left_out]
    assert "without an update, and" not in said(bench(benchmark_power=rows))


def test_the_table_by_value(bench):
    rows = [*narrow(), energy(200, 100, way="peer", limit="", capped="")]
    found = power.table(bench(benchmark_power=rows), "c", "tab-c").frame.values.tolist()
    assert found[0] == ["2.7B", "PyTorch's attention", "200", "100", "500", MISSING, MISSING,
                        "1500"]  # fmt: skip
    assert found[2] == ["2.7B", "16-bit: update after", "140", "98.0", "700",
                        "140", "100%", "1500"]  # fmt: skip
    assert [row[1] for row in found[1:]] == list(power.NAMES.values())


def test_a_step_that_failed_is_left_out(bench):
    failed = {**energy("", ""), **key(capture="true", **NARROW), "status": "oom", "note": "much"}
    failed |= dict.fromkeys(("ms_mean", "power_limit_w", "capped_percent", "sm_mhz", "n"), "")
    rows = [energy(100, 70, mode="forward-backward", **NARROW), failed]
    b = bench(benchmark_power=rows)
    assert said(b).startswith("Repeated for some seconds, the step below takes 700 W, where the")
    assert len(power.table(b, "c", "tab-c").frame) == 1


def test_the_page_counts_these_rows_too(bench):
    b = bench(benchmark=times(30, 60, 69), benchmark_power=narrow())
    assert len(b.measured()) == len(b.table) + 3 == 8
