"""The chapter's sentences, tables and figures, from complete, partial and no data."""

import re

import pytest

from a2lib.report import metrics, provenance, style
from a2lib.report.chapters.flash import (
    Flash,
    accuracy,
    answer,
    board,
    ceilings,
    counters,
    estimate,
    figures,
    gaps,
    local,
    memory,
    protocol,
    published,
    reasons,
    regimes,
    standing,
    tables,
)
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import pick
from a2lib.report.panels import MEASURES
from a2lib.report.tables import MISSING


@pytest.fixture(params=["complete", "partial", "nothing"])
def flash(request, tmp_path):
    if request.param == "nothing":
        return Flash([tmp_path])
    return Flash([request.getfixturevalue(request.param)])


def texts(flash):
    return [
        answer.sentence(flash), answer.completeness(flash), answer.results(flash, "R", "tab-r"),
        estimate.binding(flash), estimate.per_tile(flash),
        estimate.table(flash, "E", "tab-e"), standing.by_pass(flash, "B", "tab-bp"),
        standing.where(flash),
        standing.who_leads(flash), reasons.two_sweeps(flash, "S", "tab-s"),
        reasons.why_backward(flash), reasons.why_not_exponentials(flash),
        standing.paper_answer(flash), reasons.fp32_leads(flash), reasons.flex_fp32(flash),
        reasons.few_tiles(flash), reasons.launches(flash), gaps.sentence(flash),
        counters.table(flash, "N", "tab-n"), counters.note(flash), counters.traffic(flash),
        estimate.binding(flash, counters.verdict(flash)), ceilings.which(flash),
        regimes.longer_replays(flash), regimes.called(flash), board.in_short(flash),
        protocol.again(flash),
        standing.spreads(flash.leaderboard, "S", "tab-sp"), regimes.sentence(flash),
        regimes.full_from(flash), regimes.apart(flash, "A", "tab-a"),
        *(regimes.table(flash, dtype, "G", f"tab-g-{dtype}") for dtype in ("bf16", "fp32")),
        ceilings.table(flash, "C", "tab-ce"), ceilings.sources(flash), ceilings.fp32_bound(flash),
        memory.parts(flash, "P", "tab-p"), memory.ours(flash), memory.peers(flash),
        memory.eager(flash), accuracy.sentence(flash),
        *(accuracy.table(flash, dtype, "X", f"tab-x-{dtype}") for dtype in ("bf16", "fp32")),
        protocol.table(flash, "O", "tab-o"), board.board(flash), protocol.sustained(flash),
        board.machines(flash, "M", "tab-ma"), board.memory_matters(flash), reasons.short(flash),
        accuracy.summary(flash, "A", "tab-as"), counters.on_the_second(flash),
        provenance.source(board.behind(flash), flash.runs),
        published.table(flash, "Beside", "tab-b"), published.gain(flash, "backward"),
        published.forward_gap(flash), local.show(flash),
        tables.latency(flash.handout, "Times", "tab-t", ("pass", "head_dim", "seq_len")),
        tables.memory(pick(flash.handout, dtype="bf16", pass_="forward"), "M", "tab-m"),
        tables.coverage(flash.handout, 120, "Held", "tab-c"), tables.sweep(flash.handout, "s"),
        provenance.source(flash.rows, flash.runs),
        provenance.runs_table(flash.rows, flash.runs, "Runs", "tab-runs"),
    ]  # fmt: skip


def charts(flash):
    for measure in MEASURES:
        yield figures.grid(flash.handout, measure, down="pass", fixed={"head_dim": 64},
                           lines=flash.ceilings if measure == "tflops" else None)  # fmt: skip
    yield figures.grid(flash.handout, "ms", down="head_dim", fixed={"pass_": "end_to_end"})
    yield figures.grid(local.rows(flash), "ms", down="pass", fixed={})
    yield figures.dots(flash.leaderboard, flash.best_public(), "best public")
    yield figures.heat(metrics.by_graph(flash.handout))
    yield figures.latency_regimes(flash.handout)
    yield figures.sustained(protocol.seconds(flash))
    yield figures.paper_shapes(flash.paper, flash.ceilings.get("bf16"))
    yield figures.beside(flash.handout, flash.reference, 64, flash.short)
    yield figures.headline(flash.handout)


def test_every_sentence_and_table_can_be_said(flash):
    for text in texts(flash):
        assert not re.search(r"\bnan\b|\bNone\b|<NA>|inf\b", str(text)), text


def test_every_figure_can_be_drawn(flash):
    for chart in charts(flash):
        svg = chart._repr_svg_()
        assert svg.count("<svg") == 1 and "nan" not in re.sub(r'id="[^"]*"', "", svg).lower()


def test_a_figure_is_the_same_bytes_twice(complete):
    flash = Flash([complete])
    first, second = (
        figures.grid(flash.handout, "ms", down="pass", fixed={"head_dim": 64})._repr_svg_()
        for _ in range(2)
    )
    assert first == second


def test_the_answer_states_the_measured_time(complete):
    flash = Flash([complete])
    row = pick(flash.leaderboard, implementation="a2lib", pass_="end_to_end").iloc[0]
    assert f"**{style.digits(row['ms'])} ms**" in str(answer.sentence(flash))
    assert answer.numbers(flash)["leaderboard_end_to_end"] == f"{style.digits(row['ms'])} ms"
    assert "sweep is complete" in str(answer.completeness(flash))


def test_a_partial_sweep_says_what_is_missing(partial):
    text = str(answer.completeness(Flash([partial])))
    assert "not complete" in text and "SDPA cuDNN in bf16 (120 of 120)" in text
    assert "a2lib (ours) in bf16 (36 of 120)" in text and "anything in fp32" in text


def test_no_data_says_so(tmp_path):
    flash = Flash([tmp_path])
    assert "not measured yet" in str(answer.sentence(flash))
    assert set(answer.numbers(flash).values()) == {"(not measured yet)", "8.00 GiB"}


def test_numbers_have_the_same_keys_whatever_is_measured(complete, partial, tmp_path):
    keys = {frozenset(answer.numbers(Flash([root]))) for root in (complete, partial, tmp_path)}
    assert len(keys) == 1


def test_a_missing_time_shows_its_reason(complete):
    flash = Flash([complete])
    rows = pick(flash.handout, dtype="fp32", head_dim=64, pass_="end_to_end")
    frame = tables.latency(rows, "t", "tab-t").frame.set_index("tokens")
    assert frame.loc["65,536", "eager"] == "oom" and (frame["cuDNN"] == "n/a").all()
    assert frame.loc["65,536", "ours"].startswith("**")


def test_an_unmeasured_cell_is_not_a_blank(partial):
    flash = Flash([partial])
    rows = pick(flash.handout, dtype="bf16", pass_="end_to_end")
    rows = rows[~((rows["seq_len"] == 256) & (rows["implementation"] == "eager"))]
    frame = tables.latency(pick(rows, head_dim=64), "t", "tab-t").frame.set_index("tokens")
    assert frame.loc["256", "eager"] == MISSING


def test_local_devices_have_tables_of_their_own(synthetic, complete, tmp_path):
    synthetic.write(tmp_path, device="cpu", ceiling=False,
                    keep=lambda s: s[0] == "eager" and s[4] in (128, 256))  # fmt: skip
    flash = Flash([complete, tmp_path])
    text = str(local.show(flash))
    assert "**CPU**" in text and "tiny sizes" in text and "tab-local-1-bf16-0" in text
    assert set(local.rows(flash)["device"]) == {"cpu"}
    assert set(flash.rows["device"]) == {"nvidia-h200"}


def test_a_source_line_names_gpu_versions_commit_date_and_file(complete):
    flash = Flash([complete])
    text = str(provenance.source(flash.rows, flash.runs))
    parts = ("1 × NVIDIA H200", "0.0-synthetic", "`synthetic`", "2026-11-21", "nvidia-h200.csv")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("stored", "shown"), [("91900", "9.19.0"), ("8907", "8.9.7"), ("", "")])
def test_cudnn_versions_are_readable(stored, shown):
    assert provenance._version("cudnn", stored) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012345, "0.0123"), (1.2345, "1.23"), (12.345, "12.3"), (1234.5, "1234"), (None, "–")],
)
def test_three_figures(value, text):
    assert style.digits(value) == text


def test_looks_differ_in_colour_and_in_marker():
    looks = LOOKS.values()
    assert len({look.colour for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)


def test_the_readme_figure_is_drawn_or_refused(complete, tmp_path, monkeypatch):
    from a2lib.report.chapters.flash import readme_figure

    monkeypatch.setattr(readme_figure, "data_dir", lambda: complete)
    picture = readme_figure.write(tmp_path / "picture.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(readme_figure, "data_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="nothing drawn"):
        readme_figure.write(tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
