"""Parameters: every wrong one stops with one line that says what is allowed."""

import importlib
from dataclasses import dataclass

import pytest
import refusals
from hypothesis import assume, example, given
from hypothesis import strategies as st

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness.parameters import (
    Common,
    ParameterError,
    WithSweep,
    check,
    parameter,
)
from a2lib.lab.sections import SECTIONS


@dataclass(frozen=True)
class Parameters(WithSweep):
    seq_len: int | None = parameters.count(None, "tokens", 2**24)
    heads: int = parameters.count(1, "heads", 2**16)
    causal: bool = parameter(True, "whether a query sees no later key")
    implementations: str = parameter(
        "auto", "a comma list", choices=("auto",), many=("eager", "tiled")
    )
    sweep: str = parameters.sweep(("grid", "all"))


FIELDS = {field.name: field for field in parameters.fields(Parameters)}
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
WHOLE = [name for name, field in FIELDS.items() if field.metadata["kind"] is int]
TEXT = [name for name, field in FIELDS.items() if field.metadata["kind"] is str]


def refused(**given) -> str:
    given = {**DEFAULTS, **given}
    return str(refusals.refused("", check, given, Parameters, error=ParameterError))


def test_defaults_pass_whatever_else_the_notebook_has():
    assert check({**DEFAULTS, "In": [""], "pytest": pytest}, Parameters) == Parameters()


@given(
    name=st.sampled_from(WHOLE),
    value=st.one_of(st.integers(-(10**6), 10**6), st.integers(-(2**70), 2**70)),
)
@example(name="seq_len", value=10**30)
@example(name="time_limit_s", value=10**400)
@example(name="seed", value=2**63)
@example(name="heads", value=10**5000)
def test_whole_numbers_are_bounded_and_may_come_as_floats(name, value):
    rules = FIELDS[name].metadata
    assert rules["minimum"] >= 0 and rules["maximum"] < 2**63
    forms = [value, *([float(value)] if abs(value) < 2**53 else [])]
    for form in forms:
        if rules["minimum"] <= value <= rules["maximum"]:
            checked = getattr(check({**DEFAULTS, name: form}, Parameters), name)
            assert checked == value and type(checked) is int
        else:
            message = refused(**{name: form})
            assert message.startswith(f"{name} = ") and len(message) < 200
            assert f"from {rules['minimum']} to {rules['maximum']}" in message


@given(
    name=st.sampled_from(WHOLE),
    value=st.one_of(st.text(), st.booleans(), st.floats(), st.lists(st.integers())),
)
def test_what_is_no_whole_number_is_refused(name, value):
    assume(not (isinstance(value, float) and value.is_integer()))
    assert name in refused(**{name: value})


@given(name=st.sampled_from(TEXT), value=st.text(max_size=12))
def test_unknown_names_are_refused_with_the_allowed_ones(name, value):
    rules = FIELDS[name].metadata
    allowed = (*rules["choices"], *rules["many"])
    assume(value not in allowed and not {p.strip() for p in value.split(",")} <= set(rules["many"]))
    message = refused(**{name: value})
    assert name in message and all(word in message for word in allowed)


def test_a_missing_parameter_is_named():
    given = {name: value for name, value in DEFAULTS.items() if name != "causal"}
    refusals.refused("causal is missing", check, given, Parameters, error=ParameterError)


@pytest.mark.parametrize("form, meant", [("False", False), ("false", False), ("TRUE", True)])
def test_flags_may_come_as_words(form, meant):
    assert check({**DEFAULTS, "causal": form}, Parameters).causal is meant
    for wrong in ("no", 0, None):
        assert "True and False" in refused(causal=wrong)


@pytest.mark.parametrize("form", [None, "null", "none", "None"])
def test_no_value_may_come_as_a_word_where_it_is_allowed(form):
    assert check({**DEFAULTS, "seq_len": form}, Parameters).seq_len is None
    assert "heads" in refused(heads=form)


@pytest.mark.parametrize("notebook", sorted({s.notebook for s in SECTIONS.values() if s.handler}))
def test_every_experiment_declares_its_parameters_alike(notebook):
    declared = importlib.import_module(f"a2lib.experiments.{notebook}").Parameters
    fields = {field.name: field for field in parameters.fields(declared)}
    assert list(fields)[-3:] == ["remeasure", "time_limit_s", "seed"]
    for field in parameters.fields(Common):
        assert fields[field.name] is field
    for field in fields.values():
        assert field.metadata["help"], field.name
        # A seed may be whatever a generator takes and the tables hold.
        if field.metadata["kind"] is int and field.name != "seed":
            assert 0 <= field.metadata["minimum"] < field.metadata["maximum"] < 2**40, field.name
    if "sweep" in fields:
        name = next(name for name, field in fields.items() if not field.metadata["many"])
        rules = fields[name].metadata
        other = rules["choices"][-1] if rules["choices"] else rules["minimum"]
        for sweep in fields["sweep"].metadata["choices"][1:]:
            words, given = f"{name} = .*: sweep {sweep} has its own", {name: other, "sweep": sweep}
            refusals.refused(words, declared, **given, error=ParameterError)
