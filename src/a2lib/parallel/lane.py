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
            self._begin = torch.cuda.Event()

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Queue ``work``, without recording a graph, on the lane behind what the current stream has
        queued; return its end."""
        if self._stream is None:
            with torch.no_grad():
                work()
            return None
        # One event for all, and no context of PyTorch's for the stream: both cost the host time.
        current = torch.cuda.current_stream()
        self._begin.record(current)
        self._stream.wait_event(self._begin)
        torch.cuda.set_stream(self._stream)
        try:
            with torch.no_grad():
                work()
            return self._stream.record_event()
        finally:
            torch.cuda.set_stream(current)

    @staticmethod
    def wait(end: torch.cuda.Event | None) -> None:
        """Let the current stream wait; never the host."""
        if end is not None:
            torch.cuda.current_stream().wait_event(end)
