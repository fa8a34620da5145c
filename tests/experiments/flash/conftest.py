"""What a worker would be given, and what it puts, in this process and without a store."""

from unittest.mock import Mock

import pytest

from a2lib.experiments.harness.worker import Job


@pytest.fixture
def put():
    """``put(handler, task, device)``: the rows that ``handler`` puts, those too before it raises;
    then ``put.raised`` is what, and ``put.begun`` who was begun."""

    def measure(handler, task, device="cpu"):
        rows, measure.begun, measure.raised = [], [], None

        def emit(event):
            measure.begun.append(event["begin"]) if "begin" in event else rows.append(event["row"])

        given = {"wanted": task.rows, "in_turns": task.in_turns, "store": Mock()}
        try:
            handler(Job(task.spec, device, emit=emit, **given))
        except Exception as error:
            measure.raised = error
        return rows

    return measure
