"""The built book: every picture is there, every reference resolves, nothing is asked of the net."""

import re
import shutil
import subprocess

import pytest
from bs4 import BeautifulSoup

from a2lib.paths import ROOT

pytestmark = pytest.mark.slow

# Each id of the two handouts, and the editions that ask it.
QUESTIONS = """
benchmarking_script nsys_profile mixed_precision_accumulation benchmarking_mixed_precision
memory_profiling gradient_checkpointing pytorch_attention torch_compile flash_forward flash_backward
flash_benchmarking leaderboard distributed_communication_single_node naive_ddp
naive_ddp_benchmarking minimal_ddp_flat_benchmarking ddp_overlap_individual_parameters
ddp_overlap_individual_parameters_benchmarking ddp_overlap_bucketed ddp_bucketed_benchmarking
optimizer_state_sharding optimizer_state_sharding_accounting fsdp fsdp_accounting
communication_accounting alternate_ring_all_reduce data_parallel_calcs fsdp_calcs tp_calcs
fsdp_tp_calcs
""".split()
ANSWERED = {"flash_forward", "flash_backward", "flash_benchmarking", "leaderboard"}


def soup(page):
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def test_the_links_from_the_book_to_the_top_resolve():
    for name in ("_config.yml", "_toc.yml", "notebooks"):
        link = ROOT / "book" / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == (ROOT / name).resolve() and link.exists()


def test_every_page_of_the_contents_was_built(book):
    text = (ROOT / "_toc.yml").read_text()
    named = re.findall(r"(?:root|file): *(\S+)", text)
    assert len(named) >= 6
    assert [name for name in named if not (book.html / f"{name}.html").is_file()] == []


def test_every_picture_exists_and_has_a_description(book):
    pictures = 0
    for page in book.pages():
        for image in soup(page).find_all("img"):
            source = image.get("src", "")
            where = f"{page.name}: {source}"
            if not source.startswith("data:"):
                assert (page.parent / source.split("?")[0]).is_file(), where
            if image.find_parent("article"):
                # Without a description docutils puts the address there.
                assert image.get("alt") and image["alt"] not in source, where
            if image.find_parent("figure"):
                pictures += 1
                assert len(image.get("alt", "")) > 40, where
    assert pictures >= 12


def test_every_figure_of_the_chapter_is_numbered_and_captioned(book):
    figures = soup(book.html / "flash.html").find_all("figure")
    numbers = [figure.find(class_="caption-number") for figure in figures]
    assert len(figures) >= 8 and all(numbers)
    assert len({number.text for number in numbers}) == len(numbers)


def test_references_to_figures_tables_and_equations_resolve(book):
    for page in book.pages():
        html = soup(page)
        names = {tag["id"] for tag in html.find_all(id=True)}
        for link in html.select("article a.reference.internal"):
            target = link.get("href", "")
            if target.startswith("#"):
                assert target[1:] in names, f"{page.name}: {target}"
        # What Sphinx could not resolve is left as code with this class.
        assert not html.select("code.xref.std-numref, code.xref.eq"), page.name
        assert "(not measured yet)" not in html.get_text(), page.name


def addresses(html):
    """Everything in a page that a browser fetches without being asked."""
    for tag in html.find_all(True):
        fetched = {"src", "srcset", "poster", "data", "background"}
        if tag.name not in ("a", "area"):
            fetched |= {"href", "xlink:href"}
        for name in fetched & set(tag.attrs):
            yield f"<{tag.name} {name}>", str(tag[name])
        if "style" in tag.attrs:
            yield f"<{tag.name} style>", " ".join(urls(tag["style"]))
    for style in html.find_all("style"):
        yield "<style>", " ".join(urls(style.text))


def urls(css):
    """What a style sheet loads."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css)
    return [one or other for one, other in found]


def test_no_page_asks_another_site_for_anything(book):
    away = re.compile(r"(?:https?:|wss?:)?//(?!www\.w3\.org/)", re.I)
    for page in book.pages():
        html = soup(page)
        for what, address in addresses(html):
            where = f"{page.name}: {what} {address}"
            assert not away.match(address.strip()), where
            local = re.split(r"[?#]", address.strip())[0]
            if what.startswith(("<script", "<link")) and local:
                assert (page.parent / local).exists(), where
        for script in html.find_all("script", src=False):
            assert not re.search(r"https?://", script.text), f"{page.name}: {script.text[:200]}"
    for sheet in book.html.rglob("*.css"):
        for address in urls(sheet.read_text(encoding="utf-8")):
            assert not away.match(address), f"{sheet.name}: {address}"


def test_scripts_name_no_content_network(book):
    networks = r"unpkg|jsdelivr|cdnjs|googleapis|gstatic|polyfill\.io|esm\.sh|skypack"
    for script in book.html.rglob("*.js"):
        text = script.read_text(encoding="utf-8")
        if script.name == "tex-mml-chtml.js":
            # Its speech engine names one. It is loaded from MathJax's menu, which is off.
            assert "enableMenu" in (ROOT / "_config.yml").read_text()
            continue
        assert not re.search(rf"https?://[^\s'\"]*(?:{networks})", text), script.name


def test_mathjax_and_its_fonts_are_beside_the_pages(book):
    scripts = [s["src"] for s in soup(book.html / "flash.html").find_all("script", src=True)]
    mathjax = [source for source in scripts if "mathjax" in source.lower()]
    assert len(mathjax) == 1 and (book.html / mathjax[0].split("?")[0]).is_file()
    fonts = book.html / "_static" / "mathjax" / "output" / "chtml" / "fonts" / "woff-v2"
    assert (fonts / "MathJax_Main-Regular.woff").is_file()
    assert (book.html / "_static" / "mathjax" / "LICENSE").is_file()


def test_a_browser_without_a_network_typesets_the_formulas(book, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}",
         "--virtual-time-budget=20000", "--dump-dom", (book.html / "flash.html").as_uri()],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    html = BeautifulSoup(done.stdout, "html.parser")
    formulas = html.select("article .math")
    assert len(formulas) > 50
    assert all(formula.find("mjx-container") for formula in formulas)
    assert not html.select("mjx-merror")
    assert "\\[" not in html.find("article").get_text()


def test_no_page_holds_a_path_of_this_machine(book):
    forbidden = [str(book.root), str(ROOT), "/home/", "/root/"]
    files = [*book.pages(), book.html / "searchindex.js"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert [path for path in forbidden if path in text] == [], file.name


def test_the_index_of_questions_has_every_id_and_links_the_answers(book):
    rows = soup(book.html / "questions.html").select("table.questions tbody tr")
    listed: dict[str, list] = {}
    for row in rows:
        cells = row.find_all("td")
        listed.setdefault(cells[0].find("code").text, []).append(cells[2])
    assert set(listed) == set(QUESTIONS)
    chapter = {tag["id"] for tag in soup(book.html / "flash.html").find_all(id=True)}
    for name, answers in listed.items():
        links = [answer.find("a") for answer in answers]
        if name in ANSWERED:
            link = next(link for link in links if link)
            assert link["href"].split("#")[1] in chapter, name
        else:
            assert all("not yet answered" in answer.text for answer in answers), name


def test_the_chapter_shows_this_machine_beside_the_published_device(book):
    section = soup(book.html / "flash.html").find(id="on-your-machine")
    assert "CPU" in section.text and "tiny sizes" in section.text and section.find("table")
    assert "CPU" not in soup(book.html / "index.html").find("table").text


def test_new_data_make_new_pages_and_no_data_is_said_plainly(book):
    # Runs last: it takes the data away. An incremental build must notice on its own.
    shutil.rmtree(book.root / "data" / "measured")
    shutil.rmtree(book.root / "build")
    done = book.build()
    assert done.returncode == 0, done.stdout + done.stderr
    text = soup(book.html / "flash.html").find("article").get_text()
    assert "not measured yet" in text and "Nothing of this sweep is measured yet" in text
    assert "nothing had been measured on another machine" in text
