"""What the chapter on plain attention says, by value: rows made by hand, in round milliseconds."""

import pytest

from a2lib.report import svg
from a2lib.report.chapters import measured
from a2lib.report.chapters.attention import Plain, answer, estimate, local, memory, published
from a2lib.theory.eager import Eager

# 2 * 8192**3 operations at 50 TFLOP/s, 2 * 2**30 bytes at 4 TB/s.
CEILING = [
    {"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
    {"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 2 * 2**30 / 4e9},
]


def row(pass_, ms, seq_len=16384, head_dim=64, causal="false", implementation="eager", **over):
    s = Eager(8, seq_len, head_dim, causal == "true")
    return {
        "implementation": implementation, "dtype": "fp32", "batch": 8, "seq_len": seq_len,
        "head_dim": head_dim, "causal": causal, "pass": pass_, "ms": ms, "ms_mean": ms,
        "ms_std": ms / 50, "ms_min": ms, "ms_graph": ms * 0.9, "ms_host": 0.25, "n": 100,
        "held_bytes": sum(s.inputs(pass_).values()), "peak_bytes": s.peak(pass_), **over,
    }  # fmt: skip


def limit(fits, predicted=30208, allocator="blocks", **over):
    return {
        "implementation": "eager", "dtype": "fp32", "batch": 8, "head_dim": 64, "causal": "false",
        "pass": "backward", "allocator": allocator, "room_bytes": 10**11, "tensors_len": 33792,
        "predicted_len": predicted, "fits_len": fits, "fails_len": fits + 256, **over,
    }  # fmt: skip


@pytest.fixture
def plain(synthetic, tmp_path):
    def make(device="nvidia-h200", **sections):
        return Plain([synthetic.by_hand(tmp_path, device=device, **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Plain([tmp_path])


def lines(table, keys=1):
    return {tuple(row[:keys]): row[keys:] for row in table.frame.astype(str).values.tolist()}


def test_the_answer_without_rows_is_arithmetic(empty):
    said = str(answer.sentence(empty))
    # 8 * 2**28 * 4 bytes; four of them and six tensors of 2**25; 4 N d and the sums in tiles.
    assert "at 16,384 tokens 8.59 GB in fp32" in said
    assert "so that 34.6 GB are taken at the peak, of which all that is not a matrix makes" in said
    assert "makes 0.201 GB" in said and "tiles takes 0.269 GB" in said
    # The square roots of 141e9 / 128 and / 160, less what is linear.
    assert "fill them at 33,141 tokens" in said and "the end is predicted at 29,652" in said
    assert said.endswith(
        "**Not measured yet on an NVIDIA H200**: where it ends. **Not measured yet on an NVIDIA "
        "H200**: the times of this grid."
    )


def test_the_answer_with_rows(plain):
    p = plain(attention=[row("forward", 40), row("backward", 100)], attention_limit=[limit(29952)])
    said = str(answer.sentence(p))
    assert "Tried in steps of 256 tokens, 29,952 ran and 30,208 did not. What removes it" in said
    assert said.endswith(
        "At 16,384 tokens, with vectors of 64, forward takes 40.0 ms and backward 100 ms."
    )
    # The ends are of the 1e11 bytes that were free: roots over 128 and 160, less what is linear.
    assert "the 100 GB that the driver calls free (141 GB by its maker's count) of an H200" in said
    assert "fill them at 27,902 tokens" in said and "the end is predicted at 24,966" in said


def test_the_table_has_times_memory_and_reasons(plain):
    blank = ("ms", "ms_mean", "ms_std", "ms_min", "ms_graph", "ms_host", "n", "held_bytes")
    blank = dict.fromkeys((*blank, "peak_bytes"), "")
    blank |= {"status": "oom", "note": "out of memory"}
    refused = [row(p, 1, 32768) | blank for p in ("forward", "backward")]
    p = plain(attention=[row("forward", 40), row("backward", 100), *refused])
    found = lines(answer.table(p, False, "c", "tab-c"), 2)
    assert found == {
        ("16,384", "64"): [
            "40.0 ± 0.80", "36.0", "0.250", "100 ± 2.0", "90.0", "0.250", "8.76", "25.8",
        ],
        ("32,768", "64"): ["oom", "·", "·", "oom", "·", "·", "·", "·"],
    }  # fmt: skip
    assert not lines(answer.table(p, True, "c", "tab-c"))


def test_scaling_and_hosts(plain):
    rows = [row("forward", ms, n, d) for ms, n, d in ((10, 8192, 64), (41, 16384, 64))]
    rows += [row("forward", 30, head_dim=16), row("forward", 60, head_dim=128)]
    p = plain(attention=[*rows, row("forward", 0.26, 256), row("backward", 1, 256),
                         row("forward", 2, 1024)])  # fmt: skip
    assert str(answer.scaling(p)) == (
        "Forward takes 4.10 times as long at 16,384 tokens as at half of them, and 2.00 times as "
        "long with vectors of 128 as with 16, for 8 times the products."
    )
    assert str(answer.hosts(p)) == (
        "The host takes longer to issue a call than the GPU to run it in 1 of 2 rows at 256 "
        "tokens: these times are the host's."
    )
    slow = plain(attention=[row("forward", 40, ms_graph=44), row("backward", 9, ms_graph=9.1)])
    assert "the GPU to run it nowhere. In 1 rows, from 16,384 tokens on, the replay takes" in str(
        answer.hosts(slow)
    )
    assert "longer than the call, by up to 10%. We have no explanation." in str(answer.hosts(slow))


def test_longer_sequences_end_as_predicted_or_not(plain):
    gone = dict.fromkeys(("ms", "ms_mean", "ms_std", "ms_min", "ms_graph", "ms_host", "n"), "")
    gone |= {"held_bytes": "", "peak_bytes": "", "status": "oom", "note": "out of memory"}
    alone = {"ms_graph": "", "note": "no graph: not tried"}
    # The ends of backward are the square roots of 1e11 / 160, of forward those of 1e11 / 64.
    made = [row("forward", 9, 24576, **alone), row("backward", 9, 24576, **alone),
            row("backward", 9, 32768) | gone, row("backward", 9, 16384) | gone]  # fmt: skip
    said = str(answer.beyond(plain(attention=made, attention_limit=[limit(24832)])))
    assert said == (
        "Beyond 16,384 tokens 3 of 3 passes end as [predicted](#attention-limit): they run up to "
        "the length whose blocks fill the memory, and past it they are out of memory. 2 of those "
        "that run have no time of a replay (not tried)."
    )
    made += [row("forward", 9, 32768) | gone, row("forward", 9, 49152)]
    said = str(answer.beyond(plain(attention=made, attention_limit=[limit(24832)])))
    assert said.startswith("Beyond 16,384 tokens 3 of 5 passes end as")
    assert str(answer.beyond(plain(attention=[row("forward", 9)]))) == ""


def test_rows_of_half_a_host_are_counted(plain, monkeypatch):
    made = [row("forward", 9, 24576), row("forward", 9)]
    p = plain(attention=made, attention_limit=[limit(24832)])
    assert measured.HALF not in str(answer.beyond(p))
    monkeypatch.setattr(measured, "SHARED", (p.table["run"].iloc[0],))
    said = str(answer.beyond(p))
    assert said.endswith(f" 2 of the 2 rows that this page times are of {measured.HALF}.")


def test_the_spread_is_drawn_by_value(plain):
    beyond = row("forward", 90, 24576)  # is of no grid
    p = plain(attention=[row("forward", 40), row("backward", 100, ms_std=8), beyond])
    figure = answer.spread(p).figure
    texts = [
        [t.get_text() for t in ax.texts if t.get_text() not in ("", "–")] for ax in figure.axes
    ]
    assert texts == [["2.0"], ["8.0"], [], []]


def test_memory_is_held_against_what_is_counted(plain):
    rows = [row("forward", 40), row("backward", 100), row("forward", 9, 4096, causal="true")]
    assert str(memory.checked(plain(attention=rows))) == (
        "In this grid, what is counted is what was measured, to the byte, in all 3 rows."
    )
    rows[1]["peak_bytes"] += 512
    assert str(memory.checked(plain(attention=rows))) == (
        "In this grid, what is counted is what was measured, to the byte, in 2 of 3 rows; "
        "elsewhere it is off by at most 512 bytes."
    )


def test_eager_rows_of_the_flash_chapter_count_too(plain):
    shape = {"dtype": "bf16", "batch": 1, "heads": 2, "seq_len": 1024, "head_dim": 64}
    flash = {"implementation": "eager", **shape, "causal": "true", "pass": "forward", "ms": 1,
             "peak_bytes": Eager(2, 1024, 64, True, 2).peak("forward")}  # fmt: skip
    others = [{**flash, "implementation": "a2lib", "peak_bytes": 1},
              {**flash, "pass": "end_to_end", "peak_bytes": 1}]  # fmt: skip
    assert str(memory.checked(plain(flash=[flash, *others]))) == (
        "In eager's rows in the sweep of [FlashAttention-2](flash.md), NVIDIA H200, what is "
        "counted is what was measured, to the byte, in all 1 rows. **Not measured yet on an "
        "NVIDIA H200**: the memory of this grid."
    )


def test_saved_tensors_are_held_against_the_count(plain):
    shape = {"implementation": "eager", "dtype": "fp32", "batch": 8, "seq_len": 1024,
             "head_dim": 64, "causal": "true"}  # fmt: skip
    sizes = {"q": 2**21, "k": 2**21, "v": 2**21, "p": 2**25, "mask": 2**20, "other": 0}
    rows = [{**shape, "tensor": name, "saved_bytes": size} for name, size in sizes.items()]
    assert "in all 6 rows" in str(memory.saved(plain(attention_saved=rows)))
    rows[-1]["saved_bytes"] = 7
    assert "5 of 6 rows; elsewhere it is off by at most 7" in str(
        memory.saved(plain(attention_saved=rows))
    )


def test_what_ours_keeps_is_told_by_row(plain):
    said = str(memory.kept(plain(attention=[row("forward", 40)])))
    assert said == (
        "**Not measured yet on an NVIDIA H200**: what autograd's hooks see of it and of the "
        "softmax written out and the times beyond this grid."
    )
    shape = {"implementation": "a2lib", "dtype": "fp32", "batch": 8, "seq_len": 1024,
             "head_dim": 64, "causal": "true"}  # fmt: skip
    sizes = {"q": 2**21, "o": 2**21, "lse": 4 * 8 * 1024, "other": 2 * 8 * 1024}
    saved = [{**shape, "tensor": name, "saved_bytes": size} for name, size in sizes.items()]
    longer = row("forward", 40) | {"seq_len": 32768}
    assert str(memory.kept(plain(attention_saved=saved, attention=[longer]))) == (
        "Autograd's hooks see it keep 6.00 bytes for each row beside inputs and output."
    )


def test_limits_by_value(plain):
    rows = [limit(30208), limit(29952, causal="true"), limit(33792, 33792, "expandable")]
    p = plain(attention_limit=rows)
    assert str(memory.predicted(p)) == (
        "The predicted length is the longest that ran in 2 of 3 cases (1 of 2 with blocks and 1 of "
        "1 with expandable); elsewhere the longest is "
        "256 tokens shorter."
    )
    rows += [limit(34304, allocator="expandable", head_dim=128),
             limit(33536, 33792, "expandable", head_dim=32)]  # fmt: skip
    # Four matrices, and q, k, v, o, do and dv.
    total = 4 * 8 * 33792**2 * 4 + 6 * 8 * 33792 * 32 * 4
    rows[-1]["room_bytes"] = 10**12
    assert str(memory.predicted(plain(attention_limit=rows))) == (
        "The predicted length is the longest that ran in 2 of 5 cases (1 of 2 with blocks and 1 of "
        "3 with expandable); elsewhere the longest is "
        "-256 to +4,096 tokens away. With `expandable_segments` the tensors of such a length would "
        "have left at most {:,.0f} MiB, and memory comes and goes by whole pages of 20 MiB "
        "there.".format((10**12 - total) / 2**20)
    )
    found = lines(memory.limits(p, "c", "tab-c"), 2)
    assert found["blocks", "backward, full"] == ["33,792", "·", "·", "30,208", "·"]
    assert found["blocks", "backward, causal"][3] == "29,952 (30,208)"


def test_the_ends_are_square_roots(empty):
    found = lines(memory.ends(empty, "c", "tab-c"))
    eighty = [int(cell.replace(",", "")) for cell in found[("80",)]]
    expected = [(80e9 / (32 * matrices)) ** 0.5 for matrices in (2, 2, 2, 3, 4, 5)]
    assert eighty[:-1] == pytest.approx(expected, rel=0.015) and eighty[-1] > 4 * 10**6
    assert list(found)[-1] == ("141",)


def test_parts_and_the_figure(empty):
    found = lines(memory.parts("c", "tab-c"))
    assert found["backward, full",][1:] == [
        f"{8 * 2**30 + 5 * 2**25:,}", "softmax backward", "dv 32, dp 8,192, dp p 8,192, ds 8,192",
        f"{24 * 2**30 + 2**25:,}",
    ]  # fmt: skip
    chart = memory.over_time()
    (ax,) = chart.figure.axes
    ends = {}
    for bar in ax.patches:
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0), bar.get_x() + bar.get_width())
    assert len(ends) == 18
    # One waiting and three temporary matrices of 8 GiB, the mask, and six tensors.
    assert max(ends.values()) == pytest.approx(32 + 0.25 + 6 / 32)
    assert svg.smallest_text(chart._repr_svg_()) >= svg.LEAST_SIZE


def test_the_floor_by_value(plain):
    p = plain(ceiling=CEILING, attention=[row("forward", 40), row("backward", 100)])
    found = lines(estimate.table(p, "c", "tab-c"), 3)
    # 4 * 2**28 * 8 * 64 operations at 50 TFLOP/s; four more passes of 2**33 bytes at 4 TB/s.
    assert found["16,384", "64", "forward"][3:] == ["11.0", "8.59", "19.6", "36.0", "54%"]
    assert str(estimate.sentence(p)).startswith(
        "At 16,384 tokens with vectors of 16 products are 33% of the forward's floor"
    )
    assert str(estimate.beside(p)) == (
        "In the 2 rows of this grid from 16,384 tokens on, the floor is 44% to 54% of the GPU's "
        "time."
    )
    fast = plain(ceiling=CEILING, attention=[row("forward", 10)])
    assert "somewhere floor or time is wrong" in str(estimate.beside(fast))


def test_launches_by_value(plain):
    short = {"implementation": "eager", "dtype": "fp32", "batch": 1, "heads": 1, "head_dim": 64,
             "causal": "true", "ms": 1}  # fmt: skip
    # 9 launches each way; 0.09 ms are 10 us a launch, and 40 us for the 4 of full attention.
    flash = [{**short, "seq_len": n, "pass": p, "ms_host": ms}
             for p, ms in (("forward", 0.09), ("backward", 0.9)) for n in (128, 512)]  # fmt: skip
    flash += [{**short, "seq_len": 1024, "pass": "forward", "ms_host": 99}]
    assert str(estimate.launches(plain(ceiling=CEILING, flash=flash))) == (
        "With vectors of 64 the host takes forward 10 µs for each of its launches, so that the 4 "
        "of full attention take 0.0400 ms, more than the floor up to 256 tokens, and backward "
        "100 µs for each of its launches, so that the 7 of full attention take 0.700 ms, more than "
        "the floor up to 1,024 tokens (median of eager's rows up to 512 tokens in the sweep of "
        "[FlashAttention-2](flash.md)). So far a GPU at its floor would wait for the host; "
        "[the grid](#attention-grid) has whose time it was."
    )
    p = plain(ceiling=CEILING, flash=flash)
    p.flash = p.flash.assign(run=p.flash["pass"])
    assert "](flash.md), the two passes of different runs). So far" in str(estimate.launches(p))


def test_the_gap_in_passes_over_a_matrix(plain):
    def timed(pass_, head_dim, passes):
        """A row that takes the floor and so many passes over a matrix at 4 TB/s."""
        p = plain(ceiling=CEILING)
        s = Eager(8, 16384, head_dim, True)
        ms = estimate.floors(p, s, pass_)["total"].ms + passes * s.matrix / 4e9
        return row(pass_, ms, head_dim=head_dim, causal="true", ms_graph=ms)

    even = [timed(p, d, n) for p, n in (("forward", 4), ("backward", 3)) for d in (16, 128)]
    said = str(estimate.gap(plain(ceiling=CEILING, attention=even)))
    assert "by the vector's size: forward 4.0 to 4.0, backward 3.0 to 3.0. It does not grow" in said
    grown = [timed("forward", 16, 1), timed("forward", 128, 5), *even[2:]]
    said = str(estimate.gap(plain(ceiling=CEILING, attention=grown)))
    assert said.endswith("forward 1.0 to 5.0, backward 3.0 to 3.0.")


def test_an_expectation_until_the_grid_is_measured(plain):
    one = {"implementation": "eager", "dtype": "fp32", "batch": 1, "heads": 1, "seq_len": 16384,
           "head_dim": 64, "causal": "true"}  # fmt: skip
    flash = [{**one, "pass": p, "ms": ms} for p, ms in (("forward", 5), ("backward", 7))]
    assert str(estimate.eight_heads(plain(flash=flash))) == (
        "An expectation: one causal head of 64 at 16,384 tokens took 5.00 ms forward and 7.00 ms "
        "backward in that sweep; 8 of them would take forward 40.0 ms and backward 56.0 ms."
    )
    measured = plain(flash=flash, attention=[row("forward", 40, causal="true")])
    assert str(estimate.eight_heads(measured)) == ""


def test_published_memory_is_given_by_its_accounts(empty):
    found = published.figures(empty)
    same = found.groupby("device")["same"].agg(["sum", "size"]).to_dict("index")
    assert {device: (c["sum"], c["size"]) for device, c in same.items()} == {
        "unnamed GPU of 80 GB": (40, 40), "H800 PCIe": (40, 40),
        "unnamed GPU of 16 to 24 GB": (13, 16),
    }  # fmt: skip
    # 8240.25 MiB: a matrix of 8192, four tensors of 8, two workspaces of 8.125.
    assert published.counted("unnamed GPU of 80 GB", 16384, 16)[0] == 8240.25 * 2**20
    said = str(published.exceptions(empty))
    assert "3 figures have more: at 256 tokens with vectors of 32 one whole matrix" in said
    assert "vectors of 64 16.0 MiB, one tensor of 16,384 tokens and vectors of 32" in said
    assert "its own account is 17.2 GB before the backward" in str(published.verdicts(empty))


def test_a_wrong_account_gives_other_figures(empty, monkeypatch):
    wrong = published.Account(2, 4, 8.125, added=(3, 4))
    monkeypatch.setitem(published.ACCOUNTS, "unnamed GPU of 80 GB", wrong)
    found = published.figures(empty)
    assert not found[found["device"] == "unnamed GPU of 80 GB"]["same"].any()


def test_published_times_beside_ours(plain):
    p = plain(attention=[row("forward", 40), row("backward", 100, causal="true")])
    found = lines(published.table(p, "c", "tab-c"), 2)
    assert found["16,384", "64"] == [
        "71.19 ± 0.35", "79.836 ± 0.119", "oom", "40.0 ± 0.80", "·",
        "155.57 ± 0.44", "250.914 ± 7.913", "oom", "·", "100 ± 2.0",
    ]  # fmt: skip
    assert "H800 PCIe: an unnamed public writeup" in str(published.sources(p))


def test_ours_beside_eager(plain, empty):
    assert str(answer.beside(empty)).endswith("ours in this protocol; its memory is counted.")
    tiled = {"implementation": "a2lib", "causal": "true", "held_bytes": 10**9, "peak_bytes": 10**9}
    p = plain(attention=[row("forward", 20, **tiled), row("backward", 30, **tiled)])
    assert str(answer.beside(p)).endswith("ours in this protocol; its memory is counted.")
    both = [row("forward", 60, causal="true"), row("backward", 90, causal="true")]
    whole = plain(attention=[row("forward", 20, **tiled), row("backward", 30, **tiled), *both])
    assert str(answer.beside(whole)) == (
        "At 16,384 tokens with a mask and vectors of 64 it takes forward 20.0 ms in place of 60.0 "
        "and backward 30.0 ms in place of 90.0, and 2.00 GB in place of 34.8."
    )
    whole.table.loc[whole.table["implementation"] == "a2lib", "run"] = "another"
    assert str(answer.beside(whole)).endswith("34.8. The two were not measured in one run.")
    found = lines(answer.removed(p, "c", "tab-c"))
    assert found["16,384",] == [
        "·", "·", "·", "20.0 ± 0.40", "30.0 ± 0.60", "2.00", "34.8", "0.269",
    ]  # fmt: skip


def test_the_softmax_written_out_beside_ours(plain, empty):
    matrix = 8 * 16384**2 * 4
    held = row("backward", 100)["held_bytes"]
    rows = [row("backward", 100), row("backward", 130, implementation="by_hand",
                                      held_bytes=held + matrix)]  # fmt: skip
    assert str(answer.by_hand(plain(attention=rows))) == (
        "Measured here, the softmax written out holds before the backward: full at 16,384 tokens "
        "1.00 matrices more, and its backward takes 130 ms in place of 100."
    )
    apart = plain(attention=rows)
    apart.table.loc[apart.table["implementation"] == "by_hand", "run"] = "another"
    assert str(answer.by_hand(apart)).endswith("100. The two were not measured in one run.")
    assert "Not measured yet on" in str(answer.by_hand(empty))


def test_another_machine_is_shown_apart(plain):
    p = plain(device="cpu", attention=[row("forward", 40)])
    said = str(local.show(p))
    assert not len(p.table) and "tiny sizes" in said and "40.0 ± 0.80" in said


@pytest.mark.parametrize("measured", [False, True])
def test_every_cell_of_the_page_runs(measured, synthetic, tmp_path, shown_by):
    if measured:
        synthetic.by_hand(tmp_path, attention=[row("forward", 40), row("backward", 100)],
                          attention_limit=[limit(30208)], ceiling=CEILING)  # fmt: skip
    shown = shown_by("attention", tmp_path)
    assert len(shown) >= 25
    text = "\n".join(shown)
    assert "nan" not in text.lower().split() and "None" not in text.replace("None has", "")
    assert ("forward takes 40.0 ms" in text) == measured
    assert ("that an estimate needs" in text) != measured
