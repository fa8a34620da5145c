"""What every step of a notebook that measures has in common: the device to itself, and a clear end
when it is interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from a2lib.errors import OneLine
from a2lib.experiments.harness.parameters import check_current
from a2lib.measure import DeviceLock


class Interrupted(OneLine, KeyboardInterrupt):
    """A step was interrupted; the message says what is kept and how to go on."""


def measures(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``step(run, ...)`` hold the lock of ``run.device`` ("cuda" or "cpu") as run ``run.id``.

    It then raises ParameterError where the notebook has other parameters by now than the run,
    DeviceBusy where another process measures there, and Interrupted for a KeyboardInterrupt.
    """

    @functools.wraps(step)
    def guarded(run, *args, **kwargs):
        check_current(run.parameters)
        with DeviceLock(run.device).held(f"run {run.id}"):
            try:
                return step(run, *args, **kwargs)
            except KeyboardInterrupt:
                raise Interrupted(
                    "every row measured so far is stored; to go on, run this cell again or start"
                    " the same command again"
                ) from None

    return guarded
