"""The text tables of the protocols and the errors, on rows whose answers a person can see."""

import re

from a2lib.experiments.flash import tables

SHAPE = {
    "dtype": "bf16", "batch": "1", "heads": "2", "seq_len": "64", "head_dim": "32",
    "causal": "true",
}  # fmt: skip


def protocol(name, implementation, second="0", **given):
    row = {"protocol": name, "implementation": implementation, "second": second, "status": "ok"}
    values = {"ms": "1.0", "ms_mean": "1.25", "sm_mhz": "1980", "power_w": "", "note": ""}
    return SHAPE | row | values | given


def error(implementation, tensor, value, **given):
    row = {"implementation": implementation, "tensor": tensor, "score_scale": "1", "status": "ok"}
    return SHAPE | row | {"error": value, "note": ""} | given


def lines(text):
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()[3:]]


def test_the_first_and_the_last_second_stand_for_those_between():
    rows = [
        protocol("sustained", "a2lib", str(s), ms=str(2.0 + s), power_w="700") for s in range(11)
    ]
    rows.append(protocol("burst", "a2lib"))
    failed = protocol("board", "sdpa_flash", status="oom", ms="", ms_mean="", note="out of memory")
    rows += [failed, protocol("burst", "sdpa_flash")]
    shape = "1x2x64x32 bf16 causal"
    assert lines(tables.protocols(rows)) == [
        f"{shape} burst a2lib 1 1.25 1980 -",
        f"{shape} burst sdpa_flash 1 1.25 1980 -",
        f"{shape} sustained, second 0 a2lib 2 1.25 1980 700",
        f"{shape} sustained, second 10 a2lib 12 1.25 1980 700",
        f"{shape} board sdpa_flash oom out of memory",
    ]


def test_errors_stand_by_tensor_and_a_missing_one_says_why():
    rows = [
        error("a2lib", t, v)
        for t, v in zip(("o", "dq", "dk"), ("0.5", "0.001", "3e-05"), strict=True)
    ]
    rows += [
        error("flex", t, "", status="unsupported", note="why") for t in ("o", "dq", "dk", "dv")
    ]
    assert lines(tables.accuracy(rows)) == [
        "1x2x64x32 bf16 causal 1 a2lib 5.00e-01 1.00e-03 3.00e-05 -",
        "1x2x64x32 bf16 causal 1 flex " + "unsupported " * 4 + "why",
    ]


def test_no_rows():
    assert tables.protocols([]) == tables.accuracy([]) == ""
