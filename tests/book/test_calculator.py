"""The calculator: its formulas in a browser against Python's, and its form in the book.

Runs where there is a Chromium, as test_browser.py does.
"""

import itertools
import json
import math
from dataclasses import asdict, replace

import forms_in_a_browser as forms
import pytest

from a2lib.report.pages import calculator
from a2lib.theory import __main__ as command
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import ACTIVATIONS, ATTENTIONS, OPTIMIZERS, Job
from a2lib.theory.layouts import SCHEDULES, SHARDINGS, STRATEGIES, Layout, evaluate, flops_share
from a2lib.theory.memory.step import PRECISIONS
from a2lib.theory.planner import largest_batch
from a2lib.theory.transformer import PUBLISHED, SIZES, GroupedShape, parameter_count

SHAPES = (
    GroupedShape(8, 16, 12, 4, 64, num_kv_heads=4, tied=True),
    SIZES["8B"],
    GroupedShape(16_384, 53_248, 60, 128, 128_256, num_kv_heads=8),
    replace(PUBLISHED["DeepSeek-V3"], num_layers=60, nodes=0),
    GroupedShape(16, 24, 12, 4, 64, experts=8, top_k=2, shared=1, dense=1, nodes=1, head_size=8),
)
MIXED, TWO = {"experts": 4, "top_k": 2}, {"pipeline": 2}
# data, tensor, pipeline, context, micro-batches; sequences of a step, tokens of one
MESHES = (
    ((1, 1, 1, 1, 1), 1, 512), ((1, 1, 1, 1, 4), 8, 1000), ((8, 1, 1, 1, 1), 16, 4096),
    ((64, 1, 1, 1, 2), 256, 2048), ((2, 4, 1, 1, 1), 6, 8192), ((4, 8, 1, 1, 3), 12, 16_384),
    ((1, 4, 2, 1, 4), 4, 777), ((2, 1, 4, 1, 16), 32, 2048), ((3, 2, 12, 1, 5), 15, 96),
    ((1, 1, 1, 2, 1), 2, 32_768), ((2, 2, 2, 2, 2), 4, 65_536), ((12, 4, 2, 4, 1), 12, 1 << 20),
    ((1000, 1, 1, 1, 1), 1000, 128), ((1, 1, 7, 1, 7), 7, 2048), ((2, 2, 13, 1, 13), 52, 4096),
    ((1, 2, 31, 1, 31), 62, 8192), ((16, 1, 4, 1, 8), 128, 4096), ((32, 1, 2, 2, 4), 256, 8192),
)  # fmt: skip
WAYS = PRECISIONS, ATTENTIONS, SHARDINGS, STRATEGIES
CROSSED = itertools.product(range(len(SHAPES)), ("H100", "A100", "TPU-v5p"), MESHES, *WAYS)
# The last two shapes' jobs, and two in three of the others'.
POINTS = [one for i, one in enumerate(CROSSED) if one[0] > 2 or i % 3]
# Numbers of a job and its layout, in one order in both languages, or the rule that they break. As
# text, since playwright takes seconds over each of so many values.
SCRIPT = """(text) => JSON.stringify(JSON.parse(text).map(([given, layout, most]) => {
  const job = on(given), broken = theory.problem(job, layout);
  if (broken) return { rule: broken.rule };
  const plan = theory.evaluate(job, layout);
  const { memory, moment, busy, bound } = plan;
  return { memory, moment, busy, bound, numbers: [
    theory.memory_bytes(plan.memory), theory.allowed(job), plan.step_s, plan.expected_s,
    plan.serial_s, ...[plan.step_s, plan.serial_s].map((s) => theory.flops_share(job, layout, s)),
    theory.tokens_per_s(job, plan.serial_s), theory.parameter_count(job.shape),
    most ? theory.largest_batch(job, layout) : 0,
  ] };
}))"""


def point(i, shape, device, mesh, precision, attention, sharding, strategy):
    """The i-th job, as one for JavaScript, and its layout; what is not crossed goes in turn."""
    sizes, batch, context = mesh
    job = {"device": device, "batch": batch, "context": context}
    job |= {"precision": precision, "attention": attention, "devices": math.prod(sizes[:4]) + i % 2}
    job |= {"headroom": (0.0, 0.1, 0.35)[i % 3], "frozen": (0.0, 0.0, 0.75)[i // 2 % 3]}
    job |= {"efficiency": (1.0, 0.45)[i % 2], "activations": ACTIVATIONS[i // 2 % 2]}
    job["optimizer"] = list(OPTIMIZERS)[i % len(OPTIMIZERS)]
    chunks, sequence = (1, 1, 2, 5)[i % 4] if sizes[2] > 1 else 1, i % 5 > 0
    schedule = SCHEDULES[i // 3 % 3] if sizes[2] > 1 and chunks == 1 else "1f1b"
    expert = (1, 2, 8)[i % 3] if SHAPES[shape].experts else 1
    more = chunks, sequence, expert, schedule
    return SHAPES[shape], job, Layout(*sizes, sharding, strategy, *more)


def close(one, other):
    return math.isclose(one, other, rel_tol=1e-11, abs_tol=1e-300)


@pytest.fixture(scope="module")
def scripts(browser):
    """A page with the calculator's functions; ``on(job)`` is the job with its device's figures."""
    tab = forms.functions(browser, "forms.js", "layouts.js", "calculator.js")
    names = """(given) => {
      globalThis.constants = given;
      globalThis.theory = a2Layouts(given);
      globalThis.on = (job) => ({ ...job, device: given.devices[job.device] });
    }"""
    tab.evaluate(names, calculator.constants())
    return tab


def test_a_browser_and_python_agree_over_thousands_of_points(scripts):
    points = [point(i, *one) for i, one in enumerate(POINTS)]
    given = []
    for i, (shape, job, layout) in enumerate(points):
        given.append([{**job, "shape": asdict(shape)}, asdict(layout), i % 29 == 0])
    answers = json.loads(scripts.evaluate(SCRIPT, json.dumps(given)))
    rules, bound, moments, fitting = set(), set(), set(), 0
    for i, ((shape, given, layout), answer) in enumerate(zip(points, answers, strict=True)):
        try:
            job = Job(shape, **{**given, "device": DEVICES[given["device"]]})
            plan = evaluate(job, layout)
        except ValueError as error:
            assert answer == {"rule": str(error)}
            rules.add(str(error).split()[0])
            continue
        for found, expected in ((answer["memory"], plan.memory), (answer["busy"], plan.busy)):
            assert list(found) == list(expected)
            for name in expected:
                assert close(found[name], expected[name]), (job, layout, name)
        expected = [
            plan.memory_bytes, job.memory, plan.step_s, plan.expected_s, plan.serial_s,
            plan.flops_share, flops_share(job, layout, plan.serial_s),
            job.batch * job.context / plan.serial_s, parameter_count(shape),
            largest_batch(job, layout) if i % 29 == 0 else 0,
        ]  # fmt: skip
        for k, (one, other) in enumerate(zip(answer["numbers"], expected, strict=True)):
            assert close(one, other), (job, layout, k, one, other)
        assert (answer["bound"], answer["moment"]) == (plan.bound, plan.moment), (job, layout)
        moments.add(plan.moment)
        bound.add(plan.bound)
        fitting += plan.memory_bytes <= job.memory
    answered = sum("rule" not in answer for answer in answers)
    assert answered > 2000 and 300 < fitting < answered - 300
    assert bound == set(calculator.BUSY) and len(moments) == 5
    assert {"data", "tensor", "pipeline", "context", "precision"} - rules == {"data"}


def test_each_rule_has_the_words_of_python(scripts):
    good = {"device": "H200", "devices": 8, "batch": 4, "context": 8, "headroom": 0.1}
    good |= {"precision": "bf16", "attention": "flash", "optimizer": "adamw", "efficiency": 1}
    good["activations"] = "library"
    shape = {"d_model": 8, "d_ff": 16, "num_layers": 4, "num_heads": 2, "vocab_size": 64}
    cases = [
        ("num_kv_heads", {}, {"num_kv_heads": 4}, {}),
        ("num_heads", {}, {"num_heads": 3}, {}), ("num_heads", {}, {"num_heads": 8}, {}),
        ("precision", {"precision": "fp32", "device": "TPU-v5p"}, {}, {}),
        ("data", {}, {}, {"data": 3}), ("tensor", {}, {}, {"tensor": 4}),
        ("pipeline", {}, {"num_layers": 9}, {"pipeline": 8}), ("pipeline", {}, {}, {"pipeline": 5}),
        *(("chunks", {}, {}, {"chunks": 2, **more}) for more in ({}, TWO, TWO | {"chunks": 3})),
        ("checkpointing", {}, {}, {"checkpointing": "selective"}),
        ("context", {}, {}, {"context": 3}), ("context", {}, {}, {"context": 8}),
        ("context", {"attention": "eager"}, {}, {"context": 2}),
        ("microbatches", {}, {}, {"data": 2, "microbatches": 4}),
        ("devices", {}, {}, {"data": 4, "tensor": 2, "pipeline": 2}),
        ("schedule", {}, {}, {"schedule": "zb-h1"}), ("expert", {}, {}, {"expert": 2}),
        ("schedule", {}, {}, {"schedule": "zb-h2", "pipeline": 2, "microbatches": 2}),
        ("experts", {}, {"experts": 4}, {}), ("experts", {}, {"top_k": 4}, {}),
        ("experts", {}, MIXED | {"dense": 4}, {}), ("expert", {}, MIXED, {"expert": 2}),
        ("expert", {}, MIXED, {"expert": 2, "data": 2, "sharding": "hsdp"}),
        ("tensor", {}, MIXED, {"tensor": 2}), ("pipeline", {}, MIXED | {"dense": 3}, TWO),
    ]  # fmt: skip
    for name, job, sizes, axes in cases:
        found = scripts.evaluate(
            "([job, layout]) => theory.problem(on(job), layout)",
            [good | job | {"shape": shape | sizes}, asdict(Layout(**axes))],
        )
        with pytest.raises(ValueError) as error:
            values = good | job | {"device": DEVICES[(good | job)["device"]]}
            evaluate(Job(GroupedShape(**shape | sizes), **values), Layout(**axes))
        assert found == {"name": name, "rule": str(error.value)}


def test_the_bars_stay_within_their_frames(scripts):
    points = [point(i, *one) for i, one in enumerate(POINTS)][::17]
    given = [[{**job, "shape": asdict(shape)}, asdict(layout)] for shape, job, layout in points]
    script = """(points) => {
      const bad = [];
      let drawn = 0;
      for (const [given, layout] of points) {
        const job = on(given);
        if (theory.problem(job, layout)) continue;
        drawn++;
        const plan = theory.evaluate(job, layout);
        bad.push(...outside(a2Calculator.memoryBar(theory, job, plan), 92),
                 ...outside(a2Calculator.timeBars(plan), 144));
      }
      return [bad.slice(0, 5), drawn];
    }"""
    outside, drawn = scripts.evaluate(script, given)
    assert outside == [] and drawn > 100


def test_an_address_is_written_in_both_languages_alike(scripts):
    for job, layout in calculator.LINKS.values():
        held = calculator.state(job, layout)
        texts = {one.name: str(held[one.name]).removesuffix(".0") for one in calculator.FIELDS}
        fields = [{"name": name, "value": text} for name, text in texts.items()]
        written = scripts.evaluate("(fields) => a2Forms.address('fit', fields)", fields)
        assert written == calculator.address(job, layout)
        assert scripts.evaluate("(hash) => a2Forms.stateOf(hash, 'fit')", written) == texts
    assert scripts.evaluate("a2Forms.stateOf('#fitting&batch=1', 'fit')") is None
    assert scripts.evaluate("a2Forms.stateOf('', 'fit')") is None


@pytest.fixture
def page(open_page):
    """The calculator on a phone, dark."""
    return open_page("calculator.html", forms.PHONE, "dark")


def as_command(tab, capsys):
    """What the command under the form prints."""
    words = forms.out(tab, "command").split()
    assert words[:3] == ["python", "-m", "a2lib.theory"]
    assert command.main([*words[3:], "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shows(tab, job, layout):
    """That the page has the figures of a job, and its words."""
    plan = evaluate(job, layout)

    def near(name, value):
        text, _, unit = forms.out(tab, name).replace(",", "").partition(" ")
        number = float(text) / {"s": 1, "ms": 1e3, "µs": 1e6}.get(unit, 1)
        assert number == pytest.approx(value, rel=6e-3, abs=1e-12), name

    for part, size in plan.memory.items():
        near(f"memory.{part}.gb", size / 1e9)
    near("memory.total.gb", plan.memory_bytes / 1e9)
    for name, seconds in plan.busy.items():
        near(f"busy.{name}.s", seconds)
    near("speed.step.floor", plan.step_s)
    near("speed.step.expected", plan.expected_s)
    near("speed.step.serial", plan.serial_s)
    near("speed.tokens.floor", job.batch * job.context / plan.step_s)
    near("speed.mfu.serial", 100 * flops_share(job, layout, plan.serial_s))
    assert forms.out(tab, "batch.most") == f"{largest_batch(job, layout):,}"
    return plan


@pytest.mark.slow
def test_a_reader_sets_a_training_by_keyboard_and_reads_whether_it_fits(page, capsys):
    example, layout = calculator.EXAMPLE, calculator.SHARDED
    shows(page, example, layout)
    assert page.text_content("#a2-state").startswith("It fits: each of 8 devices holds 94.6 GB")
    assert page.input_value("#a2-size") == "8B"
    before = page.inner_html(".a2-memory")

    page.focus("#a2-sharding")
    page.keyboard.type("none")
    replicas = replace(layout, sharding="none")
    plan = shows(page, example, replicas)
    assert page.inner_html(".a2-memory") != before
    page.wait_for_function("document.getElementById('a2-state').textContent.includes('not fit')")
    said = page.text_content("#a2-state")
    assert "no batch would" in said and f"bound by {plan.bound}" in said
    found = as_command(page, capsys)
    assert found["fits"] is False and found["step_s"] == plan.step_s
    page.focus("#a2-size")
    page.keyboard.type("small")
    forms.types(page, "batch", "1,024")
    shows(page, replace(example, shape=SIZES["small"], batch=1024), replicas)
    assert page.input_value("#a2-d_model") == "768"
    forms.types(page, "d_ff", "3000")
    odd = replace(SIZES["small"], d_ff=3000)
    shows(page, replace(example, shape=odd, batch=1024), replicas)
    assert page.input_value("#a2-size") == ""
    page.focus("#a2-batch_of")
    page.keyboard.type("on")
    shows(page, replace(example, shape=odd, batch=8192), replicas)

    page.focus(".a2-calculator summary")
    page.keyboard.press("Enter")
    forms.types(page, "tensor", "4")
    forms.types(page, "efficiency", "50")
    page.select_option("#a2-tied", "tied"), page.select_option("#a2-sequence", "whole")
    tied = GroupedShape(**asdict(odd), tied=True)
    mixed = replace(example, shape=tied, batch=2048, efficiency=0.5)
    shows(page, mixed, replace(replicas, data=2, tensor=4, sequence=False))
    found = as_command(page, capsys)
    assert found["layout"]["tensor"] == 4 and found["efficiency"] == 0.5
    assert found["largest_batch"] == int(forms.out(page, "batch.most").replace(",", ""))


@pytest.mark.slow
def test_what_breaks_a_rule_is_said_under_its_field(page):
    def wrong(field, rule):
        assert forms.said_under(page, field) == rule
        assert forms.out(page, "memory.total.gb") == forms.out(page, "batch.most") == "–"
        assert page.inner_html(".a2-memory") == page.inner_html(".a2-time") == ""
        page.wait_for_function("document.getElementById('a2-state').textContent.startsWith('No')")

    page.evaluate("document.querySelector('.a2-calculator details').open = true")
    devices = "8 is not a multiple of the 3 devices of tensor × pipeline × context; it must be"
    for field, text, rule in (
        ("d_model", "-1", "allowed: whole numbers from 1 to 1,000,000"),
        ("headroom", "120", "allowed: numbers from 0 to 99"),
        ("devices", "3", "data 3 does not divide batch 32; it must"),
        ("tensor", "3", devices),
    ):
        before = page.input_value(f"#a2-{field}")
        forms.types(page, field, text)
        wrong(field, rule)
        forms.types(page, field, before)
        assert page.locator(".a2-error:not(:empty)").count() == 0
    page.select_option("#a2-device", "TPU-v5p")
    page.select_option("#a2-precision", "fp32")
    where = "on google-tpu-v5p, whose maker states no rate in fp32"
    wrong("precision", f"precision fp32: allowed is bf16 {where}")


def test_a_rule_is_said_under_the_field_of_its_own_that_was_set_last(scripts):
    given = calculator.state(calculator.EXAMPLE, calculator.SHARDED)
    given |= {"headroom": 0.1, "efficiency": 1}

    def marked(change, *recent):
        answer = scripts.evaluate(
            "([given, recent]) => a2Calculator.respond(theory, constants, given, recent)",
            [{**given, **change}, recent],
        )
        [field] = answer["wrong"]
        return field

    assert marked({"batch": 7}, "batch") == "batch"
    assert marked({"batch": 7}, "d_ff", "devices", "batch") == "devices"
    assert marked({"batch": 7}) == "batch"  # as an address has it
    assert marked({"tensor": 3}, "tensor") == "tensor"
    assert marked({"microbatches": 3}, "microbatches") == "microbatches"
    assert marked({"num_heads": 33}, "d_model", "num_heads") == "d_model"
    assert marked({"num_heads": 33}, "num_heads", "d_model") == "num_heads"
    assert marked({"d_model": 4097}, "d_model") == "d_model"
    assert marked({"precision": "fp32", "device": "TPU-v5p"}, "device") == "device"


def test_where_no_batch_fits_what_makes_room_is_named(scripts):
    def answer(job, layout):
        return scripts.evaluate(
            "([job, layout]) => a2Calculator.remedies(theory, on(job), layout)",
            [{**asdict(job), "device": "H200"}, asdict(layout)],
        )

    def most(job, layout):
        return f"(at most {largest_batch(job, layout):,} sequences a step)"

    job, replicas = calculator.EXAMPLE, calculator.REPLICAS
    assert largest_batch(job, replicas) == 0
    words = answer(job, replicas)
    for sharding, name in (("zero1", "a sharded optimizer (zero1)"), ("fsdp", "FSDP")):
        assert f"{name} {most(job, replace(replicas, sharding=sharding))}" in words
    assert "checkpointing" not in words  # it leaves the state as it is
    # Sequences so long that one of them is too much, unless the blocks run again.
    long, whole = replace(job, context=32_768), calculator.SHARDED
    again = replace(whole, checkpointing="block")
    assert largest_batch(long, whole) == 0 < largest_batch(long, again)
    assert f"checkpointing each block {most(long, again)}" in answer(long, whole)
    # Where no change does alone, some do together, and none that is not needed.
    both = replace(replicas, sharding="zero1", checkpointing="block")
    for one in ({"sharding": "zero1"}, {"sharding": "fsdp"}, {"checkpointing": "block"}):
        assert largest_batch(long, replace(replicas, **one)) == 0
    words = f"checkpointing each block and a sharded optimizer (zero1) {most(long, both)}"
    assert answer(long, replicas).startswith(f"Room is made by {words}")
    assert answer(replace(job, context=10**7), replicas).startswith("Neither")


@pytest.mark.slow
def test_the_answer_is_in_view_beside_the_fields_of_a_phone(page):
    edge = "([selector, edge]) => document.querySelector(selector).getBoundingClientRect()[edge]"
    for field in ("#a2-d_model", "#a2-batch", "#a2-checkpointing"):
        page.focus(field)
        bar = page.evaluate(edge, [".bd-header-article", "bottom"])
        top, below = (page.evaluate(edge, [one, "top"]) for one in (".a2-verdict", field))
        assert bar - 8 <= top < below < 844, field
    said = page.text_content(".a2-verdict")
    assert said.startswith("It fits: 94.6 GB of 127 GB a device; a step in at least")
    page.select_option("#a2-sharding", "none")
    assert page.text_content(".a2-verdict").startswith("It does not fit: ")
    page.set_viewport_size({"width": 1400, "height": 900})
    assert not page.is_visible(".a2-verdict")


@pytest.mark.slow
def test_a_link_to_what_is_shown_is_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    forms.types(page, "batch", "64")
    page.click(".a2-copy")
    page.wait_for_function("document.querySelector('.a2-copied').textContent === 'copied'")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.evaluate("location.href") and "batch=64" in link


@pytest.mark.slow
def test_the_address_holds_the_form_and_a_link_fills_it(page, book):
    [(job, layout)] = [one for words, one in calculator.LINKS.items() if "32,768" in words]
    page.locator("ul.a2-links a", has_text="32,768").click()
    page.wait_for_function(f"document.getElementById('a2-context').value === '{job.context}'")
    shows(page, job, layout)
    forms.types(page, "batch", "4")
    page.wait_for_function("location.hash.includes('batch=4')")
    address = page.evaluate("location.href")
    other = page.context.new_page()
    other.goto(address)
    shows(other, replace(job, batch=4), layout)
    top = other.locator(".a2-calculator").bounding_box()["y"]
    assert abs(top) < 200  # it is on the screen
    # what an address cannot set is left, and what breaks a rule is said
    other.goto("about:blank")
    other.goto((book.html / "calculator.html").as_uri() + "#fit&device=A9&batch=x&gone=1")
    assert other.input_value("#a2-device") == "H200"
    assert other.text_content("#a2-batch-error").startswith("allowed: whole numbers")
    other.close()


@pytest.mark.slow
def test_it_fits_a_phone_and_both_themes(page):
    fields = len(calculator.FIELDS) - len(calculator.AXES + calculator.MIXED) + 1
    forms.fits_a_phone(page, ".a2-calculator", fields)
    page.focus("#a2-sharding")
    page.keyboard.press("Tab")
    assert forms.in_focus(page) == "a2-checkpointing"
    live = page.get_attribute("#a2-state", "aria-live")
    assert live == "polite" and page.get_attribute(".a2-memory", "aria-labelledby") == "a2-state"
    fills = []
    for theme in ("dark", "light"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        kinds = page.locator(".a2-memory rect[class^=part]")
        colours = kinds.evaluate_all("(all) => all.map((one) => getComputedStyle(one).fill)")
        assert len(set(colours)) == len(calculator.PARTS)
        fills.append(colours)
    assert fills[0] != fills[1]
