"""What a GPU's steps take of energy, by its driver's counter."""

from __future__ import annotations

import contextlib

from a2lib.measure.device import Sensors
from a2lib.measure.timing import median_reading
from a2lib.measure.watch import Watch


class Meter:
    """Reads the counter before step ``settled`` and after step ``steps`` - 1, and clock and limit
    meanwhile.

        with Meter(settled, steps) as meter:
            run(config, before_step=meter)
        meter.row()

    Within it steps run as they do: it reads where the device is idle anyway, and in a thread.
    """

    def __init__(self, settled: int, steps: int):
        self._settled, self._steps = settled, steps
        self._sensors, self._watch = Sensors(), Watch()
        self._joules: list[float | None] = []
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()

    def __call__(self, step: int) -> None:
        """Before each step, with its number, and after the last."""
        if step == self._settled:
            self._watching.enter_context(self._watch)
        if step in (self._settled, self._steps):
            self._joules.append(self._sensors.energy_j())
        if step == self._steps:
            self._watching.close()

    def row(self) -> dict[str, object]:
        """The values of a row; None for what the driver does not tell."""
        first, last = self._joules
        known = first is not None and last is not None
        return {
            "joules": (last - first) / (self._steps - self._settled) if known else None,
            "power_limit_w": self._sensors.power_limit_w(),
            "capped_percent": self._watch.capped_percent(),
            "sm_mhz": median_reading(self._watch.mhz),
        }
