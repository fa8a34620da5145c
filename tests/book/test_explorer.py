"""The explorer of FSDP and tensor parallelism: its formulas in a browser, and its form in the book.

Runs where a Chromium is installed, as test_browser.py does.
"""

import itertools
import json
import math
from types import SimpleNamespace

import forms_in_a_browser as forms
import pytest

from a2lib.theory import parallelism
from a2lib.theory.parallelism import EXAMPLE, Layer

NAMES = ("tokens", "d_model", "d_ff", "flops", "bandwidth", "element_bytes")
LAYERS = list(itertools.product(
    (1, 7, 4096, 65_536, 1_000_003), (1, 4096, 12_288), (3, 14_336, 53_248),
    (1e12, 989.4e12, 2.5e15), (1e6, 50e9, 450e9, 1.8e12), (0.5, 1, 2, 4),
))  # fmt: skip
MESHES = ((1, 1), (8, 1), (1, 8), (8, 8), (3, 5), (60, 7), (1000, 36))
PASSES = ("forward", "backward")
ASSETS = ("forms.js", "parallelism.js", "explorer.js", "forms.css", "explorer.css")
WAYS = list(itertools.product((True, False), PASSES))  # whether messages share a link, and a pass
# The ends of what the form allows.
ENDS = ((1e9, 1e6, 1e6, 1e9, 1e15, 0.001), (1, 1, 1, 1e18, 1e6, 16), (1e9, 1, 1, 1e9, 1e15, 1))
# Numbers of one layer on one mesh, in one order in both languages; as text, since playwright takes
# seconds over each of so many values.
SCRIPT = """([layers, names, meshes]) => JSON.stringify(layers.map((values, i) => {
  const one = Object.fromEntries(names.map((name, k) => [name, values[k]]));
  const [f, t] = meshes[i % meshes.length], p = a2Parallelism;
  const costs = (found) => ["forward", "backward"].flatMap((pass) => {
    const { flops, compute_s, data_s, tensor_s } = found[pass];
    return [flops, compute_s, data_s, tensor_s];
  });
  return { numbers: [
    ...costs(p.fully_sharded_tensor_parallel(one, f, t)), ...costs(p.data_parallel(one, f)),
    p.data_slope(one), p.tensor_slope(one), p.data_limit(one), p.tensor_limit(one, "forward"),
    p.tensor_limit(one, "backward"), p.mesh_limit(one), p.shared_mesh_limit(one),
    ...p.shared_mesh_split(one),
    ...[true, false].flatMap((shared) => p.best_split(one, f * t, shared)),
    ...[true, false].flatMap((shared) => ["forward", "backward"].map(
      (pass) => p.communication_share(one, f, t, shared, pass))),
  ], whole: [true, false].map((shared) => p.best_whole_split(one, f * t, shared)),
  binds: [true, false].flatMap((shared) => ["forward", "backward"].map(
      (pass) => p.binds(one, f, t, shared, pass))) };
}))"""


def twin(layer: Layer, f: int, t: int) -> list[float]:
    """The numbers of SCRIPT, by the Python functions."""

    def costs(found):
        return [value for pass_ in PASSES for value in vars(found[pass_]).values()]

    return [
        *costs(parallelism.fully_sharded_tensor_parallel(layer, f, t)),
        *costs(parallelism.data_parallel(layer, f)),
        parallelism.data_slope(layer), parallelism.tensor_slope(layer),
        parallelism.data_limit(layer), parallelism.tensor_limit(layer),
        parallelism.tensor_limit(layer, "backward"), parallelism.mesh_limit(layer),
        parallelism.shared_mesh_limit(layer), *parallelism.shared_mesh_split(layer),
        *parallelism.best_split(layer, f * t, True), *parallelism.best_split(layer, f * t, False),
        *(parallelism.communication_share(layer, f, t, *way) for way in WAYS),
    ]  # fmt: skip


def binding(layer: Layer, f: int, t: int, shared: bool, pass_: str) -> str:
    """What a pass waits for, from its times."""
    cost = parallelism.fully_sharded_tensor_parallel(layer, f, t)[pass_]
    if parallelism.communication_share(layer, f, t, shared, pass_) <= 1:
        return "computation"
    if shared and f > 1 and t > 1:
        return "both axes"
    return "FSDP" if cost.data_s > cost.tensor_s else "tensor parallelism"


@pytest.fixture(scope="module")
def scripts(browser):
    return forms.functions(browser, *ASSETS)


def test_a_browser_and_python_agree_over_thousands_of_points(scripts):
    found = json.loads(scripts.evaluate(SCRIPT, [LAYERS, NAMES, MESHES]))
    assert len(found) == len(LAYERS) > 2000
    bound = set()
    for i, (values, answer) in enumerate(zip(LAYERS, found, strict=True)):
        layer, mesh = Layer(**dict(zip(NAMES, values, strict=True))), MESHES[i % len(MESHES)]
        expected = twin(layer, *mesh)
        assert len(answer["numbers"]) == len(expected)
        for k, (one, other) in enumerate(zip(answer["numbers"], expected, strict=True)):
            assert math.isclose(one, other, rel_tol=1e-12), (values, mesh, k, one, other)
        waits = [binding(layer, *mesh, *way) for way in WAYS]
        assert answer["binds"] == waits, (values, mesh)
        bound.update(waits)
        n = math.prod(mesh)
        if n <= 64:  # Python tries every number up to n
            whole = [parallelism.best_whole_split(layer, n, shared) for shared in (True, False)]
            assert answer["whole"] == [list(split) for split in whole], (values, mesh)
    assert bound == {"computation", "FSDP", "tensor parallelism", "both axes"}
    assert len(MESHES) % 2  # so that each mesh meets each value of every list


def test_a_number_is_read_or_refused_by_a_rule_that_is_named(scripts):
    script = "([whole, least, texts]) => texts.map((x) => a2Forms.problem(x, whole, least, 1e6))"

    def rules(*given):
        return set(scripts.evaluate(script, given))

    assert rules(True, 1, ["65,536", " 8 ", "1e6"]) == {""}
    rule = "allowed: whole numbers from 1 to 1,000,000"
    assert rules(True, 1, ["0", "1.5", "1,5", "", "1000001"]) == {rule}
    assert rules(False, 0.001, ["989.4", ".5"]) == {""}
    rule = "allowed: numbers from 0.001 to 1,000,000"
    assert rules(False, 0.001, ["1e-9", "NaN"]) == {rule}


def test_the_map_stays_within_its_frame_for_every_layer(scripts):
    script = """([layers, names, meshes]) => layers.flatMap((values, i) => {
      const one = Object.fromEntries(names.map((name, k) => [name, values[k]]));
      return outside(a2Explorer.map(one, ...meshes[i % meshes.length]), 300);
    }).slice(0, 5)"""
    layers, meshes = [*LAYERS[::29], *ENDS], [*MESHES, (10**6, 10**6), (10**6, 1)]
    assert scripts.evaluate(script, [layers, NAMES, meshes]) == []


@pytest.mark.slow
def test_a_reader_types_a_mesh_and_reads_what_binds(open_page):
    tab = open_page("parallelism.html", forms.PHONE, "dark")

    def costs(f, t, layer=EXAMPLE):
        cost = parallelism.fully_sharded_tensor_parallel(layer, f, t)["forward"]
        for name in ("compute_s", "data_s", "tensor_s"):
            ms = float(forms.out(tab, f"costs.{name}.forward").replace(",", ""))
            assert ms == pytest.approx(1e3 * getattr(cost, name), rel=6e-3)

    costs(8, 8)  # the form holds the answers of its first values
    assert forms.out(tab, "limits.data.n") == f"{math.floor(parallelism.data_limit(EXAMPLE)):,}"
    most = math.floor(parallelism.tensor_limit(EXAMPLE))
    assert forms.out(tab, "limits.tensor_forward.n") == f"{most:,}"
    before = tab.inner_html(".a2-map")
    forms.types(tab, "n_fsdp", "1,024")
    tab.keyboard.press("Tab")
    assert forms.in_focus(tab) == "a2-n_tp"
    tab.keyboard.type("4")
    costs(1024, 4)
    assert binding(EXAMPLE, 1024, 4, False, "forward") == "FSDP"
    assert forms.out(tab, "costs.overlap.forward") == "FSDP"
    assert forms.out(tab, "n") == "4,096"
    whole = parallelism.best_whole_split(EXAMPLE, 4096, True)
    assert forms.out(tab, "splits.shared.whole") == " × ".join(map(str, whole))
    assert tab.inner_html(".a2-map") != before
    # said once the typing rests: where keys come slowly, for the mesh between the two as well
    words = "1,024 × 4 = 4,096 devices: the forward is"
    tab.wait_for_function(f"document.getElementById('a2-state').textContent.startsWith('{words}')")
    # the address holds the state: another tab has the same, and is where the explorer is
    other = tab.context.new_page()
    other.goto(tab.evaluate("location.href"))
    assert other.input_value("#a2-n_fsdp") == "1,024"
    assert other.text_content("#a2-state") == tab.text_content("#a2-state")
    top = "document.getElementById('explorer').getBoundingClientRect().top"
    other.wait_for_function(f"Math.abs({top}) < 200")
    other.close()

    forms.types(tab, "flops", "-1")
    assert forms.said_under(tab, "flops") == "allowed: numbers from 0.001 to 1,000,000"
    assert forms.out(tab, "costs.compute_s.forward") == forms.out(tab, "limits.data.n") == "–"
    assert tab.inner_html(".a2-map") == ""
    forms.types(tab, "flops", "494.7")
    assert tab.text_content("#a2-flops-error") == ""
    costs(1024, 4, Layer(**vars(EXAMPLE) | {"flops": 494.7e12}))

    forms.fits_a_phone(tab, ".a2-explorer", 8)
    box = tab.locator(".output:has(.a2-explorer)")
    behind = box.evaluate("(one) => getComputedStyle(one).backgroundColor")
    assert behind == "rgba(0, 0, 0, 0)"  # the page's own
    fills = []
    for theme in ("dark", "light"):
        tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        fills.append(tab.locator(".a2-map .bound").evaluate("(one) => getComputedStyle(one).fill"))
    assert len(set(fills)) == 2


@pytest.mark.slow
def test_the_scripts_come_with_the_page_that_names_them(book):
    with_it = [page.name for page in book.pages() if "explorer." in page.read_text("utf-8")]
    text = (book.html / "parallelism.html").read_text(encoding="utf-8")
    assert with_it == ["parallelism.html"]
    for name in ASSETS:
        assert text.count(f"_static/{name}") == 1 and (book.html / "_static" / name).is_file()


def test_a_page_that_names_a_script_that_is_not_there_is_a_warning(monkeypatch):
    monkeypatch.syspath_prepend(forms.PAGES.parent)
    import a2lib_pages

    said, added = [], []
    monkeypatch.setattr(a2lib_pages.logger, "warning", lambda text, *rest: said.append(text % rest))
    app = SimpleNamespace(
        env=SimpleNamespace(metadata={"one": {"assets": "explorer.js explorer.css gone.js"}}),
        add_js_file=lambda name, **_: added.append(name),
        add_css_file=added.append,
    )
    for page in ("one", "other"):
        a2lib_pages.add_assets(app, page, "", {}, object())
    assert added == ["explorer.js", "explorer.css"]
    assert said == ["one: assets: _ext/pages has no gone.js"]
