"""The pages of timed chapters over the rows that are committed, and over tables that are whole: no
sentence of theirs may wait for rows to fail."""

import dataclasses
import re
import shutil

import pytest

from a2lib.experiments import benchmark
from a2lib.experiments.benchmark.configurations import SIZES, Configuration, Parameters
from a2lib.paths import ROOT
from a2lib.report.chapters.mixed_precision import Mixed, gains, speed
from a2lib.theory.transformer import parameter_count

PAGES = ("benchmark", "mixed_precision", "attention", "compile")
RATES = {"fp32": 50, "tf32": 300, "bf16": 600, "bf16_weights": 640}  # TFLOP/s
# What no reader should see: a missing value of Python or pandas, an empty list, a type's name.
WRONG = re.compile(
    r"([^.;\s] |\()None\b|<NA>|\bnan( ms| %|×)|\binf( ms| %|×)|\bnp\.|\[\]|  and "
)
NOT_YET = "Not measured yet"


def milliseconds(configuration, phase):
    """A crude cost: operations over a rate, and for what is launched the host's if that is more."""
    shares = {"forward": 1, "loss": 0.01, "backward": 2, "optimizer": 0.3}
    phases = benchmark.handlers.PHASES[configuration.mode]
    tokens = configuration.batch * configuration.context
    forward = 2 * tokens * parameter_count(SIZES[configuration.model])
    asked = (phase,) if phase in shares else phases
    gpu = sum(shares[p] for p in asked) * forward / RATES[configuration.precision] / 1e9
    gpu *= 0.95 if configuration.attention == "flash" else 1
    launched = 0 if configuration.capture else 0.4 * SIZES[configuration.model].num_layers
    launched *= 0.4 if configuration.compile == "blocks" else 1
    host = sum(shares[p] for p in asked) * launched / 3
    return (max(gpu, host) + (phase == "wall"), host)


def filled(key, configuration, phase):
    ms, host = milliseconds(configuration, phase)
    trains = "optimizer" in benchmark.handlers.PHASES[configuration.mode]
    fits = configuration.model != "10B" or not trains
    if not fits:
        return {**key, "status": "oom", "note": "not tried: needs at least 2 GB of 1 GB"}
    return {**key, "ms": f"{ms:.6g}", "ms_p20": f"{0.99 * ms:.6g}", "ms_p80": f"{1.01 * ms:.6g}",
            "ms_mean": f"{ms:.6g}", "ms_std": f"{ms / 200:.4g}", "ms_min": f"{0.98 * ms:.6g}",
            "ms_host": f"{host:.6g}" if host and phase != "wall" else "", "n": 10,
            "peak_bytes": 10**9}  # fmt: skip


def rows(tasks, make):
    for task in tasks:
        configuration = Configuration(**task.spec["configuration"])
        for keys in task.rows.values():
            for key in keys:
                text = {name: str(value).lower() if isinstance(value, bool) else value
                        for name, value in key.items()}  # fmt: skip
                yield make(text, configuration)


@pytest.fixture(scope="module")
def whole(synthetic, tmp_path_factory):
    """A data folder with every row that the benchmark's sweeps ask for, and ceilings."""
    given = dataclasses.replace(Parameters(), sweep="all")

    def step(key, configuration):
        slow = 5 if key["step_number"] == 0 else 1
        ms = slow * milliseconds(configuration, key["phase"])[0]
        return {**key, "ms": f"{ms:.6g}", "n": 1, "reserved_bytes": 10**9}

    def first(key, configuration):
        cost = {"nothing": 900, "product": 800, "block": 300, "memory": 100, "modules": 400}
        extra = cost.get(key["prepared"], 50) if key["part"] == "first" else 0
        return {**key, "ms": f"{extra + milliseconds(configuration, 'wall')[0]:.6g}", "n": 1}

    def energy(key, configuration):
        ms = milliseconds(configuration, "wall")[0]
        return {**key, "ms": f"{ms:.6g}", "ms_mean": f"{ms:.6g}", "joules": f"{0.7 * ms:.6g}",
                "power_limit_w": 700, "capped_percent": 100, "sm_mhz": 1500, "n": 60}  # fmt: skip

    table = rows(benchmark.table_tasks(given, "cuda"), lambda k, c: filled(k, c, k["phase"]))
    ceiling = [
        {"operation": "matmul", "dtype": t, "size": 8192, "ms": 2 * 8192**3 / rate / 1e9, "n": 9}
        for t, rate in (("fp32", 60), ("bf16", 800))
    ] + [{"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 0.5, "n": 9}]
    return synthetic.by_hand(
        tmp_path_factory.mktemp("whole"), benchmark=table, ceiling=ceiling,
        benchmark_steps=rows(benchmark.warmup_tasks("cuda"), step),
        benchmark_first=rows(benchmark.first_tasks("cuda"), first),
        benchmark_power=rows(benchmark.power_tasks("cuda"), energy),
    )  # fmt: skip


def wrong(texts):
    return [text for text in texts if WRONG.search(text)]


def test_a_whole_table_leaves_no_gap(whole, shown_by):
    texts = shown_by("benchmark", whole)
    every = "\n".join(texts)
    assert not wrong(texts) and NOT_YET not in every
    assert "| does not fit |" in every and "Met: " in every and "Missed: " in every


def test_whole_models_in_every_precision_leave_no_gap(whole):
    mixed = Mixed([whole])
    told = [gains.trend, gains.against_estimate, speed.hosts, speed.source]
    texts = [str(sentence(mixed)) for sentence in told]
    texts += [str(of(mixed, "c", "tab-c")) for of in (gains.table, speed.table, speed.expected)]
    assert not wrong(texts) and NOT_YET not in "\n".join(texts)
    assert texts[0].startswith("In the GPU's own time bf16 gains over fp32 at 512 tokens: forward ")
    assert texts[0].count("(10B)") == 2 and "10B at 512: " in texts[1]
    assert texts[4].count("| replay |") == len(speed.MODELS)


@pytest.mark.parametrize("page", PAGES)
def test_the_committed_rows_are_shown(shown_by, tmp_path, page):
    shutil.copytree(ROOT / "data" / "measured", tmp_path / "measured")
    texts = shown_by(page, tmp_path)
    assert len(texts) > 10 and not wrong(texts)
