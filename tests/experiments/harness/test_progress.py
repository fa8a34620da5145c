"""The bar of a notebook: one output, replaced in place."""

import time

import pytest
from waiting import until

from a2lib.experiments.harness import output as outputs


class Output:
    def __init__(self):
        self.shown = []

    def update(self, bundle, raw):
        self.shown.append(bundle["text/plain"])


@pytest.fixture
def output(monkeypatch):
    """What a notebook shows of a bar."""
    made = Output()
    monkeypatch.setattr(outputs, "display", lambda bundle, replaceable: made)
    monkeypatch.setattr(outputs, "TICK_S", 0.01)
    monkeypatch.setattr(outputs, "EVERY_S", 0)
    return made


def test_the_clock_goes_on_while_nothing_else_does(output):
    bar = outputs.Progress(3, "steps", "rows")
    bar._started -= 20
    assert until(lambda: output.shown and "0/3 rows [00:2" in output.shown[-1])
    bar.step()
    bar.close("done")
    said = list(output.shown)
    assert "1/3 rows" in said[-1] and said[-1].endswith(" done")
    time.sleep(0.1)
    assert output.shown == said and not any("\n" in line or "row/s" in line for line in said)
