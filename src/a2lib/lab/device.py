"""The name a device's results are filed under, and what its driver tells about its state."""

import contextlib
import ctypes
import re
import statistics
import sys
import threading
from pathlib import Path
from typing import Self

READ_EVERY_S = 0.2


def _may_have_cuda() -> bool:
    """Return whether torch is worth asking for a device: it takes seconds to load, and has none
    without CUDA's driver."""
    if sys.modules.get("torch"):
        return True
    try:
        return Path("/dev/nvidiactl").exists() or bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


def device_kind() -> str:
    """ "cuda" where torch has a device, else "cpu"."""
    if not _may_have_cuda():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_count() -> int:
    """Return how many CUDA devices torch has."""
    if not _may_have_cuda():
        return 0
    import torch

    return torch.cuda.device_count()


def device_slug() -> str:
    """Return the current CUDA device as a file name, "nvidia-h200" for one; "cpu" without CUDA."""
    if device_kind() == "cpu":
        return "cpu"
    import torch

    return slugify(torch.cuda.get_device_name())


def synchronize(device: str) -> None:
    """Wait for all work on the current CUDA device; nothing where ``device`` is "cpu"."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


class Sensors:
    """Clock, power and energy of the current CUDA device, as its driver tells them through NVML.

    A reading is None where it does not: no NVML, no permission, a part of a GPU (MIG), a device it
    has no name for.
    """

    def __init__(self) -> None:
        self._nvml = self._handle = None
        with contextlib.suppress(Exception):
            self._nvml, self._handle = _open_nvml()

    def sm_mhz(self) -> int | None:
        """Return the present clock of the multiprocessors in MHz."""
        return self._read("ClockInfo", 1)  # NVML_CLOCK_SM

    def power_w(self) -> float | None:
        """Return the power in watts, which the driver averages over about a second."""
        return self._read_thousandths("PowerUsage")

    def energy_j(self) -> float | None:
        """Return the energy in joules since the driver was loaded."""
        return self._read_thousandths("TotalEnergyConsumption")

    def power_limit_w(self) -> float | None:
        """Return the power in watts that the driver keeps the device to."""
        return self._read_thousandths("EnforcedPowerLimit")

    def capped(self) -> bool | None:
        """Return whether the clock is lower now than it could be, to keep that limit."""
        reasons = self._read("CurrentClocksThrottleReasons")
        return None if reasons is None else bool(reasons & 4)  # ...ThrottleReasonSwPowerCap

    def _read_thousandths(self, what: str) -> float | None:
        thousandths = self._read(what)
        return None if thousandths is None else thousandths / 1000

    def _read(self, what: str, *arguments: int) -> int | None:
        with contextlib.suppress(Exception):
            return int(getattr(self._nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments))
        return None


class Watch:
    """Clock and power beside a measurement that leaves no room to read them inside: within it a
    thread reads the sensors; ``mhz`` are its readings of the clock.

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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def power_w(self) -> float | None:
        """Return the median of the readings, None where there are none."""
        return statistics.median(self._watts) if self._watts else None

    def capped_percent(self) -> float | None:
        """Return the readings at which the driver kept the clock low for the limit of power."""
        return 100 * statistics.fmean(self._capped) if self._capped else None

    def _read(self) -> None:
        while not self._over.wait(READ_EVERY_S):
            self.mhz.append(self._sensors.sm_mhz())
            watts, capped = self._sensors.power_w(), self._sensors.capped()
            if watts is not None:
                self._watts.append(watts)
            if capped is not None:
                self._capped.append(capped)


def _open_nvml() -> tuple:
    """pynvml, and its handle of the GPU that torch uses now; found by its UUID, since NVML counts
    all devices, whatever CUDA_VISIBLE_DEVICES leaves."""
    import pynvml
    import torch

    # Before NVML, which works in processes that must not touch the device.
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device")
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def slugify(name: str) -> str:
    """``name`` in lower case, with single hyphens between its runs of letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
