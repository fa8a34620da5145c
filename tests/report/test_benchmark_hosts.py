"""Whose host the benchmark's times are of."""

from benchmark_rows import first, steps, times, whole

from a2lib.report.chapters import measured
from a2lib.report.chapters.benchmark import answer, warmup
from a2lib.report.chapters.benchmark import first as apart


def test_host_times_of_half_a_host_are_told(bench, monkeypatch, synthetic, tmp_path):
    synthetic.by_hand(tmp_path, device="cpu")
    other = synthetic.RUN.replace("nvidia-h200", "cpu")
    rows = times(1, 2, 1, host=9) + whole(3) + times(1, 2, 1, mode="forward-backward")
    halved = [{**row, "run": other} for row in times(2, 4, 2, host=9, model="small")]
    first_step = [{**row, "run": other} for row in first("nothing", 110) + first("product", 105)]
    b = bench(benchmark=rows + halved + whole(6, model="small"), benchmark_first=first_step,
              benchmark_steps=steps([100] + [10] * 9, 0))  # fmt: skip
    told = (answer.launch_bound, warmup.sentence, apart.sentence)
    assert all("of a host of two" not in str(sentence(b)) for sentence in told)
    monkeypatch.setattr(measured, "SHARED", (other[:20],))
    launched, warm, cold = (str(sentence(b)) for sentence in told)
    assert "of a host of two" not in warm
    assert launched.endswith(
        f" What the host takes is, in 1 of 2 of these launched train-steps, of {measured.HALF}."
    )
    assert cold.endswith(
        f" What the host takes is, in all of these first steps, of {measured.HALF}."
    )
