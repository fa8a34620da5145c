"""What the chapter on fully sharded data parallel says, by value: rows made by hand."""

import pytest

from a2lib.measure import bulk, read_runs
from a2lib.report import svg
from a2lib.report.chapters.fsdp import Fsdp, answer, gathers, local, memory, targets
from a2lib.report.chapters.fsdp.rows import activations, sizes
from a2lib.theory import fsdp as theory
from a2lib.theory.latency import Line

MB, GB = 2**20, 10**9
SETTING = {"batch": 4, "context": 512, "precision": "bf16", "attention": "flash",
           "compile": "blocks", "backend": "nccl", "world_size": 2}  # fmt: skip
WITHOUT = {False: 100, True: 80}


def row(ms, wrapper="fsdp", capture=False, model="xl25", **over):
    return {
        "wrapper": wrapper, "model": model, **SETTING, "capture": str(capture).lower(),
        "ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, "n": 20, "ms_without": WITHOUT[capture],
        "ms_without_p20": WITHOUT[capture] - 1, "ms_without_p80": WITHOUT[capture] + 1,
        "ms_waited": 0.5 if wrapper == "fsdp" else "", "ms_host": 3 if capture else ms - 5,
        "ms_rank_min": ms - 0.5, "ms_rank_median": ms - 0.25, "ms_rank_max": ms,
        "conditions": "", "note": "", **over,
    }  # fmt: skip


ROWS = [row(84, capture=True), row(112), row(200, "fsdp2"),
        row(150, capture=True, model="2.7B", ms_without=140)]  # fmt: skip
# By the formula, activations of 6 GB, and a peak that is 0.1 GB above it.
LEFT, ABOVE = 6 * GB, GB // 10


def held(moment, step, parts, wrapper="fsdp", model="xl25", **over):
    own = {"parameter_bytes": parts["parameters"], "gradient_bytes": parts["gradients"],
           "optimizer_bytes": parts["optimizer"], "whole_bytes": parts["gathered"],
           "travelling_bytes": parts["travelling"]}  # fmt: skip
    if wrapper == "fsdp2":
        own |= {"whole_bytes": "", "travelling_bytes": ""}
    values = {name: size if size == "" else round(size) for name, size in own.items()}
    return {
        "wrapper": wrapper, "model": model, **SETTING, "step_number": step, "moment": moment,
        **values, "present_bytes": round(sum(parts.values())), "tensor_bytes": "",
        "allocated_bytes": "", "reserved_bytes": "", "driver_bytes": "", "note": "", **over,
    }  # fmt: skip


def memory_rows(wrapper="fsdp", model="xl25", above=ABOVE, init=1.0):
    s = sizes(model)
    first = {m.moment: m.parts for m in theory.between(s, 2)}
    later = {m.moment: m.parts for m in theory.step(s, 2, LEFT)}
    peak = theory.peak(s, 2, LEFT)
    most = round(peak.total) + above
    rows = [held(name, 0, parts, wrapper, model) for name, parts in first.items()]
    rows[0]["present_bytes"] = round(rows[0]["present_bytes"] * init)
    rows += [held("forward", 3, later["backward root"], wrapper, model),
             held("before", 3, first["after"], wrapper, model),
             held("after", 3, first["after"], wrapper, model)]  # fmt: skip
    return [*rows, held("peak", 3, peak.parts, wrapper, model, tensor_bytes=most,
                        reserved_bytes=26 * GB, driver_bytes=30 * GB)]  # fmt: skip


HELD = [*memory_rows(), *memory_rows("fsdp2", above=GB)]


def gather(unit, pass_, start, end, turn, compute_end):
    begins = max(turn, end)
    return {"unit": unit, "pass": pass_, "gather_start_ms": start, "gather_end_ms": end,
            "turn_ms": turn, "compute_start_ms": begins, "compute_end_ms": compute_end,
            "slack_ms": turn - end, "waited_ms": begins - turn}  # fmt: skip


def step_table(blocks, late=()):
    """A gather of 0.2 ms, a block's forward of 0.5 and backward of 1; ``late`` end 0.3 ms after
    their turn in backward."""
    rows = [gather("root", "forward", 0.1, 0.4, 0.1, 0.5)]
    for i in range(blocks):
        turn = 0.5 + 0.5 * i
        start = max(0.2, turn - 0.5)
        rows.append(gather(f"layers.{i}", "forward", start, start + 0.2, turn, turn + 0.5))
    for done, i in enumerate(reversed(range(blocks - 1))):
        turn = 0.5 + 0.5 * blocks + 1 + done
        end = turn + 0.3 if i in late else turn - 0.8
        rows.append(gather(f"layers.{i}", "backward", end - 0.2, end, turn, turn + 1))
    return rows


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows=(), held=(), tables=(), strips=(), device="nvidia-h200", **sections):
        given = {"fsdp": rows, "fsdp_memory": held, **sections}
        root = synthetic.by_hand(tmp_path, device=device, **given)
        (known,) = read_runs(root)
        for model, capture, table in tables:
            about = {"section": "fsdp", "model": model, "capture": capture, **SETTING}
            bulk.put("gathers", device, f"fsdp-{model}-{capture}", table, run=known["run"],
                     about=about, data=root)  # fmt: skip
        for model in strips:
            about = {"section": "fsdp", "model": model, "capture": False, **SETTING}
            bulk.put("strip", device, f"fsdp-{model}", STRIP, run=known["run"], about=about,
                     data=root)  # fmt: skip
        return Fsdp([root])

    return make


STRIP = [
    {"start_us": 0.0, "duration_us": 50.0, "stream": stream, "kind": kind, "phase": "backward",
     "part": "backward"} for stream, kind in (("7", "matmul"), ("20", "communication"))
]  # fmt: skip


@pytest.fixture
def empty(tmp_path):
    return Fsdp([tmp_path])


def test_the_answer_without_rows_is_the_formula(empty):
    # 3.41 billion parameters, 16 bytes each.
    assert str(answer.sentence(empty)) == (
        "**The answer.** Of the xl of 2026 (2.7B) each of 2 ranks keeps 27.3 GB of weights, "
        "gradients and moments in place of 54.5 GB. **Not measured yet on an NVIDIA H200**: the "
        "most in a step, whether each all-gather is done in time and its step beside one GPU's."
    )
    said = str(memory.estimate("xl25"))
    assert "4.00 GB after init, 7.99 GB before the first step and 16.0 GB after it" in said
    assert "two blocks of 82 MB in bf16 and the root's 64 MB are whole" in said
    assert "gradient (82 MB) and the cast to fp32 of the one before (164 MB)" in said


def test_the_answer_with_rows(made):
    tables = [("2.7B", True, step_table(32))]
    c = made(ROWS, memory_rows(model="2.7B"), tables)
    # One block to go: 26.9 GB of state, 0.3 of a block and the root, 0.3 of a block's and the
    # head's gradient, 0.4 of a cast, 0.2 of activations. 150 / 140; one gather late, by 0.3 ms.
    assert str(answer.sentence(c)).endswith(
        "The most in a step is 28.2 GB, +0.4% from the formula. Captured, 63 of 64 all-gathers "
        "were in time and the step stood 0.300 ms for the others (that of root in forward). "
        "Captured, its step takes 1.07 times that of one GPU."
    )


def test_the_answer_is_of_the_other_model_until_the_one_asked_for_is_measured(made):
    said = str(answer.sentence(made(ROWS[:3], HELD, [("xl25", True, step_table(48))])))
    assert "in place of 54.5 GB. Measured is the xl of 2025. The most in a step is " in said
    assert "Captured, its step takes 1.05 times that of one GPU. **Not measured yet on" in said
    assert said.endswith("the same of the xl of 2026 (2.7B).")


def test_memory_is_held_against_the_formula(made, empty):
    c = made((), HELD)
    assert activations(c, "xl25") == pytest.approx(LEFT)
    found = {pair.name: pair for pair in memory.pairs(c, "xl25")}
    assert [round(pair.off, 4) for pair in found.values()][:4] == [0, 0, 0, 0]
    peak = theory.peak(sizes("xl25"), 2, LEFT).total
    assert found["that step's peak"].off == pytest.approx(ABOVE / peak, rel=1e-6)
    assert str(memory.verdict(c)) == (
        "For the xl of 2025 all 4 moments are within 3% of the formula; the furthest is that "
        f"step's peak, {ABOVE / peak:+.1%}."
    )
    lines = {line[0]: line for line in memory.table(c, "xl25", "c", "t").frame.values.tolist()}
    assert lines["after init"][1:5] == ["4.00", "4.00", "0.0%", "4.00"]
    assert lines["after the first step"][1:7] == ["16.0", "16.0", "0.0%", "4.00", "4.00", "7.99"]
    # FSDP2's peak is 1 GB above the formula's.
    top = lines["that step's peak"]
    assert [float(top[i]) for i in (1, 2, -1)] == pytest.approx(
        [peak / GB, (peak + ABOVE) / GB, peak / GB + 1], abs=0.06
    )
    said = str(memory.others(c))
    assert "reserved 26.0 GB by then, and the driver says that 30.0 GB are in use" in said
    assert f"ours {(peak + ABOVE) / (peak + GB):.3f} times that" in said
    nothing = memory.table(empty, "xl25", "c", "t").frame.values.tolist()
    assert [line[2] for line in nothing] == ["·"] * 5
    assert "Not measured yet" in str(memory.verdict(empty))


def test_what_is_far_from_the_formula_is_named(made):
    peak = theory.peak(sizes("xl25"), 2, LEFT).total
    c = made((), memory_rows(above=2 * GB, init=1.25))
    assert str(memory.verdict(c)) == (
        "For the xl of 2025 2 of 4 moments are further than 3% from the formula: after init "
        "+25.0% (activations, rest: +1.00 GB) and that step's peak "
        f"{2 * GB / peak:+.1%} (activations, rest: +2.00 GB)."
    )


def test_gathers_are_predicted_by_the_link_or_by_the_fitted_line(made, empty):
    e = gathers.expected(empty, "xl25")
    # 81.92 MB, half of which crosses 450 GB/s; in fp32 twice as long.
    assert e.gather == pytest.approx(81.92 / 2 / 450, rel=1e-6)
    assert e.scatter == pytest.approx(2 * e.gather) and e.backward == 2 * e.forward
    assert "links of 450 GB/s" in str(gathers.prediction(empty))
    line = Line(40e-6, 250e9)
    sent = [{"operation": "all_reduce", "backend": "nccl", "world_size": 2, "dtype": "fp32",
             "size": s * MB, "ms": 1, "ms_queued": 1e3 * line.time_s(s * MB), "n": 9, "note": ""}
            for s in (1, 10, 100, 1024)]  # fmt: skip
    c = made(collectives=sent)
    # An all-reduce of S bytes sends as many as an all-gather of 2 S.
    assert gathers.expected(c, "xl25").gather == pytest.approx(0.04 + 81.92 / 2 / 250, rel=1e-3)
    assert "the line fitted to all-reduces" in str(gathers.prediction(c))


def test_gathers_that_are_late_are_counted(made, empty):
    tables = [("xl25", False, step_table(48)), ("xl25", True, step_table(48, late=(3, 7)))]
    c = made(ROWS, (), tables)
    assert str(gathers.answer(c)) == (
        "For the xl of 2025: launched, 95 of 96 all-gathers were in time and the step stood 0.300 "
        "ms for the others (that of root in forward); captured, 93 of 96 all-gathers were in time "
        "and the step stood 0.900 ms for the others (that of root in forward, layers.7 in "
        "backward and layers.3 in backward)."
    )
    worse = [("xl25", True, step_table(48, late=(3, 5, 7)))]
    assert "(the first is root in forward)" in gathers.sentence(made(ROWS, (), worse), "xl25")
    # 0.091 ms were predicted.
    assert str(gathers.why(c)).startswith(
        "Of the xl of 2025, captured, the median all-gather takes in forward 0.200 ms beside "
        "0.500 ms and in backward 0.200 ms beside 1.00 ms of a block, 2.2 and 2.2 times the "
        "prediction. Between a gather's marks"
    )
    # 0.3 and 0.9 ms of rank 0's own.
    assert "launched, 0.500 and 0.300 ms" in str(gathers.waits(c))
    assert "captured, 0.500 and 0.900 ms" in str(gathers.waits(c))
    found = gathers.summary(c, "c", "t").frame.values.tolist()
    assert found == [
        ["the xl of 2025, launched", "forward", 49, 48, "−0.30", "0.30", "0.30"],
        ["the xl of 2025, launched", "backward", 47, 47, "0.80", "0.80", "0.00"],
        ["the xl of 2025, captured", "forward", 49, 48, "−0.30", "0.30", "0.30"],
        ["the xl of 2025, captured", "backward", 47, 45, "−0.30", "0.80", "0.60"],
    ]
    latest = gathers.latest(c, "xl25", True, "c", "t").frame.values.tolist()
    assert len(latest) == gathers.LATEST
    assert [line[:2] for line in latest][0] == ["root", "forward"]
    assert {"layers.3", "layers.7"} <= {line[0] for line in latest if line[1] == "backward"}
    assert "Not measured yet" in str(gathers.answer(empty)) + str(gathers.why(empty))
    assert "Not measured yet" in str(gathers.waits(empty))
    assert gathers.summary(empty, "c", "t").frame.empty


def test_gathers_that_last_longer_launched_wait_for_a_host(made):
    """0.2 ms replayed, 0.4 launched, in backward alone; the steps of 112 and 84 ms are not level,
    those of 85 and 84 are."""
    slow = [row | {"gather_end_ms": row["gather_end_ms"] + 0.2} if row["pass"] == "backward"
            else row for row in step_table(48)]  # fmt: skip
    tables = [("xl25", False, slow), ("xl25", True, step_table(48))]
    said = str(gathers.waits(made(ROWS, (), tables)))
    assert said.endswith(
        "Of the xl of 2025, launched, the median all-gather lasts 0.400 ms in backward, replayed "
        "0.200: begun on rank 0, it waits for one of the two hosts."
    )
    c = made([ROWS[0], row(85)], (), tables)
    assert str(gathers.waits(c)).endswith(
        "it waits for one of the two hosts. One after another, its launched steps are level with "
        "replayed ones, 85.0 and 84.0 ms: there the hosts are ahead."
    )
    assert "gathers wait for the hosts" in str(answer.sentence(c))
    same = made(ROWS[:2], (), [("xl25", way, step_table(48)) for way in (False, True)])
    assert str(gathers.waits(same)).endswith("no gather is slow by itself then.")
    assert "gathers wait for the hosts" not in str(answer.sentence(same))


def test_the_launched_ratios_of_the_other_model_stand_beside(made):
    """115 over 140 and 160 ms; 107 and 175 ms of the host for 48 blocks, 64 and 96 for 32."""
    large = {"model": "2.7B", "ms_without": 100}
    rows = [row(115, **large, ms_host=64), row(160, "fsdp2", **large, ms_host=96)]
    ahead = [row(97, capture=True), ROWS[1], row(180, "fsdp2"), *rows]
    said = str(targets.sentence(made(ahead)))
    assert (
        "Of the xl of 2026 (2.7B), ours takes 1.150 of the step of one GPU and 0.719 of FSDP2's, "
        "115 and 160 ms, to issue which takes the host 64.0 and 96.0. That is 2.00 and 3.00 ms of "
        "the host for a block, where it was 2.23 and 3.65: with that host the launched step would "
        "be the GPU's."
    ) in said
    # 48 blocks of 2 ms.
    said = str(targets.sentence(made([*ROWS[:2], row(180, "fsdp2"), *rows])))
    assert (
        ": with that host too, 48 blocks would take 96.0 ms to issue, more than the 84.0 of the "
        "replay, since the GPU has less to do in each."
    ) in said
    assert "for a block" not in str(targets.sentence(made([*ROWS[:2], row(180, "fsdp2"), rows[0]])))


def test_a_wait_of_a_mark_is_none(made):
    table = [gather("root", "forward", 0, 1.004, 1, 2)]
    assert gathers.in_time(table[0]) and gathers.waited(table) == 0
    every = gathers.sentence(made((), (), [("xl25", True, table)]), "xl25")
    assert every == "captured, 1 of 1 all-gathers were in time"


def test_steps_stand_beside_one_gpu_and_the_peer(made, empty):
    c = made(ROWS)
    assert str(answer.times(c)) == (
        "For the xl of 2025, launched, our step takes 112 ms and that of one GPU 100 ms, a ratio "
        "of 1.120; FSDP2's takes 200 ms, ours 0.560 times that. For the xl of 2025, captured, our "
        "step takes 84.0 ms and that of one GPU 80.0 ms, a ratio of 1.050. For the xl of 2026 "
        "(2.7B), captured, our step takes 150 ms and that of one GPU 140 ms, a ratio of 1.071."
    )
    lines = answer.table(c, "c", "t").frame.values.tolist()
    assert [line[:3] for line in lines] == [
        ["xl25, launched", "ours", "112"], ["xl25, launched", "PyTorch's FSDP2", "200"],
        ["xl25, captured", "ours", "84.0"], ["2.7B, captured", "ours", "150"],
    ]  # fmt: skip
    assert lines[1][6] == "·" and lines[0][6] == "0.500"
    assert "Not measured yet" in str(answer.times(empty))


def test_targets_are_ratios_and_say_when_they_are_missed(made, empty):
    c = made([*ROWS[:2], row(180, "fsdp2")], HELD)
    peak = theory.peak(sizes("xl25"), 2, LEFT).total
    found = [line[2:] for line in targets.table(c, "c", "t").frame.values.tolist()]
    # 84 / 80, 112 / 100, 112 / 180, 84 / 180.
    assert found == [
        ["1.15", "1.050", "met"], ["1.15", "1.120", "met"], ["0.60", "0.622", "missed"],
        ["0.60", "0.467", "met"], ["1.00", f"{(peak + ABOVE) / (peak + GB):.3f}", "met"],
    ]  # fmt: skip
    said = str(targets.sentence(c))
    assert said.startswith("4 of the 5 targets that are measured are met. Launched, the host takes")
    assert "107 ms to issue our step and 175 ms to issue FSDP2's, of 112 and 180 ms" in said
    assert "more than FSDP2" not in said and "The same kernels" not in said
    slow = str(targets.sentence(made([ROWS[0], row(180)], [*memory_rows(above=2 * GB), *HELD[7:]])))
    assert "replayed take 84.0 ms: the rest of the launched step's 180 is the host" in slow
    # Half of two norms a block and one, weights and two moments.
    assert "holds 1000.00 MB more than FSDP2's; norms and their moments, which" in slow
    assert f"are {3 * 4 * 97 * 1600 / 2 / 1e6:.2f} MB more." in slow
    c.table.loc[c.table["wrapper"] == "fsdp2", "run"] = "another"
    assert targets.table(c, "c", "t").frame.values.tolist()[2][-1] == "missed, two runs"
    nothing = targets.table(empty, "c", "t").frame.values.tolist()
    assert [line[-1] for line in nothing] == ["·"] * 5
    assert "Not measured yet" in str(targets.sentence(empty))


def test_bytes_sent_are_the_theory_s():
    (xl, _) = memory.sent("c", "t").frame.values.tolist()
    # 8 GB of gradients, half of them twice; 2 bytes of every matrix, and 4 of its gradient.
    assert xl == ["the xl of 2025", "7.99", "7.99", "12.0", "7.92", "2.00", "1.93", "4.00"]


def test_the_figures_hold_the_rows(made, empty):
    tables = [("xl25", True, step_table(48, late=(3,)))]
    c = made(ROWS, HELD, tables, strips=("xl25",))
    first, second = memory.figure(c).figure.axes
    # Formula and rows of five moments; the other model has the formula of three.
    widths = [sum(p.get_width() for p in first.patches if abs(p.get_y() + 0.18 - y) < 0.01)
              for y in (-0.2, 0.2)]  # fmt: skip
    assert widths == pytest.approx([4.0, 4.0], abs=0.01)
    assert {round(patch.get_y() + 0.18, 1) for patch in second.patches} == {-0.2, 0.8, 1.8}
    forward, backward = gathers.figure(c, "xl25").figure.axes
    assert [len(bars.get_paths()) for bars in forward.collections] == [49, 49, 1]
    assert [len(bars.get_paths()) for bars in backward.collections] == [47, 47, 1]
    charts = [memory.figure(c), gathers.figure(c, "xl25"), gathers.strip(c, "xl25")]
    charts += [memory.figure(empty), gathers.figure(empty, "xl25"), gathers.strip(empty, "xl25")]
    for chart in charts:
        assert svg.smallest_text(chart._repr_svg_()) >= svg.LEAST_SIZE


def test_another_machine_is_shown_with_all_its_rows(made):
    here = {"backend": "gloo", "model": "tiny"}
    rows = [{**one, **here, "present_bytes": ""} for one in memory_rows()]
    c = made([row(5, ms_host="", **here)], rows, device="cpu")
    said = str(local.show(c))
    assert "**CPU**: tiny sizes" in said and "| tiny, launched | ours | 5.00 |" in said
    assert "CPU: memory of rank 0, tiny, 2 ranks with gloo, batch 4 each" in said
    assert "| ours | before, step 0 | 3.72 GiB |" in said


def test_a_row_that_failed_is_named_and_leaves_the_rest(made):
    """As when the peer has no room: nothing of it has a number."""
    blank = {"status": "oom", "note": "out of memory"}
    timed = {name: "" for name in row(1) if name.startswith("ms") or name == "n"}
    sized = {name: "" for name in HELD[0] if name.endswith("_bytes")}
    failed = [row(1, "fsdp2") | timed | blank]
    unheld = [one | sized | blank for one in memory_rows("fsdp2")]
    c = made([*ROWS[:2], *failed], [*memory_rows(), *unheld])
    lines = answer.table(c, "c", "t").frame.values.tolist()
    assert lines[1][:3] == ["xl25, launched", "PyTorch's FSDP2", "oom"]
    assert [line[-1] for line in memory.table(c, "xl25", "c", "t").frame.values] == ["·"] * 5
    assert [line[-1] for line in targets.table(c, "c", "t").frame.values.tolist()] == [
        "met", "met", "·", "·", "·",
    ]  # fmt: skip
    assert "FSDP2" not in str(memory.others(c)) + str(answer.times(c))
    assert str(answer.untimed(c)) == (
        "- xl25, launched, PyTorch's FSDP2: oom (out of memory)\n"
        "- xl25, memory, PyTorch's FSDP2: oom (out of memory)"
    )
    alone = {"conditions": "NCCL_NVLS_ENABLE=0"}
    assert str(answer.untimed(made([row(9) | alone]))) == (
        "\nAll rows are with NCCL_NVLS_ENABLE=0, without NVLink's multicast."
    )


def test_the_page_with_rows_and_without(shown_by, made, tmp_path):
    without = shown_by("fsdp", tmp_path)
    assert sum("Not measured yet" in text for text in without) >= 6
    every = [*HELD, *memory_rows(model="2.7B"), *memory_rows("fsdp2", "2.7B")]
    steps = [*ROWS, row(180, model="2.7B"), row(300, "fsdp2", model="2.7B")]
    tables = [(model, capture, step_table(blocks)) for model, blocks in (("xl25", 48), ("2.7B", 32))
              for capture in (True, False)]  # fmt: skip
    made(steps, every, tables, strips=("xl25", "2.7B"))
    with_rows = shown_by("fsdp", tmp_path)
    assert len(with_rows) == len(without)
    assert not any("Not measured yet" in text for text in with_rows)
