"""What the chapter on the sharded optimizer says, by value: rows made by hand, in round numbers."""

import dataclasses

import pytest

from a2lib.experiments.sharded_optimizer import memory_tasks, time_tasks
from a2lib.experiments.sharded_optimizer.configurations import Parameters, Way
from a2lib.report import svg
from a2lib.report.chapters.sharded_optimizer import (
    Sharding,
    answer,
    local,
    memory,
    published,
    schemes,
    times,
)
from a2lib.report.chapters.sharded_optimizer.rows import (
    MAIN,
    SETTINGS,
    exchange_s,
    formula,
    weight_bytes,
)
from a2lib.theory.sharding import MOMENTS, STATE

MB = 2**20
ENGINES, TORCH = "copy_engines", "torch_ddp"
RUN = {"batch": 4, "context": 512, "backend": "nccl", "world_size": 2}


def training(setting=MAIN):
    return {**RUN, **setting.columns()}


def timed(ms, optimizer="plain", wrapper="bucketed", capture=False, **over):
    return {
        **dataclasses.asdict(Way.of(optimizer, wrapper)), **training(), "compile": "blocks",
        "capture": str(capture).lower(), "ms": ms, "ms_p20": ms - 0.5, "ms_p80": ms + 0.5, "n": 20,
        "ms_without": 80, "ms_without_p20": 79, "ms_without_p80": 81, "ms_optimizer": 14,
        "ms_host": 3 if capture else ms - 1, "ms_rank_min": ms - 1, "ms_rank_median": ms - 0.5,
        "ms_rank_max": ms, "conditions": "", "note": "", **over,
    }  # fmt: skip


def held(optimizer, moment, rank=0, factor=1.01, wrapper="bucketed", **over):
    """So much of what the formula has."""
    of = formula(optimizer)
    at = of.at(moment if moment in MOMENTS else "after")
    total = of.peak() if moment == "step" else sum(at.values())
    size = weight_bytes()
    return {
        **dataclasses.asdict(Way.of(optimizer, wrapper)), **training(), "compile": "none",
        "moment": moment, "on_rank": rank, "parameter_bytes": at["parameters"],
        "gradient_bytes": at["gradients"], "optimizer_bytes": at[STATE], "buffer_bytes": 10**8,
        "present_bytes": int(factor * sum(at.values())), "tensor_bytes": int(factor * total),
        "allocated_bytes": int(factor * total), "reserved_bytes": 10**11, "driver_bytes": 10**11,
        "reduced_bytes": size if moment == "step" else "",
        "gathered_bytes": size * (optimizer == "sharded") if moment == "step" else "",
        "broadcast_bytes": 0 if moment == "step" else "", "note": "", **over,
    }  # fmt: skip


TIMES = [
    timed(88, capture=True), timed(90, "sharded", capture=True),
    timed(84, wrapper=ENGINES, capture=True), timed(82, "sharded", ENGINES, capture=True),
    timed(110), timed(112, "sharded"), timed(150, wrapper=TORCH), timed(200, "zero", TORCH),
]  # fmt: skip
MEMORY = [
    held(optimizer, moment, rank, 1.01 - 0.02 * rank)
    for optimizer in ("plain", "sharded")
    for moment in (*MOMENTS, "step")
    for rank in (0, 1)
]


def gather(size, ms):
    return {"operation": "all_gather", "backend": "nccl", "world_size": 2, "dtype": "fp32",
            "size": size, "ms": ms, "n": 9, "ms_queued": ms, "note": ""}  # fmt: skip


# No overhead, 800 GB/s of the whole tensor: 400 on the link.
GATHERS = [gather(s * MB, 1e3 * s * MB / 800e9) for s in (1, 10, 100, 1024)]


@pytest.fixture
def made(synthetic, tmp_path):
    def make(times=(), memory=(), device="nvidia-h200", **sections):
        sections |= {"sharded_optimizer": times, "sharded_optimizer_memory": memory}
        rows = {name: rows for name, rows in sections.items() if rows}
        return Sharding([synthetic.by_hand(tmp_path, device=device, **rows)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Sharding([tmp_path])


def lines(table, keys=2):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_the_formula(empty):
    assert str(answer.sentence(empty)) == (
        "**The answer.** Weights, gradients and AdamW's state of the xl of 2025 are 32.0 GB on "
        "each of 2 GPUs after an update, and 24.0 GB where each keeps half of the state. **Not "
        "measured yet on an NVIDIA H200**: the same by the allocator, a step replayed from a CUDA "
        "graph and a step launched from Python."
    )
    # 28 bytes a parameter at 4.8 TB/s; 3.996 GB at 450 GB/s.
    said = str(answer.estimate(empty))
    assert "11.7 ms for the xl of 2025. Half of it takes 5.83 ms" in said
    assert "8.88 ms by the maker's 450 GB/s: longer than what is saved" in said
    # 5.83 + 8.88; 8.88 + 5.83 / 8.
    assert "make 14.7 ms; in 8 chunks" in said and "9.61 ms, less than the 11.7 ms" in said


def test_the_answer_with_rows(made):
    assert str(answer.sentence(made(TIMES, MEMORY))).endswith(
        "half of the state. Measured: 32.4 and 24.3 GB, within 1.00% of the formula. A step "
        "replayed from a CUDA graph takes 82.0 ms in place of 84.0, 0.976 times. A step launched "
        "from Python takes 112 ms in place of 110, 1.018 times, which is level."
    )
    slow = made(TIMES, MEMORY, collectives=[
        {**row, "ms_queued": 20 * row["ms"]} for row in GATHERS
    ])  # fmt: skip
    assert "200 ms by measured all-gathers" in str(answer.estimate(slow))
    assert "ms, more than the 11.7 ms of the whole update." in str(answer.estimate(slow))


def test_an_exchange_is_as_many_messages_as_chunks(made):
    late = [{**row, "ms_queued": row["ms"] + 1} for row in GATHERS]
    seconds, measured = exchange_s(made(collectives=late))
    assert measured and seconds == pytest.approx(8 * 1e-3 + weight_bytes() / 800e9)


def test_what_hides_of_the_exchange(made, empty):
    """Half of the 14 ms is 7 without an exchange; 11 leave 4 of the 8.88 that it takes."""
    rows = [timed(110, ms_optimizer=14), timed(112, "sharded", ms_optimizer=11)]
    assert str(answer.hides(made(rows))) == (
        "Measured, launched, the whole update takes 14.0 ms, 1.20 times what its bytes take, and "
        "ours with its exchange 11.0: of the 8.88 ms that the exchange takes by the estimate, 55% "
        "run beside half of an update."
    )
    # 200 ms of exchange would have made it longer.
    slow = [{**row, "ms_queued": 20 * row["ms"]} for row in GATHERS]
    said = str(answer.hides(made(rows, collectives=slow)))
    assert "half of one saves more than was counted" in said
    assert "Not measured yet" in str(answer.hides(empty))


def test_memory_is_that_of_the_fullest_rank_beside_the_formula(made, empty):
    c = made(memory=MEMORY)
    said = str(memory.sentence(c))
    assert said.startswith(
        "Without sharding the fullest of 2 GPUs holds 8.07, 16.2 and 32.4 GB at the three "
        "moments, at most 1.00% from the formula; the peak of a later step is 39.1 GB, by the "
        "count of its tensors 38.7. With sharding"
    )
    assert "Sharding saves 8.07 GB, and nothing before the first update" in said
    assert said.endswith(
        "Of all 8 lines of the tables below, PyTorch's wrappers and later peaks "
        "included, none is further than 1.00% from the formula."
    )
    assert "Not measured yet" in str(memory.sentence(empty))
    found = lines(memory.table(c, MAIN, "c", "t"))
    assert len(found) == 8
    line = found["sharded", "after update"]
    # 24.05 GB and 1 %; what no column names is that, what the formula has as the rest, less 0.1.
    assert line == ["24.3", "24.0", "+1.00%", "7.99", "7.99", "7.99", "0.100", "0.208", "24.3"]
    assert found["sharded", "later peak"] == ["31.0", "30.7", "+1.00%", *["·"] * 5, "31.0"]
    assert str(memory.rest(c, "c", "t")).count("nothing measured yet") == 2


def test_the_buckets_of_pytorch_s_ddp_are_in_its_formula(made):
    rows = [held("plain", moment, wrapper=TORCH, factor=1) for moment in ("after", "step")]
    for row in rows:
        row |= {name: row[name] + weight_bytes() for name in ("present_bytes", "tensor_bytes")}
    found = lines(memory.table(made(memory=rows), MAIN, "c", "t"))
    assert found["AdamW, PyTorch's DDP", "after update"][1:3] == ["40.0", "+0.00%"]
    assert found["AdamW, PyTorch's DDP", "later peak"][1:3] == ["46.7", "+0.00%"]
    few = [held("plain", "init", buffer_bytes=3480)]
    found = lines(memory.table(made(memory=few), MAIN, "c", "t"))
    assert found["AdamW", "model made"][6] == "<0.001"


def test_the_figure_is_measured_where_there_are_rows(made, empty):
    (ax,) = memory.figure(empty).figure.axes
    assert "by the formula" in ax.get_xlabel() and not ax.lines
    assert len(ax.patches) == 6 * 5
    c = made(memory=[row for row in MEMORY if row["moment"] != "step"])
    (ax,) = memory.figure(c).figure.axes
    assert len(ax.lines) == 6 and "formula" not in ax.get_xlabel()
    ends = [(p.get_x() + p.get_width(), round(p.get_y(), 2)) for p in ax.patches]
    last = max(end for end, y in ends if y == max(y for _, y in ends))
    assert last == pytest.approx(1.01 * sum(formula("sharded").at("after").values()) / 1e9)
    for chart in (memory.figure(empty), memory.figure(c)):
        assert svg.smallest_text(chart._repr_svg_()) >= svg.LEAST_SIZE


def test_times_with_and_without_in_turns(made, empty):
    c = made(TIMES)
    said = str(times.sentence(c))
    assert said.startswith(
        "For the xl of 2025, captured, a step takes 82.0 ms with sharding and 84.0 without, 0.976 "
        "times; its update, exchange included, 14.0 ms and 14.0. For the xl of 2025, launched, a "
        "step takes 112 ms with sharding and 110 without, 1.018 times, which is level; its update"
    )
    assert "Launched, for the xl of 2025 the host takes as long to issue a step as" in said
    assert said.endswith(
        "takes 200 ms, its DDP with AdamW 150, both launched, a ratio of 1.333; ours, launched, "
        "takes 0.56 times ZeroRedundancyOptimizer's step."
    )
    assert "Not measured yet" in str(times.sentence(empty))
    found = lines(times.table(c, MAIN, "c", "t"))
    assert found["captured", "sharded"][2] == "1.023"
    assert found["captured", "sharded, copy engines"][:3] == ["82.0", "81.5 to 82.5", "0.976"]
    assert found["launched", "PyTorch's ZeRO"][2] == "1.333"
    assert found["launched", "AdamW, PyTorch's DDP"][0] == "150"
    assert len(found) == len(TIMES)


def test_rows_of_older_code_are_shown_and_answer_nothing(made):
    """Launched, those of copy engines are faster, and of an earlier run."""
    early = [timed(100, wrapper=ENGINES), timed(95, "sharded", ENGINES)]
    c = made([*TIMES, *early])
    assert c.pair(False)[1].ms == 95 and not c.older(False)
    c.runs.loc["19990101T000000Z"] = c.runs.iloc[0]
    c.runs.loc["19990101T000000Z", "git"] = "older"
    earlier = (c.times["side"] == ENGINES) & ~c.times["capture"]
    c.times.loc[earlier, "run"] = "19990101T000000Z"
    assert c.pair(False)[1].ms == 112 and c.pair(True)[1].ms == 82
    assert (
        "The rows of copy engines, launched, are of an older commit (95.0 ms with sharding and 100 "
        "without, 0.950 times): no answer of this page is taken from them."
    ) in str(times.sentence(c))


def test_the_same_step_of_the_chapter_before_is_told_where_its_code_is_another(made):
    keep = ("optimizer", "ms_optimizer")
    other = {k: v for k, v in timed(75, wrapper=ENGINES, capture=True, ms_without=70).items()
             if k not in keep} | {"sent_dtype": "fp32"}  # fmt: skip
    c = made(TIMES, ddp=[other])
    assert "the chapter before" not in str(times.sentence(c))
    c.runs.loc["later"] = c.runs.iloc[0]
    c.runs.loc["later", "git"] = "another"
    c.steps["run"] = "later"
    assert (
        "The step without sharding of the xl of 2025, captured, takes 75.0 ms in [the chapter "
        "before](ddp.md), and 70.0 with nothing sent, 80.0 here: those rows are of another commit"
    ) in str(times.sentence(c))


def test_a_row_without_a_time_says_why(made):
    failed = {**timed(1, "sharded"), "status": "oom", "note": "out of memory"}
    failed |= {name: "" for name in failed if name.startswith("ms") or name == "n"}
    c = made([timed(110), failed])
    assert lines(times.table(c, MAIN, "c", "t"))["launched", "sharded"] == ["oom", *["·"] * 6]
    assert str(times.untimed(c)) == "- xl25, launched, bf16, sharded: oom (out of memory)"


def test_bytes_against_zero_by_formula_and_as_counted(made, empty):
    said = str(schemes.sentence(made(memory=MEMORY)))
    assert said.startswith(
        "Ours sends 1.5 times what a step without sharding does, 12.0 GB from each GPU in place "
        "of 7.99"
    )
    assert "7.99 GB, 1.0 times. Counted from the calls of a step, all-reduces are given" in said
    assert said.endswith("all-gathers end with 7.99, as the formula has it (to 0.00%).")
    wrong = [{**row, "gathered_bytes": row["gathered_bytes"] and 10**9} for row in MEMORY]
    assert "which is not the formula's (to 87.49%)" in str(schemes.sentence(made(memory=wrong)))
    found = lines(schemes.table(made(memory=MEMORY, collectives=GATHERS), "c", "t"), keys=1)
    # 12 GB at 450 GB/s, and at the 400 of the rows.
    assert found["ours",] == [
        "7.99", "7.99", "7.99", "4.00", "12.0", "26.6", "30.0",
    ]  # fmt: skip
    assert found["AdamW",][1:] == ["0", "7.99", "0", "7.99", "17.8", "20.0"]
    assert lines(schemes.table(empty, "c", "t"), keys=1)["AdamW",][-1] == "·"
    assert "1 rank: 16 and 16; 2 ranks: 12 and 10; 8 ranks: 9 and 5.5" in str(schemes.state(empty))


def test_targets_are_met_or_missed(made, empty):
    found = answer.targets(made(TIMES, MEMORY), "c", "t").frame.values.tolist()
    assert [line[3:] for line in found] == [
        ["1.00", "0.976", "met"], ["1.00", "1.018", "missed"],
        ["3% off", "1.00%", "met"], ["3% off", "1.00%", "met"],
    ]  # fmt: skip
    assert found[0][1] == "sharded, copy engines"
    assert [line[-1] for line in answer.targets(empty, "c", "t").frame.values.tolist()] == ["·"] * 4
    far = [{**row, "present_bytes": int(1.05 * row["present_bytes"])} for row in MEMORY]
    verdicts = answer.targets(made(memory=far), "c", "t").frame.values.tolist()
    assert [line[-1] for line in verdicts[2:]] == ["missed", "missed"]


def test_ratios_of_two_runs_say_so(made):
    c = made(TIMES)
    c.times.loc[(c.times["optimizer"] == "plain") & ~c.times["capture"], "run"] = "another"
    found = answer.targets(c, "c", "t").frame.values.tolist()
    assert [line[-1] for line in found[:2]] == ["met", "missed, two runs"]


def test_published_figures_stand_beside_the_formula(made, empty):
    said = str(published.sentence(empty))
    # 38.18 - 26.93; 14.89 / 2; one and a half of that.
    assert "finds 11.2 GiB less with sharding after the update, more than the 7.44 GiB" in said
    assert "divides too: 11.2 GiB in all" in said and "takes 1.29 times the plain one" in said
    found = lines(published.table(empty, "c", "t"), keys=3)
    assert found["in use", "plain", "after"] == ["38.18 GiB", "29.8", "·"]
    assert found["optimizer state", "sharded", "after"][0] == "7.32 to 7.56 GiB"
    plain = {"precision": "fp32", "attention": "eager"}
    c = made([timed(640, compile="none", **plain)], [held("plain", "after", **plain)])
    found = lines(published.table(c, "c", "t"), keys=3)
    assert found["in use", "plain", "after"][2] == "30.1"
    assert found["step", "plain", ""] == ["0.6334 s", "·", "640 ms"]


def test_another_machine_is_shown_with_all_its_rows(made):
    tiny = {"backend": "gloo", "model": "tiny", "present_bytes": "", "buffer_bytes": ""}
    rows = [{**held("sharded", "after", rank), **tiny} for rank in (0, 1)]
    c = made([timed(5, "sharded", backend="gloo", model="tiny")], rows, device="cpu")
    said = str(local.show(c))
    assert "**CPU**: tiny sizes" in said and said.count("| sharded |") == 2
    assert "memory of tiny, 2 ranks with gloo, batch 4 each, context 512, bf16, flash" in said


def whole_sweep(monkeypatch):
    """Rows of every key that the sweep of two GPUs asks for."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    asked = Parameters(sweep="all").asked()

    def keys(tasks):
        return [key for task in tasks for own in task.rows.values() for key in own]

    def text(key):
        return {name: str(x).lower() if isinstance(x, bool) else x for name, x in key.items()}

    for key in keys(time_tasks(asked.times)):
        yield "sharded_optimizer", {**timed(100 + len(key["optimizer"])), **text(key)}
    for key in keys(memory_tasks(asked.memory)):
        shape = held("plain" if key["optimizer"] == "plain" else "sharded", key["moment"])
        yield "sharded_optimizer_memory", {**shape, **key}


def test_the_page_with_the_rows_of_a_sweep_and_without(shown_by, synthetic, tmp_path, monkeypatch):
    without = shown_by("sharded_optimizer", tmp_path)
    assert sum("Not measured yet" in text for text in without) == 6
    sections = {"collectives": GATHERS}
    for section, row in whole_sweep(monkeypatch):
        sections.setdefault(section, []).append(row)
    full = synthetic.by_hand(tmp_path, **sections)
    with_rows = shown_by("sharded_optimizer", full)
    assert len(with_rows) == len(without)
    assert not any("Not measured yet" in text for text in with_rows)
    # A line of each table for each row of the two GPUs, of memory of the fullest rank.
    c = Sharding([full])
    shown = {"sharded_optimizer": times.table, "sharded_optimizer_memory": memory.table}
    for section, table in shown.items():
        told = sum(len(table(c, setting, "c", "t").frame) for setting in SETTINGS)
        assert told == len(sections[section]) / (2 if table is memory.table else 1)
