"""What the chapter says of the hardware's counters, by value, on rows made by hand."""

import pytest

from a2lib.report.chapters.flash import counters, estimate, reasons
from a2lib.report.chapters.flash.rows import SECOND

CUDNN = "sdpa_cudnn"


@pytest.fixture
def counted(timed):
    """A kernel of a call: bytes in GB, busy shares in percent."""

    def row(implementation, pass_, l2, tensor, exp=20, device=1, launch=0, kernel="k", **over):
        row = timed(implementation, pass_, "", launch=launch, kernel=kernel, **over)
        return {**row, "l2_bytes": round(l2 * 1e9), "device_bytes": round(device * 1e9),
                "tensor_percent": tensor, "exp_percent": exp, "n": ""}  # fmt: skip

    return row


@pytest.fixture
def ours(counted):
    """Our two backward kernels."""

    def rows(tensor_dq, tensor_dkdv, l2=10, **over):
        return [counted("a2lib", "backward", l2, tensor_dq, kernel="backward_dq_kernel", **over),
                counted("a2lib", "backward", l2, tensor_dkdv, launch=1,
                        kernel="backward_dkdv_kernel", **over)]  # fmt: skip

    return rows


def test_a_call_is_the_kernels_of_one_run(made, counted):
    rows = [counted(CUDNN, "backward", 8, 50), counted(CUDNN, "backward", 0.1, 1, launch=1),
            counted(CUDNN, "backward", 5, 9, launch=2)]  # fmt: skip
    flash = made(flash_counters=rows)
    flash.counters.loc[flash.counters["launch"] == 2, "run"] = "an older one"
    found = counters.of(flash, CUDNN, "backward")
    # The small kernel counts for the bytes and not for the shares; the older run for neither.
    assert (found.l2_bytes, found.device_bytes) == (8_100_000_000, 2_000_000_000)
    assert (found.tensor, found.busy) == ((50.0,), 50.0)


def test_shares_are_weighed_by_products(made, ours):
    # 3 products at 60 % take 5, 4 at 40 % take 10: 7 in 15.
    found = counters.of(made(flash_counters=ours(60, 40)), "a2lib", "backward")
    assert found.products == (3, 4) and found.busy == pytest.approx(700 / 15)


def test_a_refused_count_is_none(made, counted):
    blank = dict.fromkeys(("device_bytes", "l2_bytes", "tensor_percent", "exp_percent"), "")
    refused = {"status": "unsupported", "note": "no ncu", **blank}
    rows = [{**counted("a2lib", "forward", 1, 1), **refused}]
    assert counters.of(made(flash_counters=rows), "a2lib", "forward") is None


def test_the_count_of_tiles_by_hand():
    # 526,336 tiles of 64 x 64, 16 KiB of keys and values each, and q and o once: 8.69 GB.
    assert counters.expected("forward") == 526336 * 16384 + 2 * 16 * 16384 * 64 * 2
    assert counters.once("forward") == 4 * 2**25 + 2**20
    assert estimate.TILES[128]["backward_dq"] == (128, 64)


def test_the_table_and_its_rates(made, counted, timed):
    rows = [counted("a2lib", "forward", 8, 45, 48, device=0.4),
            counted(CUDNN, "forward", 4, 51, 52, head_dim=128)]  # fmt: skip
    times = [timed("a2lib", "forward", 9, ms_graph=2), timed(CUDNN, "forward", 4, head_dim=128)]
    flash = made(flash_counters=rows, flash=times)
    assert counters.table(flash, "c", "n").frame.to_numpy().tolist() == [
        ["ours, forward", "64", "8.00", "8.69", "4.0", "0.400", "0.135", "45", "48"],
        ["cuDNN, forward", "128", "4.00", "–", "1.0*", "1.00", "0.269", "51", "52"],
    ]
    assert "A star: over the time as called" in str(counters.note(flash))


@pytest.mark.parametrize(("factor", "words"), [(1, "1.00 to 1.00 times the bytes that counting "
                                                   "tiles gives: the count holds"),
                                               (2, "which is off")])  # fmt: skip
def test_whether_the_count_holds(made, counted, timed, factor, words):
    l2 = counters.expected("forward") / 1e9 * factor
    rows = [counted("a2lib", "forward", l2, 45, device=0.4), counted(CUDNN, "forward", l2 / 2, 50)]
    text = str(counters.traffic(made(flash_counters=rows, flash=[timed("a2lib", "forward", 2)])))
    assert words in text and "cuDNN's forward asks for 0.50 of ours" in text
    assert "carries 3.0 times what each tensor once" in text and "at most 0.20 of 4.8 TB/s" in text


@pytest.mark.parametrize(
    ("exp", "wide", "words"),
    [(48, 20, ("93 % together, about what taking turns gives", "4.0 TB/s here, and 10.0")),
     (60, 20, ("105 % together, so some of the one runs beside", "not at its limit")),
     (48, 6, ("about what taking turns", "Whether L2, at 4.0 TB/s, is at its limit is open"))],
)  # fmt: skip
def test_what_the_counters_say_of_the_forward(made, counted, timed, exp, wide, words):
    rows = [counted("a2lib", "forward", 8, 45, exp),
            counted("a2lib", "forward", wide, 50, head_dim=128)]  # fmt: skip
    times = [timed("a2lib", "forward", 2), timed("a2lib", "forward", 2, head_dim=128)]
    flash = made(flash_counters=rows, flash=times)
    said = str(estimate.binding(flash, counters.verdict(flash)))
    assert all(word in said for word in words) and "which of the two was not tested" not in said


@pytest.fixture
def backward(made, ours, counted, timed):
    """Ours at 50 % in both kernels, cuDNN at 50 % too, and the measured shares of its rate."""

    def flash(d64, d128, narrow=50):
        rows, times = [], []
        for head_dim, share, busy in ((64, d64, narrow), (128, d128, 50)):
            over = {"head_dim": head_dim}
            rows += [*ours(busy, busy, **over), counted(CUDNN, "backward", 9, 60, **over)]
            rows.append(counted("a2lib", "forward", 20, 50, **over))
            shape = {**over, "heads": 2048 // head_dim}
            times += [timed("a2lib", "backward", 1 / share, **shape),
                      timed(CUDNN, "backward", 1, **shape), timed("a2lib", "forward", 1, **shape)]
        return made(flash_counters=rows, flash=times)

    return flash


def test_products_times_busy_shares(backward):
    # 5/7 of 50 over 60 is 0.60.
    text = str(reasons.why_backward(backward(0.6, 0.6, narrow=40)))
    assert "50 % of the time and cuDNN's for 60 %; 5/7 times that ratio is 0.60, and 0.60" in text
    assert "and nothing else" not in text  # 40 over 60 makes 0.48 with heads of 64
    text = str(reasons.why_backward(backward(0.48, 0.6, narrow=40)))
    assert "and nothing else" in text and "and not 60 % with heads of 128 is open" in text
    # 20 GB in 1/0.6 ms are 12 TB/s, below the forward's 20.
    assert "draws 12.0 TB/s from it, and our forward 20.0" in text
    assert "busy for 50 % with them, and for 40 % with 64 and heads of 64" in text


def test_a_guess_that_the_counters_do_not_exclude_is_not_excluded(backward):
    text = str(reasons.why_backward(backward(0.6, 0.6, narrow=50)))
    assert "Nor is it that registers" not in text


@pytest.mark.parametrize(("l2", "words"), [(20, "the most of any call counted, for 2.0 times"),
                                           (5, "Nor is L2, from which it draws 4.0 TB/s")])
def test_the_forward_with_wide_heads(made, counted, timed, l2, words):
    rows = [counted("a2lib", "forward", l2, 54, 29, head_dim=128),
            counted(CUDNN, "forward", 10, 75, 38, head_dim=128)]  # fmt: skip
    times = [timed(name, "forward", ms, head_dim=d, heads=h)
             for d, h, pair in ((64, 32, (1.05, 1)), (128, 16, (1.25, 1)))
             for name, ms in zip(("a2lib", CUDNN), pair, strict=True)]  # fmt: skip
    text = str(reasons.why_not_exponentials(made(flash_counters=rows, flash=times)))
    assert "0.95 of cuDNN's rate there and 0.80 with heads of 128" in text and words in text
    assert "busy for 29 % of the time, our tensor cores for 54 %, cuDNN's for 75 %" in text


def test_what_the_second_machine_counts_otherwise(made, counted, synthetic, tmp_path):
    rows = [counted("a2lib", "forward", 8, 45, device=0.4), counted(CUDNN, "forward", 4, 50)]
    there = [counted("a2lib", "forward", 8.08, 44.5, device=0.5), counted(CUDNN, "forward", 4, 51),
             counted(CUDNN, "backward", 4, 90)]  # fmt: skip
    assert str(counters.on_the_second(made(flash_counters=rows))) == ""
    synthetic.by_hand(tmp_path, device=SECOND, flash_counters=there)
    assert str(counters.on_the_second(made(flash_counters=rows))) == (
        "On the H100, for the 2 calls counted there too, the bytes through L2 are the same within "
        "1.0 %, and the shares of busy tensor cores within 1.0 points; device memory carries 1.25 "
        "times as much for ours."
    )
