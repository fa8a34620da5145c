"""Clock and power beside a measurement that leaves no room to read them inside."""

from __future__ import annotations

import statistics
import threading

from a2lib.measure.device import Sensors

READ_EVERY_S = 0.2


class Watch:
    """Within it a thread reads the sensors; ``mhz`` are its readings of the clock.

    with Watch() as watch:
        measure()
    watch.power_w(), watch.capped_percent()
    """

    def __init__(self) -> None:
        self.mhz: list[int | None] = []
        self._watts: list[float] = []
        self._capped: list[bool] = []
        self._sensors = Sensors()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def power_w(self) -> float | None:
        """The median of the readings, None where there are none."""
        return statistics.median(self._watts) if self._watts else None

    def capped_percent(self) -> float | None:
        """Of the readings, those at which the driver kept the clock low for the limit of power."""
        return 100 * statistics.fmean(self._capped) if self._capped else None

    def _read(self) -> None:
        while not self._over.wait(READ_EVERY_S):
            self.mhz.append(self._sensors.sm_mhz())
            watts, capped = self._sensors.power_w(), self._sensors.capped()
            self._watts += [] if watts is None else [watts]
            self._capped += [] if capped is None else [capped]
