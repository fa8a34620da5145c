"""The chapter's estimate, regimes, memory, accuracy and protocols, by value, on rows by hand."""

import json

import pytest

from a2lib.report import provenance
from a2lib.report.chapters.flash import (
    accuracy,
    ceilings,
    estimate,
    memory,
    protocol,
    published,
    regimes,
)
from a2lib.report.chapters.flash.rows import SECOND
from a2lib.report.chapters.flash.view import PASSES
from a2lib.report.chapters.measured import SHARED
from a2lib.report.metrics import pick


def test_the_estimate_in_round_numbers(made):
    flash = made()
    # 132 multiprocessors of 4,096 operations a clock reach 989.4 TFLOP/s at 1,830 MHz.
    assert estimate.clock(flash) == pytest.approx(1.83e9, rel=1e-3)
    forward, backward = (estimate.times(flash, p) for p in ("forward", "backward"))
    # A tile of 64 x 64 takes 256 clocks of products, of exponentials and of shared memory.
    tiles = 16 * 256 * 257 / 2
    same = tiles * 256 / 132 / 1.83e9 * 1e3
    for limit in ("tensor cores", "exponentials", "shared memory"):
        assert forward[limit] == pytest.approx(same, rel=1e-3)
    assert backward["tensor cores"] == pytest.approx(same * 7 / 2, rel=1e-3)
    assert backward["exponentials"] == pytest.approx(same * 2, rel=1e-3)
    # q, k, v and o of 32 MiB each and a float per query, at 4.8 TB/s.
    assert forward["device memory"] == pytest.approx((4 * 2**25 + 2**20) / 4.8e12 * 1e3)


@pytest.mark.parametrize(("ms", "words"), [(1.0, "some of them overlap"),
                                           (1.3, "either they hardly overlap, or L2")])
def test_what_binds_follows_from_the_measured_forward(made, timed, ms, words):
    text = str(estimate.binding(made(flash=[timed("a2lib", "forward", ms)])))
    assert "tensor cores, exponentials and shared memory need about the same 0.558 ms" in text
    assert "they would need 1.12 ms" in text and words in text
    assert "1.95 ms for the seven products that are executed, 1.39 ms for the five" in text


def test_clocks_of_a_tile(made, timed):
    # 526,336 tiles, 132 multiprocessors: 500 clocks each at 1,000 MHz.
    ms = 526336 * 500 / 132 / 1e9 * 1e3
    text = str(estimate.per_tile(made(flash=[timed("a2lib", "forward", ms, sm_mhz=1000)])))
    assert "the products 256, its exponentials 256, shared memory, at least 256" in text
    assert text.endswith("Measured, it takes 500 in all, at 1000 MHz.") and "16.0 KiB" in text


def curve(one_head, gpu, host, **over):
    """A forward of ours at 128, 256, ... tokens with these times of the GPU and of the host."""
    return [one_head("a2lib", "forward", max(g, host), seq_len=128 * 2**i, ms_graph=g,
                     ms_host=host, **over) for i, g in enumerate(gpu)]  # fmt: skip


def test_three_regimes(made, one_head):
    flash = made(flash=curve(one_head, (0.01, 0.02, 0.05, 0.06, 0.12, 0.25, 0.95, 3.8), 0.04))
    assert regimes.of_curve(flash.handout) == {
        256: "one", 512: "one", 1024: "flat", 2048: "one", 4096: "one", 8192: "two", 16384: "two",
    }  # fmt: skip
    assert regimes.launch_bound(flash.handout) == [128, 256]
    frame = regimes.table(flash, "bf16", "c", "n").frame
    assert list(frame.iloc[0]) == [
        "ours, forward", "1,024", "256 – 512, 2,048 – 4,096", "8,192 – 16,384", "128 – 256"]
    assert str(regimes.sentence(flash)).splitlines()[2:] == [
        "- **bf16 forward**: flat at 1,024, slope one at 256 – 512, 2,048 – 4,096 and slope two at "
        "8,192 – 16,384 tokens; launch-bound at 128 – 256."
    ]


def test_a_replay_that_takes_longer_is_named(made, one_head):
    rows = curve(one_head, (1.0, 2.0), 0.1)
    assert str(regimes.longer_replays(made(flash=rows))) == ""
    rows[1] |= {"ms": 1.6, "ms_p20": 1.6, "ms_p80": 1.6}
    text = str(regimes.longer_replays(made(flash=rows)))
    assert "In 1 of the 2 rows" in text and "1.25 times: ours, bf16 forward, d = 64, 256" in text


def test_times_as_called_of_launch_bound_rows(made, one_head):
    def rows(seq_len, times, gpu=0.1, host=0.2):
        return [one_head("a2lib", pass_, ms, seq_len=seq_len, ms_graph=gpu, ms_host=host)
                for pass_, ms in zip(("forward", "backward"), times, strict=True)]  # fmt: skip

    assert str(regimes.called(made(flash=rows(128, (1, 1), gpu=1)))) == ""
    assert str(regimes.called(made(flash=rows(128, (0.203, 0.099))))) == (
        "Of the sweep's 2 launch-bound rows it lies between the GPU's and the host's in 2."
    )
    flash = made(flash=[*rows(128, (0.15, 0.3)), *rows(256, (0.15, 0.09)), *rows(512, (1, 1), 1)])
    assert str(regimes.called(flash)) == (
        "Of the sweep's 4 launch-bound rows it lies between the GPU's and the host's in 2, above "
        "the host's in 1 and below the GPU's in 1, by at most 10 µs."
    )


def test_times_as_called_of_different_runs_and_of_half_a_host(made, one_head):
    flash = made(flash=[one_head("a2lib", pass_, 1, seq_len=n, ms_graph=0.5, ms_host=2)
                        for n in (128, 256) for pass_ in PASSES])  # fmt: skip
    assert str(regimes.hosts(flash)) == ""
    half = SHARED[0] + "-nvidia-h200-000000"
    flash.handout = flash.handout.assign(run="alone")
    flash.handout.loc[flash.handout["pass"] == "backward", "run"] = half
    apart = ("The passes of our sweep are of different runs: where calls are launch-bound, times "
             "as called compare within a pass and do not add up. ")  # fmt: skip
    told = "one GPU of a host of two, with half of its cores, while the other GPU ran another sweep"
    assert str(regimes.hosts(flash)) == f"{apart}The times of backward are of {told}."
    here = flash.handout[["pass", "seq_len"]].apply(tuple, axis=1) == ("forward", 128)
    flash.handout.loc[here, "run"] = half
    assert str(regimes.hosts(flash)) == (
        f"{apart}The times of 1 of 2 forward and backward are of {told}."
    )
    flash.handout["ms_graph"] = 3  # none is launch-bound
    assert str(regimes.hosts(flash)) == ""


def test_a_length_below_the_least_has_no_slope(made, one_head):
    assert regimes.of_curve(made(flash=curve(one_head, (1, 2), 0.1)).handout) == {256: "one"}


def test_host_and_gpu_apart(made, one_head):
    rows = [one_head("a2lib", "end_to_end", 0.2, 0.1, 0.3, seq_len=128, ms_graph=0.02, ms_host=0.1),
            one_head("a2lib", "end_to_end", 5, seq_len=65536, ms_graph=4.9, ms_host=0.1),
            one_head("eager", "end_to_end", 1, seq_len=128)]  # fmt: skip
    frame = regimes.apart(made(flash=rows), "c", "n").frame
    assert frame.to_numpy().tolist() == [
        ["ours", "128", "0.200 (0.100 – 0.300)", "0.0200", "0.100", "host"],
        ["ours", "65,536", "5.00 (5.00 – 5.00)", "4.90", "0.100", "GPU"],
        ["eager", "128", "1.00 (1.00 – 1.00)", "·", "·", "·"],
    ]


def test_the_tiles_that_fill_the_gpu(made):
    assert "8,192 tokens of one head make 128 programs for the 132" in str(
        regimes.full_from(made()))  # fmt: skip


CUDNN = "sdpa_cudnn"
# o, dq, dk and dv of 8 MiB each and two rows of 256 KiB.
OURS = 4 * 2**23 + 2 * 2**18


def test_memory_to_the_byte(made, one_head):
    rows = [one_head("a2lib", "end_to_end", 1, peak_bytes=OURS)]
    flash = made(flash=rows)
    assert list(memory.parts(flash, "c", "n").frame["bytes"])[-2:] == ["34,078,720"] * 2
    assert "to the byte, in all 1 rows" in str(memory.ours(flash))


def test_memory_that_differs_is_said(made, one_head):
    rows = [one_head("a2lib", "end_to_end", 1, peak_bytes=OURS),
            one_head("a2lib", "forward", 1, peak_bytes=2**23 + 2**18 + 512)]  # fmt: skip
    text = str(memory.ours(made(flash=rows)))
    assert "In 1 of the 2 rows" in text and "at most 512 bytes" in text


def test_what_the_peers_hold(made, one_head):
    matrix = 65536**2 * 2
    held = {"a2lib": OURS, "sdpa_cudnn": OURS + 65536 * 64 * 4, "flex": OURS,
            "eager": OURS + matrix * 9 // 2, "compile": OURS + 2 * matrix}  # fmt: skip
    rows = [one_head(name, "end_to_end", 1, peak_bytes=peak) for name, peak in held.items()]
    text = str(memory.peers(made(flash=rows)))
    assert "hold: SDPA cuDNN 1.00 and FlexAttention 0.00 (at 65,536 tokens" in text
    assert "PyTorch eager 4.50 and torch.compile 2.00. Counting says 4.5" in text


def test_what_eager_moves(made, one_head):
    # A copy of 4.295 GB read and as much written in 1 ms; a matrix is twice 4.295 GB.
    ceiling = [{"operation": "copy", "dtype": "bf16", "size": 65536**2, "ms": 1}]
    text = str(memory.eager(made(flash=[one_head("eager", "forward", 20)], ceiling=ceiling)))
    assert "9 kernels on the GPU; forward they move 11 matrices" in text
    assert "its measured 20.0 ms would move 20" in text


def test_ceilings_beside_the_data_sheet(made):
    ceiling = [
        {"operation": "matmul", "dtype": "bf16", "size": size, "ms": 2 * size**3 / rate / 1e9,
         "sm_mhz": mhz} for size, rate, mhz in ((4096, 900, 1980), (8192, 600, 1500))
    ] + [{"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
         {"operation": "copy", "dtype": "bf16", "size": 2 * 10**9, "ms": 1}]  # fmt: skip
    flash = made(ceiling=ceiling)
    assert ceilings.table(flash, "c", "n").frame.to_numpy().tolist() == [
        ["bf16 product of 4096 × 4096", "900 TFLOP/s", "1980 MHz", "989.4 TFLOP/s", "91 %", "84 %"],
        ["bf16 product of 8192 × 8192", "600 TFLOP/s", "1500 MHz", "989.4 TFLOP/s", "61 %", "74 %"],
        ["fp32 product of 8192 × 8192", "50.0 TFLOP/s", "·", "66.9 TFLOP/s", "75 %", "·"],
        ["device copy, read plus written", "4.00 TB/s", "·", "4.8 TB/s", "83 %", "·"],
    ]
    assert str(ceilings.which(flash)) == (
        "The ceiling of a dtype is the fastest of its products; in bf16 that of 4096 × 4096, 900 "
        "TFLOP/s at 1980 MHz. The larger ones do not run at that clock: that of 8192 × 8192 runs "
        "at 1500 MHz and reaches 600 TFLOP/s, 74 % of what that clock allows."
    )
    text = str(ceilings.fp32_bound(flash))
    assert "165 TFLOP/s by the data sheet, 150 by the measured product" in text
    assert "hold at 1830 MHz (132 multiprocessors" in str(ceilings.sources(flash))


def errors(**worst):
    """Accuracy rows in fp32 at both scales: dv has the error given, the others half of it."""
    shape = {"dtype": "fp32", "batch": 1, "heads": 1, "seq_len": 2048, "head_dim": 64}
    return [{"implementation": name, **shape, "causal": "true", "score_scale": scale,
             "tensor": tensor, "error": error if tensor == "dv" else error / 2}
            for name, error in worst.items() for scale in (1, 10)
            for tensor in ("o", "dq", "dk", "dv")]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "words"),
    [(1e-6, "In none of the 2 cases is a peer more than twice as accurate as ours. "),
     (3e-6, "More than twice as accurate as ours: PyTorch eager (in fp32, scores as they are) and "
            "PyTorch eager (in fp32, scores 10 times as large). "),
     (9e-6, "**Ours is the least accurate** in fp32, scores as they are and in fp32, scores 10 "
            "times as large. ")],
)  # fmt: skip
def test_accuracy_is_judged_by_the_worst_tensor(made, ours, words):
    flash = made(flash_accuracy=errors(a2lib=ours, eager=1e-6, flex=4e-6))
    assert str(accuracy.sentence(flash)) == words
    assert accuracy.shapes(flash) == "1 heads of 64, 2,048 tokens"
    assert accuracy.summary(flash, "c", "n").frame.to_numpy().tolist() == [
        [f"fp32, {case}", f"{ours:.1e}", "1.0e-06 (eager)", "4.0e-06 (Flex)"]
        for case in ("scores as they are", "scores 10 times as large")
    ]
    frame = accuracy.table(flash, "fp32", "c", "n").frame
    assert list(frame.columns)[1:] == [
        f"{t}{s}" for s in ("", " ×10") for t in ("*o*", "*dQ*", "*dK*", "*dV*")]  # fmt: skip
    assert list(frame.iloc[1])[:5] == ["eager", "5.0e-07", "5.0e-07", "5.0e-07", "1.0e-06"]


@pytest.mark.parametrize(("there", "words"), [(1e-6, "All 8 of our errors are the same figures"),
                                              (2e-6, "0 of our 8 errors are the same")])
def test_errors_on_the_second_machine(made, synthetic, tmp_path, there, words):
    synthetic.by_hand(tmp_path, device=SECOND, flash_accuracy=errors(a2lib=there, eager=5))
    flash = made(flash_accuracy=errors(a2lib=1e-6, eager=1e-6))
    assert words in str(accuracy.sentence(flash))
    assert "5.0" not in str(accuracy.summary(flash, "c", "n"))


def protocol_row(timed, kind, ms, second=0, mean=None, implementation="a2lib", **over):
    row = timed(implementation, "end_to_end", ms, sm_mhz=1980 - 30 * second)
    return {**row, "protocol": kind, "second": second, "ms_mean": mean or ms, "power_w": 700,
            **over}  # fmt: skip


@pytest.mark.parametrize(("last", "words"), [(4.4, "10 % slower"), (4.04, "level"),
                                             (3.6, "10 % faster")])
def test_seconds_on_end(made, timed, last, words):
    rows = [protocol_row(timed, "sustained", 4.2 + (last - 4.2) * i / 9, i) for i in range(10)]
    rows += [protocol_row(timed, "burst", 4), protocol_row(timed, "burst", 2, implementation=CUDNN),
             *(protocol_row(timed, "sustained", 2.2, i, implementation=CUDNN) for i in (0, 9))]
    assert str(protocol.sustained(made(flash_protocol=rows))) == (
        "On the H200, from the burst to the last second, by the medians: ours 4.00 ms (1980 MHz, "
        f"700 W) to {last:.2f} ms (1710 MHz, 700 W), {words}; SDPA cuDNN 2.00 ms (1980 MHz, 700 W) "
        "to 2.20 ms (1710 MHz, 700 W), 10 % slower. So ours takes 2.00 times cuDNN's time in the "
        f"burst and {last / 2.2:.2f} times at the end."
    )


@pytest.mark.parametrize(
    ("ms", "words"),
    [(2.0, "stays below 700 W (SDPA cuDNN) is not slower at the end, as the power limit predicts."),
     (2.2, "is slower at the end all the same, so the power limit is not the whole reason.")],
)  # fmt: skip
def test_who_stays_below_the_power_limit(made, timed, ms, words):
    rows = [protocol_row(timed, "burst", 2, implementation=CUDNN, power_w=""),
            *(protocol_row(timed, "sustained", ms, i, implementation=CUDNN, power_w=650)
              for i in (0, 9))]  # fmt: skip
    assert str(protocol.sustained(made(flash_protocol=rows))).endswith(words)


@pytest.mark.parametrize(("ms", "words"), [(4.05, "their ranges overlap"), (5, "are apart")])
def test_two_bursts_beside_each_other(made, timed, ms, words):
    flash = made(flash_protocol=[protocol_row(timed, "burst", 4)],
                 flash=[timed("a2lib", "end_to_end", ms)])  # fmt: skip
    text = str(protocol.again(flash))
    assert "4.00 (4.00 – 4.00) ms and" in text and words in text


def test_protocols_beside_each_other(made, timed):
    rows = [protocol_row(timed, "burst", 4), protocol_row(timed, "sustained", 5, 9),
            protocol_row(timed, "sustained", 3, 0), protocol_row(timed, "board", 4, mean=6),
            protocol_row(timed, "board", 4, mean=5, implementation="sdpa_cudnn")]  # fmt: skip
    flash = made(flash_protocol=rows)
    assert list(protocol.table(flash, "c", "n").frame.iloc[0]) == [
        "ours", "H200", "4.00 (4.00 – 4.00)", "1980", "5.00 (5.00 – 5.00)", "1710", "6.00", "1980",
    ]  # fmt: skip


def test_the_published_forward(made, one_head):
    # Printed: 17.31 ms tiled and 64.50 ms eager, on an H800.
    rows = [one_head("a2lib", "forward", 1.731), one_head("eager", "forward", 32.25)]
    text = str(published.forward_gap(made(flash=rows)))
    assert "takes 10.0 times as long as ours, and the published eager 2.00 times" in text
    assert "by 1.43 (SXM form) or 2.40 (PCIe form" in text
    assert "more than the first explains and less than the second" in text
    assert "accounts for 2.00 of the forward's 10.0; a factor of 5.0 remains" in text


def test_a_command_that_repeats():
    ran = "papermill notebooks/flash.ipynb -p sweep all -p time_limit_s 300"
    again = "papermill notebooks/flash.ipynb -p sweep all -p remeasure True"
    assert provenance.repeating(ran) == provenance.repeating(again) == again
    assert provenance.repeating("make flash") == "make flash"


def test_the_lab_record_says_what_its_run_measured(made, one_head, tmp_path):
    rows = made(flash=[one_head("a2lib", "forward", 1), one_head("eager", "forward", 2)]).rows
    rows.iloc[0, rows.columns.get_loc("run")] = "R1"
    notebook = tmp_path / "n.ipynb"
    cell = {"cell_type": "code", "outputs": [{"text": ["NVIDIA H200\n", "  run     R1\n"]}]}
    notebook.write_text(json.dumps({"cells": [cell]}))
    said = str(provenance.lab_record(rows, notebook))
    assert said.endswith("measured 1 of the 2 rows shown here; the others are of other runs.")
    assert str(provenance.lab_record(rows[:1], notebook)).endswith("1 of the 1 rows shown here.")
    none = str(provenance.lab_record(rows[1:], notebook))
    assert none.endswith("measured none of the 1 rows shown here, which are of others.")
    assert len(pick(rows, run="R1")) == 1


def test_the_tiles_of_the_estimate_are_those_of_the_kernels():
    tiles = pytest.importorskip("a2lib.attention.tiles").TILES
    for head_dim, kernels in estimate.TILES.items():
        for kernel, tile in kernels.items():
            assert tiles[kernel, "16bit", head_dim, True][0][:2] == tile
    assert estimate.TILE[0] == regimes.TILE


def test_what_all_runs_share_is_said_once(made, one_head):
    flash = made(flash=[one_head("a2lib", "forward", 1), one_head("eager", "forward", 2)])
    rows = flash.measured().assign(run=[*flash.runs.index, "R2"])
    runs = flash.runs.copy()
    runs.loc["R2"] = runs.iloc[0]
    runs.loc["R2", ["triton", "git"]] = "3.9", "abc"
    table = provenance.runs_table(rows, runs, "Runs", "n")
    assert list(table.frame.columns) == ["run", "rows", "Triton", "commit", "command"]
    assert ("{table} Runs; all with NVIDIA H200, driver 0.0, PyTorch 0.0-synthetic, CUDA 0.0, "
            "cuDNN 0, Python 3.11\n") in str(table)  # fmt: skip
