"""The bugs of dev/plant_bugs.py still fit the code that they are planted in, and give Python."""

import ast
import importlib.util

import pytest

from a2lib.paths import ROOT

spec = importlib.util.spec_from_file_location("plant_bugs", ROOT / "dev" / "plant_bugs.py")
plant_bugs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plant_bugs)


@pytest.mark.parametrize("planted", plant_bugs.BUGS, ids=str)
def test_a_bug_can_be_planted(planted):
    for source in plant_bugs.edited(planted).values():
        ast.parse(source)


def test_each_bug_has_a_check_and_each_check_a_run_without_bugs():
    checks, without_bugs = set(), set()
    for planted in plant_bugs.BUGS:
        assert hasattr(plant_bugs, f"check_{planted.check}")
        checks.add(planted.check)
        if not planted.edits:
            without_bugs.add(planted.check)
    assert checks == without_bugs
    count = len(plant_bugs.BUGS) - len(without_bugs)
    page = (ROOT / "book" / "which-bug.md").read_text(encoding="utf-8")
    assert f"{count} mistakes were planted" in page
