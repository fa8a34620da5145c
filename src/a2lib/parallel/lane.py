"""A stream beside the one that computes, and the order of the two."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ended:
    """Where some work of a lane ends, which may be in the capture of a CUDA graph."""

    event: torch.cuda.Event
    captured: bool


class Lane:
    """A stream beside the current one, before it in line unless ``priority`` is 0; on the CPU there
    is none."""

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        self._device, self._priority = device, priority
        self._captured = False  # whether what it was given last went into a graph
        self._stream = self._new() if device.type == "cuda" else None

    def _new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=self._priority)

    def run(self, work: Callable[[], None]) -> Ended | None:
        """Queue ``work`` on the lane behind what the current stream has queued; where it ends."""
        if self._stream is None:
            work()
            return None
        before, self._captured = self._captured, torch.cuda.is_current_stream_capturing()
        if before and not self._captured:
            # A capture that was cut off before the streams met again may have it still.
            self._stream = self._new()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return Ended(self._stream.record_event(), self._captured)

    @staticmethod
    def wait(end: Ended | None) -> None:
        """Let the current stream wait; never the host. Not for the end of a capture that is over:
        that one failed, and nothing of it has been queued."""
        if end is not None and (not end.captured or torch.cuda.is_current_stream_capturing()):
            torch.cuda.current_stream().wait_event(end.event)
