"""Waiting for what another process or thread does."""

import time


def until(found, seconds=60):
    """What ``found()`` gives, as soon as that is true, or after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return value
