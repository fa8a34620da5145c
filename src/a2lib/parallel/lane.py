"""A stream beside the one that computes, and the order of the two."""

from collections.abc import Callable

import torch


class Lane:
    """A stream beside the current one, before it in line unless ``priority`` is 0; on the CPU there
    is none."""

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Queue ``work`` on the lane behind what the current stream has queued; return its end."""
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    @staticmethod
    def wait(end: torch.cuda.Event | None) -> None:
        """Let the current stream wait; never the host."""
        if end is not None:
            torch.cuda.current_stream().wait_event(end)
