"""A stream beside the one that computes, and the order of the two."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Lane:
    """The stream that transfers run on, beside the current one; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Queue ``work`` on the lane behind what the current stream has queued; the event after."""
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    @staticmethod
    def wait(event: torch.cuda.Event | None) -> None:
        """Let the current stream wait; never the host."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
