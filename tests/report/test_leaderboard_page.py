"""The leaderboard's page: what its columns make of a row, by hand."""

import pandas as pd
import pytest

from a2lib.report.pages import leaderboard

P, U, TABLE, BLOCK = 8_125_698_048, 2 * 32_768 * 4096, 2 * 151_936 * 4096, 202_375_168
ROOT = 2 * TABLE + 2 * BLOCK + 2 * U
PRODUCTS = 34 * (3 * U + 2 * 2 * 32_768 * 11_008)
ROW = {"model": "8B", "layers": 34, "batch": 1, "context": 32_768, "dtype": "bf16"}
ROW |= {"world_size": 2, "device": "nvidia-h200", "ms_optimizer": 0.0, "attention": "flash"}
ROW |= {"host_bytes": 0, "local": True, "run": "none"}
# A product at 1 PFLOP/s, a copy at 2 TB/s, attention at 1 PFLOP/s.
CEILING = [("matmul", "bf16", 1000, 2e9 / 1e12), ("copy", "bf16", 10**9, 1.0)]
PRODUCT = 16 * 16_384**2 * 128 / 1e12
FLASH = [("forward", 2 * PRODUCT), ("backward", 5 * PRODUCT)]


def tables(name):
    if name == "ceiling":
        return pd.DataFrame(CEILING, columns=["operation", "dtype", "size", "ms"])
    rows = pd.DataFrame(FLASH, columns=["pass", "ms"])
    rows = rows.assign(ms_p20=0.0, ms_p80=0.0, ms_graph=rows["ms"], implementation="a2lib")
    return rows.assign(heads=16, head_dim=128, seq_len=16_384, batch=1, dtype="bf16", causal=True)


def table_of(**ms):
    """Return the page's table of ways by their time, which keep the root's inputs twice."""
    times = pd.DataFrame(ms.items(), columns=["way", "ms"])
    return leaderboard.columns(times.assign(**ROW, kept_bytes=2 * ROOT), tables)


def test_bytes_and_times_of_two_ways():
    inputs = {**ROW, "way": "recomputed", "ms": 6000.0, "kept_bytes": 34 * U + ROOT}
    lse = 34 * 4 * 32_768 * 32
    kept = 34 * 3 * U + lse + ROOT + TABLE
    again = {**ROW, "way": "own_fsdp", "ms": 5000.0, "kept_bytes": kept}
    whole, planned = leaderboard.columns(pd.DataFrame([again, inputs]), tables).to_dict("records")
    assert whole["way"] == "recomputed"
    assert (whole["state"], whole["blocks"]) == (6 * P, 34 * U)
    assert (planned["blocks"], planned["again_bytes"]) == (34 * 3 * U + lse, PRODUCTS)
    # At 1 PFLOP/s a byte of a product is 4,096 operations; attention is 2 and 5 products of half.
    attention = 34 * 32 * 32_768**2 * 128 / 1e12
    assert planned["FlashAttention"] == pytest.approx(7 * attention)
    assert planned["recomputed"] == pytest.approx(PRODUCTS * 4096 / 1e12)
    blocks, head = 34 * 2 * 32_768 * BLOCK / 1e12, 2 * 32_768 * 151_936 * 4096 / 1e12
    assert whole["recomputed"] == pytest.approx(2 * attention + blocks + head)
    assert planned["gained"] == 1000.0
    assert planned["predicted"] == pytest.approx(whole["recomputed"] - planned["recomputed"])
    # The baseline repeats the whole forward, a third of the step.
    assert whole["hfu"] == pytest.approx(4 / 3 * whole["mfu"])
    # With all scores attention has twice as many operations.
    full = 3 * (blocks + 4 * attention + head) / (3 * (blocks + 2 * attention + head))
    assert planned["mfu_full"] == pytest.approx(full * planned["mfu"])
    assert planned["mfu"] == pytest.approx(3 * (blocks + 2 * attention + head) / 5000 * 1e3 / 989.4)


def test_states_in_bf16_stand_beside_the_ladder():
    table = table_of(own_attention=4000.0, own_copies=3900.0, bf16_states=4000.0)
    first, last, beside = table.to_dict("records")
    assert (last["way"], last["gained"]) == ("own_copies", 100.0)
    assert (beside["way"], beside["state"], first["state"]) == ("bf16_states", 3 * P, 6 * P)
    assert pd.isna(beside["gained"]) and pd.isna(beside["predicted"])
    assert [*leaderboard.ladder(table)["way"]] == ["own_attention", "own_copies"]


def test_fp8_has_no_share_of_a_peak_and_no_prediction():
    plain, fp8 = table_of(own_copies=4000.0, fp8_ffn=4000.0).to_dict("records")
    for name in ("mfu", "mfu_full", "hfu", "matmuls", "predicted_ms", "gained"):
        assert pd.isna(fp8[name])
    assert plain["mfu"] > 0 and plain["predicted_ms"] > 0 and fp8["flops"] == plain["flops"]
    stream, hidden, weights = 32_768 * 4096, 32_768 * 11_008, 3 * 4096 * 11_008
    assert fp8["counted"] - plain["counted"] == 5 * hidden + 3 * stream + weights


def test_runs_have_letters_by_their_age():
    rows = pd.DataFrame({"run": ["20261129T202000Z-b", "20261127T014557Z-a", "20261129T202000Z-b"]})
    assert [*rows["run"].map(leaderboard.run_letters(rows))] == ["B", "A", "B"]
    assert leaderboard.run_days(rows) == "A: 2026-11-27, B: 2026-11-29"
    one_day = pd.DataFrame({"run": ["20261127T015359Z-b", "20261127T014557Z-a"]})
    assert leaderboard.run_days(one_day) == "A and B: 2026-11-27"


def test_the_rate_of_a_step_s_matmuls_leaves_attention_out():
    table = table_of(own_copies=4000.0).assign(**{"in matmuls": 2000.0})
    matmuls = 3 * 2 * 32_768 * (34 * BLOCK + 151_936 * 4096) / 1e12
    assert leaderboard.matmul_rate(table, "own_copies") == pytest.approx(matmuls / 2)


def test_losses_stand_beside_the_seed_s_own_bf16():
    trainings = [("fp8", "blocks", 3.0), ("bf16", "none", 2.0), ("bf16", "blocks", 1.0)]
    rows = []
    for seed in (1, 0):
        for ffn, compiled, loss in trainings:
            held_out = loss + 10 * seed
            rows.append({"ffn": ffn, "compile": compiled, "seed": seed, "loss_held_out": held_out})
    table = leaderboard.loss_table(pd.DataFrame(rows))
    assert [*table.loc[0]] == [1.0, 3.0, 2.0] and [*table.loc[1]] == [11.0, 13.0, 12.0]
