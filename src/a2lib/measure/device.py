"""The name a device's results are filed under."""

from __future__ import annotations

import re


def device_slug() -> str:
    """The current CUDA device as a file name, "nvidia-h200" for one; "cpu" without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return slugify(torch.cuda.get_device_name())


def synchronize(device: str) -> None:
    """Wait for all work on the current CUDA device; nothing where ``device`` is "cpu"."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def slugify(name: str) -> str:
    """``name`` in lower case, with single hyphens between its runs of letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def check_slug(device: str) -> None:
    """Raise ValueError unless ``device`` is a name that ``device_slug()`` could have given."""
    if not device or slugify(device) != device:
        raise ValueError(f"device {device!r}: must be lower-case letters, digits and hyphens")
