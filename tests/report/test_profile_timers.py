"""What the profile chapter says of times: the trace's, the timer's, the host's, a graph's."""

import functools

import pytest
from profile_rows import KEY, STEP, chapter, forward, lines, row

from a2lib.report.chapters.profile import answer, host, timer
from a2lib.report.chapters.profile.rows import idle


@pytest.fixture
def made(synthetic, tmp_path):
    return functools.partial(chapter, synthetic, tmp_path)


def timed(ms, capture=False, **over):
    """A row of the benchmark, which times the same steps."""
    keys = {name: value for name, value in KEY.items() if name != "profiler"}
    made = {**keys, "capture": str(capture).lower(), "warmup": 5, "phase": "step", "ms": ms}
    return made | {"n": 10} | over


def test_idle_is_what_every_timer_leaves(made):
    rows = [row(ms_timer=437.5), row(ms_timer=500.0, profiler="torch")]
    p = made(rows, ({}, STEP), benchmark=[timed(400.0), timed(380.0, capture=True),
                                          timed(900.0, warmup=0)])  # fmt: skip
    assert p.timers("small", 512) == [437.5, 500.0, 400.0]
    assert p.idle("small", 512) == pytest.approx((0.125, 0.3))
    assert p.replayed("small", 512) == 380.0 and p.replayed("small", 128) is None
    assert str(answer.sentence(p)).endswith("The GPU is idle for 12% to 30% of the small "
                                            "model's step.")  # fmt: skip
    assert "step, by every timer, in 1 of 1 configurations: small at 512 (12% to 30%)." in str(
        host.idling(p)
    )
    assert "is within 2% in 0 of 1 configurations, and differs most in small at 512, 400 to 500 " \
        "ms" in str(host.unsteady(p))  # fmt: skip


def test_one_graph_is_the_test_of_the_hosts_gaps(made):
    p = made([row(ms_timer=437.5)], ({}, STEP), benchmark=[timed(357.0, capture=True)])
    said = str(host.graphs(p))
    assert "take 1.02 times that in 1 configurations: small at 512, 357 ms for 350 ms" in said
    assert "438 ms without a graph. So the gaps are the host's." in said
    p = made([row(ms_timer=437.5)], ({}, STEP), benchmark=[timed(420.0, capture=True)])
    assert str(host.graphs(p)).endswith("the gaps are not the host's alone.")


def test_a_full_queue(made):
    """A kernel takes 3.5 ms: 1,000 of them ahead are 3.5 s."""
    contexts = (128, 256, 512, 1024)
    waits = dict(zip(contexts, (3_500_000, 3_400_000, 3_300_000, 35_000), strict=True))
    rows = [row(context=c, us_queued=us) for c, us in waits.items()]
    p = made(rows, *(({"context": c}, STEP) for c in contexts))
    said = str(host.queue(p))
    assert "no further than some 943 to 1,000 kernels" in said
    assert "(small at 128, small at 256 and small at 512)" in said
    assert "takes 350 µs in the mean" in said
    rows = [row(context=c, us_queued=us) for c, us in list(waits.items())[2:]]
    p = made(rows, *(({"context": c}, STEP) for c in contexts[2:]))
    assert str(host.queue(p)) == "The host is at most 943 kernels ahead."


def test_the_trace_beside_the_timer(made):
    rows = [forward(128, ms_timer=8.0, ms_traced=9.9), forward(256, ms_timer=10.1, ms_range=3.0),
            forward(512, ms_timer=10.5, ms_traced=10.5)]  # fmt: skip
    p = made(rows, *(({"context": c}, STEP) for c in (128, 256, 512)))
    said = str(timer.agreement(p))
    assert said.startswith(
        "From the first kernel's start to the last one's end, 1 of 3 forwards are within 2% of the "
        "timer's. In small at 128 the traced process takes longer: of its"
    )
    assert "In small at 512 the timer says more, by 500 µs: its first event is recorded" in said
    assert "the trace says more" not in said
    assert "is shorter than the kernels in 1 of 3" in said
    assert lines(timer.forwards(p, "c", "tab-c"), 3)["plain", "small", "128"] == [
        "8.00", "9.90", "10.0", "+25.0 %", "10.0", "10.0",
    ]  # fmt: skip
    p = made([forward(128, profiler="torch")], ({"context": 128}, STEP))
    found = lines(timer.forwards(p, "c", "tab-c"), 3)
    assert found["plain", "small", "128"][-1] == "torch.profiler"


def test_the_forward_of_every_way_stands_beside_the_timer(made):
    """In bf16 a forward has no trace of its own, and is of a step's: 0.3 ms of 14 before the first
    kernel are the timer's."""
    narrow = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
    rows = [forward(512, compile="blocks", ms_traced=10.2, ms_timer=10.1),
            row("forward", 14.0, ms_timer=7.0, ms_traced=14.3, **narrow)]  # fmt: skip
    p = made(rows, ({"compile": "blocks"}, STEP), (narrow, STEP))
    assert [key[:2] for key in lines(timer.forwards(p, "c", "tab-c"), 3)] == [
        ("compiled", "small"), ("bf16, ours, compiled", "small"),
    ]  # fmt: skip
    said = str(timer.agreement(p))
    assert "1 of 2 forwards are within 2%" in said
    assert "In small at 512 (bf16, ours, compiled) the traced process" in said
    assert "the timer says 200 µs to 300 µs more than the trace" in said
    # Compiled code has no ranges of modules to take them from.
    assert str(timer.ranged(p)).startswith("These traces have ranges around the phases alone.")
    slower = row("forward", 14.0, ms_timer=7.0, ms_traced=14.6, **narrow)
    assert timer.verdict(chapter_row(made, slower)) == timer.OTHER
    same = row("forward", 14.0, ms_timer=7.0, ms_traced=7.0)
    assert timer.verdict(chapter_row(made, same)) == timer.OTHER


def chapter_row(made, one):
    return next(made([one], ({}, STEP)).table.itertuples())


def test_every_trace_has_a_line(made):
    rows = [row(ms_timer=700.0), row(mode="forward"), row(profiler="torch"), row("forward"),
            row(model="2.7B", compile="blocks"),
            {**KEY, "context": 128, "phase": "step", "status": "oom"}]  # fmt: skip
    text = str(timer.every(made(rows, ({}, STEP)), "c", "tab-c"))
    assert text.count("| small | 512 |") == 3 and text.count("| 2.7B | 512 |") == 1
    assert "train-step | Nsight Systems | 700 | 350 | 350 | 350 | 50% |" in text
    assert "| 128 |" not in text


def test_a_trace_that_is_longer_than_the_timer_is_not_explained_by_its_events(made):
    rows = [forward(128, ms_timer=9.0, ms_traced=9.0), forward(256, ms_timer=7.0, ms_traced=7.0)]
    p = made(rows, *(({"context": c}, STEP) for c in (128, 256)))
    said = str(timer.agreement(p))
    assert "In small at 128 and small at 256 the trace says more, by 1.00 ms to 3.00 ms: that is " \
        "not explained." in said  # fmt: skip
    assert "-" not in said and "first event" not in said


def test_which_ranges_the_traces_have(made):
    own, step = forward(128), row("forward", 9.0)
    traces = [({"context": c}, STEP) for c in (128, 512)]
    assert str(timer.ranged(made([own, forward(512)], *traces))) == (
        "These traces have ranges around the phases alone. With a range around every module, which "
        "tells parts apart, the host takes longer."
    )
    assert "the phases alone, but for small at 512. With" in str(
        timer.ranged(made([own, step], *traces))
    )
    assert str(timer.ranged(made([step], *traces))).startswith(
        "**Traces with ranges around the phases alone are not measured yet**: all of these have "
        "one around every module."
    )


def test_what_a_profiler_adds(made):
    rows = [row(ms_timer=100, ms_traced=110), row(context=128, ms_timer=100, ms_traced=125)]
    assert str(timer.perturbed(made([*rows, row(mode="forward")]))) == (
        "By the same timer traced steps take 1.00 times in a plain forward and 1.10 to 1.25 times "
        "in a plain train-step the time of others."
    )


def test_the_traces_of_phases_alone_come_first(made):
    p = made([row("forward", 9.0), forward(512, 7.0)], ({}, STEP))
    assert p.forward("small", 512).ms == 7.0
    p = made([row("forward", 9.0), row("forward", 8.0, profiler="torch")], ({}, STEP))
    assert p.forward("small", 512).ms == 9.0


def test_idle_and_the_host(made):
    rows = [row(ms_timer=500.0, ms_host=490.0, us_queued=2, context=128),
            row(ms_timer=360.0, us_queued=5000), row(ms_timer=340.0, context=1024)]  # fmt: skip
    p = made(rows, *(({"context": c}, STEP) for c in (128, 512, 1024)))
    assert [idle(p.row("small", c)) for c in (128, 1024)] == pytest.approx([0.3, 0.0])
    assert str(host.idling(p)) == (
        "The GPU is idle for more than 10% of the step, by every timer, in 1 of 3 configurations: "
        "small at 128 (30%). There issuing the step takes the host 90% of it or more: the GPU "
        "waits for launches. A kernel starts 2.00 µs after its launch there, and 90.0 µs to 5.00 "
        "ms elsewhere (medians)."
    )
    found = lines(host.hosts(p, "c", "tab-c"), 3)
    assert found["plain", "small", "128"] == [
        "100", "500", "350", "·", "30%", "490", "350", "·", "0",
    ]  # fmt: skip
    p = made([row(ms_timer=355.0)], ({}, STEP))
    assert str(host.idling(p)).endswith("the most is 1.4%, in small at 512.")
    p = made([row(ms_timer=500.0)], ({}, STEP))
    assert "In small at 512 it does not, and the gaps have another" in str(host.idling(p))


def test_what_the_host_does_while_it_issues(made):
    p = made([forward(512, ms_range=8.0, ms_launching=2.0, launches=1000)], ({}, STEP))
    said = str(host.issuing(p))
    assert "in plain (small at 512): 5.00 µs a kernel, and 8.00 µs under the profiler" in said
    assert "of which 25% inside the calls that launch. The rest" in said
    both = [forward(512, ms_range=8.0, ms_launching=2.0, launches=1000),
            forward(128, ms_host=4.0, launches=100, compile="blocks")]  # fmt: skip
    assert "; in compiled (small at 128): 40.0 µs a kernel" in str(
        host.issuing(made(both, ({}, STEP)))
    )
    # Where the host is ahead its launches wait for the GPU.
    p = made([forward(512, ms_launching=2.0, us_queued=5000)], ({}, STEP))
    assert "**Not measured yet" in str(host.issuing(p))
